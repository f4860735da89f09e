"""Requests that have not reached the scheduler. The loop pulls them, so simultaneous arrivals always keep one order.

A front end can delay requests. It adds `seconds` to each request. It passes on requests one by one, each after
`per_request` seconds and `per_token` seconds per prompt token (tokenizer), so the scheduler sees the first request of a
burst alone. Requests that follow others do not queue there. A front end in
the event loop of the engine is also blocked during a model call: a request that arrives during call n is visible to the
scheduler after call n + lag - 1. With lag 1, this is the end of call n. If the server is idle, the request is visible
at once. Until the scheduler sees a request, its `arrival` is the time at which the front end has passed it on.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable
from heapq import heapify, heappop, heappush
from operator import itemgetter
from typing import Optional

from servesim.core import Request

from .clients import Clients


class Inbox:
    """Requests on their way to a server."""

    __slots__ = (
        "_coming", "_open", "_passed_on", "_released", "clients", "delayed", "end_lag", "lag", "next_arrival",
        "per_request", "per_token", "released_first", "seconds", "timeout",
    )  # fmt: skip

    def __init__(
        self,
        requests: Iterable[Request] = (),
        lag: int = 1,
        seconds: float = 0.0,
        per_request: float = 0.0,
        end_lag: bool = False,
        per_token: float = 0.0,
        client_delay: float = 0.0,
        timeout: Optional[float] = None,
    ) -> None:
        self.clients = Clients(requests, client_delay, timeout)
        self.clients.send = self.send
        self.lag = max(1, lag)  # model calls until the scheduler sees a request; 1 = no lag
        self.seconds = seconds  # minimum time from sending to the scheduler
        self.per_request = per_request  # from one request to the next: it passes them on one by one
        self.per_token = per_token  # in addition, per prompt token
        self.end_lag = end_lag  # a client sees the end of its stream one model call late
        self.timeout = timeout
        self._open: list[tuple[float, int, Request]] = []  # heap of submitted requests by their time-out
        self._coming: deque[Request] = deque()  # in order of arrival; none follows another one
        self._passed_on = -math.inf  # when the front end passes on the last of them
        self._released: list[tuple[float, int, Request]] = []  # heap of those that follow others, or arrive once more
        self.released_first = True  # at equal times, before the others
        self.delayed: deque[tuple[int, Request]] = deque()  # (ended calls at which it becomes visible, request)
        self.next_arrival = math.inf

    @property
    def unseen(self) -> int:
        """Requests that were sent, and that the scheduler has not seen, without those that follow others."""
        return len(self._coming) + len(self.delayed)

    def __len__(self) -> int:
        return self.unseen + len(self._released)

    def send(self, request: Request) -> None:
        """Add a request, which comes after those before it unless it follows one."""
        if request.follows is not None:
            request.arrival += self._work(request)
            self.send_again(request, request.arrival + self.seconds)
            return
        if self.per_request or self.per_token:
            self._passed_on = request.arrival = max(self._passed_on, request.arrival) + self._work(request)
        self._coming.append(request)
        if request.arrival + self.seconds < self.next_arrival:
            self.next_arrival = request.arrival + self.seconds

    def send_again(self, request: Request, time: float) -> None:
        """Let a request arrive once more at a time, for example because its KV has been copied."""
        heappush(self._released, (time, request.serial, request))
        if time < self.next_arrival:
            self.next_arrival = time

    def _work(self, request: Request) -> float:
        return self.per_request + self.per_token * request.prompt

    def pop_visible(self, now: float, calls: int, idle: bool) -> list[Request]:
        """Return the requests that become visible now, in order of arrival. `idle`: no call blocks the front end."""
        visible: list[Request] = []
        if self.lag == 1:
            while self.next_arrival <= now:
                visible.append(self.pop())
            return visible
        while self.next_arrival <= now:  # `calls` model calls have ended; they arrived during the last one
            self.delayed.append((calls + self.lag - 1, self.pop()))
        while self.delayed and (idle or self.delayed[0][0] <= calls):
            visible.append(self.delayed.popleft()[1])
        return visible

    def pop(self) -> Request:
        """Return the request of the next arrival."""
        coming, released, time = self._coming, self._released, self.next_arrival
        is_released = bool(released) and released[0][0] == time
        if is_released and not self.released_first and coming and coming[0].arrival + self.seconds == time:
            is_released = False
        request = heappop(released)[2] if is_released else coming.popleft()
        self._update_next_arrival()
        return request

    def _update_next_arrival(self) -> None:
        self.next_arrival = self._coming[0].arrival + self.seconds if self._coming else math.inf
        if self._released and self._released[0][0] < self.next_arrival:
            self.next_arrival = self._released[0][0]

    def take_all(self, copied: Collection[Request] = ()) -> list[Request]:
        """Take out the requests of a router that the scheduler has not seen.

        Those with copied KV do not arrive once more either, but are not returned.
        """
        entries = sorted(self._released, key=itemgetter(0, 1))
        followers = [entry[2] for entry in entries if entry[2].follows is not None and entry[2] not in copied]
        taken = [*(request for _, request in self.delayed), *self._coming, *followers]
        self.delayed.clear()
        self._released.clear()
        self._coming.clear()
        self._update_next_arrival()
        return taken

    def take_out(self, request: Request) -> None:
        """Let a request not arrive, or not once more."""
        self._released = [entry for entry in self._released if entry[2] is not request]
        heapify(self._released)
        self.delayed = deque([entry for entry in self.delayed if entry[1] is not request])
        self._coming = deque([other for other in self._coming if other is not request])
        self._update_next_arrival()

    # Clients that give up

    def expect_timeout(self, request: Request) -> None:
        """Note a request that the scheduler sees from now on."""
        if self.timeout is not None:
            heappush(self._open, (request.sent + self.timeout, request.serial, request))

    def next_timeout(self) -> float:
        """Return when the next client gives up whose request the scheduler has seen; inf: none."""
        while self._open and self._open[0][2].status == "done":
            heappop(self._open)
        return self._open[0][0] if self._open else math.inf

    def pop_timed_out(self, now: float) -> list[Request]:
        """Return the requests whose clients have given up, in this order."""
        gone = []
        while self.next_timeout() <= now:
            gone.append(heappop(self._open)[2])
        return gone
