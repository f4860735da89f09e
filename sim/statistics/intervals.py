"""Means, paired differences and relative changes with Student t confidence intervals.

A pair is two runs with the same random numbers, so their common variation cancels in the difference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, Optional

from servesim.runs.intervals import half_width_of_draws

MAX_LOG = 50.0  # a wider interval has no upper limit in practice


class Interval(NamedTuple):
    """A mean and the half-width of its confidence interval."""

    mean: float
    half_width: Optional[float]  # None: a single value has no interval
    n: int  # number of values

    @property
    def excludes_zero(self) -> bool:
        """Whether the mean is significantly different from zero."""
        return self.half_width is not None and abs(self.mean) > self.half_width

    def relative_to(self, base: float) -> Interval:
        """Return the interval as a fraction of `base`."""
        scale = abs(base) or math.nan
        return Interval(self.mean / scale, None if self.half_width is None else self.half_width / scale, self.n)


class RelativeChange(NamedTuple):
    """A change as a fraction of the base, and the limits of its confidence interval."""

    mean: float  # infinite if the base is 0
    low: Optional[float] = None  # None: one run each
    high: Optional[float] = None

    @property
    def excludes_zero(self) -> bool:
        """Whether the change is significant."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


def interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Return the mean of independent values and its t interval."""
    count = len(values)
    if not count:
        return Interval(math.nan, None, 0)
    if count == 1 or all(value == values[0] for value in values):  # avoids rounding errors
        return Interval(values[0], 0.0 if count > 1 else None, count)
    mean = math.fsum(values) / count
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    return Interval(mean, t_quantile(confidence, count - 1) * deviation / math.sqrt(count), count)


def paired_difference(values: Sequence[float], base: Sequence[float], confidence: float = 0.95) -> Interval:
    """Return the mean of value - base over all pairs, and its t interval."""
    assert len(values) == len(base), "values and base must have the same length"
    return interval([value - other for value, other in zip(values, base)], confidence)


def relative_change(
    values: Sequence[float], base: Sequence[float], confidence: float = 0.95, effects: Sequence[float] = ()
) -> RelativeChange:
    """Return the change of the mean as a fraction of the base's mean, over all pairs.

    The interval is that of the logarithm of the ratio of the means (delta method), so it never falls below -100 %: no
    metric can fall by more. `effects` are the changes of this logarithm in each draw of the cost model.
    """
    mean, other = math.fsum(values) / len(values), math.fsum(base) / len(base)
    if not (mean > 0 and other > 0):  # no logarithm: both 0, only one 0, or no value
        change = 0.0 if mean == other else (mean - other) / abs(other) if other else math.copysign(math.inf, mean)
        return RelativeChange(change, change, change) if len(values) > 1 else RelativeChange(change)
    change = mean / other - 1
    if len(values) < 2 and len(effects) < 2:
        return RelativeChange(change)
    slopes = interval([value / mean - paired / other for value, paired in zip(values, base)], confidence)
    half_width = with_draws(slopes, effects, confidence).half_width or 0.0
    factors = (math.exp(-half_width), math.exp(min(half_width, MAX_LOG)))
    return RelativeChange(change, *(mean / other * factor - 1 for factor in factors))


def replications_for(half_width: float, measured: Interval, confidence: float = 0.95) -> int:
    """Return the number of replications needed for this half-width, estimated from the measured interval.

    With more replications, the t quantile falls too: from 4.3 with 3 to 2.3 with 10.
    """
    if measured.half_width is None or measured.half_width <= half_width or half_width <= 0:
        return measured.n
    scale = measured.half_width / relative_half_width(confidence, measured.n)
    few, enough = measured.n, math.ceil(measured.n * (measured.half_width / half_width) ** 2)
    while enough - few > 1:
        middle = (few + enough) // 2
        if scale * relative_half_width(confidence, middle) <= half_width:
            enough = middle
        else:
            few = middle
    return enough


def relative_half_width(confidence: float, count: int) -> float:
    """Return the half-width of the interval of `count` values, as a multiple of their standard deviation."""
    return t_quantile(confidence, count - 1) / math.sqrt(count)


def with_draws(measured: Interval, effects: Sequence[float], confidence: float = 0.95) -> Interval:
    """Add the uncertainty of the cost model to an interval.

    `effects` are the changes of the value in each draw of the cost model, with the same requests.
    """
    if len(effects) < 2:
        return measured
    half_width = math.hypot(measured.half_width or 0.0, half_width_of_draws(effects, confidence))
    return measured._replace(half_width=half_width)


@lru_cache(maxsize=4096)
def t_quantile(confidence: float, degrees_of_freedom: int) -> float:
    """Return the t with P(|T| < t) = confidence."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees_of_freedom, (1 + confidence) / 2))
