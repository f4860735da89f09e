"""The state of a vLLM V1 scheduler as a policy sees it: queues, blocks and prefix cache.

vLLM's objects are read, never changed. A request keeps vLLM's id, so that a plan names vLLM's requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Optional

from servesim.core import NOT_CACHED, BlockPool, CachedPrefix, CacheDraft, Chunk, Request, View
from servesim.engine.cohort import Cohort
from servesim.engine.queues import FifoQueue, RequestQueue, running_queues
from servesim.engine.rules import rules_of

from .policy_state import PolicyState


class VllmState(PolicyState):
    """A policy inside one scheduler of vLLM."""

    def read_state(self, scheduler: Any, waiting: Iterable[Any], now: float) -> View:
        """Return the policy's view of a scheduler and of the requests that may be admitted."""
        blocks = scheduler.kv_cache_manager.block_pool
        pool = BlockPool(blocks.num_gpu_blocks - 1, scheduler.block_size)  # vLLM counts the null block
        pool.free = blocks.get_num_free_blocks()
        cohort = Cohort(pool.block_size)
        running, prefilling = running_queues(rules_of(self.policy).running_order)
        for entry in scheduler.running:
            request = self._update(entry, "running", len(blocks_of(scheduler, entry)), now)
            running.push(request)
            if entry.is_prefill_chunk:
                request._in_prefilling = True
                prefilling.push(request)
            elif not awaits_end(entry, scheduler.max_model_len):
                cohort.join(request)
        queue = self._sorted(waiting, now)
        draft = BlockDraft(scheduler) if scheduler.kv_cache_manager.enable_caching else None
        view = View(queue, running, FifoQueue(), prefilling, FifoQueue(), pool, cohort, scheduler.max_model_len, draft)
        view.now = now
        return view

    def in_order(self, waiting: Iterable[Any], now: float) -> list[Any]:
        """Return waiting entries in the order of the policy."""
        entries = {entry.request_id: entry for entry in waiting}
        return [entries[request.id] for request in self._sorted(entries.values(), now)]

    def _sorted(self, waiting: Iterable[Any], now: float) -> RequestQueue:
        queue = self.waiting_queue()
        for entry in waiting:
            queue.push(self._update(entry, "waiting", 0, now))
        self.promote(queue, now)
        return queue

    def make_request(self, entry: Any, now: float) -> Request:
        limit = entry.max_tokens
        return Request(
            entry.request_id, entry.arrival_time, entry.num_prompt_tokens, max(1, limit), limit, entry.priority
        )

    def _update(self, entry: Any, status: str, blocks: int, now: float) -> Request:
        """Copy the state of an entry to its request. Tokens in flight count as written, as in vLLM."""
        request = self.request_of(entry, now)
        request.status, request._cohort, request._in_prefilling = status, None, False
        request._written = entry.num_output_tokens + entry.num_output_placeholders
        request._in_flight = entry.num_output_placeholders
        request._cached, request._blocks = entry.num_computed_tokens, blocks
        request.preemptions = entry.num_preemptions
        return request


def blocks_of(scheduler: Any, entry: Any) -> Any:
    """Return the KV blocks that an entry holds."""
    return scheduler.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks.get(entry.request_id, ())


def awaits_end(entry: Any, max_model_len: int) -> bool:
    """Whether the last token of an entry is in flight (asynchronous scheduling)."""
    in_flight: int = entry.num_output_placeholders
    length: int = entry.num_prompt_tokens + entry.max_tokens
    return in_flight > 0 and entry.num_computed_tokens + 2 - in_flight >= min(length, max_model_len)


class BlockDraft(CacheDraft):
    """vLLM's prefix cache while a policy plans a step: what the requests planned so far would change.

    vLLM allocates and caches blocks request by request, the running ones first. So a draft knows the hashes that they
    will cache, the cached blocks that they will use, and the blocks that they take from the front of the free list.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._pool = scheduler.kv_cache_manager.block_pool
        self._planned: set[Any] = set()  # hashes that this step caches
        self._used: set[int] = set()  # ids of cached blocks that no request held and that this step uses
        self._evicted: set[int] = set()  # ids of blocks that this step takes
        self._next: Optional[Any] = None  # of the free list
        self._dropped: Counter[int] = Counter()  # references of preempted requests, by block id

    def start(self, chunks: Iterable[Chunk] = (), decodes: bool = True) -> None:
        self._planned, self._used, self._evicted = set(), set(), set()
        self._next, self._dropped = self._pool.free_block_queue.fake_free_list_head.next_free_block, Counter()
        tokens = {chunk.request.id: chunk.tokens for chunk in chunks}
        for entry in self._scheduler.running:
            decode = int(decodes and not entry.is_prefill_chunk)  # one that is not a prompt decodes
            self._plan(entry, entry.num_computed_tokens + tokens.get(entry.request_id, decode))

    def _plan(self, entry: Any, tokens: int) -> None:
        self._planned.update(entry.block_hashes[: tokens // self._scheduler.block_size])

    def find(self, request: Request, free: int) -> CachedPrefix:
        entry, size = self._scheduler.requests[request.id], self._scheduler.block_size
        if entry.skip_reading_prefix_cache:
            return NOT_CACHED
        self._evict(self._pool.get_num_free_blocks() - len(self._used) - len(self._evicted) - free)
        blocks = idle = 0
        for block_hash in entry.block_hashes[: (entry.num_tokens - 1) // size]:
            block = self._cached(block_hash)
            if block is None and block_hash not in self._planned:
                break
            blocks += 1
            idle += block is not None and block.ref_cnt == 0 and block.block_id not in self._used
        return CachedPrefix(blocks * size, idle, True, blocks)

    def _cached(self, block_hash: Any) -> Optional[Any]:
        found = self._pool.get_cached_block(block_hash, [0])
        return found[0] if found and found[0].block_id not in self._evicted else None

    def _evict(self, blocks: int) -> None:
        """Take blocks from the front of the free list."""
        while blocks > 0 and self._next is not None:
            if self._next.block_id not in self._used:
                self._evicted.add(self._next.block_id)
                blocks -= 1
            self._next = self._next.next_free_block

    def admit(self, request: Request, prefix: CachedPrefix, tokens: int) -> None:
        entry = self._scheduler.requests[request.id]
        for block_hash in entry.block_hashes[: prefix.blocks_in_cache]:
            block = self._cached(block_hash)
            if block is not None and block.ref_cnt == 0:
                self._used.add(block.block_id)
        self._plan(entry, prefix.tokens + tokens)

    def preempt(self, request: Request, tokens: int, blocks: int = 0) -> int:
        held = blocks_of(self._scheduler, self._scheduler.requests[request.id])
        self._dropped.update(block.block_id for block in held)
        freed = sum(bool(block.ref_cnt == self._dropped[block.block_id]) for block in held)
        size: int = self._scheduler.block_size
        return freed - (-(request.cached + tokens) // size) - len(held)  # with the blocks that it got in this step
