"""Fast-forward with speculative decoding: steps in which all running requests verify their drafts need no decision.

Every step adds another number of tokens to each request (draft_cohort.py), so the steps run one by one, as in the loop.
If no request has joined or left, only sums and times change: these steps need no more than their sums.
"""

from __future__ import annotations

from typing import Callable

from servesim.core import StepCost, check_seconds
from servesim.core.limits import MAX_STEP

from .draft_cohort import DraftCohort
from .fast_forward import FastForward
from .loop import Loop
from .model_call import deliver_rows, put_in_flight
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
        running, rows = len(server.running), cohort.size
        ended = loop.inbox.ended if loop.inbox.stops_at_ends else None  # in a fleet: an end may bring a request
        ends = 0 if ended is None else len(ended)
        loop.send(step, self._end_of(step))
        while ended is None or len(ended) == ends:
            now = loop.now
            horizon = min(loop.inbox.next_arrival if self.only_arrivals else self.next_change(None), loop.barrier)
            if now >= horizon or loop.inbox.delayed or loop.port is not None:
                return now
            before, running = running, len(server.running)
            if running < before:
                if not plan.hold.past_finish:
                    return now
                server.waits.go_on(server, now)
            if not cohort.size or cohort.need > server.pool.free or not self._others_await_end(running - cohort.size):
                return now
            if cohort.size < rows and server.waiting:  # fewer rows leave more of the budget to a request that waits
                return now
            rows = cohort.size
            if self._is_steady(step):
                step = self._run_steady(step, horizon)
                continue
            server.rules.repeat_plan(server)
            step = Step(plan, now, now if server.flight is None else max(now, server.flight.end))
            start_decode(server, step)
            if loop.observers:
                loop.notify_start(step, NO_REQUESTS, now)
            loop.send(step, self._end_of(step))
        return loop.now

    def _is_steady(self, step: Step) -> bool:
        """Whether only sums and times change in the next step, unless a request leaves when a step returns."""
        server, cache = self.server, self.server.prefix_cache
        if not self.loop.fast_path or self._needs_clock(self.cohort.size) or self.cohort.new_members:
            return False
        if not server.overlaps:
            return cache is None or cache.takes_blocks
        if step.verified or step.chunks or server.flight is not step:
            return False
        return cache is None or not cache.shares

    def _run_steady(self, step: Step, horizon: float) -> Step:
        """Run steps of all members of the cohort, up to the first after which one leaves. Return the newest step.

        With two steps in flight, `step` returns next. One object stands for one step after another.
        """
        loop, server, cohort, use, pool = self.loop, self.server, self.cohort, self.server.kv_use, self.server.pool
        overlaps, rows, now = server.overlaps, cohort.size, loop.now
        drafts, steps, contexts = rows * cohort.drafts.tokens, 0, 0
        if not overlaps:
            step = Step(step.plan, now, now)
        while now < horizon and cohort.need <= pool.free:
            start, context = max(now, step.end), cohort.context
            end = start + self._seconds_of(rows, context, drafts, cohort.longest)
            pool.free -= cohort.take_blocks()
            use.count(rows + drafts, pool.held)
            steps += 1
            contexts += context
            accepted = cohort.draw_rows(rows)
            newest = Step(step.plan, now, start) if overlaps and cohort.leaving else step
            returned = step.end if overlaps else end
            if overlaps and not cohort.leaving:
                deliver_rows(server, step, returned)
                step.joined = NO_REQUESTS
            newest.decided, newest.start, newest.end, newest.context = now, start, end, context
            newest.decode_rows, newest.rows, newest.drafts = rows, rows, drafts
            if cohort.leaving:
                cohort.count_all(steps, contexts)
                cohort.drawn, cohort.flight = accepted, newest
                cohort.in_flight += 1
                put_in_flight(server, newest)
                loop.receive()
                return newest
            if not overlaps:
                deliver_rows(server, step, returned)
            use.tokens += accepted - drafts
            server.tokens_generated += accepted
            loop.now = now = returned
            loop.calls += 1
        cohort.count_all(steps, contexts)
        return step

    def _others_await_end(self, others: int) -> bool:
        """Whether all running requests that are not in the cohort, of this number, run no more."""
        server, cohort = self.server, self.cohort
        if others and server.foresees_ends and server.flight is not None:
            for row in server.flight.verified:
                if row.request._cohort is None and row.request.status == "running" and cohort.awaits_end(row.request):
                    others -= 1
        return not others

    def _needs_clock(self, rows: int) -> bool:
        return len(self.padding.decode_buckets) > 0 or rows > self._max_draft_rows

    def _end_of(self, step: Step) -> float:
        """Return the end of a step that verifies drafts."""
        if self._needs_clock(step.decode_rows):
            self._max_draft_rows = step.decode_rows
            return self.loop.clock.start_call(step, step.start, self.server.rules)
        return step.start + self._seconds_of(step.decode_rows, step.context, step.drafts, step.longest)

    def _seconds_of(self, rows: int, context: int, drafts: int, longest: int) -> float:
        if drafts:
            seconds = self.cost.verify(rows, rows, context, drafts, longest)
        elif longest:
            seconds = self.cost.decode_unequal(rows, rows, context, longest)
        else:
            seconds = self.cost.decode(rows, rows, context)
        if not 0.0 <= seconds <= MAX_STEP:
            check_seconds(self.cost, seconds)
        if context > self.max_context:
            self.max_context = context
        if context > self.max_row_context * rows:
            self.max_row_context = context / rows
        return seconds
