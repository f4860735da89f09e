"""The seconds that a cost model predicts for many steps, as one array operation."""

from __future__ import annotations

import numpy as np
from servesim.core import Shape, StepCost
from servesim.costs.parts import PartsCost, Points

from .curves import round_up_to_bucket
from .sample_set import Array


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
