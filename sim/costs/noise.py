"""Step times that scatter as measured steps did."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from servesim.core import Shape, StepCost


class NoisyCost(StepCost):
    """Another model's times, each stretched by a factor drawn from how measured steps of its kind scattered."""

    def __init__(self, cost: StepCost, noise: Mapping[str, Sequence[float]], seed: int) -> None:
        self.cost = cost
        # Quantiles of measured over expected time, evenly spaced from the least to the most.
        self.noise = {kind: [float(factor) for factor in factors] for kind, factors in noise.items() if factors}
        self._random = random.Random(f"step noise {seed}")

    @property
    def steady(self) -> bool:
        return False

    def seconds(self, shape: Shape) -> float:
        kind = "prefill" if shape.kind == "mixed" and "mixed" not in self.noise else shape.kind
        return self.cost.seconds(shape) * self._factor(kind)

    def decode(self, rows: int, live: int, context: int) -> float:
        return self.cost.decode(rows, live, context) * self._factor("decode")

    def _factor(self, kind: str) -> float:
        drawn = self._random.random()  # drawn even where there is no noise, so that kinds do not shift each other
        factors = self.noise.get(kind)
        if not factors:
            return 1.0
        place = drawn * (len(factors) - 1)
        low = int(place)
        return factors[low] + (factors[min(low + 1, len(factors) - 1)] - factors[low]) * (place - low)
