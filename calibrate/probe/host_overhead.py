"""Host overhead of a step (scheduling, block tables, building rows), fitted to live calls. Times are seconds.

Used in the worker and in the simulation: Python 3.9 and numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from servesim.core import Shape, StepCost
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


class CostWithHost(StepCost):
    """Step costs of a device plus the host overhead."""

    def __init__(self, cost: StepCost, host: HostOverhead) -> None:
        self.cost = cost
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
    active = list(range(design.shape[1]))
    while True:  # no term may be negative: drop the most negative one and solve again
        solution = np.linalg.lstsq(design[:, active], seconds, rcond=None)[0]
        worst = int(solution.argmin())
        if solution[worst] >= 0 or len(active) == 1:
            break
        del active[worst]
    fitted = dict(zip(active, solution.tolist()))
    return HostOverhead(*(max(0.0, fitted.get(term, 0.0)) for term in range(design.shape[1])))
