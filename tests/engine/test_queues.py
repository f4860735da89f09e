"""The sorted queue has the order of a plain list, after any sequence of operations and with many requests."""

from __future__ import annotations

import random
from operator import attrgetter

import pytest
from servesim.core import Request
from servesim.engine import queues
from servesim.engine.queues import SortedQueue


class ListModel:
    """The same queue as one list, with the requests at the front and the sorted ones behind them."""

    def __init__(self) -> None:
        self.front: list[Request] = []
        self.sorted: list[Request] = []

    def push(self, request: Request) -> None:
        index = sum(other.priority <= request.priority for other in self.sorted)  # behind equal keys
        self.sorted.insert(index, request)

    def remove(self, request: Request) -> None:
        (self.front if request in self.front else self.sorted).remove(request)

    def items(self) -> list[Request]:
        return self.front + self.sorted


@pytest.mark.parametrize("seed", range(6))
def test_a_sorted_queue_behaves_as_a_list(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "MAX_BLOCK", 4)  # many blocks
    rng = random.Random(seed)
    queue, model = SortedQueue(attrgetter("priority")), ListModel()
    for id in range(400):
        items = model.items()
        action = rng.choice(["push", "push", "push", "front", "remove", "remove head", "move", "reorder"])
        if action in ("push", "front") or not items:
            request = Request(id, rng.random(), 1, 1, priority=rng.randint(0, 9))
            request.status = "waiting"
            if action == "front":
                queue.push_front(request)
                model.front.insert(0, request)
            else:
                queue.push(request)
                model.push(request)
        elif action == "reorder":
            if rng.random() < 0.2:
                rng.shuffle(items)
                queue.reorder(items)
                model.front, model.sorted = items, []
        else:
            request = items[0] if action == "remove head" else rng.choice(items)
            if action == "move":
                queue.move_to_front(request)
            else:
                queue.remove(request)
                request.status = "running"
            model.remove(request)
            model.front += [request] if action == "move" else []
        items = model.items()
        assert list(queue) == items
        assert list(reversed(queue)) == items[::-1]
        assert len(queue) == len(items)
        if items:
            index = rng.randrange(-len(items), len(items))
            assert queue[index] is items[index]
            assert queue.oldest() == min(request.arrival for request in items)
    with pytest.raises(IndexError):
        queue[len(queue)]


@pytest.mark.parametrize("size", [2, 1000])
def test_a_request_is_found_although_its_sort_key_has_changed(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "MAX_BLOCK", size)
    queue = SortedQueue(attrgetter("priority"))
    requests = [Request(id, 0.0, 1, 1, priority=id) for id in range(5)]
    for request in requests:
        queue.push(request)
    requests[3].priority = -7
    queue.remove(requests[3])
    assert [request.id for request in queue] == [0, 1, 2, 4]
    with pytest.raises(ValueError, match="not in"):
        queue.remove(requests[3])


def test_an_operation_on_a_sorted_queue_moves_few_requests() -> None:
    """One list moved half of all requests per operation, so a million of them at once took hours."""
    rng = random.Random(1)
    requests = [Request(id, 0.0, 1, 1, priority=rng.randint(0, 9999)) for id in range(20_000)]
    queue = SortedQueue(attrgetter("priority"))
    for request in requests:
        queue.push(request)
    assert [request.id for request in queue] == [r.id for r in sorted(requests, key=attrgetter("priority", "id"))]
    sizes = list(map(len, queue._blocks))
    assert max(sizes) <= queues.MAX_BLOCK and len(sizes) < 3 * len(requests) / queues.MAX_BLOCK
    for request in rng.sample(requests, len(requests)):
        queue.remove(request)
    assert len(queue) == 0 and not queue._blocks
