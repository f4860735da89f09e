"""Requests that have not reached the scheduler. The loop pulls them, so simultaneous arrivals always keep one order.

A front end can delay requests. It adds `seconds` to each request. It passes on requests one by one, each after
`per_request` seconds and `per_token` seconds per prompt token (tokenizer), so the scheduler sees the first request of a
burst alone. Requests that follow others do not queue there. A front end in
the event loop of the engine is also blocked during a model call: a request that arrives during call n is visible to the
scheduler after call n + lag - 1. With lag 1, this is the end of call n. If the server is idle, the request is visible
at once. Until the scheduler sees a request, its `arrival` is the time at which the front end has passed it on.

Requests of an iterator are read when their arrival is next, so that few of them exist at a time. The router of a fleet
has an inbox without a front end.

The client of a request that follows another one needs `client_delay` seconds after the answer. It gives up `timeout`
seconds after it has sent a request, if the engine aborts such a request.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator
from heapq import heapify, heappop, heappush
from itertools import islice
from operator import attrgetter, itemgetter
from typing import Any, Final, Optional

from servesim.core import Request

PART: Final = 1024  # requests that are read from an iterator at once
FORGET: Final = 16  # requests that it has passed on and keeps at most, unless more are to come


class Inbox:
    """Requests on their way to a server."""

    __slots__ = (
        "_coming", "_direct", "_gone", "_next", "_next_serial", "_open", "_passed_on", "_released", "_source",
        "client_delay", "delayed", "end_lag", "ended", "followers", "lag", "next_arrival", "per_request", "per_token",
        "released_first", "reports_ends", "seconds", "stops_at_ends", "tells_timeouts", "timeout",
    )  # fmt: skip

    def __init__(
        self,
        requests: Iterable[Request],
        lag: int = 1,
        seconds: float = 0.0,
        per_request: float = 0.0,
        end_lag: bool = False,
        per_token: float = 0.0,
        client_delay: float = 0.0,
        timeout: Optional[float] = None,
    ) -> None:
        self.lag = max(1, lag)  # model calls until the scheduler sees a request; 1 = no lag
        self.seconds = seconds  # minimum time from sending to the scheduler
        self.per_request = per_request  # from one request to the next: it passes them on one by one
        self.per_token = per_token  # in addition, per prompt token
        self.end_lag = end_lag  # a client sees the end of its stream one model call late
        self.client_delay = client_delay  # minimum time from the end of an answer to the next request
        self.timeout = timeout
        self._open: list[tuple[float, int, Request]] = []  # heap of submitted requests by their time-out
        self._gone: set[Request] = set()  # of these, those whose time-outs the router knows
        self.followers: dict[Any, list[Request]] = defaultdict(list)  # by the id of the request that they follow
        # in order of arrival, with their serials; none follows another one
        self._source: Optional[Iterator[Request]] = requests if isinstance(requests, Iterator) else None
        all_requests = [] if self._source is not None else list(requests)
        for serial, request in enumerate(all_requests):
            request.serial = serial
            if request.follows is not None:
                self.followers[request.follows].append(request)
        self._coming = [request for request in all_requests if request.follows is None]
        self._coming.sort(key=attrgetter("sent"))  # a stable sort: equal arrival times keep the given order
        self._passed_on = -math.inf  # when the front end passes on the last of them
        for request in self._coming:
            self._pass_on(request)
        self._next = 0
        self._direct = self.lag == 1
        self._next_serial = len(all_requests)
        self._released: list[tuple[float, int, Request]] = []  # followers whose predecessor has finished
        self.released_first = True  # at equal times, before requests of the trace
        self.reports_ends = bool(self.followers)
        self.ended: Optional[list[tuple[float, Request]]] = None  # in a fleet: when requests ended, for the router
        self.stops_at_ends = False  # in a fleet: an end here may bring a request at the router
        self.tells_timeouts = False  # in a fleet: so does a client that gives up, maybe to another server
        self.delayed: deque[tuple[int, Request]] = deque()  # (ended calls at which it becomes visible, request)
        self.next_arrival = self._arrival(0)

    def __len__(self) -> int:  # without followers that are not released
        return self.unseen + len(self._released)

    @property
    def unseen(self) -> int:
        """Requests that were sent, and that the scheduler has not seen."""
        return len(self._coming) - self._next + len(self.delayed)

    def receive(self, now: float, calls: int) -> None:
        """Move arrivals up to now to `delayed`. `calls` model calls have ended; they arrived during the last one."""
        visible_after = calls + self.lag - 1
        while self.next_arrival <= now:
            self.delayed.append((visible_after, self.pop()))

    def pop_visible(self, now: float, calls: int, idle: bool) -> list[Request]:
        """Return the requests that become visible now, in order of arrival. `idle`: no call blocks the front end."""
        if self._direct and not self._released:  # the usual case: no lag
            first = last = self._next
            while self.next_arrival <= now:
                last += 1
                self.next_arrival = self._arrival(last)
            visible = self._coming[first:last]
            self._skip_to(last)
            return visible
        visible = []
        self.receive(now, calls)
        delayed = self.delayed
        while delayed and (idle or delayed[0][0] <= calls):
            visible.append(delayed.popleft()[1])
        return visible

    def add(self, request: Request) -> None:
        """Add a request during the run. It arrives at its arrival time."""
        request.serial = self._next_serial
        self._next_serial += 1
        self._release(request)
        self._update_next_arrival()

    def send(self, request: Request) -> None:
        """Add a request of a router. It keeps its serial, and comes after those before it unless it follows one."""
        if request.follows is None:
            self._pass_on(request)
            self._coming.append(request)
        else:
            self._release(request)
        self._update_next_arrival()

    def send_again(self, request: Request, time: float) -> None:
        """Let a request arrive once more at a time, for example because its KV has been copied."""
        heappush(self._released, (time, request.serial, request))
        self._update_next_arrival()

    def take_all(self, copied: Collection[Request] = ()) -> list[Request]:
        """Take out the requests of a router that the scheduler has not seen.

        Those with copied KV do not arrive once more either, but are not returned.
        """
        entries = sorted(self._released, key=itemgetter(0, 1))
        followers = [entry[2] for entry in entries if entry[2].follows is not None and entry[2] not in copied]
        taken = [*(request for _, request in self.delayed), *self._coming[self._next :], *followers]
        self.delayed.clear()
        self._released.clear()
        self._next = len(self._coming)
        self._update_next_arrival()
        return taken

    def take_out(self, request: Request) -> None:
        """Let a request not arrive, or not once more."""
        released = [entry for entry in self._released if entry[2] is not request]
        if len(released) < len(self._released):
            self._released = released
            heapify(released)
        else:
            self.delayed = deque([entry for entry in self.delayed if entry[1] is not request])
            self._coming[self._next :] = [other for other in self._coming[self._next :] if other is not request]
        self._update_next_arrival()

    def end(self, ended: Request, now: float) -> None:
        """Start the think time of the requests that follow this one; in a fleet, tell the router."""
        if self.ended is not None:
            self.ended.append((now, ended))
        if self.followers:
            for request in self.followers.pop(ended.id, ()):
                request.sent = request.arrival = now + max(request.think_time, self.client_delay)
                request.visible_at = request.state_since = request.sent
                self._release(request)
            self._update_next_arrival()

    def take_back_end(self, ended: Request) -> None:
        """Let the requests that follow this one wait again: it has not ended."""
        followers = [entry[2] for entry in self._released if entry[2].follows == ended.id]
        if followers:
            self.followers[ended.id] = followers
            self._released = [entry for entry in self._released if entry[2].follows != ended.id]
            heapify(self._released)
            self._update_next_arrival()

    def _release(self, request: Request) -> None:
        request.arrival += self._work(request)
        heappush(self._released, (request.arrival + self.seconds, request.serial, request))

    def _pass_on(self, request: Request) -> None:
        if self.per_request or self.per_token:
            self._passed_on = request.arrival = max(self._passed_on, request.arrival) + self._work(request)

    def _work(self, request: Request) -> float:
        return self.per_request + self.per_token * request.prompt

    def expect_timeout(self, request: Request) -> None:
        """Note a request that the scheduler sees from now on."""
        if self.timeout is not None:
            heappush(self._open, (request.sent + self.timeout, request.serial, request))

    def next_timeout(self) -> float:
        """Return when the next client gives up whose request the scheduler has seen; inf: none."""
        while self._open and self._open[0][2].status == "done":
            heappop(self._open)
        return self._open[0][0] if self._open else math.inf

    def report_timeouts(self, now: float) -> None:
        """Tell the router which clients have given up. The engine aborts their requests at its next decision."""
        if self.next_timeout() <= now:
            for time, _, request in self._open:
                if time <= now and request.status != "done" and request not in self._gone:
                    self._gone.add(request)
                    self.end(request, time)

    def pop_timed_out(self, now: float) -> list[Request]:
        """Return the requests whose clients have given up, in this order."""
        gone = []
        while self.next_timeout() <= now:
            gone.append(heappop(self._open)[2])
        return gone

    @property
    def has_followers(self) -> bool:
        """Whether a request waits for the end of another one, here or at the router."""
        return self.stops_at_ends or bool(self.followers)

    def unreleased(self) -> list[Request]:
        """Return the requests whose predecessor has not finished or does not exist."""
        return [request for followers in self.followers.values() for request in followers]

    def pop(self) -> Request:
        """Return the request of the next arrival."""
        is_released = bool(self._released) and self._released[0][0] == self.next_arrival
        if is_released and (self.released_first or self._arrival(self._next) > self.next_arrival):
            request = heappop(self._released)[2]
        else:
            request = self._coming[self._next]
            self._skip_to(self._next + 1)
        self._update_next_arrival()
        return request

    def _arrival(self, index: int) -> float:
        """Return when a request of the trace reaches the scheduler; inf after the last one."""
        if index >= len(self._coming) and not self._read_part():
            return math.inf
        return self._coming[index].arrival + self.seconds

    def _read_part(self) -> bool:
        """Read the next requests of an iterator. Return whether there are any."""
        if self._source is None:
            return False
        part = list(islice(self._source, PART))
        for request in part:
            self._pass_on(request)
        if not part:
            self._source = None
        self._coming += part
        self._next_serial += len(part)
        return bool(part)

    def _skip_to(self, index: int) -> None:
        """Go on with the request at this place, and forget those before it from time to time."""
        self._next = index
        if index >= FORGET and 2 * index >= len(self._coming):
            del self._coming[:index]
            self._next = 0

    def _update_next_arrival(self) -> None:
        self.next_arrival = self._arrival(self._next)
        if self._released and self._released[0][0] < self.next_arrival:
            self.next_arrival = self._released[0][0]
