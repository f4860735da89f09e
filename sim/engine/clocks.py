"""The clocks of the engine loop: virtual, wall and paced. The simulated clock is in simulated.py.

A clock says when a model call ended, and waits for the next event. Times are seconds since the run began.
Standard library only, Python 3.9.
"""

from __future__ import annotations

import math
import time
from typing import Any, Callable, Optional

from servesim.core import StepCost, Traits

from .shape import NO_PADDING, shape_of
from .step import Step

BUSY_WAIT_S = 1e-3  # a sleep may end this late, so the rest of a wait is spent awake
MAX_LATENESS_S = 0.25  # how late the host of a paced clock may be before its time slips
SLEEP_S = 0.1  # longest sleep between two checks whether to stop

Stop = Optional[Callable[[], bool]]


class Clock:
    """What a loop asks of time."""

    def end_of(self, step: Step, start: float, traits: Traits) -> float:
        """Return the time at which the model call of a step has ended."""
        raise NotImplementedError

    def start(self) -> float:
        """Begin at 0."""
        return 0.0

    def wait(self, instant: float, stop: Stop = None) -> float:
        """Wait until a time, or until `stop` says so; return the time it is then."""
        raise NotImplementedError

    def drive(self, loop: Any, stop: Stop = None) -> None:
        """Run a loop until everything is served, or until `stop` says so."""
        loop.now = self.start()
        while stop is None or not stop():
            instant = loop.step()
            if instant is None:
                continue
            if instant == math.inf:
                return
            loop.now = self.wait(instant, stop)

    def fast_forward(self, loop: Any) -> Any:
        """Return what runs held steps as one event, None where every step is run by itself."""
        return None


class VirtualClock(Clock):
    """Time that passes only when a step costs it: repeatable to the last bit."""

    def __init__(self, cost: StepCost) -> None:
        self.cost = cost
        self._now = 0.0

    def start(self) -> float:
        self._now = 0.0
        return 0.0

    def now(self) -> float:
        """Return the time."""
        return self._now

    def end_of(self, step: Step, start: float, traits: Traits) -> float:
        self._now += self.cost.duration(shape_of(step, NO_PADDING, traits))
        return self._now

    def wait(self, instant: float, stop: Stop = None) -> float:
        self._now = instant
        return instant


class WallClock(Clock):
    """Real time since `start`."""

    def __init__(self) -> None:
        self.origin = time.perf_counter()

    def start(self) -> float:
        self.origin = time.perf_counter()
        return 0.0

    def now(self) -> float:
        """Return the seconds since the start."""
        return time.perf_counter() - self.origin

    def end_of(self, step: Step, start: float, traits: Traits) -> float:
        return time.perf_counter() - self.origin

    def wait(self, instant: float, stop: Stop = None) -> float:
        due = instant + self.origin
        while True:
            left = due - time.perf_counter()
            if left <= BUSY_WAIT_S:
                break
            if stop is not None and stop():
                return self.now()
            time.sleep(min(left - BUSY_WAIT_S, SLEEP_S))
        while time.perf_counter() < due:
            pass
        return instant


class PacedClock(WallClock):
    """Real time of a fake device: a step takes what a cost model says, host overhead included.

    Times are those of the cost model, not of the sleep that imitates it: a host that is a little late catches up.
    A host that is far behind is too slow for the device it imitates, and its steps take as long as they take.
    """

    def __init__(self, cost: StepCost) -> None:
        super().__init__()
        self.cost = cost
        self.late = 0.0  # seconds the host was behind at worst
        self._begun = 0.0

    def start(self) -> float:
        self._begun = super().start()
        return self._begun

    def end_of(self, step: Step, start: float, traits: Traits) -> float:
        end = self._begun + self.cost.duration(shape_of(step, NO_PADDING, traits))
        behind = self.now() - end
        self.late = max(self.late, behind)
        if behind > MAX_LATENESS_S:
            end += behind
        self._begun = self.wait(end)
        return self._begun

    def wait(self, instant: float, stop: Stop = None) -> float:
        self._begun = super().wait(instant, stop)
        return self._begun
