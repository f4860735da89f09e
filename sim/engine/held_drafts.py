"""Fast-forward with speculative decoding: steps in which all running requests verify their drafts need no decision.

Every step adds another number of tokens to each request; the cohort knows the sum (draft_cohort.py). If no row is the
first or the last one of a request, in the step that returns and in the step before the next one, only sums and times
change. Such steps have no `Step` of their own. The others run one by one, as in the loop.
"""

from __future__ import annotations

from typing import Callable

from servesim.core import StepCost, check_seconds
from servesim.core.limits import MAX_STEP

from .draft_cohort import DraftCohort
from .fast_forward import FastForward
from .loop import Loop
from .plans import start_decode
from .shape import Padding
from .step import NO_REQUESTS, Step


class HeldDrafts(FastForward):
    """Runs the held plans of a loop whose requests have drafts."""

    def __init__(
        self, loop: Loop, cost: StepCost, padding: Padding, cold_start: Callable[[str], float], cohort: DraftCohort
    ) -> None:
        super().__init__(loop, cost, padding, cold_start)
        self.cohort = cohort
        self._max_draft_rows = 0  # rows of a step whose shape the clock has recorded

    def earliest_end(self, step: Step) -> float:
        return step.decided

    def run(self, step: Step) -> float:
        loop, server, cohort, plan = self.loop, self.server, self.cohort, step.plan
        while True:
            running = len(server.running)
            loop.send(step, self._end_of(step))
            horizon = loop.inbox.next_arrival if self.only_arrivals else self.next_change(None)
            horizon = min(horizon, loop.barrier)
            if loop.now >= horizon or loop.inbox.delayed or loop.port is not None:
                return loop.now
            if len(server.running) < running:
                if not plan.hold.past_finish:
                    return loop.now
                server.waits.go_on(server, loop.now)
            if not cohort.size or not self._others_await_end():
                return loop.now
            if loop.fast_path:
                self._run_equal(step, horizon)
            now = loop.now
            if now >= horizon or cohort.need > server.pool.free:
                return now
            server.rules.repeat_plan(server)
            step = Step(plan, now, now if server.flight is None else max(now, server.flight.end))
            start_decode(server, step)
            if loop.observers:
                loop.notify_start(step, NO_REQUESTS, now)

    def _run_equal(self, step: Step, horizon: float) -> None:
        """Run further steps while only sums and times change; with two steps in flight, `step` becomes the last one."""
        loop, server, cohort, use = self.loop, self.server, self.cohort, self.server.kv_use
        overlaps, cache, pool, rows = server.overlaps, server.prefix_cache, server.pool, cohort.size
        if self._needs_clock(rows) or (cache is not None and (cache.shares or not overlaps)):
            return
        if cohort.new_members or (overlaps and (step.joined or step.verified)):
            return
        tokens, drafts = rows * cohort.width, rows * cohort.drafts.tokens
        while loop.now < horizon and cohort.need <= pool.free and not cohort.next_ends:
            context, before = cohort.context, step.end
            pool.free -= cohort.take_blocks()
            end = before + self._seconds_of(rows, context, drafts)
            use.tokens += tokens
            use.token_sum += use.tokens
            use.block_sum += pool.held
            use.peak_blocks = max(use.peak_blocks, pool.held)
            cohort.count_step()
            start = step.start if overlaps else before
            step.start, step.end, step.context = before, end, context
            now = before if overlaps else end
            accepted = cohort.return_rows(step)
            use.tokens += accepted - drafts
            server.tokens_generated += rows + accepted
            assert cohort.last_end is not None
            server.token_gaps.add(now - cohort.last_end, rows)
            cohort.busy += now - start
            cohort.last_end = loop.now = now
            loop.calls += 1

    def _others_await_end(self) -> bool:
        """Whether all running requests that are not in the cohort run no more."""
        server, cohort = self.server, self.cohort
        others = len(server.running) - cohort.size
        if others and server.foresees_ends and server.flight is not None:
            for row in server.flight.verified:
                if row.request._cohort is None and row.request.status == "running" and cohort.awaits_end(row.request):
                    others -= 1
        return not others

    def _needs_clock(self, rows: int) -> bool:
        return self.reads_longest or len(self.padding.decode_buckets) > 0 or rows > self._max_draft_rows

    def _end_of(self, step: Step) -> float:
        """Return the end of a step that verifies drafts."""
        if self._needs_clock(step.decode_rows):
            self._max_draft_rows = step.decode_rows
            return self.loop.clock.start_call(step, step.start, self.server.rules)
        return step.start + self._seconds_of(step.decode_rows, step.context, step.drafts)

    def _seconds_of(self, rows: int, context: int, drafts: int) -> float:
        seconds = self.cost.verify(rows, rows, context, drafts)
        if not 0.0 <= seconds <= MAX_STEP:
            check_seconds(self.cost, seconds)
        if context > self.max_context:
            self.max_context = context
        if context > self.max_row_context * rows:
            self.max_row_context = context / rows
        return seconds
