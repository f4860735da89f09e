"""Write steps as samples.csv, the file that `sim calibrate fit` reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Optional

import numpy as np
from numpy.typing import NDArray
from servesim.core import Shape
from servesim.files.write import csv_writer, open_text

from .step_log import TimedStep

COLUMNS = ("kind", "point", "seconds", *Shape._fields, "flagged")


def write_samples(path: Path, steps: Sequence[TimedStep], slow: Optional[NDArray[np.bool_]] = None) -> None:
    """Write one row per step. Steps of one shape are samples of one point. The fit ignores flagged rows."""
    points: dict[Shape, int] = {}
    with open_text(path, overwrite=False) as file:
        writer = csv_writer(file)
        writer.writerow(COLUMNS)
        for k, step in enumerate(steps):
            point = points.setdefault(step.shape, len(points))
            flagged = "new shape" if slow is not None and slow[k] else ""
            writer.writerow((step.shape.kind, point, f"{step.seconds:.9g}", *step.shape, flagged))
