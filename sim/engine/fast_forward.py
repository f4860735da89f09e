"""Fast-forward: while a plan holds, its decode steps run as one event, with bit-identical results.

How it works. A policy returns `hold=n`: it would return the same plan for n further steps as long as nothing arrives,
finishes or runs short of blocks. These steps need no decision, and the cohort makes a step of all requests O(1), so
only their durations and blocks are left to compute. A segment ends at the first of: the hold, the end of a request, an
arrival that the scheduler sees, a wake-up or promotion, a step for which blocks are missing. If the plan also holds
past the end of requests (`lasts`), the next segment follows at once.

Why it is exact. Every duration is computed as for a single step (`fixed + slope * context`, or `StepCost.decode`), and
durations are added to the time one by one in the same order, so no float is rounded differently. Blocks are taken in
the order of the steps. Tests run every policy with and without fast-forward and compare every time to the last bit.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Callable, Optional

from servesim.core import Plan, StepCost

from .loop import Loop
from .results import record_decode
from .shape import Padding
from .step import Step

Line = tuple[int, float, float, bool]  # padded rows, seconds at no context, seconds a token of it, whether that is so
SHORT = 10  # iterations that are cheaper one by one
STRIDE = 1024  # iterations at once


class FastForward:
    """Runs the held plans of a loop."""

    def __init__(self, loop: Loop, cost: StepCost, padding: Padding, cold_start: Callable[[str], float]) -> None:
        self.loop = loop
        self.cold_start = cold_start
        self.cost = cost
        self.padding = padding
        self.padded = 0  # decode rows run that nobody asked for
        self.context = 0  # the most there was
        self._patient = loop.policy.max_wait is None
        self._lines: dict[int, dict[int, Line]] = {}  # by rows that the plan adds, and live ones
        server = loop.server
        self._parts = (loop, loop.inbox, server, server.cohort, server.pool, cost.decode)  # looked up once

    @property
    def rows(self) -> int:
        """Return the most decode rows that ran."""
        return max((rows for lines in self._lines.values() for rows, _, _, _ in lines.values()), default=0)

    def run(self, step: Step, now: float) -> float:
        """Run a decode that has begun for as long as its plan holds; return when its last step ended."""
        loop, inbox, server, cohort, pool, decode = self._parts
        plan, phases, begun = step.plan, cohort.phases, loop.calls
        extra, wake, spare = plan.padding, plan.wake, plan.spare
        hold, horizon, lasts = self._bounds(plan)
        lines = self._lines.setdefault(extra, {})
        late = self.cold_start("decode")
        while True:  # from the end of one request to the end of the next
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
                ticks, limit, now, context, free = self._near(line, live, context, now, limit, horizon, free, phase)
            if ticks < limit and (now < horizon or inbox.lag > 1):
                ticks, now, context, free, horizon = self._far(
                    wake, line, live, context, now, ticks, limit, horizon, free, phase
                )
            if ticks > 1:
                pool.free = free + spare
            self.padded += (rows - live) * ticks
            if context > self.context:
                self.context = context
            finished = record_decode(server, start, now, ticks, first)
            loop.calls += ticks
            if not loop.plain:
                loop.notify_end(step, now, first, finished)
            if not lasts or now >= horizon or inbox.lobby or not cohort.size:
                break
            hold -= ticks
            need = phases[-cohort.ticks % cohort.block]
            if need + spare > pool.free or hold <= 0:
                break
            pool.free -= need
            late = 0.0
        if loop.calls - begun > 1:
            server.view.memory = loop.policy.leap(server.view.memory, loop.calls - begun - 1)
        return now

    def _bounds(self, plan: Plan) -> tuple[int, float, bool]:
        """Return how many steps a plan may run, until when, and whether it goes on when a request finishes."""
        inbox, wake = self.loop.inbox, plan.wake
        hold = plan.hold + 1
        if inbox.lobby or inbox.chained:
            hold = self._limit(hold)
        horizon = inbox.next_arrival if self._patient and wake is None else self._horizon(wake)
        return hold, horizon, plan.lasts and wake is None and not inbox.chained

    def _near(
        self, line: Line, live: int, context: int, now: float, limit: int, horizon: float, free: int, phase: int
    ) -> tuple[int, int, float, int, int]:
        """Run a few steps one by one, which is cheaper; return them, the limit, the end, the context, free blocks."""
        rows, fixed, slope, linear = line
        gaps, cohort = self.loop.server.gaps, self.loop.server.cohort
        phases, block, seconds = cohort.phases, cohort.block, gaps.seconds
        ticks = 1
        for ticks in range(2, (limit if limit < SHORT else SHORT) + 1):
            taken = phases[(phase - ticks) % block]
            if taken > free:
                limit = ticks = ticks - 1
                break
            free -= taken
            context += live
            duration = fixed + slope * context if linear else self.cost.decode(rows, live, context)
            seconds.append(duration)
            now += duration
            if now >= horizon:
                break
        if ticks > 1:
            gaps.seen.extend([live] * (ticks - 1))
        return ticks, limit, now, context, free

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
        gaps, phases = self.loop.server.gaps, self.loop.server.cohort.phases
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
        lobby = self.loop.inbox.lobby
        if self.loop.has_pending_followers:
            return 1
        return min(limit, lobby[0][0] - self.loop.calls) if lobby else limit

    def _horizon(self, wake: Optional[float]) -> float:
        """Return the instant before which nobody arrives, wakes the policy or is promoted."""
        promotion = None if self._patient else self.loop.server.next_promotion()
        instants = (self.loop.inbox.next_arrival, wake, promotion)
        return min(instant for instant in instants if instant is not None)

    def _arrivals(self, wake: Optional[float], now: float, ticks: int, limit: int) -> tuple[int, float]:
        """Let those in who arrive during a leap; return how many iterations it may still have, and its horizon."""
        loop, inbox = self.loop, self.loop.inbox
        if inbox.lag == 1 or inbox.next_arrival > now:
            return limit, now
        inbox.receive(now, loop.calls + ticks)
        return min(limit, inbox.lobby[0][0] - loop.calls), self._horizon(wake)


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
