"""vLLM's scheduler_delay_factor: prompts wait for a multiple of the latency of the last prefill.

The oldest waiting request must have waited that long. If no request runs, there is no delay. Three scopes:

queue                0.4.1 - 0.5.3: one test per step; then the whole queue may be admitted
request              0.4.0: one test per admission; requests admitted in this step count as running
request-unless-idle  0.5.4 - 0.10: one test per admission; requests admitted in this step do not count as running
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple, Optional

from servesim.core import View, first_time_after

SCOPES = ("queue", "request", "request-unless-idle")


class DelayState(NamedTuple):
    """Policy state of the delay factor."""

    prefill_start: Optional[float] = None  # start of the last prefill, until its latency is measured
    latency: float = 0.0  # seconds from the start of the last prefill to the next step


class DelayGate:
    """Applies the delay factor during one call of `decide`. The constructor measures the last latency."""

    def __init__(self, factor: float, scope: str, view: View, state: DelayState) -> None:
        if state.prefill_start is not None:
            state = DelayState(None, view.now - state.prefill_start)
        self.state = state
        self.wake_at: Optional[float] = None  # time at which the delayed request may be admitted
        self._wait = factor * state.latency
        self._scope = scope
        self._view = view
        self._oldest: list[float] = []  # earliest arrival time from each queue position on

    def allows(self, removed: int, admitted: int) -> bool:
        """Return whether the next request may be admitted. `removed` and `admitted` count those of this step."""
        if not self._view.running and (self._scope != "request" or not admitted):
            return True
        oldest = self._view.waiting.oldest() if self._scope == "queue" or not removed else self._oldest_from(removed)
        if self._view.now - oldest > self._wait:
            return True
        self.wake_at = first_time_after(oldest, self._wait)
        return False

    def _oldest_from(self, position: int) -> float:
        if not self._oldest:
            arrivals = [request.arrival for request in self._view.waiting]
            self._oldest = list(accumulate(reversed(arrivals), min))[::-1]
        return self._oldest[position]

    def state_after_prefill(self) -> DelayState:
        """Return the policy state of a step with a prefill."""
        return DelayState(self._view.now, self.state.latency)
