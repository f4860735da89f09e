"""The clocks a live run can go by: the wall's, a virtual one, and one of a pretended device.

Instants are seconds since the run began. Standard library only, Python 3.9.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Callable, Optional

from servesim.core import Shape, StepCost
from servesim.costs.mapping import cost_from

SPIN = 1e-3  # a sleep may end this late, so the rest of a wait is spent awake
SLACK = 0.25  # what a pretended device's host may be behind before time slips
SLICE = 0.1  # longest sleep between two looks whether to stop

Stop = Optional[Callable[[], bool]]


class WallClock:
    """Real time since `start`."""

    def __init__(self) -> None:
        self.origin = time.perf_counter()

    def start(self) -> float:
        """Begin at 0."""
        self.origin = time.perf_counter()
        return 0.0

    def now(self) -> float:
        """Return the seconds since the start."""
        return time.perf_counter() - self.origin

    def after(self, shape: Shape) -> float:
        """Return the instant at which a call that has just returned ended."""
        return time.perf_counter() - self.origin

    def wait(self, instant: float, stop: Stop = None) -> float:
        """Return that instant once it has come; if told to stop, the present one."""
        due = instant + self.origin
        while True:
            left = due - time.perf_counter()
            if left <= SPIN:
                break
            if stop is not None and stop():
                return self.now()
            time.sleep(min(left - SPIN, SLICE))
        while time.perf_counter() < due:
            pass
        return instant


class PacedClock(WallClock):
    """Real time on a device that is only pretended: a step takes what a cost model says, the host's part included.

    Instants are those of the cost model, not of the sleep that imitates it: a host that is a little behind catches up.
    One that is far behind is too slow for the device it pretends, and its steps take as long as they take.
    """

    def __init__(self, cost: StepCost) -> None:
        super().__init__()
        self.cost = cost
        self.late = 0.0  # seconds the host was behind at worst
        self._begun = 0.0

    def start(self) -> float:
        """Begin at 0."""
        self._begun = super().start()
        return self._begun

    def after(self, shape: Shape) -> float:
        """Wait until the call is over."""
        end = self._begun + seconds(self.cost, shape)
        behind = self.now() - end
        self.late = max(self.late, behind)
        if behind > SLACK:
            end += behind
        self._begun = self.wait(end)
        return self._begun

    def wait(self, instant: float, stop: Stop = None) -> float:
        """Return that instant once it has come; if told to stop, the present one."""
        self._begun = super().wait(instant, stop)
        return self._begun


class VirtualClock(WallClock):
    """Time that passes only when a step costs it: a live run as fast as it goes, and repeatable to the last bit."""

    def __init__(self, cost: StepCost) -> None:
        super().__init__()
        self.cost = cost
        self._now = 0.0

    def start(self) -> float:
        """Begin at 0."""
        self._now = 0.0
        return 0.0

    def now(self) -> float:
        """Return the instant it is."""
        return self._now

    def after(self, shape: Shape) -> float:
        """Let a call take its time."""
        self._now += seconds(self.cost, shape)
        return self._now

    def wait(self, instant: float, stop: Stop = None) -> float:
        """Be there at once."""
        self._now = instant
        return instant


def clock_of(pace: Optional[Mapping[str, Any]]) -> WallClock:
    """Return the clock of a device: of a pretended one, what its steps take is given as profiles write it."""
    return PacedClock(cost_from(pace, "pace")) if pace else WallClock()


def seconds(cost: StepCost, shape: Shape) -> float:
    """Return what a step takes, asked for in the way the simulated engine asks, so that it is equal to the last bit."""
    if shape.prefill_rows or shape.swapped:
        return cost.seconds(shape)
    return cost.decode(shape.decode_rows, shape.decode_live, shape.context)
