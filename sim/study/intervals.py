"""Means and paired differences with Student t confidence intervals.

A pair is two runs with the same random numbers, so their common variation cancels in the difference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, Optional

from servesim.runs.intervals import half_width_of_draws


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


def interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Return the mean of independent values and its t interval."""
    count = len(values)
    if not count:
        return Interval(math.nan, None, 0)
    if all(value == values[0] for value in values):  # avoids rounding errors
        return Interval(values[0], 0.0 if count > 1 else None, count)
    mean = math.fsum(values) / count
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    return Interval(mean, t_quantile(confidence, count - 1) * deviation / math.sqrt(count), count)


def paired_difference(values: Sequence[float], base: Sequence[float], confidence: float = 0.95) -> Interval:
    """Return the mean of value - base over all pairs, and its t interval."""
    assert len(values) == len(base), "values and base must have the same length"
    return interval([value - other for value, other in zip(values, base)], confidence)


def replications_for(half_width: float, measured: Interval) -> int:
    """Return the number of replications needed for this half-width, estimated from the measured interval."""
    if measured.half_width is None or measured.half_width <= half_width or half_width <= 0:
        return measured.n
    return math.ceil(measured.n * (measured.half_width / half_width) ** 2)


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
