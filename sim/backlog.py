"""Saturation: whether more comes in than is served, so that a longer run would only wait longer.

A point is called saturated when over the second half of its arrivals the backlog (requests sent and not over) grows,
by a straight line through it, by more than 5 % of what arrives meanwhile and by more than half of its own mean. The
first keeps the swings of a busy but stable queue out, the second those of short runs.
"""

from __future__ import annotations

from typing import Sequence

import numpy as np

from .core import Request

POINTS = 64  # instants at which the backlog is looked at
PART = 0.05  # of the arrivals that a growing backlog must keep
SWING = 0.5  # of its mean that it must grow by


def growth(requests: Sequence[Request]) -> tuple[float, float, int]:
    """Return by how much the backlog grows over the second half of the arrivals, its mean, and how many arrive."""
    arrival = np.sort(np.array([r.arrival for r in requests], dtype=np.float64))
    half = len(arrival) // 2
    if len(arrival) < 4 or arrival[-1] <= arrival[half]:
        return 0.0, 0.0, 0
    over = np.sort(np.array([r.seen for r in requests if r.seen is not None], dtype=np.float64))
    times = np.linspace(arrival[half], arrival[-1], POINTS)
    backlog = np.searchsorted(arrival, times, side="right") - np.searchsorted(over, times, side="right")
    centred = times - times.mean()
    slope = float((centred * backlog).sum() / (centred * centred).sum())
    return slope * float(times[-1] - times[0]), float(backlog.mean()), len(arrival) - half


def saturated(requests: Sequence[Request]) -> bool:
    """Whether the backlog grows through the run."""
    grown, mean, arrived = growth(requests)
    return grown > PART * arrived and grown > SWING * mean
