"""Data-parallel ranks in lock step: replicas of a fleet that run every step together, as long as the slowest one.

Each rank has a server, an inbox and a policy of its own. After a step the ranks exchange how many requests run on each
of them. A rank without work waits for the others. Without a router, every request has its rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from servesim.core import Request

from .fleet import Fleet
from .loop import Loop


class LockStep(Fleet):
    """Runs the ranks together. They share one clock."""

    routes = False  # whether a router chooses the ranks; otherwise each has requests of its own
    _returns_at = math.inf  # of the step of all ranks

    def run_until(self, until: float) -> None:
        while self.is_due(until):
            self.advance()

    def is_due(self, until: float) -> bool:
        if self._returns_at < math.inf:
            return self._returns_at <= until
        return min([loop.decides_at for loop in self.loops]) < until

    def advance(self) -> None:
        if self._returns_at < math.inf:
            end, self._returns_at = self._returns_at, math.inf
            self._return(end)
        else:
            self._decide(min([loop.decides_at for loop in self.loops]))

    def plan(self, number: int) -> None:
        """Do nothing: all ranks run together."""

    def attach(self, loop: Loop) -> None:
        """Let the clients send to a rank, if there is no router."""
        own = loop.inbox.clients
        if self.routes:
            super().attach(loop)
        else:
            self.world.connect(own, loop.send)
            self.is_coupled = self.is_coupled or bool(own.followers)

    def _decide(self, now: float) -> None:
        """Decide a step of all ranks, and launch it."""
        self.idle_s, self.now = self.idle_s + (now - self.now), now
        running = [len(loop.server.running) for loop in self.loops]
        for loop in self.loops:
            loop.idle_s += now - loop.now
            loop.now, loop.sleeps = now, False
            loop.server.rules.exchange(loop.server, running)
        states = [loop.server.view.state for loop in self.loops]
        steps = [loop.start(now) for loop in self.loops]
        ends = [
            loop.clock.finish_call(step, now, loop.server.rules)
            for loop, step in zip(self.loops, steps)
            if step.runs_model
        ]
        for loop, step, state in zip(self.loops, steps, states):
            if step.runs_model:
                loop.launch(step, max(ends))
            else:
                time = loop.next_decision(step, state)
                loop.decides_at = now if time is None else time
        self._returns_at = max(ends, default=math.inf)

    def _return(self, end: float) -> None:
        """Record the results of a step. Ranks that did not run the model decide with the others."""
        self.now = end
        for loop in self.loops:
            if loop.server.flight is not None:
                loop.receive()
            else:
                loop.idle_s += end - loop.now
                loop.now = loop.decides_at = end
                loop.sleeps = False

    def _set_times(self) -> None:
        """Keep the time of all ranks, and the seconds in which none of them ran the model."""


def requests_by_rank(requests: Iterable[Request], ranks: int) -> list[list[Request]]:
    """Return the requests of each rank: a session stays on its rank; sessions and other requests take them in turn.

    A request that follows another one needs its rank: only there its end is known.
    """
    by_rank: list[list[Request]] = [[] for _ in range(ranks)]
    rank_of: dict[tuple[str, Any], int] = {}
    turns = 0
    for request in requests:
        rank = rank_of.get(("id", request.follows), rank_of.get(("session", request.session)))
        if rank is None:
            rank, turns = turns % ranks, turns + 1
        rank_of["id", request.id] = rank
        if request.session is not None:
            rank_of.setdefault(("session", request.session), rank)
        by_rank[rank].append(request)
    return by_rank
