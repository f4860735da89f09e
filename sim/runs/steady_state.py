"""Which part of a run is counted: all of it (terminating), or its middle (steady state).

A terminating run has an end that matters: everything counts. A steady-state run stands for a long one: requests that
arrive while the queues still fill up, or so late that they are served while the load dries up, are left out. The cut
goes by arrival and is the same for every configuration, so that pairs stay pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from servesim.core import Request
from .metrics import Measures
from servesim.engine.step import Gaps

STEADY = (0.2, 0.1)  # parts of the arrivals' span cut at the start and at the end, unless told otherwise


class Window(NamedTuple):
    """The middle of a run."""

    start: float
    end: float

    def holds(self, instant: float | None) -> bool:
        """Whether an instant lies in it."""
        return instant is not None and self.start <= instant < self.end


def middle(requests: Sequence[Request], warm_up: float, drain: float) -> Window:
    """Return the span of arrivals less so large a part at either end."""
    first, last = min(r.arrival for r in requests), max(r.arrival for r in requests)
    span = last - first
    return Window(first + warm_up * span, last - drain * span)


def steady(requests: Sequence[Request], slo: dict[str, float], warm_up: float, drain: float) -> dict[str, Any]:
    """Return the figures of a run's middle: latencies of who arrived in it, rates of what ended in it.

    Gaps between tokens are pooled over the whole run and cannot be cut: there is no itl.
    """
    window = middle(requests, warm_up, drain)
    seconds = window.end - window.start
    inside = Measures([r for r in requests if window.holds(r.arrival)], Gaps(), slo)
    ended = [r for r in requests if r.outcome == "finished" and window.holds(r.seen)]
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
