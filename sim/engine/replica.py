"""One replica of a fleet: the loop of its server, and those that it had before a crash or a restart."""

from __future__ import annotations

import math

from servesim.core import Request
from servesim.routers.router import Replica as Reported

from .loop import Loop
from .server import Server


class Replica:
    """A place in a fleet."""

    __slots__ = ("_away_s", "decides", "loop", "loops", "planned", "sent")

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.loops = [loop]  # also those before a crash or a restart
        self.sent = 0  # requests
        self.planned = math.inf  # when it does the next thing, as the fleet knows it
        self.decides = True  # whether this is a decision, and not the return of a step
        self._away_s = 0.0  # seconds without a server

    @property
    def server(self) -> Server:
        return self.loop.server

    @property
    def idle_s(self) -> float:
        """Seconds without a model call."""
        return sum([loop.idle_s for loop in self.loops]) + self._away_s

    @property
    def last_call(self) -> float:
        """When its last model call ended; 0: it had none."""
        return max([loop.last_call for loop in self.loops])

    @property
    def is_empty(self) -> bool:
        """Whether it has no request."""
        loop = self.loop
        return loop.server.idle() and not (len(loop.inbox) or loop.notices.unreported)

    def send(self, request: Request) -> None:
        """Add a request that the router sends now."""
        self.sent += 1
        self.loop.send(request)

    def replace(self, loop: Loop, now: float) -> None:
        """Go on with a new server, which is empty."""
        self._away_s += now - self.loop.now
        self.loops.append(loop)
        self.loop = loop
        loop.now = loop.decides_at = now

    def report(self) -> Reported:
        """Return what the replica says about itself."""
        server, port = self.loop.server, self.loop.arrivals.port
        waiting = len(server.waiting) + len(server.swapped) + (0 if port is None else len(port.queue))
        return Reported(waiting, len(server.running), server.pool.held / max(1, server.pool.total))
