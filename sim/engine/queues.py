"""Request queues: FIFO, sorted, or fixed slots. All have the same methods. A policy sees them as `core.Queue`."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, MutableSequence, Sequence
from heapq import heapify, heappop, heappush
from itertools import chain, islice
from operator import attrgetter
from typing import Any, Callable, Optional

from servesim.core import Request, ServerQueue

SortKey = Callable[[Request], Any]
MAX_BLOCK = 1000  # requests per block of a sorted queue


class RequestQueue(ServerQueue):
    """A queue with the methods that only the server uses."""

    __slots__ = ()

    def push(self, request: Request) -> None:
        """Add a request at its position."""
        raise NotImplementedError

    def push_front(self, request: Request) -> None:
        """Add a request before all others."""
        raise NotImplementedError

    def remove(self, request: Request) -> None:
        """Remove a request from any position."""
        raise NotImplementedError

    def position(self, request: Request) -> int:
        """Return the position of a request."""
        raise NotImplementedError

    def reorder(self, requests: Sequence[Request]) -> None:
        """Put the same requests into a new order."""
        raise NotImplementedError


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


class ItemsQueue(RequestQueue):
    """A queue whose requests are in one deque or list."""

    __slots__ = ("_items",)

    def __init__(self, items: MutableSequence[Request]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __bool__(self) -> bool:
        return bool(self._items)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._items)

    def __reversed__(self) -> Iterator[Request]:
        return reversed(self._items)

    def __getitem__(self, index: int, /) -> Request:
        return self._items[index]


class FifoQueue(ItemsQueue):
    """A first-in, first-out queue. Preempted requests may be pushed to the front."""

    __slots__ = ("_arrivals",)

    def __init__(self) -> None:
        super().__init__(deque())
        self._arrivals = ArrivalIndex()

    def push(self, request: Request) -> None:
        self._items.append(request)
        self._arrivals.add(request)

    def push_front(self, request: Request) -> None:
        self._items.insert(0, request)
        self._arrivals.add(request)

    def remove(self, request: Request) -> None:
        self._items.remove(request)

    def reorder(self, requests: Sequence[Request]) -> None:
        check_same_requests(requests, self._items)
        self._items = deque(requests)

    def oldest(self) -> float:
        return self._arrivals.oldest(self._items, self._items[0].status)


class BatchQueue(ItemsQueue):
    """A first-in, first-out queue of running requests: few, and they leave in any order.

    A list that is searched by identity: compiled, this is several times faster than `deque.remove`.
    """

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__([])

    def push(self, request: Request) -> None:
        self._items.append(request)

    def remove(self, request: Request) -> None:
        del self._items[self.position(request)]

    def position(self, request: Request) -> int:
        items = self._items
        assert isinstance(items, list)  # the compiler then uses its fast loop
        for index, other in enumerate(items):
            if other is request:
                return index
        raise ValueError(f"{request} is not in the queue")

    def reorder(self, requests: Sequence[Request]) -> None:
        check_same_requests(requests, self._items)
        self._items = list(requests)

    def oldest(self) -> float:
        return min([request.arrival for request in self._items])


class SortedQueue(RequestQueue):
    """A queue sorted by a key. Requests that were pushed or moved to the front come before the sorted ones.

    The sorted requests are in blocks of at most MAX_BLOCK requests, each with its keys. A push or a removal finds its
    block by bisection and moves only the requests of this block. So a million waiting requests are no problem.
    """

    __slots__ = ("_arrivals", "_blocks", "_front", "_keys", "_last_keys", "_size", "_sort_key")

    def __init__(self, sort_key: SortKey) -> None:
        self._arrivals = ArrivalIndex()
        self._sort_key = sort_key
        self._front: OrderedDict[Request, None] = OrderedDict()
        self._blocks: list[list[Request]] = []  # no block is empty
        self._keys: list[list[Any]] = []  # keys of the requests of each block
        self._last_keys: list[Any] = []  # last key of each block
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __bool__(self) -> bool:
        return self._size > 0

    def __iter__(self) -> Iterator[Request]:
        if len(self._blocks) == 1 and not self._front:  # the usual case
            return iter(self._blocks[0])
        return chain(self._front, chain.from_iterable(self._blocks))

    def __reversed__(self) -> Iterator[Request]:
        return chain(chain.from_iterable(map(reversed, reversed(self._blocks))), reversed(self._front))

    def __getitem__(self, index: int, /) -> Request:
        if index == 0 and self._blocks and not self._front:  # policies read the head in every step
            return self._blocks[0][0]
        for request in islice(self, index, None) if index >= 0 else islice(reversed(self), -index - 1, None):
            return request
        raise IndexError(index)

    def push(self, request: Request) -> None:
        key = self._sort_key(request)
        self._size += 1
        self._arrivals.add(request)
        if not self._blocks:
            self._insert_block(0, [request], [key])
            return
        number = bisect_right(self._last_keys, key)
        if number == len(self._blocks):  # the largest key so far
            number -= 1
            block, keys = self._blocks[number], self._keys[number]
            block.append(request)
            keys.append(key)
            self._last_keys[number] = key
        else:
            block, keys = self._blocks[number], self._keys[number]
            index = bisect_right(keys, key)
            block.insert(index, request)
            keys.insert(index, key)
        if len(block) > MAX_BLOCK:
            half = MAX_BLOCK // 2
            self._insert_block(number + 1, block[half:], keys[half:])
            del block[half:], keys[half:]
            self._last_keys[number] = keys[-1]

    def push_front(self, request: Request) -> None:
        self._front[request] = None
        self._front.move_to_end(request, last=False)
        self._size += 1
        self._arrivals.add(request)

    def move_to_front(self, request: Request) -> None:
        """Move a request to the front, behind the requests that are already there."""
        self.remove(request)
        self._front[request] = None
        self._size += 1

    def remove(self, request: Request) -> None:
        if request in self._front:
            del self._front[request]
            self._size -= 1
            return
        number, index = self._find(request)
        self._size -= 1
        block, keys = self._blocks[number], self._keys[number]
        del block[index], keys[index]
        if block:
            self._last_keys[number] = keys[-1]
        else:
            del self._blocks[number], self._keys[number], self._last_keys[number]

    def reorder(self, requests: Sequence[Request]) -> None:
        check_same_requests(requests, self)
        self._front = OrderedDict.fromkeys(requests)
        self._blocks, self._keys, self._last_keys = [], [], []

    def oldest(self) -> float:
        return self._arrivals.oldest(self, self[0].status)

    def _insert_block(self, number: int, block: list[Request], keys: list[Any]) -> None:
        self._blocks.insert(number, block)
        self._keys.insert(number, keys)
        self._last_keys.insert(number, keys[-1])

    def _find(self, request: Request) -> tuple[int, int]:
        """Return the block of a sorted request and its index there. Equal keys may be in several blocks."""
        if len(self._blocks) == 1 or (self._blocks and self._blocks[0][0] is request):  # a short queue, or its head
            return 0, self._blocks[0].index(request)
        key = self._sort_key(request)
        for number in range(bisect_left(self._last_keys, key), len(self._blocks)):
            keys = self._keys[number]
            first = bisect_left(keys, key)
            for index in range(first, bisect_right(keys, key, first)):
                if self._blocks[number][index] is request:
                    return number, index
            if keys[-1] > key:
                break
        for number, block in enumerate(self._blocks):  # the sort key of a user's policy has changed
            if request in block:
                return number, block.index(request)
        raise ValueError(f"{request} is not in the queue")


class SlotQueue(RequestQueue):
    """Numbered slots. A request takes the lowest free slot; the order of the queue is the order of the slots."""

    __slots__ = ("_free", "_size", "_slots")

    def __init__(self) -> None:
        self._slots: list[Optional[Request]] = []
        self._free: list[int] = []  # heap of the free slots
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __bool__(self) -> bool:
        return self._size > 0

    def __iter__(self) -> Iterator[Request]:
        return iter(self._in_order())

    def __reversed__(self) -> Iterator[Request]:
        return reversed(self._in_order())

    def __getitem__(self, index: int, /) -> Request:
        return self._in_order()[index]

    def _in_order(self) -> list[Request]:
        return [request for request in self._slots if request is not None]

    def push(self, request: Request) -> None:
        if self._free:
            slot = heappop(self._free)
            self._slots[slot] = request
        else:
            slot = len(self._slots)
            self._slots.append(request)
        request.slot = slot
        self._size += 1

    def push_front(self, request: Request) -> None:
        self.push(request)

    def remove(self, request: Request) -> None:
        slot = request.slot
        assert slot is not None and self._slots[slot] is request, f"{request} is not in the queue"
        self._slots[slot] = None
        heappush(self._free, slot)
        request.slot = None
        self._size -= 1

    def reorder(self, requests: Sequence[Request]) -> None:
        check_same_requests(requests, self)
        used = [slot for slot, request in enumerate(self._slots) if request is not None]
        for request, slot in zip(requests, used):
            self._slots[slot] = request
            request.slot = slot

    def oldest(self) -> float:
        return min([request.arrival for request in self])


def check_same_requests(requests: Sequence[Request], queue: Iterable[Request]) -> None:
    """Assert that a new order has the same requests."""
    present = set(queue)
    assert len(requests) == len(present) and set(requests) == present, "a new order must have the same requests"


def running_queues(order: str) -> tuple[RequestQueue, RequestQueue]:
    """Return the running queue and the prefilling queue of an engine with this order (EngineRules.running_order)."""
    if order == "slot":
        return SlotQueue(), SortedQueue(attrgetter("slot"))
    if order == "arrival":
        return SortedQueue(attrgetter("arrival")), SortedQueue(attrgetter("arrival"))
    return BatchQueue(), BatchQueue()
