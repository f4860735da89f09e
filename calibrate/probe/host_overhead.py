"""Host time of a step (scheduling, block tables, building rows), fitted to live calls. Times are seconds.

With asynchronous scheduling, the host works while the device runs the step before: the host time then includes the
launch of the step. A step also takes less time than one of a probe, which waits for its launch and for its tokens.
Used in the worker and in the simulation: Python 3.9 and numpy.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import median
from typing import Any

from servesim.calibrate.device.backend import Backend, Row
from servesim.core import Shape
from servesim.costs.parts import HostPart
from servesim.engine.step import ModelCall

SLOW_RATIO = 10.0  # calls above this multiple of the median are excluded as outliers
MIN_CALLS = 20  # needed for a fit of all terms
OVERLAP_ROWS = (1, 16, 64)  # decodes of the steps that measure how much of a step overlaps
OVERLAP_STEPS = 25  # per number of rows


def measured_host(result: Mapping[str, Any]) -> HostPart:
    """Return the host time of a measured run, for `Profile.for_run`. The step times of the fake backend include it."""
    fake = (result.get("backend") or {}).get("backend") == "fake"
    return HostPart() if fake else HostPart(*result.get("host", ()))


HostSample = tuple[float, int, int, int]  # host seconds of a call, rows, prompt chunks, prompt tokens


def host_sample(seconds: float, shape: Shape) -> HostSample:
    """Return the host time of one call."""
    return seconds, shape.prefill_rows + shape.decode_live, shape.prefill_rows, shape.prefill_live


def overhead_samples(calls: Sequence[ModelCall]) -> list[HostSample]:
    """Return the host times of measured calls that do not overlap."""
    # Before the first call the driver waits for an arrival; that is no host time.
    return [host_sample(call.called - call.start, call.shape) for call in calls[1:]]


def measure_overlap(backend: Backend) -> tuple[float, float]:
    """Return by how many seconds per step, and per row, a step is shorter if it is launched during the one before."""
    import numpy as np

    saved = [max(0.0, time_steps(backend, rows, False) - time_steps(backend, rows, True)) for rows in OVERLAP_ROWS]
    row, step = np.polyfit(OVERLAP_ROWS, saved, 1).tolist()
    return (step, row) if step >= 0 <= row else (median(saved), 0.0)


def time_steps(backend: Backend, rows: int, in_flight: bool) -> float:
    """Return the median seconds between the ends of equal decode steps, one by one or with two in flight."""
    backend.launch([Row([1], 1, [1])] * rows)
    ends = []
    for _ in range(OVERLAP_STEPS):
        if in_flight:
            backend.launch([Row([-1 - row], 1, [1]) for row in range(rows)])
            backend.collect()
        else:
            backend.collect()
            backend.launch([Row([1], 1, [1])] * rows)
        ends.append(time.perf_counter())
    backend.collect()
    return median(end - start for start, end in zip(ends, ends[1:]))


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
