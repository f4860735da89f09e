"""A fleet: replicas behind a router. Clients, transfers, faults and scaling are SimPy processes (world.py).

At every event the replicas have run up to now. Replicas that cannot influence each other run one after another. If the
end of a request may bring another one, or if KV is copied, they run in the order of their next times. `_due` is a heap
of these times; an entry that is not the newest of its replica is passed over.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from operator import itemgetter
from random import Random
from typing import Any, Callable, Final, Optional, Protocol

from servesim.core import BadInput, Request, Stuck
from servesim.routers.router import REFUSED, Asked, Router
from servesim.routers.router import Fleet as View

from .clients import PART, Clients
from .loop import Loop
from .replica import Replica
from .router_view import CachedTokens
from .several import Servers
from .transfers import Transfers
from .world import LATER, World

NO_REPLICA: Final = -1
Ask = Callable[[Request], Asked]  # what the router sees of a request


class Changing(Protocol):
    """Replicas that come and go (presence.py)."""

    alive: set[int]

    def route(self, decodes: bool, request: Request, client: Request) -> int:
        """Return the replica of a request, which waits if there is none."""

    def check_drained(self, number: int) -> None:
        """Let a replica leave that drains and has nothing to do."""

    def lose_rest(self) -> None:
        """Lose the requests that no replica could take."""

    def last_end(self) -> float:
        """Return when the last client saw the end of its request."""

    def metrics(self) -> dict[str, Any]:
        """Return what the results say about the changes."""

    def seconds_there(self) -> list[float]:
        """Return for how many seconds each replica was there."""


class Fleet(Servers):
    """Runs replicas and their router."""

    def __init__(
        self, replicas: Sequence[Replica], router: Router, requests: Iterable[Request], ask: Ask, seed: int,
        staleness: float, transfers: Optional[Transfers] = None, decode: Optional[tuple[Router, Sequence[int]]] = None,
    ) -> None:  # fmt: skip
        super().__init__([replica.loop for replica in replicas])
        self.replicas = list(replicas)
        self.router = router
        self.memory = router.memory(len(replicas))
        self.present = list(range(len(replicas)))
        self.staleness = staleness  # seconds between two reports of the replicas; 0: they are always new
        self.replica_of: dict[Any, int] = {}  # by the id of a request
        self.transfers = transfers  # prefill and decode on different replicas; `router` is that of the prefills
        self.presence: Optional[Changing] = None
        self.decode_router = router if decode is None else decode[0]
        self.decode_memory = self.decode_router.memory(len(replicas))
        self.decode_replicas = [] if decode is None else list(decode[1])
        self.present_decodes = self.decode_replicas
        self.world: World = World(self)
        front_end = replicas[0].loop.inbox
        self.clients = Clients(requests, front_end.clients.delay, front_end.timeout)
        self._ask = ask
        self._cached = CachedTokens(self.replicas)
        self._view = View(0.0, self.present, self.memory, self._cached)  # what a router sees at a choice
        self._asked: dict[Any, tuple[Asked, int]] = {}  # requests in flight and their replicas, if the router learns
        self._without_token: dict[Any, Request] = {}  # of these, if the router learns of first tokens
        self._ended: list[tuple[float, Request]] = []  # that the router does not know yet
        self._reported_at = -math.inf
        self._random = Random(f"router {seed}")
        self._sent = 0
        self._streams = isinstance(requests, Iterator)
        self._learns = router.learns or self.decode_router.learns
        self.is_coupled = bool(self.clients.followers) or transfers is not None
        self._due: list[tuple[float, bool, int, int]] = []  # (time, whether it decides, turn, replica)
        self._turns = 0
        if transfers is not None:
            self.present = [number for number in self.present if number not in self.decode_replicas]
            transfers.choose, transfers.deliver = self._route, self._deliver
            transfers.changed, transfers.call = self.note_change, self.world.call

    @property
    def size(self) -> int:
        return len(self.replicas)

    def attach(self, loop: Loop) -> None:
        """Let a loop tell the clients and the router what it does."""
        loop.inbox.clients = self.clients
        loop.notifies = loop.notifies or self._tells

    @property
    def _tells(self) -> bool:
        """Whether something depends on the ends of requests."""
        return self._learns or self.is_coupled

    def run(self) -> float:
        """Run until all requests are done. Return the time."""
        if self._tells:
            self.clients.on_end = self._note_end
        for number, loop in enumerate(self.loops):
            self.attach(loop)
            self.plan(number)
        self.world.connect(self.clients, self._send)
        try:
            self.world.run()
        finally:  # also if a replica is stuck
            self._set_times()
        self._finish()
        return self.now

    def _set_times(self) -> None:
        """Set the end of the run, and the idle time of a replica on average."""
        self.now = max([replica.loop.now for replica in self.replicas])
        idle = [self.now - replica.loop.now + replica.idle_s for replica in self.replicas]
        self.idle_s = sum(idle) / len(idle)
        if self.presence is not None:  # a replica may start after the last model call or request
            busy = self.now - self.idle_s
            self.now = max([self.presence.last_end(), *[replica.last_call for replica in self.replicas]])
            self.idle_s = self.now - busy

    def metrics(self) -> dict[str, Any]:
        return {} if self.presence is None else self.presence.metrics()

    def seconds_there(self) -> Sequence[float]:
        return () if self.presence is None else self.presence.seconds_there()

    # The replicas run

    def plan(self, number: int) -> None:
        """Note when a replica does the next thing."""
        replica = self.replicas[number]
        loop = replica.loop
        time, decides = loop.next_time, not loop.returns_first
        if time != replica.planned or decides != replica.decides:
            replica.planned, replica.decides = time, decides
            self._turns += 1
            if time < math.inf:
                heappush(self._due, (time, decides, self._turns, number))

    def expect(self, more: bool) -> None:
        for replica in self.replicas:
            replica.loop.expects = more

    def run_until(self, until: float) -> None:
        """Run replicas that do not influence each other up to a time."""
        if not self._learns:  # nothing looks at them before the end
            if until == math.inf:
                self._run_all(until)
            return
        due, later = self._due, []
        while due and due[0][0] <= until:
            time, decides, _, number = heappop(due)
            replica = self.replicas[number]
            if time == replica.planned and decides == replica.decides:
                replica.planned = math.nan  # its entry is gone
                replica.loop.run_until(until)
                later.append(number)
        for number in later:
            self.plan(number)

    def _run_all(self, until: float) -> None:
        for replica in self.replicas:
            replica.loop.run_until(until)

    def is_due(self, until: float) -> bool:
        """Whether the next thing is a delivery up to a time, or a decision before it."""
        due = self._due
        while due:
            time, decides, _, number = due[0]
            replica = self.replicas[number]
            if time == replica.planned and decides == replica.decides:
                break
            heappop(due)
        return bool(due) and (due[0][0] < until or (due[0][0] == until and not due[0][1]))

    def advance(self) -> None:
        """Let the first replica do its next thing."""
        number = heappop(self._due)[3]
        replica = self.replicas[number]
        replica.planned = math.nan  # its entry is gone
        if replica.loop.next_time < math.inf:
            replica.loop.advance()
        self.note_change(number)

    def note_change(self, number: int) -> None:
        """Note that a replica has run, or that something has come to it or left it."""
        self.plan(number)
        if self.presence is not None:
            self.presence.check_drained(number)

    # Requests

    def _send(self, request: Request) -> None:
        """Let the router choose a replica, and send the request to it."""
        self._tell_router(self.world.now)
        self.send_again(request)
        self._sent += 1
        if not self._tells and self._streams and self._sent % PART == 0:  # so that few requests exist at a time
            self._run_all(request.sent)

    def send_again(self, request: Request) -> None:
        """Send a request, or one whose prefill has ended."""
        if self.transfers is not None:
            self.transfers.send(request, self.world.now)
            return
        number = self._route(False, request, request)
        if number != NO_REPLICA:
            self._deliver(number, request)

    def _deliver(self, number: int, request: Request) -> None:
        self.replicas[number].send(request)
        self.plan(number)

    def _note_end(self, request: Request, now: float) -> None:
        """Note the end of a request for the router, and go on after a prefill."""
        self._ended.append((now, request))
        if self.transfers is not None:
            prefilled = self.transfers.ended(request, now)
            if prefilled is not None:
                self.world.call(now, self._send, prefilled, LATER + prefilled.serial)

    # The router

    def _route(self, decodes: bool, request: Request, client: Request) -> int:
        """Return the replica of a request, or of the prefill of that of a client; NO_REPLICA: none can take it now."""
        if self.presence is not None:
            return self.presence.route(decodes, request, client)
        return self.choose(decodes, request)

    def choose(self, decodes: bool, request: Request, among: Optional[Sequence[int]] = None) -> int:
        """Return the replica that the router, or that of the decodes, chooses for a request, of all or of some."""
        router, view, asked = self.router, self._view, self._ask(request)
        view.memory, view.present = self.memory, self.present if among is None else among
        if decodes:
            router, view.memory = self.decode_router, self.decode_memory
            view.present = self.present_decodes if among is None else among
        view.now = max(request.sent, self.world.now) if self.is_coupled else request.sent
        self._cached.set_request(request)
        number = router.route(asked, view, self._random)
        if number == REFUSED:
            raise BadInput(f"cluster.router: it refuses request {request.id}; a fleet cannot simulate this")
        if number not in view.present:
            raise ValueError(f"replica {number!r}, expected one of {view.present}")
        router.sent(asked, number, view)
        self.replica_of[request.id] = number
        if self._tells:
            self._asked[request.id] = asked, number
            if router.reads_first_tokens:
                self._without_token[request.id] = request
        return number

    def _router_of(self, number: int) -> tuple[Router, Any]:
        """Return the router that sends to a replica, and its memory."""
        if self.decode_replicas and number in self.decode_replicas:
            return self.decode_router, self.decode_memory
        return self.router, self.memory

    def _tell_router(self, now: float) -> None:
        """Tell the router what has happened up to now: first tokens, ends, and what the replicas report."""
        if self._without_token:
            self._tell_first_tokens()
        if self._ended:
            ended, self._ended = self._ended, []
            for _, request in sorted(ended, key=itemgetter(0)):
                self.forget_choice(request)  # if its prefill failed, it was not sent to a decode replica
        reads = self.router.reads_reports or self.decode_router.reads_reports
        if reads and now > self._reported_at and now - self._reported_at >= self.staleness:
            self._reported_at = now
            reports = [replica.report() for replica in self.replicas]
            self.router.reported(self.memory, reports)
            if self.transfers is not None:
                self.decode_router.reported(self.decode_memory, reports)

    def forget_choice(self, request: Request) -> None:
        """Tell the router that a request has left the replica that it has chosen."""
        sent = self._asked.pop(request.id, None)
        if sent is not None:
            asked, number = sent
            router, memory = self._router_of(number)
            router.ended(memory, asked, number)
            self._without_token.pop(request.id, None)

    def _tell_first_tokens(self) -> None:
        started = [
            (request.first_token, request)
            for request in self._without_token.values()
            if request.first_token is not None
        ]
        for _, request in sorted(started, key=itemgetter(0)):
            del self._without_token[request.id]
            asked, number = self._asked[request.id]
            router, memory = self._router_of(number)
            router.prefilled(memory, asked, number)

    def _finish(self) -> None:
        """Raise Stuck if requests remain, now that nothing happens any more."""
        if self.presence is not None:
            self.presence.lose_rest()
            self._set_times()  # requests may have been lost at the end
        alive = range(self.size) if self.presence is None else self.presence.alive
        loops = [self.replicas[number].loop for number in sorted(alive)]
        for loop in loops:
            loop.require_idle()
        if unreleased := self.clients.unreleased():
            raise Stuck("these requests wait for a request that does not exist or never finished", unreleased, self.now)
        for loop in loops:  # ranks without a router have clients of their own
            loop.require_done()
