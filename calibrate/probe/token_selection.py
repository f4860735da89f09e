"""The time to select tokens: measured apart from the model call for every variant that a device has, and fitted.

Measuring runs in the worker: Python 3.9 and the standard library.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Optional

from servesim.calibrate.device.backend import STEP_FAILURES, Backend, Row

ROWS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
MIN_ROUNDS, MAX_ROUNDS = 3, 15  # samples per variant and number of rows

Medians = dict[str, list[list[float]]]  # variant -> (rows, seconds)


def measure_sampling(backend: Backend, max_rows: int, budget: float = 30.0) -> Medians:
    """Return the median seconds of the selection of tokens, by variant and number of rows.

    Every selection follows a model call of its own, so that it finds logits, caches and clocks as in a step. The
    variants alternate. After `budget` seconds, no new round starts, but there are at least MIN_ROUNDS.
    """
    counts = [rows for rows in ROWS if rows < max_rows] + [max_rows]
    pairs = [(name, rows) for rows in counts for name in backend.samplings if runs(backend, name, rows)]  # warm-up
    seconds: dict[tuple[str, int], list[float]] = {pair: [] for pair in pairs}
    deadline = time.perf_counter() + budget
    for number in range(MAX_ROUNDS):
        if number >= MIN_ROUNDS and time.perf_counter() > deadline:
            break
        for (name, rows), samples in seconds.items():
            samples.append(time_selection(backend, name, rows))
    medians: Medians = {}
    for (name, rows), samples in seconds.items():
        medians.setdefault(name, []).append([rows, median(samples)])
    return medians


def runs(backend: Backend, sampling: str, rows: int) -> bool:
    """Return whether the device can run a variant with this many rows."""
    try:
        time_selection(backend, sampling, rows)
    except STEP_FAILURES:
        return False
    return True


def time_selection(backend: Backend, sampling: str, rows: int) -> float:
    """Run decodes of one cached token and return the seconds of the selection of their tokens."""
    backend.compute([Row([1], 1, [1])] * rows)
    backend.synchronize()
    start = time.perf_counter()
    backend.select_tokens(sampling)
    backend.synchronize()
    return time.perf_counter() - start


def fit_term(medians: Sequence[Sequence[float]]) -> dict[str, float]:
    """Fit seconds per step and per row, both at least 0; errors are relative, so that small batches count too."""
    import numpy as np

    from .solver import nonneg_least_squares

    table = np.array(medians, dtype=float)
    weights = 1 / np.maximum(table[:, 1], 1e-9)
    design = np.column_stack([np.ones(len(table)), table[:, 0]]) * weights[:, None]
    step, row = nonneg_least_squares(design, table[:, 1] * weights)
    return {"step": float(step), "row": float(row)}


def sampling_keys(used: Any, medians: Optional[Mapping[str, Sequence[Sequence[float]]]]) -> Optional[dict[str, Any]]:
    """Return the section `sampling` of a profile; `used` is the variant of the measured steps, or a section."""
    if used is None or isinstance(used, Mapping):
        return None if used is None else dict(used)
    return {"used": str(used), "terms": {name: fit_term(points) for name, points in (medians or {}).items()}}
