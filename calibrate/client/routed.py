"""Servers behind a router object of this package: it chooses a server for each request, as in a simulation.

The router learns when a request is sent, when its first token arrives and when its answer ends. At each interval of
reports it learns the queues of the servers, from their /metrics.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING, Any

from servesim.core import Request
from servesim.routers import Asked, Fleet, Replica, Router

from .server_counters import parse_metrics

if TYPE_CHECKING:
    import aiohttp

WAITING, RUNNING, KV_USAGE = "vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"


class RoutedServers:
    """The servers of one load, and the memory of their router."""

    def __init__(
        self, urls: Sequence[str], router: Router, ask: Callable[[Request], Asked], interval: float, seed: int
    ) -> None:
        self.urls = urls
        self.router = router
        self.memory = router.memory(len(urls))
        self.requests = [0] * len(urls)  # that were sent to each
        self.interval = interval  # seconds between two reports; 0: the router reads none
        self._ask = ask
        self._random = Random(f"router {seed}")
        self._sent: dict[Any, tuple[Asked, int]] = {}  # requests without an end, by id

    def asks_caches(self, request: Request) -> bool:
        """Whether the router asks what the prefix caches of the servers have. No server tells it."""
        asked: list[int] = []

        def cached(replica: int) -> int:
            asked.append(replica)
            return 0

        self.router.choices(self._ask(request), Fleet(0.0, range(len(self.urls)), self.memory, cached))
        return bool(asked)

    def choose(self, request: Request, now: float) -> str:
        """Let the router choose a server for a request that is sent now; return its address."""
        asked, fleet = self._ask(request), Fleet(now, range(len(self.urls)), self.memory)
        number = self.router.route(asked, fleet, self._random)
        self.router.sent(asked, number, fleet)
        self.requests[number] += 1
        self._sent[request.id] = asked, number
        return self.urls[number]

    def on_first_token(self, request: Request) -> None:
        self.router.prefilled(self.memory, *self._sent[request.id])

    def on_end(self, request: Request) -> None:
        if request.id in self._sent:
            self.router.ended(self.memory, *self._sent.pop(request.id))

    async def report(self, session: aiohttp.ClientSession) -> None:
        """Tell the router at each interval what the servers say about themselves."""
        reports = [Replica()] * len(self.urls)
        while self.interval:
            reports = await asyncio.gather(*(read_report(session, *each) for each in zip(self.urls, reports)))
            self.router.reported(self.memory, reports)
            await asyncio.sleep(self.interval)


async def read_report(session: aiohttp.ClientSession, url: str, last: Replica) -> Replica:
    """Return the queues and the KV usage of a server; the last report if it does not answer."""
    import aiohttp

    try:
        async with session.get(f"{url}/metrics") as response:
            counts = parse_metrics(await response.text(errors="replace"))
        return Replica(int(counts[WAITING]), int(counts[RUNNING]), counts[KV_USAGE])
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError, LookupError, ValueError):
        return last
