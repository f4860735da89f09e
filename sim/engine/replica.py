"""One replica of a fleet: its loop runs up to the next time at which something may come from outside.

A held plan is decided, but its steps wait. They run when a request comes, up to its arrival, or when one of them may
finish a request before the fleet goes on. So arrivals at other replicas cost nothing, and the steps are those of a
server that knows its arrivals from the beginning.
"""

from __future__ import annotations

import math
from typing import Any

from servesim.core import Request
from servesim.routers.router import Replica as Reported

from .loop import Loop
from .server import Server


class Replica:
    """The loop of one server in a fleet."""

    __slots__ = (
        "_bound",
        "_fast_forward",
        "_reported",
        "horizon",
        "idle_s",
        "loop",
        "sent",
        "stops_at_ends",
        "wakes_at",
    )

    def __init__(self, loop: Loop, fast_forward: Any) -> None:
        self.loop = loop
        loop.in_fleet = True
        self._fast_forward = fast_forward  # None: every step runs alone
        self._bound = 0.0  # held steps change nothing before this time
        self._reported = (-math.inf, Reported())
        self.horizon = 0.0  # the time up to which it runs now
        self.wakes_at = 0.0  # when it may change something next
        self.idle_s = 0.0  # seconds without a model call
        self.sent = 0  # requests

    def send(self, request: Request) -> None:
        """Add a request that the router sends now."""
        self.sent += 1
        self.loop.inbox.send(request)

    def run_until(self, horizon: float) -> float:
        """Run all steps that are decided before a time. Return when something may change next; inf: at a request."""
        loop, ended = self.loop, self.loop.inbox.ended
        self.horizon, known = horizon, len(ended or ())
        while True:
            if loop.inbox.stops_at_ends and ended is not None and len(ended) > known:
                self.horizon = min(self.horizon, *[time for time, _ in ended[known:]])
            loop.barrier = horizon = self.horizon
            held = loop.held
            if held is not None:
                if loop.inbox.next_arrival >= horizon and self._bound >= horizon:
                    self.wakes_at = self._bound
                    return self.next_event
                loop.held = None
                loop.run_held(held)
                continue
            time = self.next_event
            if time >= horizon:
                self.wakes_at = time
                return time
            self._wait(time)
            self._step()

    def _step(self) -> None:
        loop = self.loop
        next_event = loop.step()
        if loop.held is not None:
            self._bound = self._fast_forward.earliest_end(loop.held)
        self.wakes_at = loop.now if next_event is None else next_event

    @property
    def next_event(self) -> float:
        """The time before which it changes nothing: its next decision, or the end of a held step."""
        return max(self.loop.now, min(self.wakes_at, self.loop.inbox.next_arrival))

    def _wait(self, time: float) -> None:
        if time > self.loop.now:
            self.idle_s += time - self.loop.now
            self.loop.now = time

    def finish(self) -> None:
        """Raise Stuck if requests remain, now that no more will come."""
        self.loop.in_fleet = False
        self.loop.require_done()

    @property
    def server(self) -> Server:
        return self.loop.server

    def report(self) -> Reported:
        """Return what the replica says about itself."""
        server = self.loop.server
        pool = server.pool
        waiting = len(server.waiting) + len(server.swapped)
        if self.loop.port is not None:
            waiting += len(self.loop.port.queue)
        return Reported(waiting, len(server.running), pool.held / max(1, pool.total))
