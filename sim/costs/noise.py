"""Random step times with the distribution of measured steps."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from servesim.core import Shape, StepCost


def mean_one(quantiles: Sequence[float]) -> list[float]:
    """Scale quantiles, evenly spaced from minimum to maximum, so that random factors between them have the mean 1.

    The lines between quantiles overstate a few slow steps: without this, random step times are too long on average.
    """
    factors = [float(factor) for factor in quantiles]
    pairs = list(zip(factors, factors[1:])) or [(factors[0], factors[0])]
    mean = sum(low + high for low, high in pairs) / (2 * len(pairs))
    return [factor / mean for factor in factors] if mean > 0 else factors


class NoisyCost(StepCost):
    """Multiplies the times of another cost model by random factors of measured steps of the same kind, of mean 1."""

    def __init__(self, cost: StepCost, noise: Mapping[str, Sequence[float]], seed: int) -> None:
        self.cost = cost
        self.noise = {kind: mean_one(factors) for kind, factors in noise.items() if factors}
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
