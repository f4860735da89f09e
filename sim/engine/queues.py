"""Request queues: FIFO, sorted, or fixed slots. All have the same methods; a policy sees them as `core.Queue`."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from operator import attrgetter
from typing import Any, Callable, Optional, Protocol, Union

from servesim.core import Request, WaitingQueue

Rank = Callable[[Request], Any]


class RequestQueue(WaitingQueue, Protocol):
    """What the server does with a queue, besides what a policy sees."""

    def push(self, request: Request) -> None:
        """Add a request where it belongs."""

    def push_front(self, request: Request) -> None:
        """Add a request before all others."""

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it is."""

    def reorder(self, requests: Sequence[Request]) -> None:
        """Take the same requests in a new order."""


class ArrivalIndex:
    """The earliest arrival of a queue; kept up to date only from the first question on."""

    __slots__ = ("_heap",)

    def __init__(self) -> None:
        self._heap: Optional[list[tuple[float, int, Request]]] = None

    def add(self, request: Request) -> None:
        """Note a request that joins the queue."""
        if self._heap is not None:
            heappush(self._heap, (request.arrival, request.serial, request))

    def oldest(self, queue: Iterable[Request], place: str) -> float:
        """Return the earliest arrival in the queue, which is not empty."""
        if self._heap is None:
            self._heap = [(request.arrival, request.serial, request) for request in queue]
            heapify(self._heap)
        while self._heap[0][2].place != place:  # it left; if it comes back, it is added again
            heappop(self._heap)
        return self._heap[0][0]


class ListedQueue:
    """A queue kept as a list or deque of its requests."""

    __slots__ = ("_arrivals", "_items")
    _items: Union[deque[Request], list[Request]]

    def __init__(self) -> None:
        self._arrivals = ArrivalIndex()

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._items)

    def __reversed__(self) -> Iterator[Request]:
        return reversed(self._items)

    def __getitem__(self, index: int) -> Request:
        return self._items[index]

    def oldest(self) -> float:
        return self._arrivals.oldest(self._items, self._items[0].place)


class FifoQueue(ListedQueue):
    """A queue in order of arrival; preempted requests may be pushed to the front."""

    __slots__ = ()
    _items: deque[Request]

    def __init__(self) -> None:
        super().__init__()
        self._items = deque()

    def push(self, request: Request) -> None:
        self._items.append(request)
        self._arrivals.add(request)

    def push_front(self, request: Request) -> None:
        self._items.appendleft(request)
        self._arrivals.add(request)

    def remove(self, request: Request) -> None:
        self._items.remove(request)

    def reorder(self, requests: Sequence[Request]) -> None:
        check_same(requests, self._items)
        self._items = deque(requests)


class SortedQueue(ListedQueue):
    """A queue sorted by rank, equals in order of arrival; requests pushed to the front stand before the sorted part."""

    __slots__ = ("_fronts", "_keys", "_rank")
    _items: list[Request]

    def __init__(self, rank: Rank) -> None:
        super().__init__()
        self._rank = rank
        self._items = []
        self._keys: list[Any] = []  # one per item; None for those in front
        self._fronts = 0

    def push(self, request: Request) -> None:
        key = self._rank(request)
        index = bisect_right(self._keys, key, self._fronts)
        self._keys.insert(index, key)
        self._items.insert(index, request)
        self._arrivals.add(request)

    def push_front(self, request: Request) -> None:
        self._insert_front(0, request)
        self._arrivals.add(request)

    def move_to_front(self, request: Request) -> None:
        """Move a request behind those already in front, before all others."""
        self.remove(request)
        self._insert_front(self._fronts, request)

    def remove(self, request: Request) -> None:
        index = self._items.index(request)
        del self._items[index]
        del self._keys[index]
        if index < self._fronts:
            self._fronts -= 1

    def reorder(self, requests: Sequence[Request]) -> None:
        check_same(requests, self._items)
        self._items = list(requests)
        self._keys = [None] * len(requests)
        self._fronts = len(requests)

    def _insert_front(self, index: int, request: Request) -> None:
        self._items.insert(index, request)
        self._keys.insert(index, None)
        self._fronts += 1


class SlotQueue:
    """Numbered slots: a request takes the lowest free one, and they are listed in the order of their numbers."""

    __slots__ = ("_free", "_items")

    def __init__(self) -> None:
        self._items: dict[Request, None] = {}
        self._free: list[int] = []  # free numbers below the highest ever taken

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._in_order())

    def __reversed__(self) -> Iterator[Request]:
        return reversed(self._in_order())

    def __getitem__(self, index: int) -> Request:
        return self._in_order()[index]

    def _in_order(self) -> list[Request]:
        return sorted(self._items, key=attrgetter("slot"))

    def push(self, request: Request) -> None:
        request.slot = heappop(self._free) if self._free else len(self._items)
        self._items[request] = None

    def push_front(self, request: Request) -> None:
        self.push(request)

    def remove(self, request: Request) -> None:
        del self._items[request]
        assert request.slot is not None
        heappush(self._free, request.slot)
        request.slot = None

    def reorder(self, requests: Sequence[Request]) -> None:
        check_same(requests, self._items)
        for request, slot in zip(requests, [other.slot for other in self]):
            request.slot = slot

    def oldest(self) -> float:
        return min(request.arrival for request in self._items)


def check_same(requests: Sequence[Request], queue: Iterable[Request]) -> None:
    """Make sure that a new order holds the same requests."""
    present = set(queue)
    assert len(requests) == len(present) and set(requests) == present, "a new order holds the same requests"


def running_queues(order: str) -> tuple[RequestQueue, RequestQueue]:
    """Return the running queue of an engine that keeps its batch in this order, and the queue of its prefills."""
    if order == "slot":
        return SlotQueue(), SortedQueue(attrgetter("slot"))
    if order == "arrival":
        return SortedQueue(attrgetter("arrival")), SortedQueue(attrgetter("arrival"))
    return FifoQueue(), FifoQueue()
