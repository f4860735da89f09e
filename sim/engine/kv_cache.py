"""What a server asks of its KV cache, whatever the engine: which tokens it has already, and whose blocks are free.

`PrefixCache` (prefix_cache.py) counts who holds a block; HostCache is the memory behind it. A policy sees a draft of a
cache while it plans a step, and `make_cache` (cache_draft.py) makes both. The cache of one engine family extends
`KvCache` too. All of them compare texts (texts.py) in a tree (text_tree.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Optional

from servesim.core import BlockPool, Chunk, Request

from .host_cache import HostCache
from .texts import Text

CACHE_COUNTS: Final = (
    "requests", "queries", "hits", "preempted_requests", "preempted_queries", "preempted_hits", "evicted_blocks",
)  # fmt: skip


class PrefixCacheStats:
    """Counts of all admissions or of all lookups, in tokens, and of the cached blocks handed out again."""

    __slots__ = (
        "_apart", "evicted_blocks", "hits", "preempted_hits", "preempted_queries", "preempted_requests",
        "queries", "requests",
    )  # fmt: skip

    def __init__(self, apart: bool = True) -> None:
        self._apart = apart  # whether preempted requests are counted apart
        self.requests = 0  # not preempted before
        self.queries = 0  # their tokens
        self.hits = 0  # of these, cached
        self.preempted_requests = 0  # not part of the hit rate
        self.preempted_queries = 0
        self.preempted_hits = 0
        self.evicted_blocks = 0

    def metrics(self) -> dict[str, float]:
        """Return the metrics of a run. The hit rate leaves out preempted requests that were counted apart."""
        return {
            "prefix_hit_rate": self.hits / max(1, self.queries),
            "prefix_cache_queries": self.queries,
            "prefix_cache_hits": self.hits,
            "prefix_cache_preempted_queries": self.preempted_queries,
            "prefix_cache_preempted_hits": self.preempted_hits,
            "prefix_cache_evictions": self.evicted_blocks,
        }

    def add(self, other: PrefixCacheStats) -> None:
        """Add the counts of another server."""
        for name in CACHE_COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def count(self, request: Request, cached: int) -> None:
        """Count an admission or a lookup."""
        tokens = request.prompt + request._written
        if request.preemptions and self._apart:
            self.preempted_requests += 1
            self.preempted_queries += tokens
            self.preempted_hits += cached
        else:
            self.requests += 1
            self.queries += tokens
            self.hits += cached


class KvCache:
    """The prefix cache of one server. A method that does nothing here is for some caches only."""

    __slots__ = ("_texts", "counts_evictable", "evicts_missing", "host", "lookups", "pool", "stats", "takes_blocks")

    def __init__(self, pool: BlockPool, counts_preempted_apart: bool = True) -> None:
        self.pool = pool
        self.stats = PrefixCacheStats(counts_preempted_apart)
        self.lookups: list[tuple[Request, int]] = []  # those that the next step counts, with the tokens that they found
        self.host: Optional[HostCache] = None  # host memory for evicted blocks
        self.counts_evictable = False  # cached blocks that no request holds are not free (BlockPool.evictable)
        self.evicts_missing = False  # whether an eviction has no effect on later steps but that of its missing blocks
        self.takes_blocks = False  # it takes the blocks of a chunk itself, before the step starts
        self._texts: dict[Request, Text] = {}  # requests that may share blocks, or find their own ones again

    def text_of(self, request: Request) -> Optional[Text]:
        """Return the text of a request, or None if the cache cannot have it."""
        text = self._texts.get(request) if self._texts else None
        if text is None and request.content is not None:
            text = self._texts[request] = Text(request)
        return text

    @property
    def idle_blocks(self) -> int:
        """Cached blocks that no request holds."""
        return self.pool.evictable

    def most_cached_blocks(self, request: Request) -> int:
        """Return the blocks of a waiting request that can come from the cache: its last token is always computed."""
        return (request.prompt + request._written - 1) // self.pool.block_size

    def cached_tokens(self, text: Text, tokens: int) -> int:
        """Return how many of the first tokens of a text are cached now. Nothing counts as used."""
        return 0

    def find_cached(self, request: Request) -> tuple[int, int]:
        """Return the cached tokens of a request that has not run here, and which of their blocks no request holds."""
        return 0, 0

    def look_up(self, request: Request, tokens: int) -> None:
        """Note that the engine has looked up the first tokens of a request."""

    def count_lookups(self) -> None:
        """Count the lookups of the step that starts now."""
        for request, tokens in self.lookups:
            self.stats.count(request, tokens)
        self.lookups.clear()

    def add_counts(self, other: KvCache) -> None:
        """Add the counts of another server."""
        self.stats.add(other.stats)
        if self.host is not None and other.host is not None:
            self.host.copies += other.host.copies
            self.host.copied_blocks += other.host.copied_blocks

    def admit(self, request: Request, cached: int, decodes: bool = True) -> int:
        """Count an admission, and hold the blocks of the first `cached` tokens. Return how many were free or copied.

        `decodes`: requests decode in this step, and their blocks are cached before those of the admission.
        """
        raise NotImplementedError

    def schedule(self, request: Request, tokens: int, decoding_before: int) -> None:
        """Note that a running request computes these tokens in this step.

        The step of decoding requests before the place `decoding_before` in the running queue has been decided: they
        are one token further.
        """

    @property
    def shares(self) -> bool:
        """Whether a request may find blocks of running ones."""
        return True

    def note_known(self, request: Request) -> None:
        """Note that a step has returned whose drafts were verified: its accepted tokens are known."""

    def evict(self, blocks: int) -> None:
        """Evict cached blocks that no request holds, so that they are free."""

    def make_room(self, blocks: int, taken: int = 0) -> None:
        """Evict if fewer blocks than these are free. `taken` of them are already taken from the pool."""

    def make_room_for(self, chunks: Sequence[Chunk], decodes: int, decode_blocks: int) -> None:
        """Evict as the engine does before it takes the blocks of a step, which are already taken from the pool.

        `decode_blocks` of them are those of the decodes.
        """

    def keep(self, request: Request, tokens: int) -> int:
        """Cache the first tokens of a running request. Return how many tokens more requests hold than before."""
        return 0

    def release(self, request: Request, known: int, may_return: bool) -> int:
        """Release the blocks of a request with this number of known tokens, which may be admitted again later.

        Return how many of these tokens no running request holds any more.
        """
        raise NotImplementedError

    def update_all(self, decoding_before: int = 0) -> None:
        """Cache what all running requests have computed, for example because afterwards not all of them advance."""

    def update_beside(self, requests: Iterable[Request]) -> None:
        """Cache the blocks that this step fills in decodes of the same texts as these requests, which do not decode."""

    def clear(self) -> None:
        """Forget all blocks that no request holds, for example because a model call has failed to write them."""
        raise NotImplementedError

    def check(self, running: Iterable[Request], tokens: int) -> None:
        """Verify all counts between two steps, and the number of tokens that running requests hold."""
        raise NotImplementedError


class InstalledCache(KvCache):
    """The prefix cache of an installed engine, which finds cached tokens itself and counts its blocks."""

    __slots__ = ()

    def admit(self, request: Request, cached: int, decodes: bool = True) -> int:
        self.stats.count(request, cached)
        return 0  # the next count of the engine has them

    def release(self, request: Request, known: int, may_return: bool) -> int:
        self.pool.free += request._blocks
        request._blocks = 0
        return known

    def correct(self, free: int) -> int:
        """Use the number of free blocks that the engine has counted. Return how many tokens more requests hold.

        These are in blocks from the cache, and in blocks of requests that left which others still hold: full ones.
        """
        blocks = self.pool.free - free
        self.pool.free = free
        return blocks * self.pool.block_size

    def check(self, running: Iterable[Request], tokens: int) -> None:
        """Verify nothing: the engine has the counts."""
