"""Code that FastServe's policies share: preemption between steps, with KV blocks kept on the device or the host.

A policy sorts all requests. The batch is the first ones, until one does not fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import merge
from typing import Any, Callable, NamedTuple, Optional

from servesim.core import FOREVER, Chunk, Plan, Policy, Preemption, Request, View, require_at_least
from servesim.core.native import mypyc_attr

MIN_FREE_HOST_FRACTION = 0.1  # new prompts wait while a smaller fraction of the host blocks is free
SortKey = Callable[[Request], Any]


class BatchChange(NamedTuple):
    """The requests that leave and enter the batch."""

    leaving: Sequence[Request] = ()
    entering: Sequence[Request] = ()


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class FastServePolicy(Policy):
    """The fields and methods that FastServe's policies share."""

    max_batch_size: int = 256  # requests per step
    max_tokens_per_batch: int = 8192  # tokens per step (decodes count only in SRPT)
    proactive_offloading: bool = True  # keep at least max_batch_size blocks free, and copy blocks back early
    num_min_free_blocks_threshold: int = 0  # blocks to keep free, if more than max_batch_size (proactive_offloading)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, 1, "max_batch_size", "max_tokens_per_batch")
        require_at_least(self, 0, "num_min_free_blocks_threshold")

    @property
    def counts_decodes(self) -> bool:
        """Whether a decode counts as one token of max_tokens_per_batch."""
        return False

    @property
    def is_sorted(self) -> bool:
        return True

    def is_overdue(self, request: Request, now: float) -> bool:
        """Return whether a request has waited for max_wait. Then it runs first."""
        return self.max_wait is not None and request.arrival + self.max_wait <= now

    def host_is_almost_full(self, view: View) -> bool:
        """Return whether few host blocks are free. Then new prompts wait."""
        total = view.pool.host_total
        return total > 0 and view.pool.host_free < MIN_FREE_HOST_FRACTION * total

    def chunks_if_all_fit(self, view: View) -> Optional[list[Chunk]]:
        """Return the prompts of all waiting requests if all requests fit into one batch (the usual case), else None."""
        if view.swapped or len(view.running) + len(view.waiting) > self.max_batch_size:
            return None
        block_size = view.pool.block_size
        tokens = len(view.running) if self.counts_decodes else 0
        blocks = view.decode_block_need + self._blocks_to_keep_free
        chunks = []
        for request in view.waiting:
            prompt = request.prompt
            tokens += prompt
            blocks += -(-prompt // block_size)
            chunks.append(Chunk(request, prompt))
        return None if tokens > self.max_tokens_per_batch or blocks > view.pool.free else chunks

    def choose_batch(self, view: View, candidates: Callable[[], Iterable[Request]], key: SortKey) -> BatchChange:
        """Return the batch change: requests run in key order, until one does not fit."""
        entering: list[Request] = []
        max_new = self.max_batch_size - len(view.running)
        tokens = len(view.running) if self.counts_decodes else 0
        for request in candidates():
            request_tokens = self._batch_tokens(request)
            if len(entering) == max_new or tokens + request_tokens > self.max_tokens_per_batch:
                break
            entering.append(request)
            tokens += request_tokens if request_tokens > 1 or self.counts_decodes else 0
        else:
            return BatchChange((), entering)
        if not max_new and key(request) >= max(map(key, view.running)):
            return BatchChange()
        return self._choose_with_preemption(view, candidates(), key)

    def _batch_tokens(self, request: Request) -> int:
        """Return the tokens that a request uses in the batch. A preempted request never exceeds the limit alone."""
        if request.status == "swapped":
            return min(request.pending, self.max_tokens_per_batch)
        return request.pending

    def _choose_with_preemption(self, view: View, candidates: Iterable[Request], key: SortKey) -> BatchChange:
        chosen: dict[Request, None] = {}
        tokens = 0
        for request in merge(sorted(view.running, key=key), candidates, key=key):
            request_tokens = self._batch_tokens(request)
            if len(chosen) == self.max_batch_size or tokens + request_tokens > self.max_tokens_per_batch:
                break
            chosen[request] = None
            tokens += request_tokens if request_tokens > 1 or self.counts_decodes else 0
        leaving = [request for request in view.running if request not in chosen]
        return BatchChange(leaving, [request for request in chosen if request.status != "running"])

    def make_plan(self, view: View, change: BatchChange, key: SortKey) -> tuple[Plan, BatchChange]:
        """Return the plan, and the batch change after the block limit was applied."""
        leaving, entering = list(change.leaving), list(change.entering)
        pool = view.pool
        need = view.decode_block_need + sum(blocks_needed(request, view) for request in entering)
        need -= sum(blocks_needed(request, view) for request in leaving)
        kept_on_device = [request for request in view.swapped if request.blocks and request not in entering]
        preempt: list[Preemption] = []
        prefetch: list[Request] = []
        if need + self._blocks_to_keep_free > pool.free:
            offloads = OffloadPlan(view, need)
            for request in sorted([*kept_on_device, *leaving], key=key, reverse=True):
                if offloads.need + self._blocks_to_keep_free <= offloads.free:
                    break
                preempt.append(offloads.free_blocks(request))
            if offloads.need > offloads.free:
                self._drop_until_fits(view, offloads, leaving, entering, preempt, key)
        elif self.proactive_offloading and pool.host_free < pool.host_total:
            prefetch = self._prefetch(view, need, entering, key)
        may_become_overdue = self.max_wait is not None and len(view.waiting) > 0
        offloaded = {preemption.request for preemption in preempt}
        preempt += [Preemption(request, "keep", "swapped") for request in leaving if request not in offloaded]
        swap_in = [request for request in entering if request.status == "swapped"]
        plan = Plan(
            preempt=preempt,
            swap_in=swap_in,
            prefetch=prefetch,
            chunks=[Chunk(request, request.pending) for request in entering if not request.cached],
            decode=len(view.running) > len(leaving) or any(request.cached for request in swap_in),
            hold=0 if preempt or entering or prefetch or may_become_overdue else FOREVER,
            keep_free=self._blocks_to_keep_free if kept_on_device else 0,
        )
        return plan, BatchChange(leaving, entering)

    @property
    def _blocks_to_keep_free(self) -> int:
        """Number of blocks that preempted requests must leave free."""
        return max(self.max_batch_size, self.num_min_free_blocks_threshold) if self.proactive_offloading else 0

    def _drop_until_fits(
        self, view: View, offloads: OffloadPlan, leaving: list[Request], entering: list[Request],
        preempt: list[Preemption],
        key: SortKey,
    ) -> None:  # fmt: skip
        """Remove requests from the end of the batch until the rest fits."""
        staying = [request for request in view.running if request not in leaving]
        for request in sorted([*staying, *entering], key=key, reverse=True):
            if offloads.need <= offloads.free:
                break
            offloads.need -= blocks_needed(request, view)
            if request.status == "running":
                leaving.append(request)
            else:
                entering.remove(request)
            if request.blocks:
                preempt.append(offloads.free_blocks(request))

    def _prefetch(self, view: View, need: int, entering: list[Request], key: SortKey) -> list[Request]:
        """Return the first preempted requests whose blocks can be copied back without a preemption."""
        free = view.pool.free - need - self._blocks_to_keep_free
        prefetch = []
        preempted = [request for request in view.swapped if request not in entering]
        for request in sorted(preempted, key=key)[: self.max_batch_size]:
            if request.host_blocks and request.host_blocks <= free:
                free -= request.host_blocks
                prefetch.append(request)
        return prefetch


class OffloadPlan:
    """Numbers of blocks while a step is planned: needed by the batch, free on the device, free on the host."""

    def __init__(self, view: View, need: int) -> None:
        self.need = need
        self.free = view.pool.free
        self.host_free = view.pool.host_free

    def free_blocks(self, request: Request) -> Preemption:
        """Free the blocks of a request: swap it out, or drop them if the host is full. Return the preemption."""
        self.free += request.blocks
        if request.blocks > self.host_free:
            return Preemption(request, "recompute", "swapped")
        self.host_free -= request.blocks
        return Preemption(request, "swap", "swapped")


def blocks_needed(request: Request, view: View) -> int:
    """Return the new device blocks that the next step of a request needs."""
    return view.pool.blocks_for(request.length) - request.blocks
