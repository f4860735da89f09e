"""Host time of a step (scheduling, block tables, building rows), fitted to live calls. Times are seconds.

With asynchronous scheduling, the host works while the device runs the step before: the host time then includes the
launch of the step. A step then takes less time than one of a probe, which waits for its launch and for its tokens.
Used in the worker and in the simulation: Python 3.9 and numpy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from servesim.core import Shape, StepCost
from servesim.costs.derived import without_host
from servesim.costs.parts import HostPart
from servesim.files.step_table import ModelCall

SLOW_RATIO = 10.0  # calls above this multiple of the median are excluded as outliers
MIN_CALLS = 20  # needed for a fit of all terms


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


def fit_saved(calls: Sequence[ModelCall], cost: StepCost) -> HostPart:
    """Return by how many seconds calls in flight were shorter than the same calls alone, which have this cost.

    The first calls follow an idle device: nothing overlaps with them.
    """
    cost = without_host(cost)
    samples = [host_sample(cost.seconds(call.shape) - (call.end - call.start), call.shape) for call in calls[2:]]
    return fit_terms(samples)


def fit_overhead(samples: Sequence[Sequence[float]]) -> HostPart:
    """Fit the host time to the result of `overhead_samples`."""
    import numpy as np

    if not samples:
        return HostPart()
    limit = SLOW_RATIO * np.median([sample[0] for sample in samples])
    return fit_terms([sample for sample in samples if sample[0] <= limit])


def fit_terms(samples: Sequence[Sequence[float]]) -> HostPart:
    """Return the least-squares fit whose terms are not negative; of few samples, the median."""
    import numpy as np

    if len(samples) < MIN_CALLS:
        return HostPart(max(0.0, float(np.median([sample[0] for sample in samples]))) if samples else 0.0)
    table = np.array(samples, dtype=float)
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
