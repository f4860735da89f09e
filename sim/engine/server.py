"""The server: waiting, running and swapped queues over one block pool. The only code that moves a request.

How it works. A server holds the queues, the block pool and the cohort, and has one method for every move of a request.
plans.py carries out a plan with them, results.py records what the model call produced. The server never decides and
never waits.

Why it is exact. Blocks are taken when a step begins and freed when a request leaves, as block managers of real engines
do, so a plan that takes more than is free fails at once. `check` verifies the counts: free and held blocks add up to
the pool, every request is in one queue, and the cohort's sums equal those of its members.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Any, Optional

from servesim.core import (
    FOREVER,
    BlockPool,
    Eviction,
    Policy,
    Rejection,
    Request,
    View,
    traits_of,
)

from .admission import Limits
from .cohort import Cohort
from .queues import FifoQueue, RequestQueue, SortedQueue, running_queues
from .step import Gaps, Step


class Server:
    """The queues, the memory, and the rules of moving between them."""

    def __init__(
        self,
        policy: Policy,
        blocks: int,
        block_size: int,
        host_blocks: int = 0,
        max_model_len: Optional[int] = None,
        max_generate_length: Optional[int] = None,
        refuses: Optional[bool] = None,
    ) -> None:
        self.policy = policy
        self.traits = traits = traits_of(policy)
        self.pool = BlockPool(blocks - traits.reserved_blocks if policy.paged else FOREVER, block_size, host_blocks)
        self.cohort = Cohort(block_size)
        self.waiting: RequestQueue = SortedQueue(self._rank) if policy.ranked else FifoQueue()
        self.running, self.prefilling = running_queues(traits.running_order)
        self.swapped = FifoQueue()
        self.finished = FifoQueue()  # done, blocks not yet released
        if not policy.paged:
            max_generate_length = None  # llm-serving looks at it only with PagedAttention
        self.limits = Limits(self.pool, max_model_len, max_generate_length)
        self.refuses = traits.rejects_oversized if refuses is None else refuses
        self.view = View(
            self.waiting, self.running, self.swapped, self.prefilling, self.finished, self.pool, self.cohort,
            max_model_len,
        )  # fmt: skip
        self.view.memory = policy.begin()
        self.gaps = Gaps()
        self.done: list[Request] = []  # in the order they ended
        self.written = 0  # tokens generated, over all requests: what counts as progress
        self.computed = 0  # prompt tokens run, those run again included
        self.recording = False  # whether steps note who was admitted and evicted, for observers
        self.failing = False  # whether a call may fail because of some request, past or present
        # waiting requests by arrival, where max_wait can change the order of the queue
        patient = policy.max_wait is None or not policy.ranked
        self._overdue: Optional[list[tuple[float, int, Request]]] = None if patient else []

    def _rank(self, request: Request) -> Any:
        return self.policy.rank(request), request.arrival, request.serial

    def submit(self, request: Request, now: float, visible: float) -> None:
        """Put an arrival into waiting, or refuse it if it could never run; it has queued since it was visible."""
        request.visible = request.since = visible
        if request.prompt + request.end > self.limits.longest:
            request.end = self.limits.last_token(request)
        if self.refuses and (reason := self.limits.misfit(request)):
            self._turn_away(request, now, "refused", reason)
            return
        if request.fails is not None:
            self.failing = True
        self._wait(request)

    def _wait(self, request: Request) -> None:
        request.place = "waiting"
        self.waiting.push(request)
        if self._overdue is not None:
            heappush(self._overdue, (request.arrival, request.serial, request))

    def promote(self, now: float) -> None:
        """Move to the front of a sorted queue who has waited for more than the policy's max_wait."""
        due = self.next_promotion()
        while due is not None and due <= now:
            assert self._overdue is not None and isinstance(self.waiting, SortedQueue)
            self.waiting.move_to_front(heappop(self._overdue)[2])
            due = self.next_promotion()

    def next_promotion(self) -> Optional[float]:
        """Return when the next waiting request will have waited for max_wait."""
        overdue, patience = self._overdue, self.policy.max_wait
        if overdue is None or patience is None:
            return None
        while overdue and overdue[0][2].place != "waiting":
            heappop(overdue)
        return overdue[0][0] + patience if overdue else None

    def _take(self, blocks: int) -> None:
        self.pool.free -= blocks
        assert self.pool.free >= 0, "a plan may not take more blocks than are free"

    def admit(self, request: Request, step: Step, prefills_on: bool) -> None:
        """Give a place in running; who will still be prefilling after this step is listed among those."""
        (self.waiting if request.place == "waiting" else self.swapped).remove(request)
        request.place = "running"
        self.running.push(request)
        if prefills_on:
            self.enlist(request)
        if self.recording:
            step.admitted.append((request, request.slot))

    def enlist(self, request: Request) -> None:
        self.prefilling.push(request)
        request._listed = True

    def unlist(self, request: Request) -> None:
        self.prefilling.remove(request)
        request._listed = False

    def evict(self, eviction: Eviction, now: float) -> int:
        """Take a request out of running, or the blocks of one that was kept; return how many blocks were copied."""
        request, how, to = eviction
        if request.place == "running":
            self._step_out(request)
        else:
            self.swapped.remove(request)
        if request._cached:  # it was still queued otherwise, and goes on being so
            request.since = now
        if how == "keep":
            self._requeue(request, "swapped")
            return 0
        if how == "swap":
            request.host = request._held
            self.pool.host_free -= request.host
            assert self.pool.host_free >= 0, "a plan may not swap out more than the host holds"
        else:
            request._cached = 0
            request.complete = False
        self.pool.free += request._held
        request._held = 0
        self._requeue(request, to)
        return request.host

    def _step_out(self, request: Request) -> None:
        request.complete = request._cohort is not None
        if request._cohort is not None:
            self.cohort.leave(request)
        else:
            self.unlist(request)
        self.running.remove(request)
        request.evictions += 1

    def _requeue(self, request: Request, to: str) -> None:
        if to == "swapped":
            request.place = "swapped"
            self.swapped.push(request)
        elif to == "front":
            request.place = "waiting"
            if self.policy.ranked:  # a sorted queue has no front but its first rank
                self._wait(request)
            else:
                self.waiting.push_front(request)
        else:
            self._wait(request)

    def swap_in(self, request: Request, now: float) -> int:
        """Let a request back into running, its blocks copied from the host if they are there; return how many."""
        copied = self.fetch(request, now)
        self.swapped.remove(request)
        request.place = "running"
        self.running.push(request)
        if request.complete:
            self.cohort.join(request)
        else:
            self.enlist(request)
        return copied

    def fetch(self, request: Request, now: float) -> int:
        """Copy a request's blocks back from the host; return how many."""
        copied = request.host
        if copied:
            self._take(copied)
            self.pool.host_free += copied
            request._held, request.host = copied, 0
            request.swapped += now - request.since
            request.since = now
        return copied

    def reject(self, rejection: Rejection, now: float) -> None:
        request = rejection.request
        if request.place == "running":
            if request._cohort is not None:
                self.cohort.leave(request)
            else:
                self.unlist(request)
            self.running.remove(request)
        else:
            (self.waiting if request.place == "waiting" else self.swapped).remove(request)
        self.pool.free += request._held
        self.pool.host_free += request.host
        request._held = request.host = 0
        self._turn_away(request, now, rejection.outcome, rejection.reason)

    def _turn_away(self, request: Request, now: float, outcome: str, reason: str) -> None:
        request.place = "done"
        request.outcome, request.reason = outcome, reason
        request.finish = request.seen = now
        self.done.append(request)

    def idle(self) -> bool:
        """Whether no request is here."""
        return not (self.waiting or self.running or self.swapped)

    def present(self) -> list[Request]:
        """Return all requests that are here."""
        return [*self.running, *self.swapped, *self.waiting]

    def check(self) -> None:
        """Verify the counts of a server between two steps; an assertion names what is wrong."""
        pool, cohort = self.pool, self.cohort
        held = sum(r.blocks for r in self.running) + sum(r._held for r in (*self.finished, *self.swapped))
        assert pool.free + held == pool.total, f"{pool.free} free + {held} held != {pool.total} blocks"
        hosted = sum(request.host for request in self.swapped)
        assert pool.host_free + hosted == pool.host_total, "host blocks lost"
        decoding = [request for request in self.running if request.decodes]
        assert cohort.size == len(decoding) and cohort.context == sum(r.cached for r in decoding), "cohort books"
        assert cohort.need() == sum(pool.blocks(r.cached + 1) > r.blocks for r in decoding), "block phases"
        assert list(self.prefilling) == [request for request in self.running if not request.decodes], "prefilling"
        for place, queue in (("waiting", self.waiting), ("running", self.running), ("swapped", self.swapped)):
            assert all(request.place == place for request in queue), f"a stranger in {place}"
        for request in self.waiting:
            assert request.blocks == request.cached == request.host == 0, f"{request} waits with memory"
        for request in decoding:
            assert request.pending == 1 and request.blocks >= pool.blocks(request.cached), f"{request}"
        assert len(set(self.present())) == len(self.waiting) + len(self.running) + len(self.swapped), "in two queues"
