"""A cost model whose times are all multiplied by one factor."""

from __future__ import annotations

from typing import Optional

from servesim.core import Shape, StepCost


class ScaledCost(StepCost):
    """Another cost model, slower or faster by a factor."""

    def __init__(self, cost: StepCost, factor: float) -> None:
        self.cost = cost
        self.factor = factor

    @property
    def deterministic(self) -> bool:
        return self.cost.deterministic

    def seconds(self, shape: Shape) -> float:
        return self.factor * self.cost.seconds(shape)

    def decode(self, rows: int, live: int, context: int) -> float:
        line = self.linear_in_context(rows, live)  # fast-forward uses the line: both must round in the same way
        return self.factor * self.cost.decode(rows, live, context) if line is None else line[0] + line[1] * context

    def linear_in_context(self, rows: int, live: int) -> Optional[tuple[float, float]]:
        line = self.cost.linear_in_context(rows, live)
        return None if line is None else (self.factor * line[0], self.factor * line[1])
