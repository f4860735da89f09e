"""The state of a server: waiting, running and swapped queues over one block pool, and the moves of a request.

How it works. There is one method per move: admit, preempt, swap in and reject a request, free its blocks. plans.py
carries out a plan with them, and model_call.py the results of a model call. It decides nothing and never waits.

Why it is exact. Blocks are allocated when a step starts and freed when a request finishes or is preempted, as in real
block managers. A plan that needs more blocks than are free fails at once. `check` verifies these rules: free and used
blocks add up to the pool, on the device and on the host. Every request is in one queue. The sums of the cohort and the
stored tokens equal those of the requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Final, Optional

from servesim.core import BlockPool, Policy, Preemption, Rejection, Request, View

from .cohort import Cohort
from .draft_cohort import DraftCohort
from .groups import group_of, stored_tokens
from .kv_cache import KvCache
from .kv_use import KvUse
from .length_limits import Limits
from .queues import FifoQueue, RequestQueue, SortedQueue, running_queues
from .step import Step, TokenGaps
from .work_totals import WorkTotals

# The queues that a preempted request may go to, by mode; one that keeps its tokens cannot wait for its first chunk.
PREEMPTION_QUEUES: Final = {
    "recompute": ("front", "back", "sorted", "swapped"), "swap": ("swapped",), "keep": ("swapped",)
}  # fmt: skip


class ServerState:
    """The queues, the block pool, and the operations on them."""

    def __init__(
        self, policy: Policy, pool: BlockPool, waiting: RequestQueue, running_order: str, max_model_len: Optional[int],
        cohort: Cohort,
    ) -> None:  # fmt: skip
        self.policy = policy
        self.pool = pool
        self.cohort = cohort
        self.draft_cohort = cohort if isinstance(cohort, DraftCohort) else None
        drafts = None if self.draft_cohort is None else self.draft_cohort.drafts
        self.drafts = drafts if drafts is not None and drafts.tokens else None  # speculative decoding
        self.waiting = waiting
        self.running, self.prefilling = running_queues(running_order)
        self.swapped = FifoQueue()
        self.finished = FifoQueue()  # finished requests that still hold blocks
        # Windows of those of the model, if it has several; their rules know them.
        self.kv_cache_groups: Sequence[Optional[int]] = ()
        self.prefix_cache: Optional[KvCache] = None
        self.limits = Limits(pool, policy, max_model_len)
        self.view = View(
            self.waiting, self.running, self.swapped, self.prefilling, self.finished, self.pool, self.cohort,
            max_model_len,
        )  # fmt: skip
        self.view.state = policy.initial_state()
        self.token_gaps = TokenGaps()
        self.work = WorkTotals(self.cohort)
        self.kv_use = KvUse()
        self.loading: list[Request] = []  # they hold blocks for KV that comes from another server
        # in a prefill pool: requests whose blocks stay after their end, and their unknown tokens
        self.kept: Optional[dict[Request, int]] = None
        self.unreleased: list[tuple[Request, int]] = []  # preempted requests with blocks, and their known tokens
        self.done: Optional[list[Request]] = None  # a list that gets the requests as they finish
        self.tokens_generated = 0  # over all requests
        self.flight: Optional[Step] = None  # the newest step in flight; Step.before is the one before it
        self.overlaps = False  # a step is decided before the last one has returned
        self.foresees_ends = False  # see EngineRules
        self._admissions = 0
        self.record_moves = False  # whether steps list admitted and preempted requests, for observers
        self.may_fail = False  # whether a request with `fails_at_token` has arrived
        # heap of waiting requests by arrival; only if max_wait can change the order of the queue
        promotes = policy.max_wait is not None and policy.is_sorted
        self._by_arrival: Optional[list[tuple[float, int, Request]]] = [] if promotes else None

    def add_to_waiting(self, request: Request) -> None:
        request.status = "waiting"
        self.waiting.push(request)
        if self._by_arrival is not None:
            heappush(self._by_arrival, (request.arrival, request.serial, request))

    def promote(self, now: float) -> None:
        """Move requests that have waited for `max_wait` to the front of a sorted queue."""
        due = self.next_promotion()
        while due is not None and due <= now:
            assert self._by_arrival is not None and isinstance(self.waiting, SortedQueue)
            self.waiting.move_to_front(heappop(self._by_arrival)[2])
            due = self.next_promotion()

    def next_promotion(self) -> Optional[float]:
        """Return the time at which the next waiting request will have waited for `max_wait`, or None."""
        heap, max_wait = self._by_arrival, self.policy.max_wait
        if heap is None or max_wait is None:
            return None
        while heap and heap[0][2].status != "waiting":
            heappop(heap)
        return heap[0][0] + max_wait if heap else None

    def allocate(self, blocks: int) -> None:
        self.pool.free -= blocks
        assert self.pool.free >= 0, f"the plan needs {-self.pool.free} more blocks than are free"

    def admit(self, request: Request, step: Step, prefilling: bool) -> None:
        """Move a request to running, and also to the prefilling queue if its prompt stays incomplete."""
        (self.waiting if request.status == "waiting" else self.swapped).remove(request)
        self.run(request)
        if prefilling:
            self.add_to_prefilling(request)
        if self.record_moves:
            step.admitted = [*step.admitted, (request, request.slot)]

    def run(self, request: Request) -> None:
        """Put a request into the running queue."""
        request.status = "running"
        self.running.push(request)
        self._admissions += 1
        request._admission = self._admissions

    def reorder_running(self, requests: Sequence[Request]) -> None:
        """Put the running requests into a new order."""
        self.running.reorder(requests)
        self.prefilling.reorder([request for request in requests if request._in_prefilling])
        for request in requests:
            self._admissions += 1
            request._admission = self._admissions

    def add_to_prefilling(self, request: Request) -> None:
        self.prefilling.push(request)
        request._in_prefilling = True

    def remove_from_prefilling(self, request: Request) -> None:
        self.prefilling.remove(request)
        request._in_prefilling = False

    def preempt(
        self, preemption: Preemption, now: float, drops_token: bool = False, tokens: int = 0, frees_last: bool = False,
        blocks: int = 0,
    ) -> int:  # fmt: skip
        """Preempt a running request, or one kept on the device. Return the number of blocks copied to the host.

        `drops_token`: it loses its token in flight, and computes it again. With a prefix cache, `tokens`: those that
        this step had given it, which the cache has; `frees_last`: its blocks are free after the plan, not before.
        """
        request, mode, queue = preemption.request, preemption.mode, preemption.queue
        assert queue in PREEMPTION_QUEUES.get(mode, ()), f"expected mode and queue of Preemption, got {mode}, {queue}"
        unknown = request.in_flight if tokens else self.cohort.unknown_tokens(request)
        if drops_token:
            self.drop_token_in_flight(request)
        if request.status == "running":
            self._leave_running(request, drops_token)
        else:
            self.swapped.remove(request)
        if request._cached:  # otherwise it has not run yet, and its queueing time continues
            flight = self.newest_step_of(request)
            request.state_since = now if flight is None else flight.end
        if mode == "keep":
            self._requeue(request, "swapped")
            return 0
        if mode == "swap":
            request.host_blocks = request._blocks
            self.pool.host_free -= request.host_blocks
            assert self.pool.host_free >= 0, f"the swap-out needs {-self.pool.host_free} more host blocks"
        else:
            request.prompt_done = False
        if self.prefix_cache is None:
            self.free_blocks(request)
        else:
            assert mode == "recompute", f"expected recompute with a prefix cache, got {mode}"
            self._release_cached(request, tokens, unknown, frees_last, blocks)
        if mode == "recompute":
            request._cached = 0
        self._requeue(request, queue)
        return request.host_blocks

    def free_blocks(self, request: Request, unknown: int = 0) -> None:
        """Free the device blocks of a request that is not in the cohort and will not return, unless they are kept.

        `unknown`: tokens at the end that a prefix cache does not know.
        """
        if self.kept is not None and request.outcome == "finished" and request in self.kept:
            self.kept[request] = unknown
            return
        if self.prefix_cache is not None:
            request._cached -= unknown
            self.kv_use.tokens -= unknown + self.prefix_cache.release(request, request._cached, may_return=False)
        elif request.sampling is not None:
            if request._blocks:
                group_of(request).free_blocks(request._cached, keeps_tables=request.host_blocks > 0)
                request._blocks = 0
        elif request._blocks or request.status == "waiting":  # otherwise its tokens, if any, are on the host
            self.pool.free += request._blocks
            self.kv_use.tokens -= request._cached
            request._blocks = 0

    def _release_cached(self, request: Request, tokens: int, unknown: int, frees_last: bool, blocks: int) -> None:
        """Release the blocks of a preempted request, now or at the end of the plan."""
        computed, held = request._cached + tokens, request._blocks
        assert self.prefix_cache is not None
        if not self.prefix_cache.takes_blocks:
            request._blocks = blocks or self.pool.blocks_for(computed)
            self.allocate(request._blocks - held)
        self.kv_use.tokens += tokens - unknown  # not computed, but released with the others
        self.unreleased.append((request, computed - unknown))
        if not frees_last:
            self.release_preempted()

    def release_preempted(self) -> None:
        """Release the blocks of preempted requests."""
        for request, known in self.unreleased:
            assert self.prefix_cache is not None
            self.kv_use.tokens -= self.prefix_cache.release(request, known, may_return=True)
        self.unreleased.clear()

    def _leave_running(self, request: Request, drops_token: bool) -> None:
        request.prompt_done = not request._in_prefilling
        if request._cohort is not None:
            self.cohort.leave(request, self.cohort.in_flight > 0 and not drops_token)
        elif request._in_prefilling:
            self.remove_from_prefilling(request)
        self.running.remove(request)
        request.preemptions += 1

    def drop_token_in_flight(self, request: Request) -> None:
        """Throw away the token of a request whose step has not returned."""
        if self.draft_cohort is not None and request._cohort is not None:
            self.draft_cohort.leave(request)
        step = self.flight
        if step is not None and step.before is not None:  # with pipeline parallelism
            step = self.newest_step_of(request)
        if step is not None and request.in_flight:
            if request in step.left:  # its steps before have returned
                request.decoding += self.cohort.busy - request._joined_busy_s
            dropped = step.drop(request)
            if self.drafts is not None:
                self.drafts.lost += dropped

    def newest_step_of(self, request: Request) -> Optional[Step]:
        """Return the newest step in flight that computes a request that has left the cohort, or None."""
        step = self.flight
        while step is not None and not step.computes(request):
            step = step.before
        return step

    def take_out(self, request: Request, stays: bool = False) -> None:
        """Remove a request from its queue for good, unless it stays. It runs no more and loses its token in flight."""
        self.drop_token_in_flight(request)
        if request.status == "running":
            if request._cohort is not None:
                self.cohort.leave(request)
            elif request._in_prefilling:
                self.remove_from_prefilling(request)
            if not stays:
                self.running.remove(request)
        elif not stays:
            (self.waiting if request.status == "waiting" else self.swapped).remove(request)

    def release(self, request: Request) -> None:
        """Free the blocks of a request that has finished."""
        self.finished.remove(request)
        self.free_blocks(request)

    def _requeue(self, request: Request, queue: str) -> None:
        if queue == "swapped":
            request.status = "swapped"
            self.swapped.push(request)
        elif queue == "front":
            request.status = "waiting"
            if self.policy.is_sorted:  # in a sorted queue the sort key decides
                self.add_to_waiting(request)
            else:
                self.waiting.push_front(request)
        else:
            self.add_to_waiting(request)

    def swap_in(self, request: Request, now: float) -> int:
        """Move a request back to running and copy its blocks from the host. Return the number of copied blocks."""
        copied = request.host_blocks
        if copied:
            self.allocate(copied)
            self.pool.host_free += copied
            request._blocks, request.host_blocks = copied, 0
            self.kv_use.tokens += stored_tokens(request)
            request.swapped += now - request.state_since
            request.state_since = now
        self.swapped.remove(request)
        request.status = "running"
        self.running.push(request)
        if request.prompt_done:
            self.cohort.join(request)
        else:
            self.add_to_prefilling(request)
        return copied

    def reject(self, rejection: Rejection, now: float) -> None:
        request = rejection.request
        unknown = self.cohort.unknown_tokens(request)
        self.take_out(request)
        self.free_blocks(request, unknown)
        if rejection.keeps_host_blocks:
            self.pool.host_lost += request.host_blocks
        else:
            self.pool.host_free += request.host_blocks
        request.host_blocks = 0
        self.finish_unserved(request, now, rejection.outcome, rejection.reason)

    def mark_finished(self, request: Request, now: float, failed: bool) -> None:
        """Record the end of a request."""
        request.outcome = "finished"
        if failed:
            request.outcome, request.reason = "failed", "the model call failed"
        elif self.limits.cut_off(request):
            request.outcome = "unanswered"
            request.reason = "stopped at max_generate_length without a final message to the client"
        request.status = "done"
        end: Optional[float] = now  # one object for all three: this saves 48 MB for a million requests
        request.last_token = request.finish = request.client_end = end
        if self.done is not None:
            self.done.append(request)

    def unused_tokens(self, request: Request) -> int:
        """Return the cached tokens of a finished request after its last one: of a decode that was not needed."""
        return max(0, request._cached - (request.prompt + request._written - 1))

    def finish_unserved(self, request: Request, now: float, outcome: str, reason: str) -> None:
        request.status = "done"
        request.outcome, request.reason = outcome, reason
        request.finish = request.client_end = now
        if self.done is not None:
            self.done.append(request)

    def idle(self) -> bool:
        """Whether all queues are empty."""
        return not (self.waiting or self.running or self.swapped)

    def all_requests(self) -> list[Request]:
        """Return all requests that are not done."""
        return [*self.running, *self.swapped, *self.waiting]

    def _outside(self) -> list[Request]:
        """Return the requests outside of the queues that hold blocks."""
        return [*self.loading, *(request for request in self.kept or () if request.status == "done")]

    def check(self) -> None:
        """Verify the counts of a server between two steps. An assertion names what is wrong."""
        pool, cohort = self.pool, self.cohort
        if self.prefix_cache is not None:
            self.prefix_cache.check([*self.running, *self._outside()], self.kv_use.tokens)
        else:
            stored = [*self.running, *self._outside(), *(r for r in (*self.finished, *self.swapped) if r._blocks)]
            stored = list(dict.fromkeys(stored))
            used = sum(request.blocks for request in stored) + pool.lost
            assert pool.free + used == pool.total, f"{pool.free} free + {used} used != {pool.total} blocks"
            for request in (*self.running, *self.swapped):
                if request.sampling is not None:
                    group_of(request).check()
            stored += self.waiting  # some engines take a token of a preempted request for computed
            assert self.kv_use.tokens == sum(map(stored_tokens, stored)), "wrong number of stored tokens"
        on_host = sum(request.host_blocks for request in self.swapped)
        assert pool.host_free + pool.host_lost + on_host == pool.host_total, "host blocks lost"
        decoding = [request for request in self.running if request.decodes]
        assert cohort.size == sum(r.sequences for r in decoding), "wrong size of the cohort"
        assert cohort.context == sum(r.sequences * r.cached for r in decoding), "wrong context of the cohort"
        longest = max((r.cached for r in decoding), default=0) if cohort.tracks_longest else 0
        assert cohort.longest == longest, "wrong longest context of the cohort"
        assert cohort.max_length == sum(r.prompt + r.max_tokens for r in decoding), "wrong lengths of the cohort"
        assert all(request.pending == 1 for request in decoding), "a decode has more than one token"
        if self.prefix_cache is None or not self.prefix_cache.takes_blocks:  # otherwise it has checked its blocks
            self._check_blocks(decoding)
        ended = set(self.finished)
        prompts = [r for r in self.running if not (r.decodes or r.awaits_end or r in ended)]
        assert list(self.prefilling) == prompts, "wrong prefilling"
        for status, queue in (("waiting", self.waiting), ("running", self.running), ("swapped", self.swapped)):
            assert all(r.status == status or r in ended for r in queue), f"a request in {status} has another status"
        for request in self.waiting:
            assert request.blocks == request.host_blocks == 0, f"{request} waits but holds blocks"
        assert len(set(self.all_requests())) == len(self.waiting) + len(self.running) + len(self.swapped), (
            "a request is in two queues"
        )

    def _check_blocks(self, decoding: Sequence[Request]) -> None:
        """Verify the blocks of the decoding requests, and those of their next step."""
        pool, cohort = self.pool, self.cohort
        single = [request for request in decoding if request.sampling is None]
        ahead = 1 if self.draft_cohort is None else self.draft_cohort.ahead
        need = sum(max(0, pool.blocks_for(r.cached + ahead) - r.blocks) for r in single)
        groups = sum(group_of(request).new_blocks(request.length) for request in cohort.groups)
        assert cohort.blocks_needed() == need + groups, "wrong number of blocks for the next step"
        assert set(cohort.groups) == set(decoding) - set(single), "wrong groups of the cohort"
        for request in decoding:
            assert request.blocks >= pool.blocks_for(request.cached), f"{request} lacks blocks"
