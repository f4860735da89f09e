"""Rising piecewise-linear curves as columns of a linear fit, and predictions of a cost model for many steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from servesim.core import Shape, StepCost
from servesim.costs.parts import PartsCost, Points

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


def curve_points(knots: Sequence[float], increments: Array) -> list[tuple[float, float]]:
    """Return the points of a curve from its first value and its increments."""
    return [(float(x), float(y)) for x, y in zip(knots, np.cumsum(increments), strict=True)]


def predict(cost: StepCost, table: Array) -> Array:
    """Return the seconds of every row of a table of shapes. `cost.seconds` gives the same, slower."""
    if not isinstance(cost, PartsCost):
        return np.array([cost.seconds(Shape(*map(int, row))) for row in table])
    prefill_rows, decode_rows, live, swapped = (table[:, k] for k in (0, 5, 6, 8))
    prefill, decode = prefill_seconds(cost, table), decode_seconds(cost, table)
    seconds = np.where(prefill_rows > 0, prefill, decode)
    mixed, both = cost.mixed, (prefill_rows > 0) & (decode_rows > 0)
    if mixed.one_pass:
        joined = prefill + mixed.step + mixed.row * decode_rows + mixed.context * table[:, 7]
        seconds = np.where(both, np.maximum(joined, decode) if mixed.floor else joined, seconds)
    else:
        seconds = np.where(both, prefill + decode - mixed.overlap * np.minimum(prefill, decode), seconds)
    seconds += np.where(swapped > 0, cost.swap.step + cost.swap.block * swapped, 0.0)
    host = cost.host
    result: Array = seconds + host.step + host.row * (prefill_rows + live) + host.prompt * prefill_rows
    return result + host.token * table[:, 2]


def prefill_seconds(cost: PartsCost, table: Array) -> Array:
    """Return the seconds of the prompts of every step, without host time; decodes join them in one pass."""
    part = cost.prefill
    tokens = table[:, 1] + table[:, 5] if cost.mixed.one_pass else table[:, 1]
    cross = table[:, 4]
    seconds = interpolate_all(part.tokens, round_up_to_bucket(tokens, part.buckets)) + part.row * table[:, 0]
    seconds += (part.square + part.paged_square * (cross > 0)) * table[:, 3]
    seconds += part.padded_square * table[:, 1] ** 2 / np.maximum(table[:, 0], 1)
    return seconds + part.cross * cross + part.cross_root * np.sqrt(cross)


def decode_seconds(cost: PartsCost, table: Array) -> Array:
    """Return the seconds of the decodes of every step, without host time; 0 if there are none."""
    values, index = np.unique(table[:, 5], return_inverse=True)
    terms = np.array([cost.decodes.terms(int(rows)) if rows else (0.0, 0.0, 0.0) for rows in values]).reshape(-1, 3)
    fixed, row, token = terms[index.reshape(-1)].T
    seconds: Array = fixed + row * table[:, 6] + token * table[:, 7]
    return seconds + cost.decodes.context_root * np.sqrt(table[:, 7])


def interpolate_all(points: Points, values: Array) -> Array:
    """Return `interpolate` of many values."""
    xs, ys = (np.array(column, dtype=float) for column in zip(*points))
    if len(xs) == 1:
        return np.full(len(values), ys[0])
    right = np.clip(np.searchsorted(xs, values, side="right"), 1, len(xs) - 1)
    x0, x1, y0, y1 = xs[right - 1], xs[right], ys[right - 1], ys[right]
    line = y0 + (y1 - y0) * (values - x0) / (x1 - x0)
    floor = np.where(values < xs[0], y0 * values / x0, np.where(values >= xs[-1], np.minimum(y0, y1), 0.0))
    seconds: Array = np.maximum(line, floor)
    return seconds
