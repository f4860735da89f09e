"""Queues in a stated order: first come first served, or by rank. What policies ask most is answered in C."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import Any, Callable, Optional, Union

from .core import Request

Rank = Callable[[Request], Any]


class Ages:
    """Who of a queue came first, kept from the first time somebody asks."""

    __slots__ = ("_heap",)

    def __init__(self) -> None:
        self._heap: Optional[list[tuple[float, int, Request]]] = None

    def add(self, request: Request) -> None:
        """Note somebody who joins the queue."""
        if self._heap is not None:
            heappush(self._heap, (request.arrival, request.serial, request))

    def oldest(self, queue: Iterable[Request], place: str) -> float:
        """Return the earliest arrival in the queue, which is not empty."""
        if self._heap is None:
            self._heap = [(request.arrival, request.serial, request) for request in queue]
            heapify(self._heap)
        while self._heap[0][2].place != place:  # it left; should it come back, it is added anew
            heappop(self._heap)
        return self._heap[0][0]


class Fifo(deque[Request]):
    """A queue in the order people came, or were pushed in front."""

    def __init__(self) -> None:
        super().__init__()
        self._ages = Ages()

    def push(self, request: Request) -> None:
        """Add at the end."""
        self.append(request)
        if self._ages._heap is not None:
            self._ages.add(request)

    def push_front(self, request: Request) -> None:
        """Add at the very front."""
        self.appendleft(request)
        self._ages.add(request)

    def reorder(self, requests: Sequence[Request]) -> None:
        """Take the same requests in a new order."""
        assert len(requests) == len(self) and set(requests) == set(self), "a new order holds the same requests"
        self.clear()
        self.extend(requests)

    def oldest(self) -> float:
        """Return the earliest arrival among those here."""
        return self._ages.oldest(self, self[0].place)


class Ranked(list[Request]):
    """A queue sorted by rank, equals as they came; what is pushed to the front stands before the sorted part."""

    def __init__(self, rank: Rank) -> None:
        super().__init__()
        self.rank = rank
        self._keys: list[Any] = []  # beside the items; None for those in front
        self._fronts = 0
        self._ages = Ages()

    def push(self, request: Request) -> None:
        """Add where its rank belongs."""
        key = self.rank(request)
        place = bisect_right(self._keys, key, self._fronts)
        self._keys.insert(place, key)
        self.insert(place, request)
        if self._ages._heap is not None:
            self._ages.add(request)

    def push_front(self, request: Request) -> None:
        """Add at the very front."""
        self._front(0, request)
        self._ages.add(request)

    def promote(self, request: Request) -> None:
        """Move behind those already in front, before everybody else."""
        self.remove(request)
        self._front(self._fronts, request)

    def remove(self, request: Request) -> None:
        """Take out one request, wherever it stands."""
        place = self.index(request)
        del self[place]
        del self._keys[place]
        if place < self._fronts:
            self._fronts -= 1

    def reorder(self, requests: Sequence[Request]) -> None:
        """Take the same requests in a new order, in front of whom comes later."""
        assert len(requests) == len(self) and set(requests) == set(self), "a new order holds the same requests"
        self[:] = requests
        self._keys = [None] * len(self)
        self._fronts = len(self)

    def oldest(self) -> float:
        """Return the earliest arrival among those here."""
        return self._ages.oldest(self, self[0].place)

    def _front(self, place: int, request: Request) -> None:
        self.insert(place, request)
        self._keys.insert(place, None)
        self._fronts += 1


Line = Union[Fifo, Ranked]


def line(rank: Optional[Rank] = None) -> Line:
    """Return an empty queue, sorted if there is a rank."""
    return Fifo() if rank is None else Ranked(rank)
