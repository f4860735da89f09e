"""Fast-forward with speculative decoding: steps in which all running requests verify their drafts need no decision.

Every step adds another number of tokens to each request (draft_cohort.py), so the steps run one by one, as in the loop.
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
            running, rows = len(server.running), cohort.size
            loop.send(step, self._end_of(step))
            now = loop.now
            horizon = loop.inbox.next_arrival if self.only_arrivals else self.next_change(None)
            if now >= min(horizon, loop.barrier) or loop.inbox.delayed or loop.port is not None:
                return now
            if len(server.running) < running:
                if not plan.hold.past_finish:
                    return now
                server.waits.go_on(server, now)
            if not cohort.size or cohort.need > server.pool.free or not self._others_await_end():
                return now
            if cohort.size < rows and server.waiting:  # fewer rows leave more of the budget to a request that waits
                return now
            server.rules.repeat_plan(server)
            step = Step(plan, now, now if server.flight is None else max(now, server.flight.end))
            start_decode(server, step)
            if loop.observers:
                loop.notify_start(step, NO_REQUESTS, now)

    def _others_await_end(self) -> bool:
        """Whether all running requests that are not in the cohort run no more."""
        server, cohort = self.server, self.cohort
        others = len(server.running) - cohort.size
        if others and server.foresees_ends and server.flight is not None:
            for row in server.flight.verified:
                if row.request._cohort is None and row.request.status == "running" and cohort.awaits_end(row.request):
                    others -= 1
        return not others

    def _end_of(self, step: Step) -> float:
        """Return the end of a step that verifies drafts."""
        rows, context = step.decode_rows, step.context
        if self.reads_longest or self.padding.decode_buckets or rows > self._max_draft_rows:
            self._max_draft_rows = rows
            return self.loop.clock.start_call(step, step.start, self.server.rules)
        seconds = self.cost.verify(rows, rows, context, step.drafts)
        if not 0.0 <= seconds <= MAX_STEP:
            check_seconds(self.cost, seconds)
        if context > self.max_context:
            self.max_context = context
        if context > self.max_row_context * rows:
            self.max_row_context = context / rows
        return step.start + seconds
