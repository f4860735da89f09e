"""Cost models that change the times of another one.

A factor, the noise of measured steps, the host time of another host, host time during the step before, another way to
select tokens, copies from a host cache, and the extra time of new shapes.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Optional

from servesim.core import Shape, StepCost

from .parts import NO_HOST, HostPart, PartsCost


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


class CostWithHost(StepCost):
    """The step times of a device plus the measured host time of a run, which replaces that of its profile."""

    def __init__(self, cost: StepCost, host: HostPart) -> None:
        self.cost = without_host(cost)
        self.host = host

    @property
    def deterministic(self) -> bool:
        return self.cost.deterministic

    def seconds(self, shape: Shape) -> float:
        rows = shape.prefill_rows + shape.decode_live
        return self.cost.seconds(shape) + self.host.seconds(rows, shape.prefill_rows, shape.prefill_live)

    def decode(self, rows: int, live: int, context: int) -> float:
        return self.cost.decode(rows, live, context) + self.host.seconds(live)


def without_host(cost: StepCost) -> StepCost:
    """Return a cost model without the host time of its profile."""
    if isinstance(cost, ScaledCost):
        return ScaledCost(without_host(cost.cost), cost.factor)
    if isinstance(cost, SampledCost):
        return SampledCost(without_host(cost.cost), cost.added)
    if isinstance(cost, CostWithHost):
        return cost.cost
    return replace(cost, host=NO_HOST) if isinstance(cost, PartsCost) else cost


def host_of(cost: StepCost) -> tuple[HostPart, float]:
    """Return the host time of a cost model, and the factor that scales it."""
    if isinstance(cost, ScaledCost):
        host, factor = host_of(cost.cost)
        return host, factor * cost.factor
    if isinstance(cost, SampledCost):
        return host_of(cost.cost)
    return (cost.host if isinstance(cost, (PartsCost, CostWithHost)) else NO_HOST), 1.0


class OverlappedCost(StepCost):
    """Step times of an engine with steps in flight: host time counts only where it exceeds the device.

    `saved`: by how much a step on the device is shorter than one alone, because its launch overlaps too.
    """

    def __init__(self, cost: StepCost, saved: HostPart) -> None:
        self.cost = without_host(cost)
        self.host, self.factor = host_of(cost)
        self.saved = saved

    @property
    def deterministic(self) -> bool:
        return self.cost.deterministic

    def seconds(self, shape: Shape) -> float:
        terms = shape.prefill_rows + shape.decode_live, shape.prefill_rows, shape.prefill_live
        device = self.cost.seconds(shape) - self.saved.seconds(*terms)
        return max(0.0, device, self.factor * self.host.seconds(*terms))

    def decode(self, rows: int, live: int, context: int) -> float:
        line = self.linear_in_context(rows, live)  # fast-forward uses the line: both must round in the same way
        if line is not None:
            return line[0] + line[1] * context
        device = self.cost.decode(rows, live, context) - self.saved.seconds(live)
        return max(0.0, device, self.factor * self.host.seconds(live))

    def linear_in_context(self, rows: int, live: int) -> Optional[tuple[float, float]]:
        line = self.cost.linear_in_context(rows, live)
        if line is None:
            return None
        fixed = line[0] - self.saved.seconds(live)
        return (fixed, line[1]) if fixed >= max(0.0, self.factor * self.host.seconds(live)) else None


class SamplingTerm(NamedTuple):
    """Seconds to select the tokens of a step, from the end of the model's work to the tokens on the host.

    A step selects one token per row that it computes, prompt chunk or decode, also for the padding rows of a batch.
    """

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


def mean_one(quantiles: Sequence[float]) -> list[float]:
    """Scale quantiles, evenly spaced from minimum to maximum, so that random factors between them have the mean 1.

    The lines between quantiles overstate a few slow steps: without this, random step times are too long on average.
    """
    factors = [float(factor) for factor in quantiles]
    pairs = list(zip(factors, factors[1:])) or [(factors[0], factors[0])]
    mean = sum(low + high for low, high in pairs) / (2 * len(pairs))
    return [factor / mean for factor in factors] if mean > 0 else factors


class HostCopyCost(StepCost):
    """Another cost model, with the time of copies from a host cache in place of its time of swapped blocks."""

    def __init__(self, cost: StepCost, step: float, block: float) -> None:
        self.cost = cost
        self.step = step  # seconds per step with copies
        self.block = block  # seconds per copied block

    @property
    def deterministic(self) -> bool:
        return self.cost.deterministic

    def seconds(self, shape: Shape) -> float:
        if not shape.swapped:
            return self.cost.seconds(shape)
        return self.cost.duration(shape._replace(swapped=0)) + self.step + self.block * shape.swapped

    def decode(self, rows: int, live: int, context: int) -> float:
        return self.cost.decode(rows, live, context)

    def linear_in_context(self, rows: int, live: int) -> Optional[tuple[float, float]]:
        return self.cost.linear_in_context(rows, live)


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


class FirstUseCost(StepCost):
    """Adds seconds to the first step of every bucket of tokens. One object belongs to one run.

    Some engines capture a CUDA graph, or compile, when they see a padded shape for the first time. These steps can take
    ten times as long as later ones of the same shape.
    """

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
