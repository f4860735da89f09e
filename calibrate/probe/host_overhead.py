"""Host time of a step (scheduling, block tables, building rows), fitted to live calls. Times are seconds.

Used in the worker and in the simulation: Python 3.9 and numpy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from servesim.costs.parts import HostPart
from servesim.engine.step import ModelCall

SLOW_RATIO = 10.0  # calls above this multiple of the median are excluded as outliers
MIN_CALLS = 20  # needed for a fit of all terms


def measured_host(result: Mapping[str, Any]) -> HostPart:
    """Return the host time of a measured run, for `Profile.for_run`. The step times of the fake backend include it."""
    fake = (result.get("backend") or {}).get("backend") == "fake"
    return HostPart() if fake else HostPart(*result.get("host", ()))


def overhead_samples(calls: Sequence[ModelCall]) -> list[tuple[float, int, int, int]]:
    """Return (host seconds, rows, prompt chunks, prompt tokens) of measured calls."""
    # Before the first call the driver waits for an arrival; that is no host time.
    return [
        (call.called - call.start, call.shape.prefill_rows + call.shape.decode_live, call.shape.prefill_rows,
         call.shape.prefill_live)
        for call in calls[1:]
    ]  # fmt: skip


def fit_overhead(samples: Sequence[Sequence[float]]) -> HostPart:
    """Fit the host time to the result of `overhead_samples`."""
    import numpy as np

    if len(samples) < MIN_CALLS:
        return HostPart(float(np.median([sample[0] for sample in samples])) if samples else 0.0)
    table = np.array(samples, dtype=float)
    table = table[table[:, 0] <= SLOW_RATIO * np.median(table[:, 0])]
    design, seconds = np.column_stack([np.ones(len(table)), table[:, 1:]]), table[:, 0]
    best, best_error = HostPart(), float("inf")
    for count in range(1, design.shape[1] + 1):  # the worker has no scipy; with four terms, all subsets are few
        for terms in combinations(range(design.shape[1]), count):
            solution = np.linalg.lstsq(design[:, terms], seconds, rcond=None)[0]
            error = float(np.sum((design[:, terms] @ solution - seconds) ** 2))
            if solution.min() >= 0 and error < best_error:
                fitted = dict(zip(terms, solution.tolist()))
                best, best_error = HostPart(*(fitted.get(k, 0.0) for k in range(design.shape[1]))), error
    return best
