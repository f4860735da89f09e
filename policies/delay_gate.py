"""vLLM's scheduler_delay_factor: prompts wait for a multiple of the last prefill's latency, in its three meanings.

queue                v0.4.1 - v0.5.3: once the oldest has waited long enough, the whole queue may go
request              v0.4.0: asked again for every head, and whoever was just let in counts as running
request-unless-idle  v0.5.4 - v0.10: asked again for every head; all may go if nothing ran before the step
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple, Optional

from servesim.core import View, just_after

SCOPES = ("queue", "request", "request-unless-idle")


class Timers(NamedTuple):
    """What the gate remembers between two steps."""

    started: Optional[float] = None  # when the last step with prompts began, until somebody reads the clock
    latency: float = 0.0  # of that step, as the gate measured it


class DelayGate:
    """The gate inside one decision. Making one is reading the clock, as the real gate does even with nobody waiting."""

    def __init__(self, factor: float, scope: str, view: View, timers: Timers) -> None:
        if timers.started is not None:
            timers = Timers(None, view.now - timers.started)
        self.timers = timers
        self.opens: Optional[float] = None  # when it would let the head pass that it held back
        self._wait = factor * timers.latency
        self._scope = scope
        self._view = view
        self._oldest: list[float] = []  # earliest arrival of those waiting from each place on

    def passes(self, left: int, admitted: int) -> bool:
        """Say whether the next head may go, so many having left the queue, of which some were admitted."""
        if not self._view.running and (self._scope != "request" or not admitted):
            return True
        oldest = self._view.waiting.oldest() if self._scope == "queue" or not left else self._oldest_after(left)
        if self._view.now - oldest > self._wait:
            return True
        self.opens = just_after(oldest, self._wait)
        return False

    def _oldest_after(self, left: int) -> float:
        if not self._oldest:
            arrivals = [request.arrival for request in self._view.waiting]
            self._oldest = list(accumulate(reversed(arrivals), min))[::-1]
        return self._oldest[left]

    def scheduled(self) -> Timers:
        """Return the timers after a step that began with prompts."""
        return Timers(self._view.now, self.timers.latency)
