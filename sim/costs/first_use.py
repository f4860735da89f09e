"""Extra time of the first step with a new padded number of tokens.

Some engines capture a CUDA graph, or compile, when they see a padded shape for the first time. These steps can take ten
times as long as later ones of the same shape.
"""

from __future__ import annotations

from typing import Optional

from servesim.core import Shape, StepCost


class FirstUseCost(StepCost):
    """Adds seconds to the first step of every bucket of tokens. One object belongs to one run."""

    def __init__(self, cost: StepCost, tokens: int, seconds: float) -> None:
        self.cost = cost
        self.tokens = tokens  # width of a bucket
        self.first = seconds
        self._used: set[int] = set()

    @property
    def deterministic(self) -> bool:
        return False

    def seconds(self, shape: Shape) -> float:
        return self.cost.seconds(shape) + self._take(shape.prefill_tokens + shape.decode_rows)

    def decode(self, rows: int, live: int, context: int) -> float:
        return self.cost.decode(rows, live, context) + self._take(rows)

    def linear_in_context(self, rows: int, live: int) -> Optional[tuple[float, float]]:
        return self.cost.linear_in_context(rows, live) if self._bucket(rows) in self._used else None

    def _bucket(self, tokens: int) -> int:
        return -(-tokens // self.tokens)

    def _take(self, tokens: int) -> float:
        bucket = self._bucket(tokens)
        if not tokens or bucket in self._used:
            return 0.0
        self._used.add(bucket)
        return self.first
