"""Data-parallel ranks in lock step: every step of all ranks ends with that of the slowest rank.

Each rank has a server, an inbox and a policy of its own. After a step the ranks exchange how many requests run on each
of them (`View.ranks`). A rank without work waits for the others. There is no router: every request has its rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Optional

from servesim.core import Request

from .loop import Loop
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
        ends: list[float] = []
        waits: list[Optional[float]] = []
        for loop, step, state in zip(self.loops, steps, states):
            if step.runs_model:
                ends.append(self.clock.finish_call(step, now, loop.server.traits))
            else:
                waits.append(loop.next_decision(step, state))
        end = max(ends) if ends else min(now if time is None else time for time in waits)
        if end == math.inf:
            for loop in self.loops:
                loop.require_done()
            return False
        self.now = end
        for loop, step in zip(self.loops, steps):
            if step.runs_model:
                loop.finish(step, end)
            loop.now = end
        if not ends:
            self.idle_s += end - now
        return True


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
