"""Random step times with the distribution of measured steps."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from servesim.core import Shape, StepCost


class NoisyCost(StepCost):
    """Multiplies the times of another cost model by random factors from measured steps of the same kind."""

    def __init__(self, cost: StepCost, noise: Mapping[str, Sequence[float]], seed: int) -> None:
        self.cost = cost
        # Quantiles of measured / predicted time, evenly spaced from minimum to maximum.
        self.noise = {kind: [float(factor) for factor in factors] for kind, factors in noise.items() if factors}
        self._random = random.Random(f"step noise {seed}")

    @property
    def deterministic(self) -> bool:
        return False

    def seconds(self, shape: Shape) -> float:
        kind = "prefill" if shape.kind == "mixed" and "mixed" not in self.noise else shape.kind
        return self.cost.seconds(shape) * self._factor(kind)

    def decode(self, rows: int, live: int, context: int) -> float:
        return self.cost.decode(rows, live, context) * self._factor("decode")

    def _factor(self, kind: str) -> float:
        quantile = self._random.random()  # also without noise, so that one kind does not change the others
        factors = self.noise.get(kind)
        if not factors:
            return 1.0
        position = quantile * (len(factors) - 1)
        low = int(position)
        return factors[low] + (factors[min(low + 1, len(factors) - 1)] - factors[low]) * (position - low)
