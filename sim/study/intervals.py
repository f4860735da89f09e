"""Confidence: means and paired differences with Student's t intervals.

Pairs are replications that drew the same random numbers, so what is common to both cancels before it is counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple, Optional

MANY = 1000  # degrees of freedom from which Fisher's expansion about the normal quantile is exact to six digits


class Interval(NamedTuple):
    """A mean and the half-width of its confidence interval."""

    mean: float
    half: Optional[float]  # None: one value alone says nothing about its spread
    size: int  # how many values it rests on

    @property
    def low(self) -> Optional[float]:
        """The lower end."""
        return None if self.half is None else self.mean - self.half

    @property
    def high(self) -> Optional[float]:
        """The upper end."""
        return None if self.half is None else self.mean + self.half

    @property
    def certain(self) -> bool:
        """Whether the interval leaves zero out: the sign is known."""
        return self.half is not None and abs(self.mean) > self.half

    def over(self, base: float) -> Interval:
        """Return the same as a part of something else."""
        scale = abs(base) or math.nan
        return Interval(self.mean / scale, None if self.half is None else self.half / scale, self.size)


def interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Return the mean of independent values and its t interval."""
    count = len(values)
    if not count:
        return Interval(math.nan, None, 0)
    if all(value == values[0] for value in values):  # no rounding where there is nothing to round
        return Interval(values[0], 0.0 if count > 1 else None, count)
    mean = math.fsum(values) / count
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    return Interval(mean, t_quantile(confidence, count - 1) * spread / math.sqrt(count), count)


def paired(values: Sequence[float], base: Sequence[float], confidence: float = 0.95) -> Interval:
    """Return the mean of value - base, pair by pair, and its t interval."""
    assert len(values) == len(base), "a pair lacks its other half"
    return interval([value - other for value, other in zip(values, base)], confidence)


def replications_for(half: float, found: Interval) -> int:
    """Return how many replications bring an interval down to this half-width, judged by its spread so far."""
    if found.half is None or found.half <= half or half <= 0:
        return found.size
    return math.ceil(found.size * (found.half / half) ** 2)


@lru_cache(maxsize=4096)
def t_quantile(confidence: float, freedom: int) -> float:
    """Return the t with P(|T| < t) = confidence."""
    if freedom > MANY:
        z = NormalDist().inv_cdf((1 + confidence) / 2)
        return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    low, high = 0.0, 1.0
    while t_inside(high, freedom) < confidence:
        low, high = high, high * 2
    while high - low > 1e-13 * high:
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if t_inside(middle, freedom) < confidence else (low, middle)
    return high


def t_inside(t: float, freedom: int) -> float:
    """Return P(|T| < t): the finite sums that whole degrees of freedom have (Abramowitz & Stegun 26.7.3, 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine = math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = term if freedom > 1 else 0.0
    for k in range(2 if odd else 1, freedom - 2, 2):
        term *= cosine * cosine * k / (k + 1)
        total += term
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total
