"""Host overhead of a step (scheduling, block tables, building rows), fitted to live calls. Times are seconds.

Used in the worker and in the simulation: Python 3.9 and numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from servesim.core import Shape, StepCost
from servesim.costs.parts import HostPart, PartsCost
from servesim.costs.scaled import ScaledCost
from servesim.engine.step import ModelCall

SLOW_RATIO = 10.0  # calls above this multiple of the median are excluded as outliers
MIN_CALLS = 20  # needed for a fit of all terms


@dataclass(frozen=True)
class HostOverhead:
    """Seconds of host work around a model call."""

    step: float = 0.0  # per step
    row: float = 0.0  # per row, prompt or decode
    prompt: float = 0.0  # per prompt chunk, in addition to its row: queue moves and block allocation
    token: float = 0.0  # per prompt token

    def seconds(self, rows: int, prompts: int = 0, tokens: int = 0) -> float:
        """Return the host overhead of a step; `tokens` are the prompt tokens of all its chunks."""
        return self.step + self.row * rows + self.prompt * prompts + self.token * tokens


def without_host(cost: StepCost) -> StepCost:
    """Return a cost model without the host time of its profile."""
    if isinstance(cost, ScaledCost):
        return ScaledCost(without_host(cost.cost), cost.factor)
    return replace(cost, host=HostPart()) if isinstance(cost, PartsCost) else cost


class CostWithHost(StepCost):
    """Step costs of a device plus the host overhead."""

    def __init__(self, cost: StepCost, host: HostOverhead) -> None:
        # The host of this run was measured: it replaces the host time of the profile.
        self.cost = without_host(cost)
        self.host = host

    @property
    def deterministic(self) -> bool:
        return self.cost.deterministic

    def seconds(self, shape: Shape) -> float:
        rows = shape.prefill_rows + shape.decode_live
        return self.cost.seconds(shape) + self.host.seconds(rows, shape.prefill_rows, shape.prefill_tokens)

    def decode(self, rows: int, live: int, context: int) -> float:
        return self.cost.decode(rows, live, context) + self.host.seconds(live)


def overhead_samples(calls: Sequence[ModelCall]) -> list[tuple[float, int, int, int]]:
    """Return (host seconds, rows, prompt chunks, prompt tokens) of measured calls."""
    # Before the first call the driver waits for an arrival; that is no host overhead.
    return [
        (call.called - call.start, call.shape.prefill_rows + call.shape.decode_live, call.shape.prefill_rows,
         call.shape.prefill_tokens)
        for call in calls[1:]
    ]  # fmt: skip


def fit_overhead(samples: Sequence[Sequence[float]]) -> HostOverhead:
    """Fit the host overhead to the result of `overhead_samples`."""
    import numpy as np

    if len(samples) < MIN_CALLS:
        return HostOverhead(float(np.median([sample[0] for sample in samples])) if samples else 0.0)
    table = np.array(samples, dtype=float)
    table = table[table[:, 0] <= SLOW_RATIO * np.median(table[:, 0])]
    design, seconds = np.column_stack([np.ones(len(table)), table[:, 1:]]), table[:, 0]
    best, best_error = HostOverhead(), float("inf")
    for count in range(1, design.shape[1] + 1):  # the worker has no scipy; with four terms, all subsets are few
        for terms in combinations(range(design.shape[1]), count):
            solution = np.linalg.lstsq(design[:, terms], seconds, rcond=None)[0]
            error = float(np.sum((design[:, terms] @ solution - seconds) ** 2))
            if solution.min() >= 0 and error < best_error:
                fitted = dict(zip(terms, solution.tolist()))
                best, best_error = HostOverhead(*(fitted.get(k, 0.0) for k in range(design.shape[1]))), error
    return best
