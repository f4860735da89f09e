"""The prefix cache as a policy sees it while it plans a step: what the requests planned so far would change.

How it works. In vLLM, a request that is admitted in a step can use the blocks of a request admitted before it in the
same step, and blocks that were handed out in the step are gone. A plan is only a proposal, so this module changes no
block: runs remember what the newest draft would take or hold, and texts that a step would cache are in a list. A new
draft has a new number, so that nothing has to be undone. Nodes may be split, which changes no answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from servesim.core import CachedPrefix, CacheDraft, Chunk, Request

from .prefix_cache import PrefixCache
from .texts import Text, equal_tokens

NOT_CACHED: Final = CachedPrefix(0, 0, False, 0)


class Draft(CacheDraft):
    """The draft of one step. The policy starts it again in each step."""

    __slots__ = ("_evicted", "_number", "_planned", "_used", "cache")

    def __init__(self, cache: PrefixCache) -> None:
        self.cache = cache
        self._number = 0
        self._planned: list[tuple[Text, int]] = []  # texts of scheduled requests, and how many of their blocks are full
        self._evicted = 0  # blocks that the step takes from the front of the free list
        self._used = 0  # cached blocks that it takes out of the free list

    def start(self, chunks: Iterable[Chunk] = ()) -> None:
        self._number += 1
        self._evicted = self._used = 0
        if self._planned:
            self._planned.clear()
        for chunk in chunks:
            request = chunk.request
            holding = self.cache.holdings.get(request)
            if holding is not None and not request.decodes:
                self._plan(holding.text, request._cached + chunk.tokens)

    def _plan(self, text: Text, tokens: int) -> None:
        blocks = tokens // self.cache.pool.block_size
        if blocks:
            self._planned.append((text, blocks))

    def find(self, request: Request, free: int) -> CachedPrefix:
        cache = self.cache
        text = cache.text_of(request)
        if text is None:
            return NOT_CACHED
        self._evict(cache.count - self._used - self._evicted - free)
        limit, size = cache.most_cached_blocks(request), cache.pool.block_size
        match = cache.tree.match(text, limit, self._number)
        blocks = match.blocks
        for planned, full in self._planned:
            if full > blocks:
                blocks = max(blocks, min(full, limit, equal_tokens(text, planned, 0, limit * size) // size))
        return CachedPrefix(blocks * size, match.idle, match.may_grow, match.blocks)

    def _evict(self, blocks: int) -> None:
        """Take blocks from the front of the free list."""
        if blocks <= 0:
            return
        blank = max(0, self.cache.blank - self._evicted)
        self._evicted += blocks
        blocks -= blank
        number, run = self._number, self.cache.ends.after
        while blocks > 0:
            assert run is not None and run is not self.cache.ends, "a plan takes more blocks than are free"
            left = run.length_in(number)
            if left and not run.refs_in(number):
                run.add_to_draft(number, min(left, blocks), 0)
                blocks -= left
            run = run.after

    def admit(self, request: Request, prefix: CachedPrefix, tokens: int) -> None:
        cache = self.cache
        text = cache.text_of(request)
        if text is None:
            return
        for run in cache.tree.pin(text, prefix.blocks_in_cache, self._number)[0]:
            if not run.refs_in(self._number):
                self._used += run.length
            run.add_to_draft(self._number, 0, 1)
        self._plan(text, prefix.tokens + tokens)

    def preempt(self, request: Request, tokens: int) -> int:
        blocks = self.cache.pool.blocks_for(request.cached + tokens)
        holding = self.cache.holdings.get(request)
        if holding is None:
            return blocks
        freed = blocks - holding.end
        for run in holding.last_to_first():
            run.add_to_draft(self._number, 0, -1)
            if not run.refs_in(self._number):
                freed += run.length
        return freed
