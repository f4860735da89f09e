"""A clock for tests of the probe and of replays: a step of the fake backend takes only the time of its cost model."""

from __future__ import annotations


class VirtualTime:
    """Replaces the module time: each reading of the clock takes a tenth of a microsecond."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 1e-7
        return self.now

    monotonic = perf_counter

    def sleep(self, seconds: float) -> None:
        self.now += seconds
