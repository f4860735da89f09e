"""Data-parallel ranks in lock step: replicas of a fleet that run every step together, as long as the slowest one.

Each rank has a server, an inbox and a policy of its own. After a step the ranks exchange how many requests run on each
of them. A rank without work waits for the others. Without a router, every request has its rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Optional

from servesim.core import Request

from .fleet import Fleet
from .replica import Replica


class LockStep(Fleet):
    """Runs the ranks together. They share one clock."""

    _is_running: bool = False  # steps run, or one has failed

    def _run_until(self, replica: Replica, horizon: float) -> float:
        """Run all ranks, whichever is asked for. If an end may bring a request, it is the last step."""
        if self._is_running:  # the process of another rank has failed in a step
            return math.inf
        self._is_running = True
        ranks, ends = self.replicas, len(self._ended)
        for rank in ranks:
            rank.loop.expects = self.arrivals.next_arrival < math.inf
        time = min([rank.next_event for rank in ranks])
        while time < horizon and not (self._is_coupled and len(self._ended) > ends):
            self.idle_s, self.now = self.idle_s + (time - self.now), time
            for rank in ranks:
                rank.wait(time)
            self.now = self._step(time)
            time = min([rank.next_event for rank in ranks])
        for rank in ranks:
            rank.wakes_at = time
        self._is_running = False
        return time

    def _step(self, now: float) -> float:
        """Run one step of all ranks. Return its end; now, if no rank runs the model."""
        running = [len(rank.server.running) for rank in self.replicas]
        for rank in self.replicas:
            rank.server.rules.exchange(rank.server, running)
        states = [rank.server.view.state for rank in self.replicas]
        steps = [rank.loop.start(now) for rank in self.replicas]
        ends = [
            rank.loop.clock.finish_call(step, now, rank.server.rules)
            for rank, step in zip(self.replicas, steps)
            if step.runs_model
        ]
        end = max(ends, default=now)
        for rank, step, state in zip(self.replicas, steps, states):  # in this order: observers see ends as starts
            time: Optional[float] = None
            if step.runs_model:
                rank.loop.send(step, end)
            else:
                time = rank.loop.next_decision(step, state)
            rank.wakes_at = end if ends or time is None else time
        for rank in self.replicas if ends else ():
            rank.loop.sleeps = False
            rank.wait(end)
        return end

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
