"""Rising piecewise-linear curves as columns of a linear fit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .sample_set import Array

KNOT_RATIO = 1.6  # a knot is at least this multiple of the one before
LAST_RATIO = 1.25  # the last segment must be this long: its slope continues above the measured range
SMOOTHNESS = 2.0  # weak: a change of slope may add twice the time of the step over one segment


def round_up_to_bucket(values: Array, buckets: Sequence[int]) -> Array:
    """Round values up to the next padding bucket. Values above the last bucket stay."""
    if not buckets:
        return values
    edges = np.array(sorted(buckets), dtype=float)
    indices = np.searchsorted(edges, values)
    return np.where(indices < len(edges), edges[np.minimum(indices, len(edges) - 1)], values)


def knots_for(values: Array, buckets: Sequence[int] = ()) -> list[float]:
    """Return the knots of a curve over values that are rounded up to buckets, if there are any.

    Every measured bucket is a knot. Above the last bucket a device runs unpadded: another curve starts there.
    """
    distinct = np.unique(values).tolist()
    knots = [x for x in distinct if x in buckets]
    first_free = len(knots)
    for x in distinct:
        if x not in buckets and (len(knots) == first_free or x >= KNOT_RATIO * knots[-1]):
            knots.append(x)
    top = distinct[-1]
    if knots[-1] != top:
        if len(knots) - first_free > 1 and top < LAST_RATIO * knots[-1]:
            knots.pop()
        knots.append(top)
    return sorted(knots)


def rising_basis(values: Array, knots: Sequence[float]) -> Array:
    """Return one column of ones, and one per segment that rises from 0 to 1 over it. The last one continues."""
    columns = [np.ones(len(values))]
    for low, high in zip(knots, knots[1:], strict=False):
        share = (values - low) / (high - low)
        columns.append(np.clip(share, 0.0, None if high == knots[-1] else 1.0))
    return np.column_stack(columns)


def smoothness_rows(knots: Sequence[float], values: Array, seconds: Array) -> Array:
    """Return rows that are small if the slopes of neighbouring segments are equal, relative to the steps there."""
    widths = np.diff(knots)
    rows = np.zeros((max(0, len(widths) - 1), len(knots)))
    for k in range(len(rows)):
        width, middle = min(widths[k], widths[k + 1]), knots[k + 1]
        local = seconds[np.argmin(np.abs(values - middle))]
        rows[k, k + 1], rows[k, k + 2] = width / widths[k] / local, -width / widths[k + 1] / local
    return rows / SMOOTHNESS


def typical_slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the median slope of the segments, weighted by their widths: one steep or flat segment does not matter."""
    if len(points) == 1:
        return 0.0
    xs, ys = np.array(points).T
    widths = np.diff(xs)
    slopes = np.diff(ys) / widths
    order = np.argsort(slopes)
    return float(slopes[order][np.searchsorted(np.cumsum(widths[order]), widths.sum() / 2)])


def continued(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return a curve with one more point, which sets its slope above the measured range.

    It is the slope of the last segment, or the typical one if that is steeper: more work is never free, and the last
    segment is often short and flat by chance.
    """
    (x0, y0), (x1, y1) = points[-2:]
    slope = max((y1 - y0) / (x1 - x0), typical_slope(points))
    return [*points, (2 * x1, y1 + slope * x1)]
