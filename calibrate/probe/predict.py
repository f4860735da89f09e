"""The seconds that a cost model predicts for many steps."""

from __future__ import annotations

import numpy as np
from servesim.core import Shape, StepCost

from .sample_set import Array


def predict(cost: StepCost, table: Array) -> Array:
    """Return the seconds of every row of a table of shapes."""
    return np.array([cost.seconds(Shape(*row)) for row in table.astype(np.int64).tolist()], dtype=float)


def predict_decodes(cost: StepCost, table: Array) -> Array:
    """Return the seconds of the decodes of every step; 0 if there are none."""
    decodes = table.astype(np.int64)
    decodes[:, :5] = decodes[:, 8] = 0  # without prompts and copies
    return np.array([cost.duration(Shape(*row)) if any(row) else 0.0 for row in decodes.tolist()], dtype=float)
