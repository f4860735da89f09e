"""Which part of a run is counted: all of it (terminating), or its middle (steady state).

A steady-state run stands for a long one: requests that arrive in the warm-up or in the drain are left out. The cut goes
by arrival and is the same for every configuration, so that pairs stay pairs.

A run is saturated, and has no steady state, if its backlog (requests sent and not over) grows in the second half of
the arrivals: the slope of a line through it is more than 5 % of the arrivals (a busy but stable queue is below), and
the line explains at least half of the variance (the swings of a short run do not).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from servesim.core import Request
from servesim.engine.step import Gaps

from .metrics import Measures

STEADY = (0.2, 0.1)  # parts of the arrivals' span cut at the start and at the end, unless told otherwise
POINTS = 64  # instants at which the backlog is looked at
PART = 0.05  # of the arrivals that a growing backlog must keep
EXPLAINED = 0.5  # of the backlog's variance, by its growth


def steady(requests: Sequence[Request], slo: dict[str, float], warm_up: float, drain: float) -> dict[str, Any]:
    """Return the figures of a run's middle: latencies of who arrived in it, rates of what ended in it.

    Gaps between tokens are pooled over the whole run and cannot be cut: there is no itl.
    """
    first, last = min(r.arrival for r in requests), max(r.arrival for r in requests)
    start, end = first + warm_up * (last - first), last - drain * (last - first)
    seconds = end - start
    inside = Measures([r for r in requests if start <= r.arrival < end], Gaps(), slo)
    finished = [r for r in requests if r.outcome == "finished"]
    ended = [r for r in finished if r.seen is not None and start <= r.seen < end]
    outputs, inputs = sum(r.written for r in ended), sum(r.prompt for r in ended)
    found = inside.as_result()
    rate = 1 / seconds if seconds > 0 else 0.0
    if inside.good is not None:
        found["attainment"] = inside.good / max(1, len(inside.requests))
    found |= {
        "duration": seconds,
        "request_throughput": len(ended) * rate,
        "output_throughput": outputs * rate,
        "total_token_throughput": (inputs + outputs) * rate,
        "request_goodput": None if inside.good is None else inside.good * rate,
    }
    return found


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
