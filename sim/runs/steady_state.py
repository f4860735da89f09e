"""Steady-state metrics of a run, and the check for saturation.

A terminating run counts all requests. A steady-state run leaves out requests that arrive in the warm-up or the drain.
The window depends on arrival times only and is the same for every configuration, so that runs stay paired.

A run is saturated, and has no steady state, if its backlog (requests sent and not finished) grows in the second half of
the arrivals. The backlog grows if a line through it gains more than 5 % of the arrivals, and explains at least half of
the variance. A busy but stable queue stays below the first limit, random swings of a short run below the second. Random
swings are a smaller part of more arrivals, so the first limit falls with the square root of their number: to 1.4 % in a
run of 10,000 requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from servesim.core import Request
from servesim.engine.step import TokenGaps

from .metrics import Metrics
from .run_requests import RunRequests

POINTS = 64  # times at which the backlog is sampled
MIN_GROWTH = 0.05  # growth of the backlog, as a fraction of the arrivals; at most 1 / sqrt(arrivals)
MIN_R2 = 0.5  # fraction of the backlog's variance that the line explains


def steady_metrics(requests: Sequence[Request], slo: dict[str, float], warm_up: float, drain: float) -> dict[str, Any]:
    """Return metrics of the steady-state window: latencies of requests that arrive in it, rates of those that end.

    The itl is not part of them: gaps between tokens are pooled over the whole run.
    """
    table = RunRequests.of(requests)
    sent, ends = table.column("sent"), table.column("client_end")
    first, last = float(sent.min()), float(sent.max())
    start, end = first + warm_up * (last - first), last - drain * (last - first)
    seconds = end - start
    inside = Metrics(table, TokenGaps(), slo, np.flatnonzero((start <= sent) & (sent < end)))
    ended = np.flatnonzero(table.finished & (start <= ends) & (ends < end))
    outputs, inputs = int(table.column("generated")[ended].sum()), int(table.column("prompt")[ended].sum())
    result = inside.as_result()
    rate = 1 / seconds if seconds > 0 else 0.0
    result |= inside.of_groups()
    result |= {
        "duration": seconds,
        "request_throughput": len(ended) * rate,
        "output_throughput": outputs * rate,
        "total_token_throughput": (inputs + outputs) * rate,
        "request_goodput": None if inside.good is None else inside.good * rate,
    }
    return result


def backlog_growth(requests: Sequence[Request]) -> tuple[float, float]:
    """Return the growth of the backlog in the second half, as a fraction of its arrivals, and the R2 of the line."""
    table = RunRequests.of(requests)
    arrival = np.sort(table.column("sent"))
    half = len(arrival) // 2
    if len(arrival) < 4 or arrival[-1] <= arrival[half]:
        return 0.0, 0.0  # all arrive at once: there is no rate
    ends = np.sort(table.column("client_end"))  # NaN last, so after every time
    points = np.linspace(arrival[half], arrival[-1], POINTS)
    backlog = np.searchsorted(arrival, points, side="right") - np.searchsorted(ends, points, side="right")
    centred, deviation = points - points.mean(), backlog - backlog.mean()
    if not deviation.any():
        return 0.0, 0.0
    slope = float((centred * deviation).sum() / (centred * centred).sum())
    explained = slope * float((centred * deviation).sum() / (deviation * deviation).sum())
    return slope * float(points[-1] - points[0]) / (len(arrival) - half), explained


def is_saturated(requests: Sequence[Request]) -> bool:
    """Whether the backlog grows during the second half of the arrivals."""
    growth, explained = backlog_growth(requests)
    arrivals = max(1, len(requests) - len(requests) // 2)
    return growth > min(MIN_GROWTH, arrivals**-0.5) and explained > MIN_R2
