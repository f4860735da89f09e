"""Means and differences with Student t confidence intervals.

A pair is two runs with the same random numbers, so their common variation cancels in the difference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, Optional

from servesim.runs.intervals import half_width_of_draws

MAX_CORRELATION = 0.95  # of neighbouring values: with more, they show nothing about the error of their mean


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


class Sample(NamedTuple):
    """The mean of some values, its standard error, and the degrees of freedom of the error."""

    mean: float
    error: Optional[float]  # None: a single value has none
    freedom: float
    n: int  # number of values

    def interval(self, confidence: float) -> Interval:
        """Return the t interval of the mean."""
        half_width = self.error and t_quantile(confidence, self.freedom) * self.error
        return Interval(self.mean, half_width, self.n)

    def scaled(self, factor: float) -> Sample:
        """Return the sample with all values multiplied."""
        return self._replace(mean=factor * self.mean, error=self.error and abs(factor) * self.error)

    def minus(self, other: Sample) -> Sample:
        """Return the difference of the means of two independent samples (Welch)."""
        mean, n = self.mean - other.mean, min(self.n, other.n)
        if self.error is None or other.error is None:
            return Sample(mean, None, 1.0, n)
        error, parts = math.hypot(self.error, other.error), [(self.error, self.freedom), (other.error, other.freedom)]
        freedom = error**4 / math.fsum(part**4 / free for part, free in parts) if error else 1.0
        return Sample(mean, error, freedom, n)


def sample(values: Sequence[float], consecutive: bool = False) -> Sample:
    """Return the mean of values and its error; consecutive ones, such as batches of a run, depend on each other."""
    count = len(values)
    if not count:
        return Sample(math.nan, None, 1.0, 0)
    if count == 1 or all(value == values[0] for value in values):  # avoids rounding errors
        return Sample(values[0], 0.0 if count > 1 else None, max(1.0, count - 1.0), count)
    mean = math.fsum(values) / count
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    share = independent_share(values) if consecutive else 1.0
    return Sample(mean, deviation / math.sqrt(count * share), max(1.0, (count - 1) * share), count)


def independent_share(values: Sequence[float]) -> float:
    """Return which fraction of consecutive values counts, if each one depends on the one before (AR(1)).

    The error of the mean is that of fewer, longer batches which do not depend on each other.
    """
    count, mean = len(values), math.fsum(values) / len(values)
    deviations = [value - mean for value in values]
    products = math.fsum(one * other for one, other in zip(deviations, deviations[1:]))
    measured = products / math.fsum(deviation**2 for deviation in deviations)
    correlation = measured + (1 + 4 * max(0.0, measured)) / count  # few values show too little (Marriott and Pope)
    correlation = min(MAX_CORRELATION, max(0.0, correlation))
    return (1 - correlation) / (1 + correlation)


def interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Return the mean of independent values and its t interval."""
    return sample(values).interval(confidence)


def paired_difference(values: Sequence[float], base: Sequence[float], confidence: float = 0.95) -> Interval:
    """Return the mean of value - base over all pairs, and its t interval."""
    assert len(values) == len(base), "values and base must have the same length"
    return interval([value - other for value, other in zip(values, base)], confidence)


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
def t_quantile(confidence: float, degrees_of_freedom: float) -> float:
    """Return the t with P(|T| < t) = confidence."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees_of_freedom, (1 + confidence) / 2))
