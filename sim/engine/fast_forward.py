"""Fast-forward: while a plan holds, its decode steps run as one event, with identical results.

How it works. A plan has a `Hold`: the policy would return it for n further steps, too, if nothing arrives, finishes
or lacks blocks. These steps need no decision, and the cohort makes a step of all requests O(1), so only their durations
and blocks are left (held_decodes.py). A segment ends if the hold ends, a request finishes, an arrival becomes
visible, `until` or `max_wait` is reached, or a step lacks blocks. If the plan also holds past the finish of requests
(`past_finish`), the next segment follows at once. A policy that learns from the time of every step is asked before each
of them whether its plan still holds.

With two steps in flight, a segment launches a step, receives the one before it, and runs further equal steps. All but
the last of these return, too. A segment has no further steps if the first two change who decodes.

In a fleet, a plan pauses at the barrier: the next arrival at any replica. If that request goes to another one, the
segment goes on later, as if it had not stopped. So the router can be told what has ended at the price of no decision.

Why it is exact. Every duration uses the formula of a single step (`fixed + slope * context`, or `StepCost.decode`).
Durations are added to the time one by one, in the same order. So every float is rounded in the same way. Blocks are
allocated in the order of the steps. Tests compare all times and metrics of every policy with and without it.
"""

from __future__ import annotations

import math
from typing import Callable, Final, Optional

from servesim.core import Plan, StepCost, check_seconds
from servesim.core.limits import MAX_STEP

from .clocks import HeldSteps
from .held_decodes import DecodeCost, HeldDecodes
from .loop import Loop
from .model_call import launch_decodes, put_in_flight, run_on
from .shape import Padding
from .step import NO_REQUESTS, Step

ROUNDED_DOWN: Final = 1 - 1e-9  # a sum of step times is at least this part of their product with the number of steps


class FastForward(HeldSteps):
    """Runs the held plans of a loop."""

    def __init__(self, loop: Loop, cost: StepCost, padding: Padding, cold_start: Callable[[str], float]) -> None:
        self.loop = loop
        self.cold_start = cold_start
        self.cost = cost
        self.padding = padding
        self.padding_rows = 0  # of all decodes
        self.max_context = 0
        self.max_row_context = 0.0  # mean of the rows of a step
        self.only_arrivals = loop.policy.max_wait is None and loop.inbox.timeout is None
        self._costs: dict[int, dict[int, DecodeCost]] = {}  # by padding rows of the plan, then by live rows
        self._extra, self._costs_now = 0, self._costs.setdefault(0, {})  # those of the newest plan
        self.server = server = loop.server
        cache = server.prefix_cache
        # A cache that evicts only what is missing: it evicts the same blocks at the end of a segment as step by step.
        self._cache = cache if cache is not None and cache.evicts_missing else None
        self._learns = loop.policy.learns
        self.reads_longest = cost.reads_longest
        self._held = HeldDecodes(server.cohort.block_offsets, server.overlaps)
        self._hold = 0  # steps that the plan may still run
        self._decided = 0  # steps of the plan so far
        self._limit = 0  # further steps of the segment at most, after its first one
        self._further = 0  # those so far
        self._is_over = True  # the segment has ended
        self._is_paused = False  # the plan waits at the barrier

    @property
    def max_rows(self) -> int:
        """The largest number of decode rows, including padding."""
        return max((cost.rows for costs in self._costs.values() for cost in costs.values()), default=0)

    def run(self, step: Step) -> float:
        loop, server, held = self.loop, self.server, self._held
        hold, horizon, past_finish = self._bounds(step.plan)
        held.horizon = min(horizon, loop.barrier)
        if self._is_paused:
            self._is_paused = False
        else:
            self._hold, self._decided = hold, 0
            self._begin(step, self.cold_start("decode"), past_finish)
        while True:  # one segment
            if not self._is_over:
                if self._further < self._limit and (held.decision < held.horizon or loop.inbox.lag > 1):
                    self._further += self._advance(self._limit - self._further, step.plan.hold.until)
                if self._further < self._limit and self._pauses(step, horizon):
                    break
                self._end(step)
            if self._hold <= 0 or not past_finish or loop.inbox.delayed or not server.cohort.size:
                break
            if self._pauses(step, horizon) or held.decision >= held.horizon:
                break
            if not self._take_blocks(step.plan.hold.keep_free):
                break
            server.waits.go_on(server, held.decision)
            step = self._next_step(step)
            self._begin(step, 0.0, past_finish)
        if self._decided > 1 and not self._learns and not self._is_paused:
            server.view.state = loop.policy.advance_state(server.view.state, self._decided - 1)
        return held.decision

    def _pauses(self, step: Step, horizon: float) -> bool:
        """Whether a plan waits at the barrier: it goes on later, without a decision, if nothing comes before that."""
        held = self._held
        if not self.loop.pauses or not self.loop.barrier <= held.decision < horizon or not self._may_wait(held.cost):
            return False
        if self.loop.inbox.lag > 1 or (not self._is_over and held.lacks_blocks):
            return False
        self._is_paused, self.loop.held = True, step
        return True

    @property
    def may_pause(self) -> bool:
        linear = self.cost.linear_in_context(1, 1) is not None
        return linear and not self._learns and self.loop.inbox.lag == 1

    def _may_wait(self, cost: DecodeCost) -> bool:
        """Whether steps change nothing outside until one of them changes who decodes."""
        loop = self.loop
        return cost.linear and not (self._learns or loop.inbox.delayed or loop.has_unreported)

    def earliest_end(self, step: Step) -> float:
        cohort, plan, flight, held = self.server.cohort, step.plan, self.server.flight, self._held
        cost = self._cost_of(cohort.size, plan.padding_rows)
        if not self._may_wait(cost):
            return step.decided
        returns = flight is not None and (self._is_over or not self._is_paused)  # before the next step
        if flight is not None and returns and (flight.ends or (flight.sampled and self.loop.tells_first_tokens)):
            return math.nextafter(flight.end, 0.0)
        steps, horizon, _ = self._bounds(plan)
        start, context, first = step.start, cohort.context, 1  # the first step has its blocks
        if self._is_paused:
            start, steps, first = held.end, self._hold, 0
        if self._is_paused and not self._is_over:
            context, steps = held.context + held.live, self._limit - self._further
        else:
            steps = min(steps, cohort.next_finish - cohort.steps)
            held.set_blocks(self._free_blocks(plan.hold.keep_free), cohort.steps + first)
        steps = first + held.steps_with_blocks(steps - first, cohort.size)
        seconds = steps * cost.fixed + cost.slope * (context + (steps - 1) * cohort.size / 2) * steps
        return min(horizon, start + seconds * ROUNDED_DOWN)

    @property
    def blocks_taken(self) -> int:
        return self._held.taken if self._is_paused and not self._is_over else 0

    def _begin(self, step: Step, cold: float, past_finish: bool) -> None:
        """Begin a segment with a step, which starts when the step before it ends.

        With two steps in flight, launch it and receive the one before it.
        """
        server, cohort, held = self.server, self.server.cohort, self._held
        live, context = cohort.size, cohort.context
        cost = self._cost_of(live, step.plan.padding_rows)
        held.longest = cohort.longest
        duration = cost.fixed + cost.slope * context if cost.linear else self._seconds(cost, live, context)
        step.rows, step.end = live, step.start + (duration + cold)
        held.begin(live, cost, context, step.start, step.end)
        self._is_over, self._further = False, 0
        counted = cohort.steps + 1
        self._limit = min(cohort.next_finish - cohort.steps, self._hold) - 1
        if server.overlaps:
            self._count_kv_use(1, 0)
            launch_decodes(server, step)
            put_in_flight(server, step)
            finished = self.loop.receive()
            goes_on = (past_finish or not finished) and not step.ends and cohort.size == live
            counted = cohort.steps
            self._limit = min(cohort.next_finish - cohort.steps, self._hold - 1) if goes_on else 0
        if self._limit > 0:
            held.set_blocks(self._free_blocks(step.plan.hold.keep_free), counted)

    def _end(self, step: Step) -> None:
        """End a segment: all of its steps return, or all but the last one if two are in flight."""
        server, loop, held, further = self.server, self.loop, self._held, self._further
        if further and held.cost.linear and not self._learns:
            server.token_gaps.add_linear(
                held.fixed, held.cost.slope, held.context - further * held.live, held.live,
                further - 1 if server.overlaps else further,
            )  # fmt: skip
        if not server.overlaps:
            self._count_kv_use(1 + further, further)
        elif further:
            self._count_kv_use(further, further)
        if further:
            self._take_further()
        if not server.overlaps:
            step.first_end, step.end, step.steps = step.end, held.end, 1 + further
            launch_decodes(server, step)
            put_in_flight(server, step)
            loop.receive()
        elif further:
            first_end = step.end
            run_on(server, step, further, held.decision, held.end)
            loop.calls += further
            if not loop.fast_path:
                loop.notify_end(step, first_end, first_end, NO_REQUESTS)
        self._is_over, self._decided, self._hold = True, self._decided + 1 + further, self._hold - 1 - further
        self._note_sizes(1 + further)

    def _note_sizes(self, steps: int) -> None:
        held = self._held
        self.padding_rows += (held.cost.rows - held.live) * steps
        if held.context > self.max_context:
            self.max_context = held.context
        if held.context > self.max_row_context * held.live:
            self.max_row_context = held.context / held.live

    def _advance(self, limit: int, until: Optional[float]) -> int:
        """Run up to `limit` further steps, also past arrivals that the scheduler does not see yet. Return how many.

        Add the gaps between their tokens, if they are not linear; that of a step in flight follows when it returns.
        """
        gaps, held, further = self.server.token_gaps, self._held, 0
        cost, live = held.cost, held.live
        in_flight, seconds = 1 if self.server.overlaps else 0, 0.0
        while further < limit:
            if held.decision >= held.horizon:
                if self._learns:
                    break
                limit = self._receive_arrivals(until, further + 1, limit)
                if further >= limit or held.decision >= held.horizon:
                    break
            if held.lacks_blocks or (self._learns and not self._learn(held.decision)):
                break
            if cost.linear and not self._learns:
                further += held.advance(limit - further)
                continue
            if in_flight and further:  # the step before returns
                gaps.add(seconds, live)
            if not cost.linear:
                held.longest += 1
                held.fixed = self._seconds(cost, live, held.context + live)
            seconds = held.advance_one()
            if not in_flight:
                gaps.add(seconds, live)
            further += 1
        return further

    def _next_step(self, step: Step) -> Step:
        """Return the next step of the same plan. With one step in flight, `step` has returned and is used again."""
        server, held = self.server, self._held
        if not server.overlaps:
            step.joined = step.ends = NO_REQUESTS
            step.start = held.end
            return step
        next_step = Step(step.plan, held.decision, held.end)
        next_step.decode_rows, next_step.context = server.cohort.size, server.cohort.context
        return next_step

    def _count_kv_use(self, steps: int, further: int) -> None:
        """Count what requests hold in these steps; the blocks of further ones are not taken yet."""
        use, blocks, held = self.server.kv_use, self.server.pool.held, self._held
        if steps == 1 and not further:
            use.tokens = tokens = use.tokens + held.live
            use.token_sum += tokens
            use.block_sum += blocks
        else:
            use.add_steps(steps, held.live, blocks, held.more_blocks(further))
            blocks += held.taken
        if blocks > use.peak_blocks:
            use.peak_blocks = blocks

    def _take_further(self) -> None:
        """Take the blocks of further steps. A cache evicts as before the last one of them."""
        self.server.pool.free -= self._held.taken
        if self._cache is not None:
            self._cache.make_room(self._held.live, self._held.last_needed)

    def _free_blocks(self, keep_free: int) -> int:
        """Return the blocks that steps can take, with those that a cache evicts for them."""
        pool = self.server.pool
        return pool.free - keep_free + (0 if self._cache is None else pool.evictable)

    def _take_blocks(self, keep_free: int) -> bool:
        """Take the blocks of the next step. Return False if they are missing."""
        server, cohort, pool = self.server, self.server.cohort, self.server.pool
        server.rules.repeat_plan(server)
        needed = cohort.block_offsets[-cohort.steps % cohort.block_size]
        if needed > self._free_blocks(keep_free):
            return False
        pool.free -= needed
        if self._cache is not None:
            self._cache.make_room(cohort.size, needed)
        return True

    def _bounds(self, plan: Plan) -> tuple[int, float, bool]:
        """Return the steps that a plan may run, the time limit, and whether it continues when a request finishes."""
        inbox, hold = self.loop.inbox, plan.hold
        steps, until = hold.steps + 1, hold.until
        if inbox.delayed or inbox.has_followers:
            steps = self._steps_until_visible(steps)
        horizon = inbox.next_arrival if self.only_arrivals and until is None else self.next_change(until)
        return steps, horizon, hold.past_finish and until is None and not inbox.has_followers

    def _learn(self, now: float) -> bool:
        """Let the policy learn from the last step. Return whether its plan still holds."""
        view = self.server.view
        state = self.loop.policy.held_state(view.state, now)
        if state is None:
            return False
        view.state = state
        return True

    def _seconds(self, cost: DecodeCost, live: int, context: int) -> float:
        """Return the time of a step that is not linear in its context."""
        if self.reads_longest:
            seconds = self.cost.decode_unequal(cost.rows, live, context, self._held.longest)
        else:
            seconds = self.cost.decode(cost.rows, live, context)
        if not 0.0 <= seconds <= MAX_STEP:
            check_seconds(self.cost, seconds)
        return seconds

    def change_cost(self, cost: StepCost) -> None:
        """Use another cost model from now on."""
        self.cost = cost
        for costs in self._costs.values():
            costs.update({n: DecodeCost(old.rows, cost.linear_in_context(old.rows, n)) for n, old in costs.items()})

    def _cost_of(self, live: int, extra: int) -> DecodeCost:
        """Return the cost of a decode with this number of live rows and padding rows of the plan."""
        if extra != self._extra:
            self._extra, self._costs_now = extra, self._costs.setdefault(extra, {})
        cost = self._costs_now.get(live)
        if cost is not None:
            return cost
        rows = max(self.padding.pad_rows(live), live + extra)
        linear = self.cost.linear_in_context(rows, live)
        for number in linear or ():  # if neither is negative, no step time is
            if not 0.0 <= number <= MAX_STEP:
                check_seconds(self.cost, number)
        cost = self._costs_now[live] = DecodeCost(rows, linear)
        return cost

    def _steps_until_visible(self, limit: int) -> int:
        """Return the steps that can run before the scheduler sees a request, or before a follower may arrive."""
        delayed = self.loop.inbox.delayed
        if self.loop.has_pending_followers:
            return 1
        return min(limit, delayed[0][0] - self.loop.calls) if delayed else limit

    def next_change(self, until: Optional[float]) -> float:
        """Return the time of the next arrival, time-out, wake-up or promotion."""
        promotion = None if self.only_arrivals else self.server.next_promotion()
        horizon = self.loop.inbox.next_arrival
        if not self.only_arrivals:
            horizon = min(horizon, self.loop.inbox.next_timeout())
        if until is not None and until < horizon:
            horizon = until
        return horizon if promotion is None else min(horizon, promotion)

    def _receive_arrivals(self, until: Optional[float], steps: int, limit: int) -> int:
        """Receive arrivals that are not visible yet, and set the new horizon. Return the new limit of further steps."""
        loop, inbox, held = self.loop, self.loop.inbox, self._held
        now = held.decision
        if inbox.lag == 1 or inbox.next_arrival > now:
            held.horizon = now
            return limit
        inbox.receive(now, loop.calls + steps)
        held.horizon = min(self.next_change(until), loop.barrier)
        return min(limit, inbox.delayed[0][0] - loop.calls - 1)
