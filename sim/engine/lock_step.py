"""Data-parallel ranks in lock step: every step of all ranks ends with that of the slowest rank.

Each rank has a server, an inbox and a policy of its own. After a step the ranks exchange how many requests run on each
of them (`View.ranks`). A rank without work waits for the others. There is no router: every request has its rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from servesim.core import Request

from .loop import Loop
from .step import Step
from .work_totals import KindTotals


class LockStep:
    """Runs the loops of all ranks together. They share one clock; the first server gets the totals of all."""

    def __init__(self, loops: Sequence[Loop]) -> None:
        self.loops = loops
        first = loops[0]
        self.server, self.policy, self.clock = first.server, first.policy, first.clock
        self.now = 0.0
        self.idle_s = 0.0  # seconds in which no rank has a model call
        for loop in loops:
            loop.server.token_gaps = first.server.token_gaps
            if loop.server.prefix_cache is not None and first.server.prefix_cache is not None:
                loop.server.prefix_cache.stats = first.server.prefix_cache.stats
        self._exchange()

    @property
    def calls(self) -> int:
        """Model calls that have ended, of all ranks."""
        return sum(loop.calls for loop in self.loops)

    def run(self) -> float:
        """Run until all requests are done. Return the time."""
        while self._step():
            self._exchange()
        return self.now

    def add_totals(self) -> dict[str, KindTotals]:
        """Add the use of the KV blocks of all ranks to that of the first; return what the model calls computed."""
        work = self.server.work.by_kind()
        for loop in self.loops[1:]:
            self.server.kv_use.add(loop.server.kv_use)
            for kind, sums in loop.server.work.by_kind().items():
                work[kind].add(sums)
        return work

    def _exchange(self) -> None:
        """Tell every rank how many requests run on each."""
        running = [len(loop.server.running) for loop in self.loops]
        for loop in self.loops:
            loop.server.view.ranks = running

    def _step(self) -> bool:
        """Run one step of all ranks, or wait. Return whether requests are left."""
        now, states = self.now, [loop.server.view.state for loop in self.loops]
        steps = [loop.start(now) for loop in self.loops]
        ends = [
            self.clock.finish_call(step, now, loop.server.traits)
            for loop, step in zip(self.loops, steps)
            if step.runs_model
        ]
        end, moved = max(ends, default=now), False
        for loop, step, state in zip(self.loops, steps, states):
            if step.runs_model:
                loop.finish(step, end)
            elif step.has_moves or step.plan.state != state:
                moved = True
                for observer in loop.observers:
                    observer.on_step_end(loop.server, step, now, [])
            loop.now = end
        if not ends:
            end = now + self.loops[0].empty_step if moved else self._next_event(steps)
            self.idle_s += 0.0 if end == math.inf else end - now
        if end == math.inf:
            return False
        self.now = end
        return True

    def _next_event(self, steps: Sequence[Step]) -> float:
        """Return the time of the next arrival on any rank; inf: all requests are done. Raise Stuck if some are left."""
        times = [loop.inbox.next_arrival for loop in self.loops]
        times += [step.plan.wake_at for step in steps if step.plan.wake_at is not None]
        if min(times) == math.inf:
            for loop in self.loops:
                if not loop.server.idle():
                    raise loop.stuck("no request runs and no request will arrive", "returned no work")
        return min(times)


def requests_by_rank(requests: Sequence[Request], ranks: int) -> list[list[Request]]:
    """Return the requests of each rank: a session stays on its rank; sessions and other requests take them in turn."""
    by_rank: list[list[Request]] = [[] for _ in range(ranks)]
    known: dict[Any, int] = {}  # session, or id without one -> rank
    for request in requests:
        key = request.id if request.session is None else request.session
        before = key if request.session is not None else request.follows  # a follow-up stays with its request
        rank = known.get(before)
        if rank is None:
            rank = len(known) % ranks
        known[key] = rank
        by_rank[rank].append(request)
    return by_rank
