"""Piecewise-linear curves, and how they continue outside their points."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

Points = Sequence[tuple[float, float]]
INFINITY = float("inf")


def interpolate(points: Points, x: float) -> float:
    """Interpolate a curve linearly; extrapolate from its first or last two points, but never to a negative value.

    Below the first point, the line must not fall faster than in proportion to x. Above the last point, it must not
    fall at all: more work never takes less time than the largest measured amount.
    """
    last = len(points) - 1
    if not last:
        return points[0][1]
    index = bisect_right(points, (x, INFINITY))
    inside = 0 < index <= last
    right = index if inside else 1 if not index else last
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    y = y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    floor = 0.0 if inside else y0 * x / x0 if not index else min(y0, y1)
    return y if y > floor else floor
