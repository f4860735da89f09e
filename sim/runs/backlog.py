"""Saturation: whether more comes in than is served, so that a longer run would only wait longer.

A point is called saturated when over the second half of its arrivals the backlog (requests sent and not over) grows,
by a straight line through it, by more than 5 % of what arrives meanwhile, and the line explains at least half of its
ups and downs. The first keeps a busy but stable queue out, the second the swings of short runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from servesim.core import Request

POINTS = 64  # instants at which the backlog is looked at
PART = 0.05  # of the arrivals that a growing backlog must keep
EXPLAINED = 0.5  # of the backlog's variance, by its growth


def growth(requests: Sequence[Request]) -> tuple[float, float]:
    """Return the part of the second half's arrivals that the backlog grows by, and how much of it a line explains."""
    arrival = np.sort(np.array([r.arrival for r in requests], dtype=np.float64))
    half = len(arrival) // 2
    if len(arrival) < 4 or arrival[-1] <= arrival[half]:
        return 0.0, 0.0  # all at once: there is no rate to keep up with
    over = np.sort(np.array([r.seen for r in requests if r.seen is not None], dtype=np.float64))
    times = np.linspace(arrival[half], arrival[-1], POINTS)
    backlog = np.searchsorted(arrival, times, side="right") - np.searchsorted(over, times, side="right")
    centred, swing = times - times.mean(), backlog - backlog.mean()
    if not swing.any():
        return 0.0, 0.0
    slope = float((centred * swing).sum() / (centred * centred).sum())
    explained = slope * float((centred * swing).sum() / (swing * swing).sum())
    return slope * float(times[-1] - times[0]) / (len(arrival) - half), explained


def saturated(requests: Sequence[Request]) -> bool:
    """Whether the backlog grows through the run."""
    part, explained = growth(requests)
    return part > PART and explained > EXPLAINED
