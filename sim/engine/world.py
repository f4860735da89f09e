"""The model in SimPy: clients, routers, transfers, faults and scaling are processes. Servers run between two events.

`World.step` lets the servers run up to the next event, then processes it, as SimPy's RealtimeEnvironment sleeps up to
it. So whatever a process looks at or sends to is exactly as of now, and a step of a server needs no event.

The order at equal times: steps return, events happen, steps are decided.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from functools import partial
from heapq import heappush
from typing import Any, Callable, Protocol

import simpy
from servesim.core import Request
from simpy.events import EventPriority

from .clients import Clients

# The order of events at equal times.
NEXT = EventPriority(0)
USUAL = EventPriority(1)
LATER = 2  # and behind this number the serial of a request: those that follow others come after the others
LAST = 1 << 40  # after all requests


class Servers(Protocol):
    """One server, or several."""

    @property
    def is_coupled(self) -> bool:
        """Whether what they do may bring an event before the next one that is known."""

    def expect(self, more: bool) -> None:
        """Note whether an event may come."""

    def is_due(self, until: float) -> bool:
        """Whether the next thing is a delivery up to a time, or a decision before it."""

    def advance(self) -> None:
        """Do the next thing."""

    def run_until(self, until: float) -> None:
        """Do all that is due."""


class Call:
    """A callback of an event that calls a function with a value."""

    def __init__(self, function: Callable[[Any], object], value: Any) -> None:
        self._function, self._value = function, value

    def __call__(self, event: simpy.Event) -> None:
        self._function(self._value)


class World(simpy.Environment):
    """An environment with servers."""

    def __init__(self, servers: Servers) -> None:
        super().__init__()
        self._servers = servers
        self._expects = False

    def step(self) -> None:
        servers, until = self._servers, self._queue[0][0] if self._queue else math.inf
        self._expect(until < math.inf)
        if servers.is_coupled:
            while servers.is_due(self.peek()):
                servers.advance()
        else:
            servers.run_until(until)
        super().step()

    def _expect(self, more: bool) -> None:
        """Let the servers know whether an event may come."""
        if self._expects != more:
            self._expects = more
            self._servers.expect(more)

    def at(self, time: float, order: int = USUAL) -> simpy.Event:
        """Return an event at an exact time; one in the past happens now."""
        return self._again(simpy.Event(self), time, EventPriority(order))

    def _again(self, event: simpy.Event, time: float, order: EventPriority = USUAL) -> simpy.Event:
        """Let an event happen at an exact time. The sum `now + delay` of `schedule` has a rounding error."""
        event.callbacks, event._ok, event._value = [], True, None
        self._expect(True)
        heappush(self._queue, (time if time > self._now else self._now, order, next(self._eid), event))
        return event

    def call(self, time: float, function: Callable[[Any], object], value: Any, order: int = USUAL) -> None:
        """Call a function at a time."""
        event = self.at(time, order)
        assert event.callbacks is not None
        event.callbacks.append(Call(function, value))

    def connect(self, clients: Clients, send: Callable[[Request], object]) -> None:
        """Let clients send their requests, and give up."""
        deliver = send
        if clients.timeout is not None and (clients.followers or clients.on_end is not None):
            deliver = partial(self._send_with_timeout, clients, send)
        self.process(send_all(self, clients, deliver))
        clients.send = partial(self._send_follower, deliver)

    def _send_follower(self, send: Callable[[Request], object], request: Request) -> None:
        """Send a request that follows another one, whose end its client has just seen."""
        self.call(request.sent, send, request, LATER + request.serial)

    def _send_with_timeout(self, clients: Clients, send: Callable[[Request], object], request: Request) -> None:
        assert clients.timeout is not None
        send(request)
        self.call(request.sent + clients.timeout, clients.give_up, request)


def send_all(world: World, clients: Clients, send: Callable[[Request], object]) -> Generator[simpy.Event, Any, None]:
    """Send each request at its time, whatever the servers do."""
    arrival, time = simpy.Event(world), -math.inf
    for request in clients.coming:
        order = NEXT if request.sent == time else USUAL  # nothing happens between requests of one time
        time = request.sent
        yield world._again(arrival, time, order)
        send(request)
