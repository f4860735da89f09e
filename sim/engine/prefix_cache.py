"""The prefix cache of vLLM V1: which KV blocks hold known text, who holds them, and which are reused next.

How it works. A free block keeps its text until it is handed out again, so all free blocks are in one list, cached or
not; its front is handed out next. A finished or preempted request puts its cached blocks at the back, the last one
first, and its partly filled block at the front. The list has runs of blocks, not blocks (block_tree.py).

Why it is exact. Blocks are taken from the front only. So the pool only counts free blocks, as without a cache, and the
list is cut to that number before anything depends on its order (`_settle`). A request without content shares no block
with another one. So its blocks need no node; only after a preemption it can find them again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Optional

from servesim.core import BlockPool, Request

from .block_tree import NO_DRAFT, BlockTree, Holding, Node, Run
from .texts import Text


class PrefixCacheStats:
    """What vLLM counts at each admission, in tokens, and the cached blocks that were handed out again."""

    __slots__ = (
        "evicted_blocks", "hits", "preempted_hits", "preempted_queries", "preempted_requests", "queries", "requests",
    )  # fmt: skip

    def __init__(self) -> None:
        self.requests = 0  # admissions of requests that were never preempted
        self.queries = 0  # their tokens
        self.hits = 0  # of these, cached
        self.preempted_requests = 0  # admissions after a preemption; not part of vLLM's hit rate
        self.preempted_queries = 0
        self.preempted_hits = 0
        self.evicted_blocks = 0

    def metrics(self) -> dict[str, float]:
        """Return the metrics of a run. The hit rate leaves out preempted requests, as that of vLLM does."""
        return {
            "prefix_hit_rate": self.hits / max(1, self.queries),
            "prefix_cache_queries": self.queries,
            "prefix_cache_hits": self.hits,
            "prefix_cache_preempted_queries": self.preempted_queries,
            "prefix_cache_preempted_hits": self.preempted_hits,
            "prefix_cache_evictions": self.evicted_blocks,
        }

    def count(self, request: Request, cached: int) -> None:
        """Count an admission."""
        tokens = request.prompt + request._written
        if request.preemptions:
            self.preempted_requests += 1
            self.preempted_queries += tokens
            self.preempted_hits += cached
        else:
            self.requests += 1
            self.queries += tokens
            self.hits += cached


class PrefixCache:
    """The cached blocks of one server."""

    __slots__ = ("_append", "_texts", "blank", "count", "ends", "holdings", "pool", "stats", "tree")

    def __init__(self, pool: BlockPool, free_order: str) -> None:
        self.pool = pool
        self.tree = BlockTree(pool.block_size)
        self.stats = PrefixCacheStats()
        self.count = pool.total  # blocks in the free list; until `_settle`, it may have blocks that were taken
        self.blank = pool.total  # blocks without text before the runs of the list
        self.holdings: dict[Request, Holding] = {}  # running requests that the tree knows
        self._append = free_order == "append"  # all freed blocks go to the back (vLLM before 0.24)
        self.ends = Run(None, 0, 0)  # the runs of the free list are a ring: the front after it, the back before it
        self.ends.before = self.ends.after = self.ends
        self._texts: dict[Request, Text] = {}  # requests that may share blocks, or were preempted

    def text_of(self, request: Request) -> Optional[Text]:
        """Return the text of a request, or None if the tree cannot have it."""
        text = self._texts.get(request)
        if text is None and request.content is not None:
            text = self._texts[request] = Text(request)
        return text

    def free_runs(self) -> list[Run]:
        """Return the runs of the free list, the next one first."""
        runs, run = [], self.ends.after
        while run is not self.ends:
            assert run is not None
            runs.append(run)
            run = run.after
        return runs

    def most_cached_blocks(self, request: Request) -> int:
        """Return the blocks of a waiting request that can come from the cache: its last token is always computed."""
        return (request.prompt + request._written - 1) // self.pool.block_size

    def admit(self, request: Request, cached: int) -> int:
        """Count an admission, and hold the blocks of the first `cached` tokens. Return how many of them were free."""
        self.stats.count(request, cached)
        text = self.text_of(request)
        if text is None:
            assert not cached, f"the plan uses {cached} cached tokens, and {request} shares no text"
            return 0
        self._settle()
        size = self.pool.block_size
        found = size * self.tree.match(text, self.most_cached_blocks(request), NO_DRAFT).blocks
        assert cached <= found and not cached % size, f"{request}: {cached} cached tokens planned, {found} found"
        runs, node = self.tree.pin(text, cached // size, NO_DRAFT)
        holding = self._hold(request, text, node)
        taken = 0
        for run in runs:
            if not run.refs:
                run.unlink()
                taken += run.length
            run.refs += 1
            holding.add(run, run.length)
        self.count -= taken
        self.pool.free -= taken
        return taken

    def _hold(self, request: Request, text: Text, node: Node) -> Holding:
        self.holdings[request] = holding = Holding(request, text, node)
        node.growers.append(holding)
        return holding

    def schedule(self, request: Request, tokens: int) -> None:
        """Cache the full blocks of a running request that computes these tokens in this step."""
        holding = self.holdings.get(request)
        if holding is not None:
            self.tree.update_path(holding.node, request._admission)
            self.tree.register(holding, (request.cached + tokens) // self.pool.block_size, request._admission)

    def update_all(self, decoding_before: int = 0) -> None:
        """Cache the full blocks of all running requests, for example because afterwards not all of them advance."""
        for holding in list(self.holdings.values()):
            self.tree.update_path(holding.node, decoding_before)

    def release(self, request: Request, computed: int, may_return: bool) -> int:
        """Release the blocks of a request with this number of computed tokens, which may be admitted again later.

        Return the number of tokens that no running request holds any more.
        """
        self._settle()
        blocks, holding = computed // self.pool.block_size, self.holdings.get(request)
        if holding is not None:
            blocks = max(blocks, holding.end)
        elif may_return and blocks:  # from now on, it can find its own blocks again
            text = self._texts[request] = Text(request)
            holding = self._hold(request, text, self.tree.root)
        unfilled = request._blocks - blocks  # they have no text
        if unfilled and self._append:
            self._append_unknown(unfilled, False)
        elif unfilled:
            self.blank += unfilled
        freed = blocks
        if holding is not None:
            freed = self._release_held(holding, blocks)
        elif blocks:
            self._append_unknown(blocks, True)
        if not may_return and self._texts:
            self._texts.pop(request, None)
        request._blocks = 0
        self.count += freed + unfilled
        self.pool.free += freed + unfilled
        return computed - (blocks - freed) * self.pool.block_size

    def _release_held(self, holding: Holding, blocks: int) -> int:
        """Release the full blocks of a request, the last one first. Return how many no other request holds."""
        tree, freed = self.tree, 0
        tree.update_path(holding.node, 0)
        tree.register(holding, blocks, 0)
        holding.node.growers.remove(holding)
        del self.holdings[holding.request]
        for run in holding.last_to_first():
            run.refs -= 1
            if not run.refs:
                run.insert_before(self.ends)
                freed += run.length
        return freed

    def _append_unknown(self, blocks: int, hashed: bool) -> None:
        """Append blocks to the free list whose text no request will look up."""
        last = self.ends.before
        assert last is not None
        if last is not self.ends and last.node is None and last.hashed == hashed:
            last.length += blocks
        else:
            Run(None, blocks, 0, hashed).insert_before(self.ends)

    def _settle(self) -> None:
        """Remove the blocks that were taken from the front of the free list since the last time."""
        taken = self.count - self.pool.free
        if taken <= 0:
            return
        self.count -= taken
        blank = min(taken, self.blank)
        self.blank -= blank
        taken -= blank
        while taken:
            run = self.ends.after
            assert run is not None and run is not self.ends, "more blocks were taken than were free"
            blocks = min(taken, run.length)
            taken -= blocks
            if run.hashed:
                self.stats.evicted_blocks += blocks
            if blocks == run.length:
                run.unlink()
            if run.node is not None:
                self.tree.remove_last(run, blocks)
            else:
                run.length -= blocks

    def clear(self) -> None:
        """Forget all blocks that no request holds, for example because a model call has failed to write them."""
        free, self.pool.free = self.pool.free, 0
        self._settle()
        self.pool.free = self.count = self.blank = free

    def check(self, running: Iterable[Request], tokens: int) -> None:
        """Verify reference counts, the free list and the tree between two steps, and the number of stored tokens."""
        self._settle()
        self.update_all()
        free = self.free_runs()
        listed = self.blank + sum(run.length for run in free)
        assert listed == self.count == self.pool.free, f"{listed} blocks in the free list, {self.pool.free} are free"
        holders: dict[Run, int] = {}
        for holding in self.holdings.values():
            for run in holding.last_to_first():
                holders[run] = holders.get(run, 0) + 1
        runs = check_tree(self.tree.root)
        for run in runs:
            assert run.refs == holders.get(run, 0), f"{run.refs} references, {holders.get(run, 0)} holders"
        assert set(free) >= {run for run in runs if not run.refs} and set(runs) >= set(holders), "lost blocks"
        assert all(not run.refs and run.length > 0 for run in free), "a held block is in the free list"
        held = sum(run.length for run in holders)
        tokens -= held * self.pool.block_size
        for request in running:
            known = self.holdings.get(request)
            blocks = 0 if known is None else known.end
            held += request.blocks - blocks
            tokens -= request.cached - blocks * self.pool.block_size
        assert tokens == 0, f"{tokens} tokens too many are counted as stored"
        assert held + self.pool.free == self.pool.total, f"{held} held + {self.pool.free} free != {self.pool.total}"


def check_tree(root: Node) -> list[Run]:
    """Verify lengths and places of the nodes. Return all runs."""
    runs: list[Run] = []
    nodes = list(root.children.values())
    while nodes:
        node = nodes.pop()
        assert node.parent is not None and node.parent.children[node.key] is node
        assert node.start == node.parent.start + node.parent.length, "a block is cached, the block before it is not"
        assert node.length == max([run.length for run in node.runs], default=0) > 0, "wrong length of a node"
        assert all(run.node is node and run.length > 0 for run in node.runs), "a run is in a wrong node"
        assert all(node.start < holding.end <= node.start + node.length for holding in node.growers)
        runs += node.runs
        nodes += node.children.values()
    return runs
