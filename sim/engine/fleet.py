"""A fleet: replicas behind a router, as SimPy processes in one environment.

The router process sends every request at its arrival. A process per replica runs the steps of its loop. No replica runs
past the time at which something may come from outside: the next arrival, or, if requests follow others, the next time
at which another replica may finish one. Times are exact: SimPy orders the events, the loops keep the times.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Generator, Sequence
from contextlib import suppress
from heapq import heappop, heappush
from operator import attrgetter
from random import Random
from typing import Any, Callable, Optional

import simpy
from servesim.core import Request
from servesim.routers.router import Asked, Router
from servesim.routers.router import Fleet as View
from simpy.events import EventPriority

from .exact_time import At
from .replica import Replica
from .several import Servers
from .transfers import Transfers

LAST = 2  # order of replicas at a time: after the router, so that they know what comes then
Ask = Callable[[Request], Asked]  # what the router sees of a request


class Fleet(Servers):
    """Runs replicas and their router."""

    def __init__(
        self, replicas: Sequence[Replica], router: Router, requests: Sequence[Request], ask: Ask, seed: int,
        staleness: float, transfers: Optional[Transfers] = None, decode: Optional[tuple[Router, Sequence[int]]] = None,
    ) -> None:  # fmt: skip
        super().__init__([replica.loop for replica in replicas])
        self.replicas = replicas
        self.router = router
        self.memory = router.memory(len(replicas))
        self.present = list(range(len(replicas)))
        self.client_delay = replicas[0].loop.inbox.client_delay
        self.staleness = staleness  # seconds between two reports of the replicas; 0: they are always new
        self.replica_of: dict[Any, int] = {}  # by the id of a request
        self._ask = ask
        self._asked: dict[Any, Asked] = {}  # of the requests in flight, if the router learns
        self._without_token: dict[Any, Request] = {}  # of these, if the router learns of first tokens
        self._random = Random(f"router {seed}")
        self._coming = sorted([r for r in requests if r.follows is None], key=attrgetter("sent"))[::-1]  # next one last
        self._followers: dict[Any, list[Request]] = {}
        for request in requests:
            if request.follows is not None:
                self._followers.setdefault(request.follows, []).append(request)
        self._released: list[tuple[float, int, Request]] = []  # followers, by their arrival
        self._ended: list[tuple[float, Request]] = []
        self.transfers = transfers  # prefill and decode on different replicas; `router` is that of the prefills
        self.decode_router = router if decode is None else decode[0]
        self.decode_memory = self.decode_router.memory(len(replicas))
        self.decode_replicas = [] if decode is None else list(decode[1])
        if transfers is not None:
            self.present = [number for number in self.present if number not in self.decode_replicas]
            transfers.choose, transfers.deliver, transfers.wake = self._choose, self._deliver, self._wake
        self._releases = 0
        self._is_static = not self._is_coupled and not router.learns  # no choice depends on what the replicas do
        for replica in replicas if not self._is_static else ():
            replica.loop.inbox.ended = self._ended
            replica.loop.inbox.stops_at_ends = bool(self._followers) or replica.server.kept is not None
            replica.loop.fast_path = False
        self._reported_at = -math.inf
        self._env = simpy.Environment()
        self._running: Optional[Replica] = None  # the one that runs steps now
        self._router_process: Optional[simpy.Process] = None
        self._replica_processes: list[simpy.Process] = []

    def run(self) -> float:
        """Run until all requests are done. Return the time."""
        env = self._env
        if self._is_static:
            while self._coming:
                request = self._coming.pop()
                self._send(request, request.sent)
        self._replica_processes = [env.process(self._run_replica(number)) for number in range(len(self.replicas))]
        self._router_process = env.process(self._run_router())
        env.run()
        self.now = max(replica.loop.now for replica in self.replicas)
        idle = [self.now - replica.loop.now + replica.idle_s for replica in self.replicas]
        self.idle_s = sum(idle) / len(idle)  # of a replica on average
        for replica in self.replicas:
            replica.finish()
        return self.now

    def _run_router(self) -> Generator[simpy.Event, Any, None]:
        while True:
            time = self._next_arrival()
            yield from self._sleep(time)
            if time > self._next_arrival():
                continue  # a request that follows another one comes earlier
            self._tell_router(time)
            while self._next_arrival() <= time:
                self._send(self._pop(), time)

    def _run_replica(self, number: int) -> Generator[simpy.Event, Any, None]:
        replica = self.replicas[number]
        while True:
            self._running = replica
            time = replica.run_until(self._horizon(number))
            self._running = None
            if self._is_coupled:
                self._release()
            yield from self._sleep(time, LAST + number)

    def _sleep(self, time: float, order: int = 1) -> Generator[simpy.Event, Any, None]:
        """Wait until a time, or until an interrupt. At equal times, the lower order is first."""
        env = self._env
        event = env.event()
        if time < math.inf:
            event._ok, event._value = True, None
            env.schedule(event, EventPriority(order), At(max(time, env.now)))
        with suppress(simpy.Interrupt):
            yield event

    def _horizon(self, number: int) -> float:
        """Return the time up to which nothing comes to a replica that is not known now."""
        arrival = self._next_arrival()
        if not self._is_coupled:
            return arrival
        others = [other.next_event for place, other in enumerate(self.replicas) if place != number]
        return min(arrival, max(min(others, default=math.inf), math.nextafter(self._env.now, math.inf)))

    def _next_arrival(self) -> float:
        """Return when the next request that is known reaches the router."""
        coming = self._coming[-1].sent if self._coming else math.inf
        return min(coming, self._released[0][0]) if self._released else coming

    @property
    def _is_coupled(self) -> bool:
        """Whether what a replica does may come to another one: followers, or KV."""
        return bool(self._followers) or self.transfers is not None

    def _push_released(self, time: float, request: Request) -> None:
        self._releases += 1
        heappush(self._released, (time, self._releases, request))

    def _pop(self) -> Request:
        if self._released and (not self._coming or self._released[0][0] < self._coming[-1].sent):
            return heappop(self._released)[2]
        return self._coming.pop()

    def _send(self, request: Request, now: float) -> None:
        """Let the router choose a replica, and send the request to it."""
        if self.transfers is None:
            self._deliver(self._choose(False, request), request)
        else:
            self.transfers.send(request, now)

    def _deliver(self, number: int, request: Request) -> None:
        self.replicas[number].send(request)
        self._wake(number)

    def _wake(self, number: int) -> None:
        """Let a replica learn of what has come. The one that runs now does not go on past the answer to it."""
        replica, running = self.replicas[number], self._running
        if running is replica or not self._replica_processes:
            return
        self._replica_processes[number].interrupt()
        if running is not None:
            running.horizon = min(running.horizon, replica.next_event)

    def _choose(self, decodes: bool, request: Request) -> int:
        """Return the replica that the router, or that of the decodes, chooses for a request."""
        asked = self._ask(request)
        router, memory, present = self.router, self.memory, self.present
        if decodes:
            router, memory, present = self.decode_router, self.decode_memory, self.decode_replicas
        view = View(max(request.sent, self._env.now), present, memory)
        number = router.route(asked, view, self._random)
        router.sent(asked, number, view)
        self.replica_of[request.id] = number
        if not self._is_static:
            self._asked[request.id] = asked
            if router.reads_first_tokens:
                self._without_token[request.id] = request
        return number

    def _router_of(self, number: int) -> tuple[Router, Any]:
        """Return the router that sends to a replica, and its memory."""
        if number in self.decode_replicas:
            return self.decode_router, self.decode_memory
        return self.router, self.memory

    def _tell_router(self, now: float) -> None:
        """Tell the router what has happened up to now: first tokens, ends, and what the replicas report."""
        if self._without_token:
            self._tell_first_tokens(now)
        ended = self._ended
        if ended:
            ended.sort(key=lambda end: end[0])
            known = bisect_right([time for time, _ in ended], now)
            for _, request in ended[:known]:
                asked = self._asked.pop(request.id, None)
                if asked is None:  # its prefill failed, so it was not sent to a decode replica
                    continue
                number = self.replica_of[request.id]
                router, memory = self._router_of(number)
                router.ended(memory, asked, number)
                self._without_token.pop(request.id, None)
            del ended[:known]
        if now - self._reported_at >= self.staleness:
            self._reported_at = now
            reports = [replica.report() for replica in self.replicas]
            self.router.reported(self.memory, reports)
            if self.transfers is not None:
                self.decode_router.reported(self.decode_memory, reports)

    def _tell_first_tokens(self, now: float) -> None:
        started = [request for request in self._without_token.values() if (request.first_token or math.inf) <= now]
        for request in sorted(started, key=attrgetter("first_token")):
            del self._without_token[request.id]
            number = self.replica_of[request.id]
            router, memory = self._router_of(number)
            router.prefilled(memory, self._asked[request.id], number)

    def _release(self) -> None:
        """Start the think time of requests whose predecessor has ended, go on after prefills, and wake the router."""
        first = self._next_arrival()
        for now, request in self._ended:
            if self.transfers is not None and (prefilled := self.transfers.ended(request, now)) is not None:
                self._push_released(now, prefilled)
            for follower in self._followers.pop(request.id, ()):
                follower.sent = follower.arrival = now + max(follower.think_time, self.client_delay)
                self._push_released(follower.sent, follower)
        if self._next_arrival() < first and self._router_process is not None:
            self._router_process.interrupt()
