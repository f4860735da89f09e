"""The prefix cache with reference counts: which KV blocks hold known text, who holds them, and which are reused next.

How it works. A free block keeps its text until it is handed out again, so all free blocks are in one list, cached or
not; its front is handed out next. A finished or preempted request puts its cached blocks at the back, the last one
first, and its partly filled block at the front. The list has runs of blocks, not blocks (block_tree.py).

Why it is exact. Blocks are taken from the front only. So the pool only counts free blocks, as without a cache, and the
list is cut to that number before anything depends on its order (`_settle`). A request without content shares no block
with another one. So its blocks need no node; only after a preemption it can find them again.
"""

from __future__ import annotations

from collections.abc import Iterable

from servesim.core import FOREVER, BlockPool, Request

from .block_tree import NO_DRAFT, BlockTree, Holding, Node, Run, RunList
from .cohort import Cohort
from .kv_cache import KvCache
from .text_tree import check_nodes, find
from .texts import Text


class PrefixCache(KvCache):
    """The cached blocks of one server."""

    __slots__ = (
        "appends_all", "blank", "count", "counts_lookups", "drops_last", "free_list", "holdings", "tree",
        "unnamed",
    )  # fmt: skip

    def __init__(
        self, pool: BlockPool, cohort: Cohort, appends_all: bool, counts_lookups: bool, counts_preempted_apart: bool
    ) -> None:
        super().__init__(pool, counts_preempted_apart)
        self.counts_lookups = counts_lookups  # not admissions
        self.tree = BlockTree(pool.block_size, cohort)
        self.free_list = RunList()
        self.blank = pool.total  # blocks without text before the runs of the list
        self.count = pool.total  # free blocks with and without text; until `_settle`, some of them may be taken
        self.holdings: dict[Request, Holding] = {}  # running requests that the tree knows
        self.unnamed = 0  # tokens at the end that are never known, with drafts of several modules
        self.drops_last = False  # the last matching block of a lookup is not used
        self.appends_all = appends_all  # also partly filled blocks go to the back

    @property
    def idle_blocks(self) -> int:
        """The free blocks that hold text. If all blocks are appended, partly filled ones count too."""
        return min(self.count - self.blank, self.pool.free)

    def cached_tokens(self, text: Text, tokens: int) -> int:
        self._settle()
        size = self.pool.block_size
        return find(self.tree.root, text, tokens // size, size)[1] * size

    def find_cached(self, request: Request) -> tuple[int, int]:
        text = self.text_of(request)
        if text is None:
            return 0, 0
        self._settle()
        match = self.tree.match(text, self.most_cached_blocks(request), NO_DRAFT, 0)
        return match.blocks * self.pool.block_size, match.idle

    def admit(self, request: Request, cached: int, decodes: bool = True) -> int:
        if not self.counts_lookups:
            self.stats.count(request, cached)
        text = self.text_of(request)
        if text is None:
            assert not cached, f"the plan uses {cached} cached tokens, and {request} shares no text"
            return 0
        self._settle()
        size = self.pool.block_size
        decoding_before = FOREVER if decodes else 0
        found = size * self.tree.match(text, self.most_cached_blocks(request), NO_DRAFT, decoding_before).blocks
        copied = max(0, cached - found) // size
        if copied and self.host is not None:
            self.host.copy(text, found // size, cached // size)
            found = cached
        assert cached <= found and not cached % size, f"{request}: {cached} cached tokens planned, {found} found"
        runs, node = self.tree.pin(text, cached // size - copied, NO_DRAFT)
        holding = self._hold(request, text, node)
        taken = 0
        for run in runs:
            if not run.refs:
                run.unlink()
                taken += run.length
            run.refs += 1
            holding.add(run, run.length)
        self.count -= taken
        taken += copied  # into blocks from the front of the list, which `schedule` caches
        self.pool.free -= taken
        return taken

    def _hold(self, request: Request, text: Text, node: Node) -> Holding:
        self.holdings[request] = holding = Holding(request, text, node)
        node.growers.append(holding)
        return holding

    def schedule(self, request: Request, tokens: int, decoding_before: int) -> None:
        if self.tree.only_registered:
            self._name(request, min(request.cached + tokens, request.length) - request.in_flight)
            return
        holding = self.holdings.get(request)
        if holding is not None:
            self.tree.update(holding.node, decoding_before)
            known = request.cached + tokens - request.in_flight
            self.tree.register(holding, known // self.pool.block_size, decoding_before)

    @property
    def shares(self) -> bool:
        return bool(self.holdings)

    def note_known(self, request: Request) -> None:
        self._name(request, min(request.cached, request.length - 1) - request.in_flight)

    def _name(self, request: Request, known: int) -> None:
        known -= self.unnamed
        if known > request.named:
            request.named = known
            holding = self.holdings.get(request) if self.holdings else None
            if holding is not None:
                self.tree.register(holding, known // self.pool.block_size, 0)

    def update_all(self, decoding_before: int = 0) -> None:
        for holding in list(self.holdings.values()):
            self.tree.update(holding.node, decoding_before)

    def update_beside(self, requests: Iterable[Request]) -> None:
        for request in requests:
            holding = self.holdings.get(request)
            if holding is not None:
                self.tree.update(holding.node, FOREVER)

    def release(self, request: Request, known: int, may_return: bool) -> int:
        self._settle()
        given = known
        if self.tree.only_registered:
            known, request.named = min(known, request.named), 0
        blocks, holding = known // self.pool.block_size, self.holdings.get(request)
        if holding is not None:
            blocks = max(blocks, holding.end)
        elif may_return and blocks:  # from now on, it can find its own blocks again
            text = self._texts[request] = Text(request)
            holding = self._hold(request, text, self.tree.root)
        unfilled = request._blocks - blocks  # they have no text
        if unfilled and self.appends_all:
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
        return given - (blocks - freed) * self.pool.block_size

    def _release_held(self, holding: Holding, blocks: int) -> int:
        """Release the full blocks of a request, the last one first. Return how many no other request holds."""
        tree, freed = self.tree, 0
        tree.update(holding.node, 0)
        tree.register(holding, blocks, 0)
        holding.node.growers.remove(holding)
        del self.holdings[holding.request]
        for run in holding.last_to_first():
            run.refs -= 1
            if not run.refs:
                self.free_list.append(run)
                freed += run.length
        return freed

    def _append_unknown(self, blocks: int, hashed: bool) -> None:
        """Append blocks to the free list whose text no request will look up."""
        last = self.free_list.last
        if last is not None and last.node is None and last.hashed == hashed:
            last.length += blocks
        else:
            self.free_list.append(Run(None, blocks, 0, hashed))

    def _settle(self) -> None:
        """Remove the blocks that were taken from the front of the free list since the last time."""
        taken = self.count - self.pool.free
        if taken > 0:
            self._take(taken)

    def take_first(self, taken: int) -> None:
        """Take blocks from the front of the free list, which the pool will count."""
        self._settle()
        self._take(taken)

    def _take(self, taken: int) -> None:
        self.count -= taken
        blank = min(taken, self.blank)
        self.blank -= blank
        taken -= blank
        while taken:
            run = self.free_list.first
            assert run is not None, "more blocks were taken than were free"
            blocks = min(taken, run.length)
            taken -= blocks
            if run.hashed:
                self.stats.evicted_blocks += blocks
                if self.host is not None:
                    self.host.receive(run, blocks)
            if blocks == run.length:
                run.unlink()
            if run.node is not None:
                self.tree.remove_last(run, blocks)
            else:
                run.length -= blocks

    def clear(self) -> None:
        free, self.pool.free = self.pool.free, 0
        self._settle()
        self.pool.free = self.count = self.blank = free

    def check(self, running: Iterable[Request], tokens: int) -> None:
        """Verify reference counts, the free list and the tree between two steps, and the number of stored tokens."""
        self._settle()
        self.update_all()
        if self.host is not None:
            self.host.check()
        free = self.free_list.runs()
        listed = self.blank + sum(run.length for run in free)
        assert listed == self.count == self.pool.free, f"{listed} blocks in the free list, {self.pool.free} are free"
        holders: dict[Run, int] = {}
        for holding in self.holdings.values():
            for run in holding.last_to_first():
                holders[run] = holders.get(run, 0) + 1
        runs = check_runs(self.tree.root)
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


def check_runs(root: Node) -> list[Run]:
    """Verify the nodes and their runs. Return all runs."""
    runs: list[Run] = []
    for node in check_nodes(root):
        assert node.length == max([run.length for run in node.runs], default=0), "wrong length of a node"
        assert all(run.node is node and run.length > 0 for run in node.runs), "a run is in a wrong node"
        assert all(node.start < holding.end <= node.end for holding in node.growers)
        runs += node.runs
    return runs
