"""Confidence: means and paired differences with Student's t intervals.

Pairs are replications that drew the same random numbers, so what is common to both cancels before it is counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, Optional


class Interval(NamedTuple):
    """A mean and the half-width of its confidence interval."""

    mean: float
    half: Optional[float]  # None: one value alone says nothing about its spread
    size: int  # how many values it rests on

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
    from scipy.special import stdtrit

    return float(stdtrit(freedom, (1 + confidence) / 2))
