"""A fleet: replicas behind a router, as SimPy processes in one environment.

The router process sends every request at its arrival. A process per replica runs the steps of its loop. No replica runs
past the time at which something may come from outside: the next arrival, or, if requests follow others, the next time
at which another replica may finish one. Times are exact: SimPy orders the events, the loops keep the times.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from contextlib import suppress
from heapq import heappop, heappush
from operator import attrgetter
from random import Random
from typing import Any, Callable, Optional

import simpy
from servesim.core import BadInput, Request
from servesim.routers.router import REFUSED, Asked, Router
from servesim.routers.router import Fleet as View
from servesim.routers.router import Replica as Reported

from .exact_time import At
from .replica import CachedTokens, Replica
from .several import Servers

Ask = Callable[[Request], Asked]  # what the router sees of a request


class Fleet(Servers):
    """Runs replicas and their router."""

    def __init__(
        self, replicas: Sequence[Replica], router: Router, requests: Sequence[Request], ask: Ask, seed: int,
        staleness: float,
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
        self._coming = sorted((r for r in requests if r.follows is None), key=attrgetter("sent"))
        self._coming.reverse()  # the next one is the last
        self._followers: dict[Any, list[Request]] = {}
        for serial, request in enumerate(requests):
            request.serial = serial
            if request.follows is not None:
                self._followers.setdefault(request.follows, []).append(request)
        self._released: list[tuple[float, int, Request]] = []  # followers, by their arrival
        self._ended: list[tuple[float, Request]] = []
        self._is_coupled = bool(self._followers)  # what a replica does may bring a request to another one
        self._is_static = not self._followers and not router.learns  # no choice depends on what the replicas do
        for replica in replicas if not self._is_static else ():
            replica.loop.inbox.ended = self._ended
            replica.loop.inbox.couples = self._is_coupled
            replica.loop.fast_path = False
        self._reported_at = -math.inf
        self._wakes: list[tuple[float, int]] = []  # heap of the times at which replicas go on, if not coupled
        self._env = simpy.Environment()
        self._router_process: Optional[simpy.Process] = None
        self._replica_processes: list[simpy.Process] = []

    def run(self) -> float:
        """Run until all requests are done. Return the time."""
        env = self._env
        if self._is_static:
            while self._coming:
                self._send(self._coming.pop())
        self._replica_processes = [env.process(self._run_replica(number)) for number in range(len(self.replicas))]
        self._router_process = env.process(self._run_router())
        try:
            env.run()
        finally:  # also if a replica is stuck
            self.now = max([replica.loop.now for replica in self.replicas])
            idle = [self.now - replica.loop.now + replica.idle_s for replica in self.replicas]
            self.idle_s = sum(idle) / len(idle)  # of a replica on average
        for replica in self.replicas:
            replica.finish()
        return self.now

    def _run_router(self) -> Generator[simpy.Event, Any, None]:
        while True:
            time = self._next_arrival()
            if time == math.inf and not self._is_coupled:
                for process in self._replica_processes:
                    process.interrupt()  # nothing comes any more
                return
            yield from self._sleep(time)
            if time > self._next_arrival():
                continue  # a request that follows another one comes earlier
            self._catch_up(time)
            self._tell_router(time)
            while self._next_arrival() <= time:
                self._wake(self._send(self._pop()))

    def _run_replica(self, number: int) -> Generator[simpy.Event, Any, None]:
        replica = self.replicas[number]
        while True:
            replica.loop.expects = self._next_arrival() < math.inf
            time = replica.run_until(self._horizon(number))
            if self._followers:
                self._release()
            yield from self._sleep(time if self._is_coupled else math.inf)

    def _catch_up(self, now: float) -> None:
        """Run the replicas that may have changed something up to now. In a coupled fleet, they have run by themselves.

        So a replica needs no event of SimPy for each of its steps.
        """
        wakes = self._wakes
        while wakes and wakes[0][0] < now:
            time, number = heappop(wakes)
            replica = self.replicas[number]
            if time == replica.wakes_at:  # otherwise it has run since
                heappush(wakes, (replica.run_until(now), number))

    def _wake(self, number: int) -> None:
        """Let a replica go on, which has got a request or has run."""
        if self._is_coupled:
            self._replica_processes[number].interrupt()
        else:
            heappush(self._wakes, (self.replicas[number].wakes_at, number))

    def _sleep(self, time: float) -> Generator[simpy.Event, Any, None]:
        """Wait until a time, or until an interrupt."""
        env = self._env
        with suppress(simpy.Interrupt):
            yield env.event() if time == math.inf else env.timeout(At(max(time, env.now)))

    def _horizon(self, number: int) -> float:
        """Return the time up to which nothing comes to a replica that is not known now."""
        arrival = self._next_arrival()
        if not self._followers:
            return arrival
        others = [other.wakes_at for place, other in enumerate(self.replicas) if place != number]
        return min(arrival, max(min(others, default=math.inf), math.nextafter(self._env.now, math.inf)))

    def _next_arrival(self) -> float:
        """Return when the next request that is known reaches the router."""
        coming = self._coming[-1].sent if self._coming else math.inf
        return min(coming, self._released[0][0]) if self._released else coming

    def _pop(self) -> Request:
        if self._released and (not self._coming or self._released[0][0] < self._coming[-1].sent):
            return heappop(self._released)[2]
        return self._coming.pop()

    def _send(self, request: Request) -> int:
        """Let the router choose a replica, and send the request to it."""
        if self.router.reads_caches:
            for number, replica in enumerate(self.replicas):
                replica.catch_up(request.sent)
                self._wake(number)
        asked = self._ask(request)
        view = View(request.sent, self.present, self.memory, CachedTokens(self.replicas, request))
        number = self.router.route(asked, view, self._random)
        if number == REFUSED:
            raise BadInput(f"cluster.router: it refuses request {request.id}; a fleet cannot simulate this")
        if number not in self.present:
            raise ValueError(f"replica {number!r}, expected one of {self.present}")
        self.router.sent(asked, number, view)
        self.replica_of[request.id] = number
        if not self._is_static:
            self._asked[request.id] = asked
            if self.router.reads_first_tokens:
                self._without_token[request.id] = request
        self.replicas[number].send(request)
        return number

    def _tell_router(self, now: float) -> None:
        """Tell the router what has happened up to now: first tokens, ends, and what the replicas report."""
        router, memory = self.router, self.memory
        if self._without_token:
            self._tell_first_tokens(now)
        ended = self._ended
        if ended:
            known = [end for end in ended if end[0] <= now]
            known.sort(key=_time_of)
            for _, request in known:
                router.ended(memory, self._asked.pop(request.id), self.replica_of[request.id])
                self._without_token.pop(request.id, None)
            ended[:] = [end for end in ended if end[0] > now]
        if router.reads_reports and now - self._reported_at >= self.staleness:
            self._reported_at = now
            router.reported(memory, self._reports(now))

    def _reports(self, now: float) -> list[Reported]:
        """Return what the replicas say about themselves. A request that ends with the step of now still runs."""
        reports = [replica.report(now) for replica in self.replicas]
        for _, request in self._ended:
            number = self.replica_of[request.id]
            reports[number] = reports[number]._replace(running=reports[number].running + 1)
        for number in range(len(self.replicas)):
            self._wake(number)
        return reports

    def _tell_first_tokens(self, now: float) -> None:
        started = [request for request in self._without_token.values() if (request.first_token or math.inf) <= now]
        for request in sorted(started, key=attrgetter("first_token")):
            del self._without_token[request.id]
            self.router.prefilled(self.memory, self._asked[request.id], self.replica_of[request.id])

    def _release(self) -> None:
        """Start the think time of requests whose predecessor has ended, and wake the router."""
        first = self._next_arrival()
        for now, request in self._ended:
            for follower in self._followers.pop(request.id, ()):
                follower.sent = follower.arrival = now + max(follower.think_time, self.client_delay)
                heappush(self._released, (follower.sent, follower.serial, follower))
        if self._next_arrival() < first and self._router_process is not None:
            self._router_process.interrupt()


def _time_of(end: tuple[float, Request]) -> float:
    return end[0]
