"""The delay factor of vLLM v0 and llm-serving: prompts wait for a multiple of the latency of the last prefill.

The oldest waiting request must have waited that long. What differs is when this is tested, and for which requests:

queue                vLLM 0.4.1 - 0.5.3: one test per step; none while no request runs
request              vLLM 0.4.0: one test per admission; none for the first admission while no request runs
request-unless-idle  vLLM 0.5.4 - 0.10: one test per admission; none while no request runs
contest              contest entry yyds of llm-serving: one test per admission, also while no request runs
contest-as-reported  the same with one test per step
"""

from __future__ import annotations

from itertools import accumulate
from typing import Final, NamedTuple, Optional

from servesim.core import View, first_time_after

ONCE_PER_STEP: Final = ("queue", "contest-as-reported")


class DelayState(NamedTuple):
    """What the delay factor keeps from one step to the next."""

    last_prefill: Optional[float] = None  # time of the last prefill, until its latency is measured
    latency: float = 0.0  # seconds from the last prefill to the next step


class Delay:
    """The delay factor during one call of `decide`."""

    def __init__(self, factor: float, scope: str, view: View, state: DelayState, waits_idle: bool = False) -> None:
        self.state = state
        self.wake_at: Optional[float] = None  # time at which the delayed request may be admitted
        self._factor = factor
        self._scope = scope
        self._waits_idle = waits_idle  # the tests also count while no request runs
        self._view = view
        self._has_passed: Optional[bool] = None  # the last test
        self._oldest: list[float] = []  # earliest arrival time from each position of the waiting queue on
        self._measures_late = scope.startswith("contest")  # only when it tests
        if not self._measures_late:
            self._measure()

    def allows(self, removed: int, admitted: int) -> bool:
        """Return whether the next waiting request may be admitted.

        `removed` counts the waiting requests, `admitted` all requests of which this step has already decided so.
        """
        if self._has_passed is None or self._scope not in ONCE_PER_STEP:
            self._has_passed = self._test(removed, admitted)
        return self._has_passed

    def _test(self, removed: int, admitted: int) -> bool:
        if self._measures_late:  # after an admission in the same step, this sets the latency to 0
            self._measure()
        if not (self._waits_idle or self._view.running or (self._scope == "request" and admitted)):
            return True
        oldest = self._oldest_from(removed) if removed else self._view.waiting.oldest()
        wait = self._factor * self.state.latency
        if self._view.now - oldest > wait:
            return True
        self.wake_at = first_time_after(oldest, wait)
        return False

    def _oldest_from(self, position: int) -> float:
        if not self._oldest:
            arrivals = [request.arrival for request in self._view.waiting]
            self._oldest = list(accumulate(reversed(arrivals), min))[::-1]
        return self._oldest[position]

    def _measure(self) -> None:
        if self.state.last_prefill is not None:
            self.state = DelayState(None, self._view.now - self.state.last_prefill)

    def record_prefill(self) -> None:
        """Note that the step has a prefill. Its latency counts from now."""
        self.state = DelayState(self._view.now, self.state.latency)
