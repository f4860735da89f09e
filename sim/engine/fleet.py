"""A fleet: replicas behind a router, as SimPy processes in one environment.

The router process sends every request at its arrival. A process per replica runs the steps of its loop. No replica runs
past the time at which something may come from outside: the next arrival, or, if requests follow others, the next time
at which another replica may finish one. Times are exact: SimPy orders the events, the loops keep the times.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator, Sequence
from random import Random
from typing import Any, Callable, Final, Optional

import simpy
from servesim.core import BadInput, Request, Stuck
from servesim.routers.router import REFUSED, Asked, Router
from servesim.routers.router import Fleet as View
from servesim.routers.router import Replica as Reported
from simpy.events import EventPriority

from .exact_time import At
from .inbox import PART, Inbox
from .loop import Loop
from .replica import Replica
from .router_view import CachedTokens
from .several import Servers
from .transfers import Transfers

LAST: Final = 2  # order of replicas at a time: after the router, so that they know what comes then
NO_REPLICA: Final = -1
Ask = Callable[[Request], Asked]  # what the router sees of a request


class Fleet(Servers):
    """Runs replicas and their router."""

    def __init__(
        self, replicas: Sequence[Replica], router: Router, requests: Iterable[Request], ask: Ask, seed: int,
        staleness: float, transfers: Optional[Transfers] = None, decode: Optional[tuple[Router, Sequence[int]]] = None,
        changes: bool = False,
    ) -> None:  # fmt: skip
        super().__init__([replica.loop for replica in replicas])
        self.replicas = list(replicas)
        self.router = router
        self.memory = router.memory(len(replicas))
        self.present = list(range(len(replicas)))
        self.staleness = staleness  # seconds between two reports of the replicas; 0: they are always new
        self.replica_of: dict[Any, int] = {}  # by the id of a request
        self._ask = ask
        self._cached = CachedTokens(self.replicas)
        self._view = View(0.0, self.present, self.memory, self._cached)  # what a router sees at a choice
        self._asked: dict[Any, tuple[Asked, int]] = {}  # requests in flight and their replicas, if the router learns
        self._without_token: dict[Any, Request] = {}  # of these, if the router learns of first tokens
        self._random = Random(f"router {seed}")
        self.arrivals = Inbox(requests, client_delay=replicas[0].loop.inbox.client_delay)
        self.arrivals.released_first = False
        self._ended: list[tuple[float, Request]] = []
        self.transfers = transfers  # prefill and decode on different replicas; `router` is that of the prefills
        self.decode_router = router if decode is None else decode[0]
        self.decode_memory = self.decode_router.memory(len(replicas))
        self.decode_replicas = [] if decode is None else list(decode[1])
        self.present_decodes = self.decode_replicas
        if transfers is not None:
            self.present = [number for number in self.present if number not in self.decode_replicas]
            transfers.choose, transfers.deliver, transfers.wake = self._route, self._deliver, self._wake
            transfers.catch_up = self._run_held
        # what a replica does may come to another one: a request that follows another one, or KV
        self._is_coupled = bool(self.arrivals.followers) or transfers is not None or changes
        self._is_static = not self._is_coupled and not router.learns  # no choice depends on what the replicas do
        for loop in self.loops if not self._is_static else ():
            self._attach(loop)
        held = [loop.fast_forward for loop in self.loops if loop.fast_forward is not None]
        streams = isinstance(requests, Iterator)
        self._runs_between = self._is_static and streams and all(each.may_pause for each in held)
        for loop in self.loops if self._runs_between else ():
            loop.pauses = True
        self._reported_at = -math.inf
        self._env = simpy.Environment()
        self._running: Optional[Replica] = None  # the one that runs steps now
        self._router_process: Optional[simpy.Process] = None
        self._replica_processes: list[simpy.Process] = []

    @property
    def size(self) -> int:
        return len(self.replicas)

    def _attach(self, loop: Loop) -> None:
        """Let a loop tell the router what it does, and expect requests at any time."""
        inbox = loop.inbox
        inbox.ended = self._ended
        inbox.stops_at_ends = bool(self.arrivals.followers) or loop.server.kept is not None
        inbox.tells_timeouts = inbox.stops_at_ends and inbox.timeout is not None and len(self.replicas) > 1
        loop.fast_path, loop.holds, loop.pauses = False, True, True
        loop.tells_first_tokens = self.router.reads_first_tokens or self.decode_router.reads_first_tokens

    def run(self) -> float:
        """Run until all requests are done. Return the time."""
        env = self._env
        try:
            if self._is_static:
                self._send_all()
            self._replica_processes = [env.process(self._run_replica(number)) for number in range(len(self.replicas))]
            self._router_process = env.process(self._run_router())
            env.run()
        finally:  # also if a replica is stuck
            self._set_times()
        self._finish()
        if unreleased := self.arrivals.unreleased():
            raise Stuck("these requests wait for a request that does not exist or never finished", unreleased, self.now)
        return self.now

    def _set_times(self) -> None:
        """Set the end of the run, and the idle time of a replica on average."""
        self.now = max([replica.loop.now for replica in self.replicas])
        idle = [self.now - replica.loop.now + replica.idle_s for replica in self.replicas]
        self.idle_s = sum(idle) / len(idle)

    def _send_all(self) -> None:
        """Send all requests. If they are created when they are read, the replicas run in between."""
        sent = 0
        while self.arrivals.next_arrival < math.inf:
            request = self.arrivals.pop()
            self._send(request, request.sent)
            sent += 1
            if self._runs_between and sent % PART == 0 and self.arrivals.next_arrival < math.inf:
                for replica in self.replicas:
                    self._run_until(replica, self.arrivals.next_arrival)

    def _run_router(self) -> Generator[simpy.Event, Any, None]:
        while self._is_coupled or self.arrivals.next_arrival < math.inf:
            if self._is_coupled:  # otherwise nothing happens that SimPy would have to order
                yield from self._sleep(self.arrivals.next_arrival)
                if self.arrivals.next_arrival > self._env.now:
                    continue  # it was woken, because something has changed
            time = self.arrivals.next_arrival
            self._catch_up(time)
            self._tell_router(time)
            while self.arrivals.next_arrival <= time:
                self._send(self.arrivals.pop(), time)
        for replica, process in zip(self.replicas, self._replica_processes):
            replica.loop.holds = False  # nothing comes any more
            process.interrupt()

    def _run_replica(self, number: int) -> Generator[simpy.Event, Any, None]:
        while True:
            time = self._run_steps(number)
            yield from self._sleep(time if self._is_coupled else math.inf, LAST + number)

    def _run_steps(self, number: int) -> float:
        """Run a replica as far as nothing from outside can change it. Return when it may change something next."""
        replica = self.replicas[number]
        if self._is_coupled:  # a report may have run held steps, whose ends bring requests
            self._release()
        self._running = replica
        time = self._run_until(replica, self._horizon(number))
        self._running = None
        if self._is_coupled:
            self._release()
            time = min(time, replica.next_event)  # blocks of prefills that have ended may be free at a time
        return time

    def _catch_up(self, now: float) -> None:
        """Run the replicas that may have changed something up to now. In a coupled fleet, they run by themselves."""
        for replica in self.replicas if not self._is_coupled else ():
            if replica.wakes_at < now:
                self._run_until(replica, now)

    def _run_until(self, replica: Replica, horizon: float) -> float:
        """Run the steps of a replica that are decided before a time. Return when it may change something next."""
        replica.loop.expects = self.arrivals.next_arrival < math.inf
        return replica.run_until(horizon)

    def _sleep(self, time: float, order: int = 1) -> Generator[simpy.Event, Any, Any]:
        """Wait until a time, or until an interrupt; return its cause. At equal times, the lower order is first."""
        env = self._env
        event = env.event()
        if time < math.inf:
            event._ok, event._value = True, None
            env.schedule(event, EventPriority(order), At(max(time, env.now)))
        try:
            yield event
        except simpy.Interrupt as interrupt:
            return interrupt.cause
        return None

    def _horizon(self, number: int) -> float:
        """Return the time up to which nothing comes to a replica that is not known now."""
        arrival = self.arrivals.next_arrival
        if not self.arrivals.followers and self.transfers is None:
            return arrival
        others = [other.next_event for place, other in enumerate(self.replicas) if place != number]
        return min(arrival, max(min(others, default=math.inf), math.nextafter(self._env.now, math.inf)))

    def _send(self, request: Request, now: float) -> None:
        """Let the router choose a replica, and send the request to it."""
        if self.transfers is not None:
            self.transfers.send(request, now)
            return
        number = self._route(False, request, request)
        if number != NO_REPLICA:
            self._deliver(number, request)

    def _route(self, decodes: bool, request: Request, client: Request) -> int:
        """Return the replica of a request, or of the prefill of that of a client; NO_REPLICA: none can take it now."""
        return self._choose(decodes, request)

    def _deliver(self, number: int, request: Request) -> None:
        self.replicas[number].send(request)
        self._wake(number)

    def _wake(self, number: int) -> None:
        """Let a replica go on, which has got a request or has run. One that runs now does not pass the answer to it."""
        replica, running = self.replicas[number], self._running
        if self._is_coupled and running is not replica and self._replica_processes:
            self._replica_processes[number].interrupt()
            if running is not None:
                running.horizon = min(running.horizon, replica.next_event)

    def _choose(self, decodes: bool, request: Request, among: Optional[Sequence[int]] = None) -> int:
        """Return the replica that the router, or that of the decodes, chooses for a request, of all or of some."""
        router, view, asked = self.router, self._view, self._ask(request)
        view.memory, view.present = self.memory, self.present if among is None else among
        if decodes:
            router, view.memory = self.decode_router, self.decode_memory
            view.present = self.present_decodes if among is None else among
        view.now = max(request.sent, self._env.now) if self._is_coupled else request.sent
        self._cached.set_request(request)
        if router.reads_caches:
            for number in range(len(self.replicas)):
                self._run_held(number)
        number = router.route(asked, view, self._random)
        if number == REFUSED:
            raise BadInput(f"cluster.router: it refuses request {request.id}; a fleet cannot simulate this")
        if number not in view.present:
            raise ValueError(f"replica {number!r}, expected one of {view.present}")
        router.sent(asked, number, view)
        self.replica_of[request.id] = number
        if not self._is_static:
            self._asked[request.id] = asked, number
            if router.reads_first_tokens:
                self._without_token[request.id] = request
        return number

    def _run_held(self, number: int) -> None:
        """Run the held steps of a replica up to the choice that is made now, because it depends on its cache."""
        self.replicas[number].run_held(self._view.now)
        self._wake(number)

    def _router_of(self, number: int) -> tuple[Router, Any]:
        """Return the router that sends to a replica, and its memory."""
        if self.decode_replicas and number in self.decode_replicas:
            return self.decode_router, self.decode_memory
        return self.router, self.memory

    def _tell_router(self, now: float) -> None:
        """Tell the router what has happened up to now: first tokens, ends, and what the replicas report."""
        if self._without_token:
            self._tell_first_tokens(now)
        if self._ended:
            self._tell_ends(now)
        reads = self.router.reads_reports or self.decode_router.reads_reports
        if reads and now - self._reported_at >= self.staleness:
            self._reported_at = now
            reports = self._reports(now)
            self.router.reported(self.memory, reports)
            if self.transfers is not None:
                self.decode_router.reported(self.decode_memory, reports)

    def _tell_ends(self, now: float) -> None:
        ended = self._ended
        if len(ended) > 1:
            ended.sort(key=_time_of)
        told = 0
        for time, request in ended:
            if time > now:
                break
            told += 1
            self._forget_choice(request)  # if its prefill failed, it was not sent to a decode replica
        del ended[:told]

    def _forget_choice(self, request: Request) -> None:
        """Tell the router that a request has left the replica that it has chosen."""
        sent = self._asked.pop(request.id, None)
        if sent is not None:
            asked, number = sent
            router, memory = self._router_of(number)
            router.ended(memory, asked, number)
            self._without_token.pop(request.id, None)

    def _reports(self, now: float) -> list[Reported]:
        """Return what the replicas say about themselves. A request that ends with the step of now still runs."""
        for replica in self.replicas:
            replica.run_held(now, True)
        ending = [0] * len(self.replicas)
        for _, request in self._ended:
            if request.status == "done" and request.id in self._asked:
                ending[self.replica_of[request.id]] += 1
        for number in range(len(self.replicas)):
            self._wake(number)
        return [replica.report(ending[number]) for number, replica in enumerate(self.replicas)]

    def _tell_first_tokens(self, now: float) -> None:
        started = [
            (request.first_token, request)
            for request in self._without_token.values()
            if request.first_token is not None and request.first_token <= now
        ]
        for _, request in sorted(started, key=_time_of):
            del self._without_token[request.id]
            asked, number = self._asked[request.id]
            router, memory = self._router_of(number)
            router.prefilled(memory, asked, number)

    def _release(self) -> None:
        """Start the think time of requests whose predecessor has ended, go on after prefills, and wake the router."""
        first = self.arrivals.next_arrival
        for now, request in self._ended:
            if self.transfers is not None and (prefilled := self.transfers.ended(request, now)) is not None:
                self.arrivals.send_again(prefilled, now)
            self.arrivals.end(request, now)
        if self.arrivals.next_arrival < first:
            self._wake_router()

    def _wake_router(self) -> None:
        if self._router_process is not None:
            self._router_process.interrupt()

    def _finish(self) -> None:
        """Raise Stuck if a replica has requests, now that nothing happens any more."""
        for replica in self.replicas:
            replica.finish()


def _time_of(end: tuple[float, Request]) -> float:
    return end[0]
