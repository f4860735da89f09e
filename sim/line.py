"""A queue in a stated order: first come first served, or by rank; its head is served in O(1)."""

from __future__ import annotations

from bisect import bisect_right
from heapq import heapify, heappop, heappush
from typing import Any, Callable, Iterator, Optional, Sequence, Union, overload

from .core import Request

Rank = Callable[[Request], Any]


class Line(Sequence[Request]):
    """Requests in order. With a rank it stays sorted, equals as they came; the front stands before the sorted part."""

    __slots__ = ("_ages", "_fronts", "_head", "_items", "_keys", "rank")

    def __init__(self, rank: Optional[Rank] = None) -> None:
        self.rank = rank
        self._items: list[Request] = []
        self._keys: list[Any] = []  # beside the items, when there is a rank
        self._head = 0  # items before it are gone; they are cut off in bulk
        self._fronts = 0
        self._ages: Optional[list[tuple[float, int, Request]]] = None  # by arrival, once somebody asks

    def __len__(self) -> int:
        return len(self._items) - self._head

    def __iter__(self) -> Iterator[Request]:
        if not self._head:
            return iter(self._items)
        return (self._items[i] for i in range(self._head, len(self._items)))

    @overload
    def __getitem__(self, index: int) -> Request: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Request]: ...
    def __getitem__(self, index: Union[int, slice]) -> Union[Request, Sequence[Request]]:
        if isinstance(index, slice):
            return self._items[self._head :][index]
        return self._items[index + self._head if index >= 0 else index]

    def push(self, request: Request) -> None:
        """Add at the end, or where its rank belongs."""
        self._age(request)
        if self.rank is None:
            self._items.append(request)
        else:
            self._insert(request, (1, self.rank(request)))

    def push_front(self, request: Request) -> None:
        """Add at the very front."""
        self._age(request)
        self._fronts += 1
        if self.rank is not None:
            self._insert(request, (0, -self._fronts))
        elif self._head:
            self._head -= 1
            self._items[self._head] = request
        else:
            self._items.insert(0, request)

    def promote(self, request: Request) -> None:
        """Move behind those already promoted, before everybody else."""
        self.remove(request)
        self._insert(request, (0, 1))

    def remove(self, request: Request) -> None:
        """Take out one request, wherever it stands."""
        if self._items[self._head] is request:
            self._head += 1
            if self._head > 64 and self._head * 2 > len(self._items):
                del self._items[: self._head]
                del self._keys[: self._head]
                self._head = 0
            return
        place = self._items.index(request, self._head)
        del self._items[place]
        if self.rank is not None:
            del self._keys[place]

    def reorder(self, requests: Sequence[Request]) -> None:
        """Take the same requests in a new order, which a rank may not contradict later."""
        assert len(requests) == len(self) and set(requests) == set(self), "a new order holds the same requests"
        self._items = list(requests)
        self._head = 0
        if self.rank is not None:
            self._keys = [(0, index) for index in range(-len(self._items), 0)]

    def clear(self) -> None:
        """Drop everything."""
        self._items, self._keys, self._head = [], [], 0

    def oldest(self) -> float:
        """Return the earliest arrival among those here."""
        if self._ages is None:
            self._ages = [(request.arrival, request.serial, request) for request in self]
            heapify(self._ages)
        here = self[0].place
        while self._ages[0][2].place != here:  # it left; should it come back, it is aged anew
            heappop(self._ages)
        return self._ages[0][0]

    def _age(self, request: Request) -> None:
        if self._ages is not None:
            heappush(self._ages, (request.arrival, request.serial, request))

    def _insert(self, request: Request, key: Any) -> None:
        place = bisect_right(self._keys, key, self._head)
        self._keys.insert(place, key)
        self._items.insert(place, request)


