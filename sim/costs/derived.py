"""Cost models that change the times of another one.

A factor, the noise of measured steps, the host time of another host, host time during the step before, another way to
select tokens, copies from a host cache, the launch of kernels without CUDA graphs, and the extra time of new shapes.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Optional

from servesim.core import Shape, StepCost

from .parts import NO_HOST, HostPart, PartsCost

Line = Optional[tuple[float, float]]  # fixed seconds of a decode step, and seconds per cached token


class ChangedCost(StepCost):
    """The times of another cost model, changed. The line of a decode step over the context is lost, if not kept."""

    def __init__(self, cost: StepCost) -> None:
        self.cost = cost

    @property
    def deterministic(self) -> bool:
        return self.cost.deterministic

    @property
    def reads_longest(self) -> bool:
        return self.cost.reads_longest

    def change(self, seconds: float, shape: Shape) -> float:
        """Return the changed seconds of a step. Subclasses implement this."""
        raise NotImplementedError

    def change_line(self, fixed: float, slope: float, rows: int, live: int) -> Line:
        """Return the changed line of a decode step, None if it is not a line."""
        return None

    def seconds(self, shape: Shape) -> float:
        return self.change(self.cost.seconds(shape), shape)

    def decode(self, rows: int, live: int, context: int) -> float:
        return self.decode_unequal(rows, live, context, 0)

    def decode_unequal(self, rows: int, live: int, context: int, longest: int) -> float:
        line = self.linear_in_context(rows, live)  # the clock uses the line: both must round in the same way
        if line is not None:
            return line[0] + line[1] * context
        shape: Shape = tuple.__new__(Shape, (0, 0, 0, 0, 0, rows, live, context, 0, longest, 0))  # faster
        if longest:
            return self.change(self.cost.decode_unequal(rows, live, context, longest), shape)
        return self.change(self.cost.decode(rows, live, context), shape)

    def linear_in_context(self, rows: int, live: int) -> Line:
        line = self.cost.linear_in_context(rows, live)
        return None if line is None else self.change_line(line[0], line[1], rows, live)


class ScaledCost(ChangedCost):
    """Another cost model, slower or faster by a factor."""

    def __init__(self, cost: StepCost, factor: float) -> None:
        super().__init__(cost)
        self.factor = factor

    def change(self, seconds: float, shape: Shape) -> float:
        return self.factor * seconds

    def change_line(self, fixed: float, slope: float, rows: int, live: int) -> Line:
        return self.factor * fixed, self.factor * slope


class CostWithHost(ChangedCost):
    """The step times of a device plus the measured host time of a run, which replaces that of its profile."""

    def __init__(self, cost: StepCost, host: HostPart) -> None:
        super().__init__(without_host(cost))
        self.host = host

    def change(self, seconds: float, shape: Shape) -> float:
        return seconds + self.host.of_step(shape)


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


def tokens_of(shape: Shape) -> int:
    """Return the tokens that a step computes, with padding."""
    return shape.prefill_tokens + shape.decode_rows + shape.drafts


class Launches(NamedTuple):
    """The launch of steps that are larger than every padding bucket, and thus have no recorded graph."""

    seconds: float = 0.0  # of the host: other steps start at once
    tokens: int = 0  # the largest bucket of steps with prompts
    rows: int = 0  # the largest bucket of decodes

    def of_step(self, shape: Shape) -> float:
        """Return the seconds of a step."""
        limit = self.tokens if shape.prefill_rows or shape.drafts else self.rows
        return self.seconds if tokens_of(shape) > limit else 0.0


NO_LAUNCHES = Launches()


class OverlappedCost(ChangedCost):
    """Step times of an engine with steps in flight: host time counts only where it exceeds the device.

    `saved`: by how much a step on the device is shorter than one alone, because its launch overlaps too. `launches`: by
    how much more without a graph.
    """

    def __init__(self, cost: StepCost, saved: HostPart, launches: Launches = NO_LAUNCHES) -> None:
        super().__init__(without_host(cost))
        self.host, self.factor = host_of(cost)
        self.saved, self.launches = saved, launches

    def change(self, seconds: float, shape: Shape) -> float:
        saved = self.saved.of_step(shape) + self.launches.of_step(shape)
        return max(0.0, seconds - saved, self.factor * self.host.of_step(shape))

    def change_line(self, fixed: float, slope: float, rows: int, live: int) -> Line:
        fixed -= self.saved.seconds(live) + self.launches.of_step(Shape(decode_rows=rows))
        return (fixed, slope) if fixed >= max(0.0, self.factor * self.host.seconds(live)) else None


class SamplingTerm(NamedTuple):
    """Seconds to select the tokens of a step, from the end of the model's work to the tokens on the host.

    A step selects one token per row that it computes, prompt chunk or decode, also for the padding rows of a batch, and
    one per draft that it verifies.
    """

    step: float  # per step
    row: float  # per row

    def seconds(self, rows: int) -> float:
        """Return the seconds of a step; one without rows, such as a copy of blocks, selects no token."""
        return self.step + self.row * rows if rows else 0.0


class SampledCost(ChangedCost):
    """Another cost model, with a different time for the selection of tokens. A step never takes less than 0 s."""

    def __init__(self, cost: StepCost, added: SamplingTerm) -> None:
        super().__init__(cost)
        self.added = added  # negative for a faster selection

    def change(self, seconds: float, shape: Shape) -> float:
        return max(0.0, seconds + self.added.seconds(shape.prefill_rows + shape.decode_rows + shape.drafts))

    def change_line(self, fixed: float, slope: float, rows: int, live: int) -> Line:
        fixed += self.added.seconds(rows)
        return (fixed, slope) if fixed >= 0.0 else None


class HostCopyCost(ChangedCost):
    """Another cost model, with the time of copies from a host cache in place of its time of swapped blocks."""

    def __init__(self, cost: StepCost, step: float, block: float) -> None:
        super().__init__(cost)
        self.step = step  # seconds per step with copies
        self.block = block  # seconds per copied block

    def seconds(self, shape: Shape) -> float:
        if not shape.swapped:
            return self.cost.seconds(shape)
        return self.cost.duration(shape._replace(swapped=0)) + self.step + self.block * shape.swapped

    def change(self, seconds: float, shape: Shape) -> float:
        return seconds  # of a decode step: it has no copies

    def change_line(self, fixed: float, slope: float, rows: int, live: int) -> Line:
        return fixed, slope


class NoisyCost(ChangedCost):
    """Multiplies the times of another cost model by random factors of measured steps of the same kind, of mean 1."""

    def __init__(self, cost: StepCost, noise: Mapping[str, Sequence[float]], seed: int) -> None:
        super().__init__(cost)
        self.noise = {kind: mean_one(factors) for kind, factors in noise.items() if factors}
        self._random = random.Random(f"step noise {seed}")

    @property
    def deterministic(self) -> bool:
        return False

    def change(self, seconds: float, shape: Shape) -> float:
        kind = "prefill" if shape.kind == "mixed" and "mixed" not in self.noise else shape.kind
        quantile = self._random.random()  # also without noise, so that one kind does not change the others
        factors = self.noise.get(kind)
        if not factors:
            return seconds
        position = quantile * (len(factors) - 1)
        low = int(position)
        factor = factors[low] + (factors[min(low + 1, len(factors) - 1)] - factors[low]) * (position - low)
        return seconds * factor


def mean_one(quantiles: Sequence[float]) -> list[float]:
    """Scale quantiles, evenly spaced from minimum to maximum, so that random factors between them have the mean 1.

    The lines between quantiles overstate a few slow steps: without this, random step times are too long on average.
    """
    factors = [float(factor) for factor in quantiles]
    pairs = list(zip(factors, factors[1:])) or [(factors[0], factors[0])]
    mean = sum(low + high for low, high in pairs) / (2 * len(pairs))
    return [factor / mean for factor in factors] if mean > 0 else factors


class LaunchedCost(ChangedCost):
    """Another cost model, of a server without CUDA graphs: a step takes at least the launch of its kernels."""

    def __init__(self, cost: StepCost, launch: float) -> None:
        super().__init__(cost)
        self.launch = launch

    def change(self, seconds: float, shape: Shape) -> float:
        return max(seconds, self.launch) if shape.prefill_rows + shape.decode_rows else seconds

    def change_line(self, fixed: float, slope: float, rows: int, live: int) -> Line:
        return (fixed, slope) if fixed >= self.launch else None


class FirstUseCost(ChangedCost):
    """Adds seconds to the first step of every bucket of tokens. One object belongs to one run.

    Some engines capture a CUDA graph, or compile, when they see a padded shape for the first time. These steps can take
    ten times as long as later ones of the same shape.
    """

    def __init__(self, cost: StepCost, tokens: int, seconds: float) -> None:
        super().__init__(cost)
        self.tokens = tokens  # width of a bucket
        self.first = seconds
        self._used: set[int] = {0}  # a step without tokens prepares nothing

    @property
    def deterministic(self) -> bool:
        return False

    def change(self, seconds: float, shape: Shape) -> float:
        bucket = self._bucket(tokens_of(shape))
        if bucket in self._used:
            return seconds
        self._used.add(bucket)
        return seconds + self.first

    def change_line(self, fixed: float, slope: float, rows: int, live: int) -> Line:
        return (fixed, slope) if self._bucket(rows) in self._used else None

    def _bucket(self, tokens: int) -> int:
        return -(-tokens // self.tokens)
