"""Data-parallel ranks in lock step: every step of all ranks ends with that of the slowest rank.

Each rank has a server, an inbox and a policy of its own. After a step the ranks exchange how many requests run on each
of them. A rank without work waits for the others. There is no router: every request has its rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from servesim.core import Request

from .loop import Loop
from .several import Servers


class LockStep(Servers):
    """Runs the loops of all ranks together. They share one clock."""

    def __init__(self, loops: Sequence[Loop]) -> None:
        super().__init__(loops)
        self.clock = loops[0].clock
        self._exchange()

    def run(self) -> float:
        """Run until all requests are done. Return the time."""
        while self._step():
            self._exchange()
        return self.now

    def _exchange(self) -> None:
        """Tell every rank how many requests run on each."""
        running = [len(loop.server.running) for loop in self.loops]
        for loop in self.loops:
            loop.server.rules.exchange(loop.server, running)

    def _step(self) -> bool:
        """Run one step of all ranks, or wait. Return whether requests are left."""
        now, states = self.now, [loop.server.view.state for loop in self.loops]
        steps = [loop.start(now) for loop in self.loops]
        ends = [
            self.clock.finish_call(step, now, loop.server.rules)
            for loop, step in zip(self.loops, steps)
            if step.runs_model
        ]
        end = max(ends) if ends else math.inf
        for loop, step, state in zip(self.loops, steps, states):  # in this order: observers see ends as they saw starts
            if step.runs_model:
                loop.send(step, end)
                continue
            time = loop.next_decision(step, state)
            if not ends:
                end = min(end, now if time is None else time)
        if end == math.inf:
            for loop in self.loops:
                loop.require_done()
            return False
        self.now = end
        for loop in self.loops:
            loop.now = end
        if not ends:
            self.idle_s += end - now
        return True


def requests_by_rank(requests: Sequence[Request], ranks: int) -> list[list[Request]]:
    """Return the requests of each rank: a session stays on its rank; sessions and other requests take them in turn.

    A request that follows another one needs its rank: only there its end is known.
    """
    by_rank: list[list[Request]] = [[] for _ in range(ranks)]
    by_id: dict[Any, int] = {}
    by_session: dict[Any, int] = {}
    turns = 0
    for request in requests:
        rank = None if request.follows is None else by_id.get(request.follows)
        if rank is None and request.session is not None:
            rank = by_session.get(request.session)
        if rank is None:
            rank = turns % ranks
            turns += 1
        by_id[request.id] = rank
        if request.session is not None:
            by_session.setdefault(request.session, rank)
        by_rank[rank].append(request)
    return by_rank
