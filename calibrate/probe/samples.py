"""The samples of a profile folder: the steps of samples.csv, and those of one point of the grid together."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Optional

from servesim.core import Shape
from servesim.files.step_table import MeasuredStep, number_shapes, read_steps

SAMPLE_FILES = ("samples.csv", "samples.csv.gz")


@dataclass
class MeasuredPoint:
    """All samples of one point of the grid. They share one shape."""

    kind: str
    shape: Shape
    seconds: list[float] = field(default_factory=list)
    flagged: int = 0
    failed: str = ""

    @cached_property
    def median(self) -> float:
        """Median of the samples, in seconds."""
        import numpy as np

        return float(np.median(self.seconds))

    @cached_property
    def median_error(self) -> float:
        """Standard error of the median, as a fraction of the median."""
        import numpy as np

        if len(self.seconds) < 2 or not self.median:
            return 1.0
        low, high = np.quantile(self.seconds, [0.25, 0.75])
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


def read_samples(path: Path, resume: bool = False) -> list[MeasuredStep]:
    """Read all rows. With `resume`, skip an incomplete last line. Without points, equal shapes are one point."""
    steps = read_steps(path, ("seconds",), complete_lines=resume)
    if any(step.point is None for step in steps):
        points = number_shapes([step.shape for step in steps])
        steps = [step._replace(point=point) for step, point in zip(steps, points)]
    return steps


def measured_points(folder: Optional[Path]) -> list[MeasuredPoint]:
    """Return the points of a profile folder, an empty list without samples."""
    path = samples_file(folder)
    points: dict[tuple[str, Optional[int]], MeasuredPoint] = {}
    for sample in [] if path is None else read_samples(path):
        point = points.setdefault((sample.kind, sample.point), MeasuredPoint(sample.kind, sample.shape))
        if sample.seconds is None:
            point.failed = sample.failed
        elif sample.flagged:
            point.flagged += 1
        else:
            point.seconds.append(sample.seconds + (sample.host or 0.0))
    return list(points.values())
