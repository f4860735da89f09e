"""Queues in a stated order: first come first served, by rank, or by numbered places. What is asked most runs in C."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import Any, Callable, Optional, Union

from servesim.core import Request

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

    push: Callable[[Request], None]  # adds at the end

    def __init__(self) -> None:
        super().__init__()
        self._ages = Ages()
        self.push = self.append

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
        self.push = self._push_aged  # from now on somebody wants to know
        return self._ages.oldest(self, self[0].place)

    def _push_aged(self, request: Request) -> None:
        self.append(request)
        self._ages.add(request)


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


class Slotted(dict[Request, None]):
    """Numbered places: whoever comes takes the lowest free one, and they stand in the order of their numbers."""

    def __init__(self) -> None:
        super().__init__()
        self._freed: list[int] = []  # numbers below the highest ever taken

    def __iter__(self) -> Iterator[Request]:
        return iter(self._in_order())

    def __reversed__(self) -> Iterator[Request]:
        return reversed(self._in_order())

    def __getitem__(self, place: Any) -> Any:
        return self._in_order()[place]

    def _in_order(self) -> list[Request]:
        return sorted(self.keys(), key=lambda request: request.slot or 0)

    def push(self, request: Request) -> None:
        """Take the lowest free place."""
        request.slot = heappop(self._freed) if self._freed else len(self)
        self[request] = None

    def remove(self, request: Request) -> None:
        """Free a place."""
        del self[request]
        assert request.slot is not None
        heappush(self._freed, request.slot)
        request.slot = None

    def reorder(self, requests: Sequence[Request]) -> None:
        """Give the same places out in a new order."""
        assert len(requests) == len(self) and set(requests) == set(self), "a new order holds the same requests"
        for request, slot in zip(requests, [other.slot for other in self]):
            request.slot = slot


Line = Union[
    Fifo, Ranked
]  # as a policy sees a queue: to be counted, indexed and gone through, which Slotted allows too


def line(rank: Optional[Rank] = None) -> Line:
    """Return an empty queue, sorted if there is a rank."""
    return Fifo() if rank is None else Ranked(rank)
