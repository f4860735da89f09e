"""Fast-forward: while a plan holds, its decode steps run as one event, with bit-identical results.

How it works. A policy returns `hold=n`: it would return the same plan for n further steps if nothing arrives, finishes
or lacks blocks. These steps need no decision, and the cohort makes a step of all requests O(1), so only their durations
and blocks are left to compute. A segment ends if the hold ends, a request finishes, an arrival becomes visible,
`wake_at` or `max_wait` is reached, or a step lacks blocks. If the plan also holds past the finish of requests
(`hold_past_finish`), the next segment follows at once. A policy that learns from the time of every step (Traits.learns)
is asked before each of them whether its plan still holds.

Why it is exact. Every duration uses the formula of a single step (`fixed + slope * context`, or `StepCost.decode`).
Durations are added to the time one by one, in the same order. So every float is rounded in the same way. Blocks are
allocated in the order of the steps. Tests run every policy with and without fast-forward and compare every time, bit by
bit.
"""

from __future__ import annotations

from typing import Callable, Final, Optional

from servesim.core import Plan, StepCost, check_seconds
from servesim.core.limits import MAX_STEP

from .clocks import HeldSteps
from .in_flight import launch_decodes, launch_further, receive_decodes
from .loop import Loop
from .results import free_finished, record_decode
from .step import NO_REQUESTS, Padding, Step, StepInFlight

MANY_BLOCKS: Final = 1 << 40  # more than any segment allocates; sums of a larger number would be slow
LOOP_STEPS: Final = 4  # up to this number of steps, `_run_few` is faster than `run_steps`


class DecodeCost:
    """The cost of a decode with a number of live rows."""

    __slots__ = ("fixed", "linear", "rows", "slope")

    def __init__(self, rows: int, linear: Optional[tuple[float, float]]) -> None:
        self.rows = rows  # with padding
        self.linear = linear is not None  # in the context
        self.fixed, self.slope = linear or (0.0, 0.0)  # seconds at context 0, and per context token


class FastForward(HeldSteps):
    """Runs the held plans of a loop."""

    def __init__(self, loop: Loop, cost: StepCost, padding: Padding, cold_start: Callable[[str], float]) -> None:
        self.loop = loop
        self.cold_start = cold_start
        self.cost = cost
        self.padding = padding
        self.padding_rows = 0  # of all decodes
        self.max_context = 0
        self._free_sum = 0  # free blocks, summed over the steps of a segment after the first one
        self._no_max_wait = loop.policy.max_wait is None
        self._costs: dict[int, dict[int, DecodeCost]] = {}  # by padding rows of the plan, then by live rows
        server = loop.server
        cache = server.prefix_cache
        # A cache that evicts only what is missing: it evicts the same blocks at the end of a segment as step by step.
        self._cache = cache if cache is not None and cache.evicts_missing else None
        self._finished_stay = server.traits.finished_stay
        self._learns = server.traits.learns
        self._hot_objects = (loop, loop.inbox, server, server.cohort, server.pool, cost.decode)  # looked up once

    @property
    def max_rows(self) -> int:
        """The largest number of decode rows, including padding."""
        return max((cost.rows for costs in self._costs.values() for cost in costs.values()), default=0)

    def run(self, step: Step, now: float) -> float:
        loop, inbox, server, cohort, pool, decode = self._hot_objects
        plan, offsets, first_call = step.plan, cohort.block_offsets, loop.calls
        extra, wake_at, keep_free = plan.padding_rows, plan.wake_at, plan.keep_free
        hold, horizon, past_finish = self._bounds(plan)
        costs, use = self._costs.setdefault(extra, {}), server.kv_use
        cold, cache = self.cold_start("decode"), self._cache
        while True:  # one segment
            start, live, steps = now, cohort.size, 1
            context, offset, free = cohort.context, 1 - cohort.steps, pool.free - keep_free
            if cache is not None:
                free += pool.evictable
            if free > MANY_BLOCKS:
                free = MANY_BLOCKS
            first_free = free
            cost = costs.get(live) or self._decode_cost(live, extra)
            rows, fixed, slope, linear = cost.rows, cost.fixed, cost.slope, cost.linear
            limit = cohort.next_finish - cohort.steps
            if limit > hold:
                limit = hold
            if linear:
                duration = fixed + slope * context
            elif not 0.0 <= (duration := decode(rows, live, context)) <= MAX_STEP:
                check_seconds(self.cost, duration)
            now = first = start + (duration + cold)
            few = limit <= LOOP_STEPS or horizon - now < LOOP_STEPS * duration or self._learns
            if limit > 1 and now < horizon and (few or not linear):
                steps, limit, now, context, free = self._run_few(cost, live, context, now, limit, horizon, free, offset)
            if steps < limit and (now < horizon or inbox.lag > 1) and not self._learns:
                steps, now, context, free, horizon = self._run_long(
                    wake_at, cost, live, context, now, steps, limit, horizon, free, offset
                )
            blocks = pool.total - pool.free - pool.evictable
            if steps == 1:
                use.tokens = tokens = use.tokens + live
                use.token_sum += tokens
                use.block_sum += blocks
            else:
                use.add_steps(steps, live, blocks, (steps - 1) * first_free - self._free_sum)
                pool.free -= first_free - free
                blocks += first_free - free
                self._free_sum = 0
                if cache is not None:
                    cache.make_room(live, offsets[(offset - steps) % cohort.block_size])
            if blocks > use.peak_blocks:
                use.peak_blocks = blocks
            self.padding_rows += (rows - live) * steps
            if context > self.max_context:
                self.max_context = context
            finished = record_decode(server, start, now, steps, first)
            if finished:
                free_finished(server, finished)
            loop.calls += steps
            if not loop.fast_path:
                loop.notify_end(step, now, first, finished)
            if not past_finish or now >= horizon or inbox.delayed or not cohort.size:
                break
            hold -= steps
            if hold <= 0 or not self._take_blocks(keep_free):
                break
            cold = 0.0
        if loop.calls - first_call > 1 and not self._learns:
            server.view.state = loop.policy.advance_state(server.view.state, loop.calls - first_call - 1)
        return now

    def _take_blocks(self, keep_free: int) -> bool:
        """Take the blocks of the next step. Return False if they are missing."""
        _, _, server, cohort, pool, _ = self._hot_objects
        if self._finished_stay:  # the next step of a plan that holds past a finish takes them from the queue
            server.release_finished()
        needed, cache = cohort.block_offsets[-cohort.steps % cohort.block_size], self._cache
        if needed + keep_free > (pool.free if cache is None else pool.free + pool.evictable):
            return False
        pool.free -= needed
        if cache is not None:
            cache.make_room(cohort.size, needed)
        return True

    def run_in_flight(self, step: Step, before: StepInFlight) -> float:
        """Run held steps of a loop that decides a step before the last one, `before`, has returned.

        Each segment launches a step, receives the one before it, and launches further equal steps. All but the last
        of these return, too. A segment has no further steps if the first two change who decodes.
        """
        loop, _, server, cohort, pool, decode = self._hot_objects
        plan, decided = step.plan, 0
        extra, keep_free = plan.padding_rows, plan.keep_free
        hold, horizon, past_finish = self._bounds(plan)
        costs = self._costs.setdefault(extra, {})
        cold = self.cold_start("decode")
        while True:  # one segment
            live, context, now = cohort.size, cohort.context, before.end
            cost = costs.get(live) or self._decode_cost(live, extra)
            rows, fixed, slope, linear = cost.rows, cost.fixed, cost.slope, cost.linear
            if linear:
                duration = fixed + slope * context
            elif not 0.0 <= (duration := decode(rows, live, context)) <= MAX_STEP:
                check_seconds(self.cost, duration)
            flight = StepInFlight(step, now, now + (duration + cold), live)
            use, blocks = server.kv_use, pool.held
            use.add_steps(1, live, blocks, 0)
            if blocks > use.peak_blocks:
                use.peak_blocks = blocks
            launch_decodes(server, flight)
            self.padding_rows += rows - live
            finished = loop.receive(before)
            decided, hold = decided + 1, hold - 1
            goes_on = past_finish or not finished
            if goes_on and hold and now < horizon and not flight.ends and cohort.size == live:
                steps, now, context = self._run_ahead(flight, cost, live, context, hold, horizon)
                decided, hold = decided + steps, hold - steps
                self.padding_rows += (rows - live) * steps
            if context > self.max_context:
                self.max_context = context
            if not past_finish or now >= horizon or not cohort.size or not hold:
                break
            if not self._take_blocks(keep_free):
                break
            before, cold = flight, 0.0
        if decided > 1:
            server.view.state = loop.policy.advance_state(server.view.state, decided - 1)
        return now

    def _run_ahead(
        self, flight: StepInFlight, cost: DecodeCost, live: int, context: int, hold: int, horizon: float
    ) -> tuple[int, float, int]:
        """Launch further decode steps, and receive the one in flight and all of them but the last.

        Return their number, the time of the next decision, and the largest context.
        """
        loop, _, server, cohort, pool, decode = self._hot_objects
        rows, fixed, slope, linear = cost.rows, cost.fixed, cost.slope, cost.linear
        cache = self._cache
        free = pool.free - flight.step.plan.keep_free + (0 if cache is None else pool.evictable)
        free = first_free = min(free, MANY_BLOCKS)
        limit, steps, free_sum, first_context = min(cohort.next_finish - cohort.steps, hold), 0, 0, context
        decision, now = flight.start, flight.end
        while steps < limit:
            if not linear:  # the time of the next step
                if steps:
                    server.token_gaps.add(fixed, live)
                if not 0.0 <= (fixed := decode(rows, live, context + live)) <= MAX_STEP:
                    check_seconds(self.cost, fixed)
            count = limit - steps if linear else 1
            ran, decision, now, free, more_free = run_ahead(
                fixed, slope, context, live, decision, now, horizon, count, free, cohort.block_offsets,
                -cohort.steps - steps,
            )  # fmt: skip
            context, steps, free_sum = context + live * ran, steps + ran, free_sum + more_free
            if ran < count:
                break
        if not steps:
            return 0, decision, context
        blocks, use = pool.held, server.kv_use
        use.add_steps(steps, live, blocks, steps * first_free - free_sum)
        pool.free -= first_free - free
        if cache is not None:
            cache.make_room(live, cohort.block_offsets[(1 - cohort.steps - steps) % cohort.block_size])
        if blocks + first_free - free > use.peak_blocks:
            use.peak_blocks = blocks + first_free - free
        first_end = flight.end
        launch_further(server, flight, steps, decision, now)
        loop.calls += steps
        if not loop.fast_path:
            loop.notify_end(flight.step, first_end, first_end, NO_REQUESTS)
        if steps > 1:
            if linear:
                server.token_gaps.add_linear(fixed, slope, first_context, live, steps - 1)
            receive_decodes(server, live, steps - 1, first_end, decision)
        return steps, decision, context

    def _bounds(self, plan: Plan) -> tuple[int, float, bool]:
        """Return the steps that a plan may run, the time limit, and whether it continues when a request finishes."""
        inbox, wake_at = self.loop.inbox, plan.wake_at
        hold = plan.hold + 1
        if inbox.delayed or inbox.followers:
            hold = self._steps_until_visible(hold)
        horizon = inbox.next_arrival if self._no_max_wait and wake_at is None else self._horizon(wake_at)
        return hold, horizon, plan.hold_past_finish and wake_at is None and not inbox.followers

    def _run_few(
        self, cost: DecodeCost, live: int, context: int, now: float, limit: int, horizon: float, free: int, offset: int
    ) -> tuple[int, int, float, int, int]:
        """Run at most LOOP_STEPS steps, or any number if the policy learns from each, in a loop.

        Return steps, limit, end, context and free blocks.
        """
        rows, fixed, slope, linear = cost.rows, cost.fixed, cost.slope, cost.linear
        gaps, cohort = self.loop.server.token_gaps, self.loop.server.cohort
        offsets, block_size = cohort.block_offsets, cohort.block_size
        steps, free_sum = 1, 0
        for steps in range(2, (limit if limit < LOOP_STEPS or self._learns else LOOP_STEPS) + 1):
            needed = offsets[(offset - steps) % block_size]
            if needed > free or (self._learns and not self._learn(now)):
                limit = steps = steps - 1
                break
            free -= needed
            free_sum += free
            context += live
            if linear:
                duration = fixed + slope * context
            elif not 0.0 <= (duration := self.cost.decode(rows, live, context)) <= MAX_STEP:
                check_seconds(self.cost, duration)
            gaps.add(duration, live)
            now += duration
            if now >= horizon:
                break
        self._free_sum = free_sum
        return steps, limit, now, context, free

    def _learn(self, now: float) -> bool:
        """Let the policy learn from the last step. Return whether its plan still holds."""
        view = self.loop.server.view
        state = self.loop.policy.held_state(view.state, now)
        if state is None:
            return False
        view.state = state
        return True

    def _decode_cost(self, live: int, extra: int) -> DecodeCost:
        """Return the cost of a decode with this number of live rows, and cache it."""
        rows = max(self.padding.pad_rows(live), live + extra)
        linear = self.cost.linear_in_context(rows, live)
        for number in linear or ():  # if neither is negative, no step time is
            if not 0.0 <= number <= MAX_STEP:
                check_seconds(self.cost, number)
        self._costs[extra][live] = cost = DecodeCost(rows, linear)
        return cost

    def _run_long(
        self, wake_at: Optional[float], cost: DecodeCost, live: int, context: int, now: float, steps: int, limit: int,
        horizon: float, free: int, offset: int,
    ) -> tuple[int, float, int, int, float]:  # fmt: skip
        """Run many steps, also past arrivals that the scheduler does not see yet.

        Return steps, end, context, free blocks and horizon.
        """
        rows, fixed, slope, linear = cost.rows, cost.fixed, cost.slope, cost.linear
        gaps, offsets = self.loop.server.token_gaps, self.loop.server.cohort.block_offsets
        while steps < limit:
            if now >= horizon:
                limit, horizon = self._receive(wake_at, now, steps, limit)
                if steps >= limit or now >= horizon:
                    break
            count = limit - steps if linear else 1
            if not linear:  # the time of the next step
                fixed = self.cost.decode(rows, live, context + live)
                if not 0.0 <= fixed <= MAX_STEP:
                    check_seconds(self.cost, fixed)
            ran, now, free, free_sum = run_steps(
                fixed, slope, context, live, now, horizon, count, free, offsets, offset - steps
            )
            self._free_sum += free_sum
            if linear:
                gaps.add_linear(fixed, slope, context, live, ran)
            elif ran:
                gaps.add(fixed, live)
            context, steps = context + live * ran, steps + ran
            if ran < count and now < horizon:
                break  # the next step lacks blocks
        return steps, now, context, free, horizon

    def _steps_until_visible(self, limit: int) -> int:
        """Return the steps that can run before the scheduler sees a request, or before a follower may arrive."""
        delayed = self.loop.inbox.delayed
        if self.loop.has_pending_followers:
            return 1
        return min(limit, delayed[0][0] - self.loop.calls) if delayed else limit

    def _horizon(self, wake_at: Optional[float]) -> float:
        """Return the time of the next arrival, wake-up or promotion."""
        promotion = None if self._no_max_wait else self.loop.server.next_promotion()
        horizon = self.loop.inbox.next_arrival
        if wake_at is not None and wake_at < horizon:
            horizon = wake_at
        return horizon if promotion is None else min(horizon, promotion)

    def _receive(self, wake_at: Optional[float], now: float, steps: int, limit: int) -> tuple[int, float]:
        """Receive arrivals that are not visible yet. Return the new limit and horizon (`now` ends the segment)."""
        loop, inbox = self.loop, self.loop.inbox
        if inbox.lag == 1 or inbox.next_arrival > now:
            return limit, now
        inbox.receive(now, loop.calls + steps)
        return min(limit, inbox.delayed[0][0] - loop.calls), self._horizon(wake_at)


def run_steps(
    fixed: float, slope: float, context: int, live: int, now: float, horizon: float, count: int, free: int,
    offsets: list[int], offset: int,
) -> tuple[int, float, int, int]:  # fmt: skip
    """Run up to `count` decode steps of `live` requests: each must start before the horizon and get its blocks.

    The index of the first step in `offsets` is `offset` - 1 modulo the block size. Return the number of steps, the end
    of the last one, the blocks that are free after it, and the sum of the free blocks over the steps.
    """
    index, free_sum = offset % len(offsets), 0
    for ran in range(count):
        index = (index or len(offsets)) - 1
        needed = offsets[index]
        if now >= horizon or needed > free:
            return ran, now, free, free_sum
        free -= needed
        free_sum += free
        context += live
        now += fixed + slope * context
    return count, now, free, free_sum


def run_ahead(
    fixed: float, slope: float, context: int, live: int, decision: float, now: float, horizon: float, count: int,
    free: int, offsets: list[int], offset: int,
) -> tuple[int, float, float, int, int]:  # fmt: skip
    """Run up to `count` decode steps, each decided when the step before it starts: at `decision`, then at `now`.

    Each must be decided before the horizon and get its blocks. The index of the first step in `offsets` is `offset`
    modulo the block size. Return the number of steps, the next decision, the end of the last step, the blocks that are
    free after it, and the sum of the free blocks over the steps.
    """
    index, free_sum = offset % len(offsets), 0
    for ran in range(count):
        needed = offsets[index]
        if decision >= horizon or needed > free:
            return ran, decision, now, free, free_sum
        index = (index or len(offsets)) - 1
        free -= needed
        free_sum += free
        context += live
        decision, now = now, now + (fixed + slope * context)
    return count, decision, now, free, free_sum
