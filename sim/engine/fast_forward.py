"""Fast-forward: while a plan holds, its decode steps run as one event, with identical results.

How it works. A plan has a `Hold`: the policy would return it for n further steps, too, if nothing arrives, finishes
or lacks blocks. These steps need no decision, and the cohort makes a step of all requests O(1), so only their durations
and blocks are left (held_decodes.py). A segment ends if the hold ends, a request finishes, an arrival becomes
visible, `until` or `max_wait` is reached, or a step lacks blocks. If the plan also holds past the finish of requests
(`past_finish`), the next segment follows at once. A policy that learns from the time of every step is asked before each
of them whether its plan still holds.

With two steps in flight, a segment launches a step, receives the one before it, and runs further equal steps. All but
the last of these return, too. A segment has no further steps if the first two change who decodes.

Why it is exact. Every duration uses the formula of a single step (`fixed + slope * context`, or `StepCost.decode`).
Durations are added to the time one by one, in the same order. So every float is rounded in the same way. Blocks are
allocated in the order of the steps. Tests compare all times and metrics of every policy with and without it.
"""

from __future__ import annotations

from typing import Callable, Final, Optional

from servesim.core import Plan, StepCost, check_seconds
from servesim.core.limits import MAX_STEP

from .clocks import HeldSteps
from .draft_cohort import DraftCohort
from .held_decodes import DecodeCost, HeldDecodes
from .loop import Loop
from .model_call import launch_decodes, put_in_flight, run_on
from .plans import start_decode
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
        self.max_draft_rows = 0  # rows of a step with drafts whose shape the clock has recorded
        self._only_arrivals = loop.policy.max_wait is None and loop.inbox.timeout is None
        self._costs: dict[int, dict[int, DecodeCost]] = {}  # by padding rows of the plan, then by live rows
        self._extra, self._costs_now = 0, self._costs.setdefault(0, {})  # those of the newest plan
        self.server = server = loop.server
        cache = server.prefix_cache
        # A cache that evicts only what is missing: it evicts the same blocks at the end of a segment as step by step.
        self._cache = cache if cache is not None and cache.evicts_missing else None
        self._learns = loop.policy.learns
        self._reads_longest = cost.reads_longest
        self._held = HeldDecodes(server.cohort.block_offsets, server.overlaps)

    @property
    def max_rows(self) -> int:
        """The largest number of decode rows, including padding."""
        return max((cost.rows for costs in self._costs.values() for cost in costs.values()), default=0)

    def run(self, step: Step) -> float:
        if self.server.draft_cohort is not None:
            return self._run_drafts(step, self.server.draft_cohort)
        loop, server, cohort, plan, held = self.loop, self.server, self.server.cohort, step.plan, self._held
        inbox = loop.inbox
        hold, horizon, past_finish = self._bounds(plan)
        held.horizon = min(horizon, loop.barrier)
        decided, cold = 0, self.cold_start("decode")
        while True:  # one segment
            self._start_segment(step, cold)
            if server.overlaps:
                further = self._run_overlapping(step, hold, past_finish)
            else:
                further = self._run_alone(step, hold)
            decided, hold = decided + 1 + further, hold - 1 - further
            self.padding_rows += (held.cost.rows - held.live) * (1 + further)
            if held.context > self.max_context:
                self.max_context = held.context
            if held.context > self.max_row_context * held.live:
                self.max_row_context = held.context / held.live
            if not past_finish or held.decision >= held.horizon or inbox.delayed or not cohort.size or hold <= 0:
                break
            if not self._take_blocks(plan.hold.keep_free):
                break
            server.waits.go_on(server, held.decision)
            step, cold = self._next_step(step), 0.0
        if decided > 1 and not self._learns:
            server.view.state = loop.policy.advance_state(server.view.state, decided - 1)
        return held.decision

    def _run_drafts(self, step: Step, cohort: DraftCohort) -> float:
        """Run steps in which all running requests verify their drafts: as the loop does, but without a decision."""
        loop, server, plan = self.loop, self.server, step.plan
        while True:
            running = len(server.running)
            loop.send(step, self._end_of_drafts(step))
            now = loop.now
            horizon = loop.inbox.next_arrival if self._only_arrivals else self._horizon(None)
            if now >= min(horizon, loop.barrier) or loop.inbox.delayed or loop.port is not None:
                return now
            if len(server.running) < running:
                if not plan.hold.past_finish:
                    return now
                server.waits.go_on(server, now)
            if not cohort.size or cohort.need > server.pool.free or not self._others_await_end(cohort):
                return now
            server.rules.repeat_plan(server)
            step = Step(plan, now, now if server.flight is None else max(now, server.flight.end))
            start_decode(server, step)
            if loop.observers:
                loop.notify_start(step, NO_REQUESTS, now)

    def _others_await_end(self, cohort: DraftCohort) -> bool:
        """Whether all running requests that are not in the cohort run no more."""
        server, others = self.server, len(self.server.running) - cohort.size
        if others and server.foresees_ends and server.flight is not None:
            for row in server.flight.verified:
                if row.request._cohort is None and row.request.status == "running" and cohort.awaits_end(row.request):
                    others -= 1
        return not others

    def _end_of_drafts(self, step: Step) -> float:
        """Return the end of a step that verifies drafts."""
        rows, context = step.decode_rows, step.context
        if self._reads_longest or self.padding.decode_buckets or rows > self.max_draft_rows:
            self.max_draft_rows = rows
            return self.loop.clock.start_call(step, step.start, self.server.rules)
        seconds = self.cost.verify(rows, rows, context, step.drafts)
        if not 0.0 <= seconds <= MAX_STEP:
            check_seconds(self.cost, seconds)
        if context > self.max_context:
            self.max_context = context
        if context > self.max_row_context * rows:
            self.max_row_context = context / rows
        return step.start + seconds

    def earliest_end(self, step: Step) -> float:
        """Return a time before which no step of a held plan ends that changes who decodes."""
        cohort, plan, flight = self.server.cohort, step.plan, self.server.flight
        cost = self._cost_of(cohort.size, plan.padding_rows)
        if self.server.drafts is not None:
            return step.decided
        returns = flight is not None and bool(flight.ends or flight.sampled)  # first or last tokens, before this step
        if returns or not cost.linear or self._learns or self.loop.inbox.delayed:
            return step.decided
        hold, horizon, _ = self._bounds(plan)
        steps = min(hold, cohort.next_finish - cohort.steps)
        return min(horizon, step.start + steps * (cost.fixed + cost.slope * cohort.context) * ROUNDED_DOWN)

    def _start_segment(self, step: Step, cold: float) -> None:
        """Begin a segment with a step, which starts when the step before it ends."""
        cohort = self.server.cohort
        live, context = cohort.size, cohort.context
        cost = self._cost_of(live, step.plan.padding_rows)
        self._held.longest = cohort.longest
        duration = cost.fixed + cost.slope * context if cost.linear else self._seconds(cost, live, context)
        step.rows, step.end = live, step.start + (duration + cold)
        self._held.begin(live, cost, context, step.start, step.end)

    def _run_alone(self, step: Step, hold: int) -> int:
        """Run a step and further ones until one of them changes who decodes; all of them return. Return how many."""
        server, cohort, held, further = self.server, self.server.cohort, self._held, 0
        limit = min(cohort.next_finish - cohort.steps, hold) - 1
        if limit > 0 and (held.decision < held.horizon or self.loop.inbox.lag > 1):
            held.set_blocks(self._free_blocks(step.plan.hold.keep_free), cohort.steps + 1)
            further = self._advance(limit, step.plan.hold.until)
        self._count_kv_use(1 + further, further)
        if further:
            self._take_further()
        step.first_end, step.end, step.steps = step.end, held.end, 1 + further
        launch_decodes(server, step)
        put_in_flight(server, step)
        self.loop.receive()
        return further

    def _run_overlapping(self, step: Step, hold: int, past_finish: bool) -> int:
        """Launch a step, receive the one before it, and run further ones. Return how many."""
        server, cohort, loop, held = self.server, self.server.cohort, self.loop, self._held
        self._count_kv_use(1, 0)
        launch_decodes(server, step)
        put_in_flight(server, step)
        finished = loop.receive()
        goes_on = (past_finish or not finished) and not step.ends and cohort.size == held.live
        limit = min(cohort.next_finish - cohort.steps, hold - 1)
        if not goes_on or limit <= 0 or held.decision >= held.horizon:
            return 0
        held.set_blocks(self._free_blocks(step.plan.hold.keep_free), cohort.steps)
        first_end = held.end
        further = self._advance(limit, None)
        if further:
            self._count_kv_use(further, further)
            self._take_further()
            run_on(server, step, further, held.decision, held.end)
            loop.calls += further
            if not loop.fast_path:
                loop.notify_end(step, first_end, first_end, NO_REQUESTS)
        return further

    def _advance(self, limit: int, until: Optional[float]) -> int:
        """Run up to `limit` further steps, also past arrivals that the scheduler does not see yet. Return how many.

        Add the gaps between their tokens; that of a step in flight follows when it returns.
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
                context = held.context
                ran = held.advance(limit - further)
                gaps.add_linear(held.fixed, cost.slope, context, live, ran - in_flight)
                further += ran
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
        horizon = inbox.next_arrival if self._only_arrivals and until is None else self._horizon(until)
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
        if self._reads_longest:
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

    def _horizon(self, until: Optional[float]) -> float:
        """Return the time of the next arrival, time-out, wake-up or promotion."""
        promotion = None if self._only_arrivals else self.server.next_promotion()
        horizon = self.loop.inbox.next_arrival
        if not self._only_arrivals:
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
        held.horizon = min(self._horizon(until), loop.barrier)
        return min(limit, inbox.delayed[0][0] - loop.calls - 1)
