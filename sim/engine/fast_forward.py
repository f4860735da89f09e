"""Leaps: while a plan holds, its iterations are not decided one by one but run at once, to the same last bit.

A leap adds the same durations in the same order as single steps would. It ends when somebody arrives, wakes the
policy or is promoted, and when memory runs short; at the end of a request it goes on if the plan lasts beyond it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Optional

from servesim.core import StepCost

from .loop import Driver
from .shape import Padding
from .step import Step

Line = tuple[int, float, float, bool]  # padded rows, seconds at no context, seconds a token of it, whether that is so
SHORT = 10  # iterations that are cheaper one by one
STRIDE = 1024  # iterations at once


class Leaps:
    """Runs the held plans of a driver."""

    def __init__(self, driver: Driver, cost: StepCost, padding: Padding) -> None:
        self.driver = driver
        self.cost = cost
        self.padding = padding
        self.padded = 0  # decode rows run that nobody asked for
        self.context = 0  # the most there was
        self._patient = driver.policy.max_wait is None
        self._lines: dict[int, dict[int, Line]] = {}  # by rows that the plan adds, and live ones
        server = driver.server
        self._parts = (  # looked up once
            driver, driver.inbox, server, server.cohort, server.pool, server.gaps, cost.decode,
            server.gaps.seconds.append,
        )  # fmt: skip

    @property
    def rows(self) -> int:
        """Return the most decode rows that ran."""
        return max((rows for lines in self._lines.values() for rows, _, _, _ in lines.values()), default=0)

    def run(self, step: Step, now: float, late: float = 0.0) -> float:
        """Run a decode that has begun for as long as its plan holds; return when its last iteration ended.

        The first iteration takes longer by `late`.
        """
        driver, inbox, server, cohort, pool, gaps, decode, append = self._parts
        phases, block, begun, padded = cohort.phases, cohort.block, driver.calls, 0
        plan = step.plan
        extra, wake, hold, spare, lasts = plan.padding, plan.wake, plan.hold + 1, plan.spare, plan.lasts
        if wake is not None or inbox.chained:
            lasts = False
        if inbox.lobby or inbox.chained:
            hold = self._limit(hold)
        lines = self._lines.setdefault(extra, {})
        horizon = inbox.next_arrival if self._patient and wake is None else self._horizon(wake)
        while True:  # from end to end of a request
            start, live, ticks = now, cohort.size, 1
            context, phase, free = cohort.context, 1 - cohort.ticks, pool.free - spare
            line = lines.get(live) or self._line(live, extra)
            rows, fixed, slope, linear = line
            limit = cohort.next_end - cohort.ticks
            if limit > hold:
                limit = hold
            duration = fixed + slope * context if linear else decode(rows, live, context)
            now = first = start + (duration + late)
            if limit > 1 and now < horizon and (limit <= SHORT or horizon - now < SHORT * duration or not linear):
                for ticks in range(2, (limit if limit < SHORT else SHORT) + 1):
                    taken = phases[(phase - ticks) % block]
                    if taken > free:
                        limit = ticks = ticks - 1
                        break
                    free -= taken
                    context += live
                    duration = fixed + slope * context if linear else decode(rows, live, context)
                    append(duration)
                    now += duration
                    if now >= horizon:
                        break
                if ticks > 1:
                    gaps.seen.extend([live] * (ticks - 1))
            if ticks < limit and (now < horizon or inbox.lag > 1):
                ticks, now, context, free, horizon = self._far(
                    wake, line, live, context, now, ticks, limit, horizon, free, phase
                )
            if ticks > 1:
                pool.free = free + spare
            padded += (rows - live) * ticks
            if context > self.context:
                self.context = context
            over = server.decoded(start, now, ticks, first)
            driver.calls += ticks
            if not driver.plain:
                driver.show(step, now, first, over)
            if not lasts or now >= horizon or inbox.lobby or not cohort.size:
                break
            hold -= ticks
            need = phases[-cohort.ticks % block]
            if need + spare > pool.free or hold <= 0:
                break
            pool.free -= need
            late = 0.0
        self.padded += padded
        iterations = driver.calls - begun
        if iterations > 1:
            server.view.memory = driver.policy.leap(server.view.memory, iterations - 1)
        return now

    def _line(self, live: int, extra: int) -> Line:
        """Return a decode's padded rows, and its duration as a line over the context if it is one."""
        rows = max(self.padding.rows(live), live + extra)
        line = self.cost.line(rows, live)
        found = (rows, *(line or (0.0, 0.0)), line is not None)
        self._lines[extra][live] = found
        return found

    def _far(
        self, wake: Optional[float], line: Line, live: int, context: int, now: float, ticks: int, limit: int,
        horizon: float, free: int, phase: int,
    ) -> tuple[int, float, int, int, float]:  # fmt: skip
        """Run a leap that is longer than a few iterations, or in which people arrive who are not seen at once.

        Return its iterations, the end of the last, its context, the free blocks and the horizon.
        """
        rows, fixed, slope, linear = line
        gaps, phases = self.driver.server.gaps, self.driver.server.cohort.phases
        while ticks < limit:
            if now >= horizon:
                limit, horizon = self._arrivals(wake, now, ticks, limit)
                if ticks >= limit or now >= horizon:
                    break
            count = 1
            if linear:
                count = int(min(limit - ticks, STRIDE, (horizon - now) / (fixed + slope * context or 1.0) + 2))
                ahead = range(context + live, context + live * count + 1, live)
                ran, now, taken = stride([fixed + slope * c for c in ahead], now, horizon, free, phases, phase - ticks)
                gaps.add_line(fixed, slope, context, live, ran)
            else:
                duration = self.cost.decode(rows, live, context + live)
                ran, now, taken = stride([duration], now, horizon, free, phases, phase - ticks)
                if ran:
                    gaps.add(duration, live)
            free, context, ticks = free - taken, context + live * ran, ticks + ran
            if ran < count and now < horizon:
                break  # short of blocks
        return ticks, now, context, free, horizon

    def _limit(self, limit: int) -> int:
        """Return how many iterations can run before somebody is seen, or may come because of an end."""
        lobby = self.driver.inbox.lobby
        if self.driver.settling:
            return 1
        return min(limit, lobby[0][0] - self.driver.calls) if lobby else limit

    def _horizon(self, wake: Optional[float]) -> float:
        """Return the instant before which nobody arrives, wakes the policy or is promoted."""
        promotion = None if self._patient else self.driver.server.next_promotion()
        instants = (self.driver.inbox.next_arrival, wake, promotion)
        return min(instant for instant in instants if instant is not None)

    def _arrivals(self, wake: Optional[float], now: float, ticks: int, limit: int) -> tuple[int, float]:
        """Let those in who arrive during a leap; return how many iterations it may still have, and its horizon."""
        driver, inbox = self.driver, self.driver.inbox
        if inbox.lag == 1 or inbox.next_arrival > now:
            return limit, now
        inbox.receive(now, driver.calls + ticks)
        return min(limit, inbox.lobby[0][0] - driver.calls), self._horizon(wake)


def stride(
    durations: Sequence[float], now: float, horizon: float, free: int, phases: list[int], phase: int
) -> tuple[int, float, int]:
    """Run iterations of such durations, none begun beyond the horizon or without blocks.

    `phase` is where the cohort stands in its blocks. Return how many ran, when the last ended and the blocks taken.
    Accumulation adds one by one, as single steps do.
    """
    count, block = len(durations), len(phases)
    ends = list(accumulate(durations, initial=now))
    first = (phase - 1) % block
    takes = (phases[first::-1] + phases[:first:-1]) * (count // block + 1)  # in the order of coming ticks
    taken = list(accumulate(takes[:count], initial=0))
    ran = max(0, min(count, bisect_left(ends, horizon), bisect_right(taken, free) - 1))
    return ran, ends[ran], taken[ran]
