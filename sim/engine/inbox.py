"""Where requests arrive: pulled by whoever drives the server, so that ties never depend on who was asked first.

A front end may be slow to show them: it takes some seconds, and llm-serving blocks its only event loop during a model
call: a request that comes while a call is in flight is seen `lag` calls later, that call counted; while the server
idles it is seen at once.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable
from heapq import heappop, heappush
from operator import attrgetter
from typing import Any

from servesim.core import Request


class Inbox:
    """Requests on their way to a server."""

    __slots__ = (
        "_arrivals", "_coming", "_direct", "_next", "_released", "_serials", "chained", "lag", "lobby", "next_arrival",
        "seconds",
    )  # fmt: skip

    def __init__(self, requests: Iterable[Request], lag: int = 1, seconds: float = 0.0) -> None:
        self.lag = max(1, lag)  # model calls that end before a request sent during the first of them is seen
        self.seconds = seconds  # from sending to the scheduler, at the least
        self.chained: dict[Any, list[Request]] = defaultdict(list)  # by the id they wait for
        everybody = list(requests)
        for serial, request in enumerate(everybody):
            request.serial = serial
            if request.after is not None:
                self.chained[request.after].append(request)
        self._coming = [request for request in everybody if request.after is None]
        self._coming.sort(key=attrgetter("arrival"))  # and as they were given, where they arrive at once
        self._arrivals = [request.arrival + seconds for request in self._coming] + [math.inf]
        self._next = 0
        self._direct = self.lag == 1
        self._serials = len(everybody)  # the next one to give
        self._released: list[tuple[float, int, Request]] = []  # chained requests whose turn has come
        self.lobby: deque[tuple[int, Request]] = deque()  # sent, with the call after which they are seen
        self.next_arrival = self._arrivals[0]

    def __len__(self) -> int:
        return len(self._coming) - self._next + len(self._released) + len(self.lobby)

    def receive(self, now: float, calls: int) -> None:
        """Let in what has been sent by now, `calls` model calls having ended; the last was in flight meanwhile."""
        seen_after = calls + self.lag - 1
        while self.next_arrival <= now:
            self.lobby.append((seen_after, self._pop()))

    def due(self, now: float, calls: int, idle: bool) -> list[Request]:
        """Return what the scheduler sees now, in order of arrival."""
        if self._direct and not self._released:  # nothing stands between sending and seeing: the usual case
            first, arrivals = self._next, self._arrivals
            last = first
            while arrivals[last] <= now:
                last += 1
            self._next, self.next_arrival = last, arrivals[last]
            return self._coming[first:last]
        seen = []
        self.receive(now, calls)
        lobby = self.lobby
        while lobby and (idle or lobby[0][0] <= calls):
            seen.append(lobby.popleft()[1])
        return seen

    def post(self, request: Request) -> None:
        """Take in a request that nobody knew of before, to arrive when it says."""
        request.serial = self._serials
        self._serials += 1
        heappush(self._released, (request.arrival + self.seconds, request.serial, request))
        self._look()

    def release(self, id: Any, now: float) -> None:
        """Start the delay of the requests that waited for this one's end."""
        for request in self.chained.pop(id, ()):
            request.arrival = request.since = now + request.delay
            heappush(self._released, (request.arrival + self.seconds, request.serial, request))
        self._look()

    def orphans(self) -> list[Request]:
        """Return the requests whose predecessor never came."""
        return [request for chain in self.chained.values() for request in chain]

    def _pop(self) -> Request:
        if self._released and self._released[0][0] == self.next_arrival:
            request = heappop(self._released)[2]
        else:
            request = self._coming[self._next]
            self._next += 1
        self._look()
        return request

    def _look(self) -> None:
        self.next_arrival = self._arrivals[self._next]
        if self._released and self._released[0][0] < self.next_arrival:
            self.next_arrival = self._released[0][0]
