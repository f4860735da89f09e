"""The router of vLLM's production-stack."""

from __future__ import annotations

from bisect import bisect
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import md5
from typing import Any, Optional

from servesim.core.native import mypyc_attr

from .router import Asked, Fleet, Memory, OwnChoices, Run

CHUNK = 128  # characters of a node
CONTROLLER_CHUNK = 256  # tokens of a chunk in the cache controller
POINTS = 160  # of a replica on the ring of sessions


class StatisticsMemory(Memory):
    """When requests were sent to each replica in the last seconds; None: it has not been sent any."""

    def __init__(self, replicas: int) -> None:
        super().__init__(replicas)
        self.sent_at: list[Optional[deque[float]]] = [None] * replicas
        self.turns: dict[tuple[int, ...], int] = {}  # by the set of replicas
        self.chunks: dict[int, dict[int, int]] = {}  # of a run of text -> replica -> how many it was sent


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class LowestRate(OwnChoices):
    """The replica that was sent the fewest requests lately; one without requests first."""

    request_stats_window: float = 60.0  # seconds

    def memory(self, replicas: int) -> Any:
        return StatisticsMemory(replicas)

    def choices(self, request: Asked, fleet: Fleet) -> Sequence[int]:
        rates = {replica: self.rate(fleet, replica) for replica in fleet.present}
        unknown = [replica for replica, rate in rates.items() if rate is None]
        return unknown[:1] or [min(fleet.present, key=lambda replica: rates[replica] or 0.0)]

    def rate(self, fleet: Fleet, replica: int) -> Optional[float]:
        """Return the requests per second that a replica was sent lately."""
        times: Optional[deque[float]] = fleet.memory.sent_at[replica]
        if times is None:
            return None
        oldest, lately = fleet.now - self.request_stats_window, len(times)
        for time in times:
            if time >= oldest:
                break
            lately -= 1
        return lately / self.request_stats_window

    def sent(self, request: Asked, replica: int, fleet: Fleet) -> None:
        super().sent(request, replica, fleet)
        memory = fleet.memory
        times = memory.sent_at[replica]
        if times is None:
            times = memory.sent_at[replica] = deque()
        times.append(fleet.now)
        while times[0] < fleet.now - self.request_stats_window:
            times.popleft()


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class StackRoundRobin(LowestRate):
    """Each replica in turn; every set of replicas has a turn of its own."""

    def choices(self, request: Asked, fleet: Fleet) -> Sequence[int]:
        return [fleet.present[fleet.memory.turns.get(tuple(fleet.present), 0) % len(fleet.present)]]

    def sent(self, request: Asked, replica: int, fleet: Fleet) -> None:
        super().sent(request, replica, fleet)
        turns, present = fleet.memory.turns, tuple(fleet.present)
        turns[present] = turns.get(present, 0) + 1


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class StackSession(LowestRate):
    """A session has one replica, on a ring of hashes; without a session, the rates decide."""

    urls: tuple[str, ...] = ()  # of the replicas: the ring depends on them; empty: names made of their numbers

    def choices(self, request: Asked, fleet: Fleet) -> Sequence[int]:
        if request.key is None:
            return super().choices(request, fleet)
        names = {self.urls[replica] if self.urls else f"replica-{replica}": replica for replica in fleet.present}
        points, owners = ring(tuple(names))
        place = bisect(points, position(request.key))
        return [names[owners[points[place % len(points)]]]]


def position(key: str) -> int:
    """Return the place of a text on the ring."""
    return int.from_bytes(md5(key.encode()).digest(), "big")


@lru_cache(maxsize=64)
def ring(names: tuple[str, ...]) -> tuple[list[int], dict[int, str]]:
    """Return the points of all replicas in order, and the replica of each."""
    owners = {position(f"{name}-{number}"): name for name in names for number in range(POINTS)}
    return sorted(owners), owners


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class StackPrefixAware(LowestRate):
    """Any of the replicas that were sent the longest beginning of the text."""

    prefix_min_match_length: int = 0  # characters; a shorter match lets the rates decide

    def choices(self, request: Asked, fleet: Fleet) -> Sequence[int]:
        matched, replicas = match(fleet.memory.chunks, request.runs(CHUNK, True), set(fleet.present))
        return super().choices(request, fleet) if matched < self.prefix_min_match_length else sorted(replicas)

    def sent(self, request: Asked, replica: int, fleet: Fleet) -> None:
        super().sent(request, replica, fleet)
        for key, chunks in request.runs(CHUNK, True):
            known = fleet.memory.chunks.setdefault(key, {})
            known[replica] = max(chunks, known.get(replica, 0))


def match(known: dict[int, dict[int, int]], runs: Sequence[Run], replicas: set[int]) -> tuple[int, set[int]]:
    """Return how many characters of a text some of these replicas were sent, in whole chunks, and which ones."""
    matched = 0
    for key, chunks in runs:
        owners = known.get(key, {})
        counts = {replica: min(chunks, owners.get(replica, 0)) for replica in replicas}
        most = max(counts.values())
        if most:
            replicas, matched = {replica for replica in replicas if counts[replica] == most}, matched + CHUNK * most
        if most < chunks:
            break
    return matched, replicas


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class StackKvAware(StackSession):
    """The first replica that the cache controller names, if it has enough of the text; else as for sessions.

    Which one the controller names first depends on the order of its reports. Here it is the first by number.
    """

    kv_aware_threshold: int = 2000  # tokens that the replica may miss

    @property
    def reads_caches(self) -> bool:
        return True

    @property
    def learns(self) -> bool:
        return True

    def choices(self, request: Asked, fleet: Fleet) -> Sequence[int]:
        for replica in fleet.present:
            matched = fleet.cached(replica) // CONTROLLER_CHUNK * CONTROLLER_CHUNK
            if matched:
                if follows_cache(request.tokens, matched, self.kv_aware_threshold):
                    return [replica]
                break
        return super().choices(request, fleet)


def follows_cache(tokens: int, matched: int, threshold: int = 2000) -> bool:
    """Whether `kvaware` takes the first instance that the cache controller names."""
    return matched >= max(tokens - threshold, 0)
