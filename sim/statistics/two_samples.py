"""Compare the values of A and B: in pairs with the same requests, else as two independent samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Optional

from .intervals import Sample, sample, with_draws

MAX_LOG = 50.0  # a wider interval has no upper limit in practice
BATCHES = "batches"  # of consecutive requests of one run
RUN = "run"


class TwoSamples(NamedTuple):
    """A metric of A and B."""

    a: Sequence[float]
    b: Sequence[float]
    paired: bool  # value k of A and of B are of the same requests
    units: tuple[str, str] = ("replications", "replications")  # of A and of B: replications | batches | run

    def difference(self, times_b: float = 1.0, times_a: float = 1.0) -> Sample:
        """Return times_b * B - times_a * A, with its error."""
        if self.paired:
            pairs = zip(self.a, self.b)
            return sample([times_b * b - times_a * a for a, b in pairs], self.units[0] == BATCHES)
        a, b = (sample(values, unit == BATCHES) for values, unit in zip((self.a, self.b), self.units))
        return b.scaled(times_b).minus(a.scaled(times_a))

    @property
    def basis(self) -> str:
        """What an interval is based on; empty without an interval."""
        if min(len(self.a), len(self.b)) < 2:
            return ""
        if self.paired:
            return f"{len(self.a)} pairs of {self.units[0]}"
        texts = [f"{len(values)} {unit}" for values, unit in zip((self.a, self.b), self.units)]
        return f"other requests, not paired: {' and '.join(texts)}"


class RelativeChange(NamedTuple):
    """A change as a fraction of the base, and the limits of its confidence interval."""

    mean: float  # infinite if the base is 0
    low: Optional[float] = None  # None: not known, or no ratio, because one side is 0
    high: Optional[float] = None

    @property
    def excludes_zero(self) -> bool:
        """Whether the change is significant."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


def relative_change(values: TwoSamples, confidence: float, effects: Sequence[float] = ()) -> RelativeChange:
    """Return the change of the mean from A to B as a fraction of A.

    The interval is that of the logarithm of the ratio of the means (delta method), so it never falls below -100 %: no
    metric can fall by more. `effects` are the changes of this logarithm in each draw of the cost model.
    """
    a, b = (math.fsum(side) / len(side) for side in (values.a, values.b))
    if not (a > 0 and b > 0):  # no logarithm: both 0, only one 0, or no value
        if a == b:
            return RelativeChange(0.0, 0.0, 0.0)
        return RelativeChange((b - a) / abs(a) if a else math.copysign(math.inf, b))
    slope = values.difference(1 / b, 1 / a).interval(confidence)
    half_width = with_draws(slope, effects, confidence).half_width
    if half_width is None:
        return RelativeChange(b / a - 1)
    factors = (math.exp(-half_width), math.exp(min(half_width, MAX_LOG)))
    return RelativeChange(b / a - 1, *(b / a * factor - 1 for factor in factors))
