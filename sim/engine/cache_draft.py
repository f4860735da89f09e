"""The prefix cache as a policy sees it while it plans a step: what the requests planned so far would change.

How it works. A request that is admitted in a step can use the blocks of a request admitted before it in the same
step, and blocks that were handed out in the step are gone. A plan is only a proposal, so this module changes no
block: runs remember what the newest draft would take or hold, and texts that a step would cache are in a list. A new
draft has a new number, so that nothing has to be undone. Nodes may be split, which changes no answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from servesim.core import FOREVER, NOT_CACHED, CachedPrefix, CacheDraft, Chunk, Request

from .block_tree import NO_DRAFT
from .prefix_cache import PrefixCache
from .texts import Text, equal_tokens

NOT_CACHED_BUT_COUNTED: Final = CachedPrefix(0, 0, True, 0)


class Draft(CacheDraft):
    """The draft of one step. The policy starts it again in each step."""

    __slots__ = ("_decoding_before", "_evicted", "_number", "_planned", "_used", "cache")

    def __init__(self, cache: PrefixCache) -> None:
        self.cache = cache
        self._number = 0
        self._decoding_before = FOREVER  # place in the running queue of the first request that computes a chunk
        self._planned: list[tuple[Text, int]] = []  # texts of scheduled requests, and how many of their blocks are full
        self._evicted = 0  # blocks that the step takes from the front of the free list
        self._used = 0  # cached blocks that it takes out of the free list

    def start(self, chunks: Iterable[Chunk] = (), decodes: bool = True) -> None:
        self._number += 1
        self._evicted = self._used = 0
        self.cache.lookups.clear()
        if self.cache.host is not None:  # what earlier steps have evicted
            self.cache._settle()
            self.cache.host.settle()
        if self._planned:
            self._planned.clear()
        registered = self.cache.tree.only_registered  # with drafts
        self._decoding_before = FOREVER if decodes and not registered else 0
        if not self.cache.holdings:
            return
        for chunk in chunks:
            request = chunk.request
            holding = self.cache.holdings.get(request)
            if holding is not None and (registered or not request.decodes):
                self._decoding_before = min(self._decoding_before, request._admission)
                known = request._cached + chunk.tokens
                self._plan(holding.text, self._known(request, known) if registered else known)
        if registered and decodes:
            for holding in self.cache.holdings.values():
                if holding.request.decodes:
                    self._plan(holding.text, self._known(holding.request, FOREVER))
        if decodes and self._decoding_before < FOREVER:  # those that decode behind it cache their blocks later
            for holding in reversed(self.cache.holdings.values()):  # the newest first
                if holding.request._admission <= self._decoding_before:
                    break
                if holding.request.decodes:
                    self._plan(holding.text, self.cache.tree.known_tokens(holding.request, FOREVER))

    def _known(self, request: Request, computed: int) -> int:
        """Return the tokens that a step of a request with drafts tells the cache."""
        return min(computed, request.length) - request.in_flight - self.cache.unnamed

    def _plan(self, text: Text, tokens: int) -> None:
        blocks = tokens // self.cache.pool.block_size
        if blocks:
            self._planned.append((text, blocks))

    def find(self, request: Request, free: int) -> CachedPrefix:
        cache = self.cache
        text = cache.text_of(request)
        if text is None:
            return self._count(request, NOT_CACHED_BUT_COUNTED) if cache.counts_lookups else NOT_CACHED
        self._evict(cache.count - self._used - self._evicted - free)
        limit, size = cache.most_cached_blocks(request), cache.pool.block_size
        match = cache.tree.match(text, limit, self._number, self._decoding_before)
        blocks = match.blocks
        for planned, full in self._planned:
            if full > blocks:
                blocks = max(blocks, min(full, limit, equal_tokens(text, planned, 0, limit * size) // size))
        if cache.drops_last and blocks:
            blocks -= 1
            match = cache.tree.match(text, blocks, self._number, self._decoding_before)
        idle, may_grow = match.idle, match.may_grow
        if cache.host is not None:
            end = cache.host.find(text, blocks, limit)
            if end > blocks:  # the host may drop them
                may_grow = True
            elif self._evicted and not may_grow:  # what this step evicts is on the host in the next one
                may_grow = cache.tree.match(text, limit, NO_DRAFT, self._decoding_before).blocks > blocks
            idle += end - blocks  # copies need blocks
            blocks = end
        if cache.counts_lookups:
            return self._count(request, CachedPrefix(blocks * size, idle, True, match.blocks))
        return CachedPrefix(blocks * size, idle, may_grow, match.blocks)

    def _count(self, request: Request, prefix: CachedPrefix) -> CachedPrefix:
        """Return a prefix whose lookup is counted. It `may_grow`, so that a plan is not held: each step looks up."""
        self.cache.lookups.append((request, prefix.tokens))
        return prefix

    def _evict(self, blocks: int) -> None:
        """Take blocks from the front of the free list."""
        if blocks <= 0:
            return
        blank = max(0, self.cache.blank - self._evicted)
        self._evicted += blocks
        blocks -= blank
        number, ends = self._number, self.cache.free_list.ends
        run = ends.after
        while blocks > 0:
            assert run is not None and run is not ends, "a plan takes more blocks than are free"
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
        self._plan(text, prefix.tokens + tokens - cache.unnamed)

    def preempt(self, request: Request, tokens: int, blocks: int = 0) -> int:
        blocks = blocks or self.cache.pool.blocks_for(request.cached + tokens)
        holding = self.cache.holdings.get(request)
        if holding is None:
            return blocks
        freed = blocks - holding.end
        for run in holding.last_to_first():
            run.add_to_draft(self._number, 0, -1)
            if not run.refs_in(self._number):
                freed += run.length
        return freed
