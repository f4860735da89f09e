"""The time to select the next token of each row of a step: a variant other than the measured one changes the step time.

A step selects one token per row that it computes, prompt chunk or decode, also for the padding rows of a batch.
"""

from __future__ import annotations

from typing import NamedTuple, Optional

from servesim.core import Shape, StepCost


class SamplingTerm(NamedTuple):
    """Seconds to select the tokens of a step, from the end of the model's work to the tokens on the host."""

    step: float  # per step
    row: float  # per row

    def seconds(self, rows: int) -> float:
        """Return the seconds of a step; one without rows, such as a copy of blocks, selects no token."""
        return self.step + self.row * rows if rows else 0.0


class SampledCost(StepCost):
    """Another cost model, with a different time for the selection of tokens. A step never takes less than 0 s."""

    def __init__(self, cost: StepCost, added: SamplingTerm) -> None:
        self.cost = cost
        self.added = added  # negative for a faster selection

    @property
    def deterministic(self) -> bool:
        return self.cost.deterministic

    def seconds(self, shape: Shape) -> float:
        return max(0.0, self.cost.seconds(shape) + self.added.seconds(shape.prefill_rows + shape.decode_rows))

    def decode(self, rows: int, live: int, context: int) -> float:
        line = self.linear_in_context(rows, live)  # fast-forward uses the line: both must round in the same way
        if line is not None:
            return line[0] + line[1] * context
        return max(0.0, self.cost.decode(rows, live, context) + self.added.seconds(rows))

    def linear_in_context(self, rows: int, live: int) -> Optional[tuple[float, float]]:
        line = self.cost.linear_in_context(rows, live)
        if line is None:
            return None
        fixed = line[0] + self.added.seconds(rows)
        return (fixed, line[1]) if fixed >= 0.0 else None
