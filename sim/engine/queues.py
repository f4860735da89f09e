"""Request queues: FIFO, sorted, or fixed slots. All have the same methods. A policy sees them as `core.Queue`."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from operator import attrgetter
from typing import Any, Callable, Optional, Protocol, Union

from servesim.core import Request, WaitingQueue

SortKey = Callable[[Request], Any]


class RequestQueue(WaitingQueue, Protocol):
    """The methods of a queue that only the server uses."""

    def push(self, request: Request) -> None:
        """Add a request at its position."""

    def push_front(self, request: Request) -> None:
        """Add a request before all others."""

    def remove(self, request: Request) -> None:
        """Remove a request from any position."""

    def reorder(self, requests: Sequence[Request]) -> None:
        """Put the same requests into a new order."""


class ArrivalIndex:
    """The earliest arrival time of a queue. The heap is built at the first call of `oldest`."""

    __slots__ = ("_heap",)

    def __init__(self) -> None:
        self._heap: Optional[list[tuple[float, int, Request]]] = None

    def add(self, request: Request) -> None:
        """Add a request that joins the queue."""
        if self._heap is not None:
            heappush(self._heap, (request.arrival, request.serial, request))

    def oldest(self, queue: Iterable[Request], status: str) -> float:
        """Return the earliest arrival time. The queue must not be empty, and `status` is that of its requests."""
        if self._heap is None:
            self._heap = [(request.arrival, request.serial, request) for request in queue]
            heapify(self._heap)
        while self._heap[0][2].status != status:  # it left the queue; if it returns, `add` is called again
            heappop(self._heap)
        return self._heap[0][0]


class ListQueue:
    """A queue that keeps its requests in a list or deque."""

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
        return self._arrivals.oldest(self._items, self._items[0].status)


class FifoQueue(ListQueue):
    """A first-in, first-out queue. Preempted requests may be pushed to the front."""

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
        check_same_requests(requests, self._items)
        self._items = deque(requests)


class SortedQueue(ListQueue):
    """A queue sorted by a key. Requests that were pushed or moved to the front come before the sorted ones."""

    __slots__ = ("_front_size", "_keys", "_sort_key")
    _items: list[Request]

    def __init__(self, sort_key: SortKey) -> None:
        super().__init__()
        self._sort_key = sort_key
        self._items = []
        self._keys: list[Any] = []  # one per item; None for the items at the front
        self._front_size = 0

    def push(self, request: Request) -> None:
        key = self._sort_key(request)
        index = bisect_right(self._keys, key, self._front_size)
        self._keys.insert(index, key)
        self._items.insert(index, request)
        self._arrivals.add(request)

    def push_front(self, request: Request) -> None:
        self._insert_front(0, request)
        self._arrivals.add(request)

    def move_to_front(self, request: Request) -> None:
        """Move a request to the front, behind the requests that are already there."""
        self.remove(request)
        self._insert_front(self._front_size, request)

    def remove(self, request: Request) -> None:
        index = self._items.index(request)
        del self._items[index]
        del self._keys[index]
        if index < self._front_size:
            self._front_size -= 1

    def reorder(self, requests: Sequence[Request]) -> None:
        check_same_requests(requests, self._items)
        self._items = list(requests)
        self._keys = [None] * len(requests)
        self._front_size = len(requests)

    def _insert_front(self, index: int, request: Request) -> None:
        self._items.insert(index, request)
        self._keys.insert(index, None)
        self._front_size += 1


class SlotQueue:
    """Numbered slots. A request takes the lowest free slot; the order of the queue is the order of the slots."""

    __slots__ = ("_free", "_items")

    def __init__(self) -> None:
        self._items: dict[Request, None] = {}
        self._free: list[int] = []  # free slots below the highest slot that was ever used

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
        check_same_requests(requests, self._items)
        for request, slot in zip(requests, [other.slot for other in self]):
            request.slot = slot

    def oldest(self) -> float:
        return min(request.arrival for request in self._items)


def check_same_requests(requests: Sequence[Request], queue: Iterable[Request]) -> None:
    """Assert that a new order has the same requests."""
    present = set(queue)
    assert len(requests) == len(present) and set(requests) == present, "a new order must have the same requests"


def running_queues(order: str) -> tuple[RequestQueue, RequestQueue]:
    """Return the running queue and the prefilling queue of an engine with this order (Traits.running_order)."""
    if order == "slot":
        return SlotQueue(), SortedQueue(attrgetter("slot"))
    if order == "arrival":
        return SortedQueue(attrgetter("arrival")), SortedQueue(attrgetter("arrival"))
    return FifoQueue(), FifoQueue()
