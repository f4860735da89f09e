"""Rows of the proof: a measured figure of a run, our prediction, and that of other simulators.

Every family of sets (benchmarks/proof_*.py) is a list of functions that take the data folder and return rows.
"""

from __future__ import annotations

import csv
import gzip
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Optional

COLUMNS = ("set", "run", "quantity", "measured", "predicted", "low", "high", "rivals", "calibrated_on", "assumed",
           "reason")  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One figure of one run. Times are in milliseconds unless the quantity says otherwise."""

    set: str
    run: str
    quantity: str
    measured: float
    predicted: float
    calibrated_on: str  # what the costs were fitted to
    rivals: Mapping[str, float] = field(default_factory=dict)  # predictions of other simulators, by name
    assumed: str = ""  # what the source does not state
    reason: str = ""  # why the prediction is bad, if it is
    interval: tuple[Optional[float], Optional[float]] = (None, None)  # of 95 %; none for figures that have no interval

    @property
    def inside(self) -> Optional[bool]:
        """Whether the measured value is inside the interval; None without one."""
        low, high = self.interval
        return None if low is None or high is None else low <= self.measured <= high

    @property
    def half_width(self) -> float:
        """Half the width of the interval, relative to the predicted value."""
        low, high = self.interval
        return 0.0 if low is None or high is None or not self.predicted else (high - low) / 2 / abs(self.predicted)

    @property
    def error(self) -> float:
        """The signed relative error; the difference if nothing was measured (a count of 0)."""
        return relative_error(self.predicted, self.measured)


def relative_error(predicted: float, measured: float) -> float:
    """Return predicted / measured - 1."""
    return predicted / measured - 1 if measured else predicted - measured


def median_error(rows: Iterable[Row], simulator: str = "") -> float:
    """Return the median absolute error of our predictions, or of those of another simulator."""
    rows = [row for row in rows if not simulator or simulator in row.rivals]
    values = [row.rivals[simulator] if simulator else row.predicted for row in rows]
    return statistics.median(abs(relative_error(value, row.measured)) for value, row in zip(values, rows))


def coverage(rows: Iterable[Row]) -> tuple[int, int, float]:
    """Return how many measured values are inside their intervals, how many have one, and the median half-width."""
    known = [row for row in rows if row.inside is not None]
    widths = [row.half_width for row in known]
    return sum(bool(row.inside) for row in known), len(known), statistics.median(widths) if widths else 0.0


Family = Callable[[Path], list[Row]]


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write rows as CSV; six significant digits, so that two runs give the same file."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for row in rows:
            rivals = json.dumps({name: float(f"{value:.6g}") for name, value in row.rivals.items()})
            numbers = (row.measured, row.predicted, *row.interval)
            figures = (*("" if value is None else f"{value:.6g}" for value in numbers), rivals if row.rivals else "")
            writer.writerow((row.set, row.run, row.quantity, *figures, row.calibrated_on, row.assumed, row.reason))


def read_rows(path: Path) -> list[Row]:
    """Read the file of write_rows."""
    with open(path, newline="", encoding="utf-8") as file:
        cells = list(csv.DictReader(file))
    return [
        Row(c["set"], c["run"], c["quantity"], float(c["measured"]), float(c["predicted"]), c["calibrated_on"],
            json.loads(c["rivals"]) if c["rivals"] else {}, c["assumed"], c["reason"],
            (number(c["low"]), number(c["high"])))
        for c in cells
    ]  # fmt: skip


def number(cell: str) -> Optional[float]:
    """Return the number of a cell, None if it is empty."""
    return float(cell) if cell else None


def table(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a CSV file, plain or gzipped."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def table_of_document(path: Path, first_column: str, number: int = 0) -> list[dict[str, str]]:
    """Return the rows of a Markdown table, found by the name of its first column; `number` of several such tables."""
    lines = path.read_text(encoding="utf-8").splitlines()
    starts = [k for k, line in enumerate(lines) if cells_of(line)[:1] == [first_column]]
    header, rows = cells_of(lines[starts[number]]), []
    for line in lines[starts[number] + 2 :]:
        if not line.startswith("|"):
            break
        rows.append(dict(zip(header, cells_of(line))))
    return rows


def cells_of(line: str) -> list[str]:
    """Return the cells of a line of a Markdown table."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
