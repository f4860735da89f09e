"""Read samples.csv: one row per measured step, with its kind, its shape, its seconds and its point of the grid.

Other columns are kept. A flagged row is an outlier. A failed row has the reason instead of seconds.
It also runs in the worker: importing it needs only Python 3.9 and the standard library.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Optional

from servesim.core import BadInput, Shape
from servesim.core.limits import MAX_COST, MAX_NUMBER
from servesim.files.csv_rows import CsvRow, read_csv, split_csv
from servesim.files.read import quote, read_text
from servesim.files.write import append, csv_writer

SAMPLE_FILES = ("samples.csv", "samples.csv.gz")
STEP_KINDS = ("prefill", "decode", "mixed", "swap")
KINDS = (*STEP_KINDS, "busy")  # busy: a decode while the front end loads the host
REQUIRED_COLUMNS = ("kind", "point", "seconds", *Shape._fields)


class Sample(NamedTuple):
    """One row of samples.csv."""

    kind: str
    point: int
    shape: Shape
    seconds: Optional[float]  # None if the step failed
    host: Optional[float]  # seconds of the host in this step, in addition to `seconds`; None if not measured
    flagged: str
    failed: str
    fields: dict[str, str]  # all columns, as text

    @property
    def good(self) -> bool:
        """Whether the sample is neither failed nor an outlier."""
        return not (self.failed or self.flagged)


@dataclass
class Point:
    """All samples of one point of the grid. They share one shape."""

    kind: str
    shape: Shape
    seconds: list[float] = field(default_factory=list)
    flagged: int = 0
    failed: str = ""

    @property
    def median(self) -> float:
        """Median of the samples, in seconds."""
        import numpy as np

        return float(np.median(self.seconds))

    @property
    def median_error(self) -> float:
        """Standard error of the median, as a fraction of the median."""
        import numpy as np

        if len(self.seconds) < 2:
            return 1.0
        low, high = np.quantile(self.seconds, [0.25, 0.75])
        if not self.median:
            return 1.0
        return float(0.93 * (high - low) / np.sqrt(len(self.seconds)) / self.median)

    @property
    def name(self) -> str:
        """Short text of the shape, for example "2x64 tokens, 4 rows of context 100"."""
        shape, sizes = self.shape, []
        if shape.prefill_rows:
            after = f" after {shape.cross // shape.prefill_tokens} cached" if shape.cross else ""
            sizes.append(f"{shape.prefill_rows}x{shape.prefill_tokens // shape.prefill_rows} tokens{after}")
        if shape.decode_rows:
            sizes.append(f"{shape.decode_rows} rows of context {shape.context // shape.decode_rows}")
        if shape.swapped:
            sizes.append(f"{shape.swapped} blocks")
        return ", ".join(sizes)


def samples_file(folder: Optional[Path]) -> Optional[Path]:
    """Return the path of a folder's samples, or None without any."""
    paths = [] if folder is None else [folder / name for name in SAMPLE_FILES]
    return next((path for path in paths if path.exists()), None)


def read_samples(path: Path, resume: bool = False) -> list[Sample]:
    """Read all rows. With `resume`, skip an incomplete last line."""
    return [_sample(row) for row in read_csv(path, REQUIRED_COLUMNS, complete_lines=resume)]


def append_samples(path: Path, rows: Iterable[Sequence[Any]]) -> None:
    """Add rows to a file of samples."""
    text = io.StringIO()
    csv_writer(text).writerows(rows)
    append(path, text.getvalue())


def holds_steps(path: Path) -> bool:
    """Return whether a file has the columns of measured steps. A file of reported totals has others."""
    header = read_text(path).partition("\n")[0]
    return set(REQUIRED_COLUMNS) <= set(split_csv(str(path), header)[0])


def measured_points(folder: Optional[Path]) -> list[Point]:
    """Return the points of a profile folder, an empty list without samples."""
    path = samples_file(folder)
    points: dict[tuple[str, int], Point] = {}
    for sample in [] if path is None else read_samples(path):
        point = points.setdefault((sample.kind, sample.point), Point(sample.kind, sample.shape))
        if sample.seconds is None:
            point.failed = sample.failed
        elif sample.flagged:
            point.flagged += 1
        else:
            point.seconds.append(sample.seconds + (sample.host or 0.0))
    return list(points.values())


def _sample(row: CsvRow) -> Sample:
    cells = row.cells
    failed, flagged = cells.get("failed") or "", cells.get("flagged") or ""
    shape = Shape(*(row.whole(name, MAX_NUMBER) for name in Shape._fields))
    seconds = None if failed else row.number("seconds", -MAX_COST, MAX_COST)
    host = row.number("host_seconds", 0.0, MAX_COST) if cells.get("host_seconds") else None
    if seconds is not None and not seconds > 0 and not flagged:
        raise row.error("seconds", "more than 0")
    _check_kind(row["kind"], shape, row.where)
    return Sample(row["kind"], row.whole("point", MAX_NUMBER), shape, seconds, host, flagged, failed, cells)


def _check_kind(kind: str, shape: Shape, where: str) -> None:
    if kind not in KINDS:
        raise BadInput(f"{where}: kind: expected one of {', '.join(KINDS)}, got {quote(kind)}")
    if shape.prefill_rows and not (shape.prefill_tokens and shape.prefill_live):
        raise BadInput(f"{where}: expected prefill_tokens and prefill_live above 0, because prefill_rows is")
    expected = "decode" if kind == "busy" else kind
    if shape.kind != expected or (kind == "swap" and not shape.swapped):
        found = shape.kind if shape.prefill_rows or shape.decode_rows or shape.swapped else "empty"
        raise BadInput(f"{where}: kind: {kind} does not match the shape, which is {found}")
