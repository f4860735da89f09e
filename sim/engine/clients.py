"""The clients of a run: when each request is sent, and which requests follow the end of another one.

The client of a request that follows another one needs `delay` seconds after the answer. It gives up `timeout` seconds
after it has sent a request, if the engine aborts such a request.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Any, Callable, Final, Optional

from servesim.core import Request

Send = Callable[[Request], object]
PART: Final = 1024  # requests of a run that are created at once


class Clients:
    """The requests that are not sent yet."""

    __slots__ = ("_next_serial", "coming", "delay", "followers", "gone", "on_end", "send", "timeout")

    def __init__(self, requests: Iterable[Request], delay: float = 0.0, timeout: Optional[float] = None) -> None:
        self.delay = delay  # minimum time from the end of an answer to the next request
        self.timeout = timeout
        self.followers: dict[Any, list[Request]] = defaultdict(list)  # by the id of the request that they follow
        self.gone: set[Request] = set()  # their clients have given up before the engine knows it
        self.send: Send = not_connected  # sends a request that follows another one, at its time
        self.on_end: Optional[Callable[[Request, float], object]] = None  # in a fleet: tell the router
        self._next_serial = 0
        self.coming: Iterator[Request]  # in order of their times, with their serials; none follows another one
        if isinstance(requests, Iterator):
            self.coming = requests
            return
        coming = []
        for request in requests:
            self.number(request)
            if request.follows is None:
                coming.append(request)
            else:
                self.followers[request.follows].append(request)
        coming.sort(key=attrgetter("sent"))  # a stable sort: equal times keep the given order
        self.coming = iter(coming)

    def number(self, request: Request) -> None:
        """Give a request the next serial."""
        request.serial = self._next_serial
        self._next_serial += 1

    def ended(self, request: Request, now: float) -> None:
        """Start the think time of the requests that follow this one, whose end its client has seen."""
        if self.gone and request in self.gone:
            self.gone.remove(request)
            return
        self._release(request, now)

    def give_up(self, request: Request) -> None:
        """Stop waiting for the end of a request, whose time is over. The engine aborts it at its next decision."""
        if request.status != "done":
            assert self.timeout is not None
            self._release(request, request.sent + self.timeout)
            self.gone.add(request)

    def _release(self, request: Request, now: float) -> None:
        if self.on_end is not None:
            self.on_end(request, now)
        if self.followers:
            for follower in self.followers.pop(request.id, ()):
                follower.sent = follower.arrival = now + max(follower.think_time, self.delay)
                follower.visible_at = follower.state_since = follower.sent
                self.send(follower)

    def unreleased(self) -> list[Request]:
        """Return the requests whose predecessor has not finished or does not exist."""
        return [request for followers in self.followers.values() for request in followers]


def not_connected(request: Request) -> object:
    raise NotImplementedError
