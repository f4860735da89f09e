"""The clocks of the engine loop: virtual, wall and paced. The simulated clock is in simulated.py.

A clock gives the end time of a model call and waits for the next event. Times are seconds since the start of the run.
Standard library only, Python 3.9.
"""

from __future__ import annotations

import math
import time
from typing import Any, Callable, Optional

from servesim.core import StepCost, check_seconds

from .rules import EngineRules
from .shape import NO_PADDING, step_shape
from .step import Step

BUSY_WAIT_S = 1e-3  # a sleep may end this late, so the clock busy-waits for the rest
MAX_LATENESS_S = 0.25  # a paced clock that is later than this does not catch up
MAX_SLEEP_S = 0.1  # maximum sleep between two calls of `stop`

StopCheck = Optional[Callable[[], bool]]


class Clock:
    """The time of a loop."""

    reads_longest = False  # whether it needs the longest context of the decoding rows of every step
    hold = True  # whether plans that hold are repeated without a call of the policy, which changes no result

    def finish_call(self, step: Step, start: float, rules: EngineRules) -> float:
        """Wait until the model call of a step ends, or advance the time to its end. Return the end time."""
        raise NotImplementedError

    def start_call(self, step: Step, start: float, rules: EngineRules) -> float:
        """Return the end of a model call that is in flight, or a time before it if a device has to tell it."""
        return self.finish_call(step, start, rules)

    def end_call(self, end: float) -> float:
        """Return the end of a model call that was in flight; `end` is the result of `start_call`."""
        return end

    def start(self) -> float:
        """Start the clock at 0."""
        return 0.0

    def wait(self, until: float, stop: StopCheck = None) -> float:
        """Wait until a time, or until `stop` returns true. Return `until`, or the real time after `stop`."""
        raise NotImplementedError

    def run_loop(self, loop: Any, stop: StopCheck = None) -> None:
        """Run a loop until all requests are done, or until `stop` returns true."""
        for request in loop.inbox.clients.coming:
            loop.inbox.send(request)
        loop.now = loop.decides_at = self.start()
        while stop is None or not stop():
            if loop.is_due_now:
                loop.advance()
            elif loop.decides_at < math.inf:
                loop.now = self.wait(loop.decides_at, stop)
            else:
                loop.require_done()
                return


class VirtualClock(Clock):
    """Time of the cost model without SimPy and padding. Tests use it to run the live loop repeatably."""

    def __init__(self, cost: StepCost) -> None:
        self.cost = cost
        self._now = 0.0
        self.reads_longest = cost.reads_longest

    def start(self) -> float:
        self._now = 0.0
        return 0.0

    def now(self) -> float:
        """Return the time."""
        return self._now

    def finish_call(self, step: Step, start: float, rules: EngineRules) -> float:
        seconds = self.cost.duration(step_shape(step, NO_PADDING, rules))
        check_seconds(self.cost, seconds)
        self._now = start + seconds
        return self._now

    def wait(self, until: float, stop: StopCheck = None) -> float:
        self._now = until
        return until


class WallClock(Clock):
    """Real time since `start`."""

    def __init__(self) -> None:
        self.origin = time.perf_counter()
        self.reads_longest = True  # measured steps are recorded with it

    def start(self) -> float:
        self.origin = time.perf_counter()
        return 0.0

    def now(self) -> float:
        """Return the seconds since the start."""
        return time.perf_counter() - self.origin

    def finish_call(self, step: Step, start: float, rules: EngineRules) -> float:
        return time.perf_counter() - self.origin

    def start_call(self, step: Step, start: float, rules: EngineRules) -> float:
        return start

    def end_call(self, end: float) -> float:
        return self.now()

    def wait(self, until: float, stop: StopCheck = None) -> float:
        end = until + self.origin
        while True:
            left = end - time.perf_counter()
            if left <= BUSY_WAIT_S:
                break
            if stop is not None and stop():
                return self.now()
            time.sleep(min(left - BUSY_WAIT_S, MAX_SLEEP_S))
        while time.perf_counter() < end:
            pass
        return until


class PacedClock(WallClock):
    """Real time of a fake backend: a step takes the time of a cost model, including host overhead.

    Times come from the cost model, not from the sleep, so a host that is a little late catches up. A host that is later
    than MAX_LATENESS_S is too slow for the device; then a step takes its real time.
    """

    def __init__(self, cost: StepCost) -> None:
        super().__init__()
        self.cost = cost
        self.late = 0.0  # maximum lateness of the host in seconds
        self._last_end = 0.0

    def start(self) -> float:
        self._last_end = super().start()
        return self._last_end

    def finish_call(self, step: Step, start: float, rules: EngineRules) -> float:
        return self.end_call(self.start_call(step, self._last_end, rules))

    def start_call(self, step: Step, start: float, rules: EngineRules) -> float:
        seconds = self.cost.duration(step_shape(step, NO_PADDING, rules))
        check_seconds(self.cost, seconds)
        return start + seconds

    def end_call(self, end: float) -> float:
        behind = self.now() - end
        self.late = max(self.late, behind)
        if behind > MAX_LATENESS_S:
            end += behind
        return self.wait(end)

    def wait(self, until: float, stop: StopCheck = None) -> float:
        self._last_end = super().wait(until, stop)
        return self._last_end
