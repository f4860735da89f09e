"""Block tables of a live run with a prefix cache: requests with equal beginnings have the same block ids.

How it works. The engine keeps runs of blocks and only counts free ones (engine/prefix_cache.py). A backend needs the id
of every block. So this module repeats each step block by block, in the order of the engine: preempted requests free
their blocks, running requests take some, an admitted request first takes its cached blocks. It never decides: the plan
says how many tokens are cached.

With steps in flight, a block is cached when the values of all its tokens are known: at the decision of a step, or when
the step before returns.

Why it is exact. Blocks are found, reused and evicted by the rules of the engine. If both did not agree, a planned hit
would not be found, or the number of free blocks would differ: both are checked in every step.
It runs in the worker: Python 3.9, standard library only.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Optional

from servesim.core import Chunk, Request
from servesim.engine.prefix_cache import PrefixCache
from servesim.engine.server import Server
from servesim.engine.step import Step
from servesim.engine.texts import Text, block_key

from .block_tables import BlockTables


class TextNode:
    """One block of text after the text of its parent, and the blocks that hold it, the first one cached first."""

    __slots__ = ("blocks", "children", "key", "parent")

    def __init__(self, parent: Optional[TextNode], key: Hashable) -> None:
        self.parent = parent
        self.key = key
        self.blocks: list[Block] = []
        self.children: dict[Hashable, TextNode] = {}


class Block:
    """A block on the device. It has no id yet if its text is cached before the step takes a block for it."""

    __slots__ = ("id", "node", "refs")

    def __init__(self, id: int = -1) -> None:
        self.id = id
        self.refs = 1  # requests that hold it
        self.node: Optional[TextNode] = None  # None: not full, so no request can find it


class Holder:
    """What a running request holds."""

    __slots__ = ("blocks", "cached_blocks", "computed", "node", "text", "unknown")

    def __init__(self, text: Text, root: TextNode) -> None:
        self.text = text
        self.node = root  # of its last cached block
        self.blocks: list[Block] = []
        self.cached_blocks = 0  # of these, full ones
        self.computed = 0  # tokens, at the end of the step
        self.unknown = 0  # tokens in flight

    def next_key(self, size: int) -> Hashable:
        """Return the key of the block after the cached ones."""
        return block_key(self.text, self.cached_blocks * size, size)


class SharedBlockTables(BlockTables):
    """The block ids of every request, with blocks that several requests hold."""

    def __init__(self, cache: PrefixCache) -> None:
        super().__init__(0, cache.pool.block_size, cache.pool.host_total)  # no policy with a cache swaps
        self.total = cache.pool.total
        self.cache = cache
        self.root = TextNode(None, None)
        self.evicted = 0  # cached blocks that were handed out again
        self._append = cache.appends_all  # as in the engine
        self._free: OrderedDict[Block, None] = OrderedDict()  # the next one first
        for id in range(1, self.total + 1):
            self._free[Block(id)] = None
        self._reserved: deque[Block] = deque()  # taken before blocks of preempted requests became free
        self._holders: dict[Request, Holder] = {}
        self._texts: dict[Request, Text] = {}  # kept while a preempted request waits
        self._in_flight: deque[list[tuple[Request, Holder]]] = deque()  # requests that get a token, per step

    @property
    def free_count(self) -> int:
        return len(self._free)

    def on_step_start(self, server: Server, step: Step, arrived: list[Request]) -> None:
        preempted: list[Request] = []  # not released yet
        if step.has_moves:
            preempted = self._preempt(step)
            for rejection in step.plan.moves.reject:
                self.release(rejection.request)
        if step.decode_rows or step.chunks:
            self._in_flight.append(self._advance(server, step))
        self._release_preempted(preempted)
        self._check_counts(server)

    def on_step_end(self, server: Server, step: Step, now: float, finished: list[Request]) -> None:
        if step.decode_rows or step.chunks:
            for request, holder in self._in_flight.popleft():
                holder.unknown -= 1
                if self._holders.get(request) is holder:  # otherwise it was preempted meanwhile
                    self._cache_blocks(holder, holder.computed - holder.unknown)
            for row in step.verified:
                self._holders[row.request].computed -= row.drafts - row.accepted
        super().on_step_end(server, step, now, finished)

    def _preempt(self, step: Step) -> list[Request]:
        """Release preempted requests. Return those that keep their blocks until the end of the step."""
        victims = step.plan.moves.preempt
        tokens = {
            victim.request: victim.extra.tokens
            for victim in victims
            if victim.extra is not None and victim.extra.tokens
        }
        if tokens:  # the step was planned for them before, so their text is cached
            tokens.update({chunk.request: chunk.tokens for chunk in step.plan.chunks})
            for request in sorted(tokens, key=lambda request: request._admission):
                holder = self._holders[request]
                self._cache_blocks(holder, min(holder.computed + tokens[request], request.length) - holder.unknown)
        kept: list[Request] = []
        for victim in victims:
            holder = self._holders[victim.request]
            computed = holder.computed + tokens.get(victim.request, 0)
            blocks, taken = (victim.extra.blocks, victim.extra.taken) if victim.extra is not None else (0, 0)
            self._reserved += [self._free.popitem(last=False)[0] for _ in range(taken)]
            self._take(self.tables[victim.request], holder, blocks or -(-computed // self.block_size))
            kept.append(victim.request)
            if victim.extra is None or not victim.extra.frees_last:
                self._release_preempted(kept)
        return kept

    def _release_preempted(self, requests: list[Request]) -> None:
        for request in requests:
            self._release_blocks(request)
        requests.clear()

    def _advance(self, server: Server, step: Step) -> list[tuple[Request, Holder]]:
        """Take the blocks of a step, in the order of the running queue, and cache those that it fills.

        Return the requests that get a token.
        """
        size, tables, holders = self.block_size, self.tables, self._holders
        chunks = {chunk.request: chunk for chunk in step.chunks}
        sampled: list[tuple[Request, Holder]] = []
        for request in server.running:
            if request in chunks:
                holder = self._start_chunk(chunks[request])
                if holder.computed < request.prompt + request._written:
                    continue
            elif step.decode_rows and request._cohort is not None:
                holder = holders[request]
                if holder.computed % size == 0:
                    self._take(tables[request], holder, holder.computed // size + 1)
                holder.computed += 1
                if (holder.computed - holder.unknown) % size == 0:
                    self._cache_blocks(holder, holder.computed - holder.unknown)
            else:
                continue
            if server.drafts is None:  # else blocks are cached at decisions only
                holder.unknown += 1
                sampled.append((request, holder))
        return sampled

    def _start_chunk(self, chunk: Chunk) -> Holder:
        request = chunk.request
        holder = self._holders.get(request)
        if holder is None:
            holder = self._admit(request, chunk.cached)
        assert holder.computed == request._cached, f"{request}: {holder.computed} tokens in its blocks"
        holder.computed += chunk.tokens
        self._take(self.tables[request], holder, request._blocks)
        self._cache_blocks(holder, holder.computed - chunk.drafts - holder.unknown)
        return holder

    def _admit(self, request: Request, cached: int) -> Holder:
        """Hold the cached blocks of a request."""
        text = self._texts.get(request) or self.cache.text_of(request) or Text(request)
        self._texts[request] = text
        self._holders[request] = holder = Holder(text, self.root)
        self.tables[request] = table = array("i")
        for _ in range(cached // self.block_size):
            node = holder.node.children.get(holder.next_key(self.block_size))
            assert node is not None, f"{request}: {cached} cached tokens planned, {len(table)} blocks found"
            block = node.blocks[0]
            if not block.refs:
                del self._free[block]
            block.refs += 1
            holder.blocks.append(block)
            table.append(block.id)
            holder.node = node
            holder.cached_blocks += 1
        holder.computed = cached
        return holder

    def _take(self, table: array[int], holder: Holder, count: int) -> None:
        """Take blocks from the front of the free list until a request holds `count`."""
        while len(table) < count:
            assert self._free or self._reserved, f"more than {self.total} blocks needed"
            old = self._reserved.popleft() if self._reserved else self._free.popitem(last=False)[0]
            if old.node is not None:
                self._forget(old, old.node)
            if len(holder.blocks) > len(table):
                holder.blocks[len(table)].id = old.id
            else:
                holder.blocks.append(Block(old.id))
            table.append(old.id)

    def clear(self) -> None:
        """Forget the texts of all free blocks, as the cache of the engine does."""
        self.cache.clear()
        for block in self._free:
            if block.node is not None:
                self._forget(block, block.node)
                block.node = None

    def _forget(self, block: Block, node: TextNode) -> None:
        """Remove the text of a block that is handed out again."""
        self.evicted += 1
        node.blocks.remove(block)
        if not node.blocks:
            assert node.parent is not None and not node.children, "a block was evicted before the blocks after it"
            del node.parent.children[node.key]

    def _cache_blocks(self, holder: Holder, tokens: int) -> None:
        """Cache the full blocks of a request that has computed these tokens at the end of the step."""
        for index in range(holder.cached_blocks, tokens // self.block_size):
            key = holder.next_key(self.block_size)
            node = holder.node.children.get(key)
            if node is None:
                node = holder.node.children[key] = TextNode(holder.node, key)
            if index == len(holder.blocks):
                holder.blocks.append(Block())
            node.blocks.append(holder.blocks[index])
            holder.blocks[index].node = holder.node = node
            holder.cached_blocks += 1

    def release(self, request: Request) -> None:
        """Free the blocks of a request that will not return."""
        self._release_blocks(request)
        self._texts.pop(request, None)

    def _release_blocks(self, request: Request) -> None:
        """Free the blocks of a request, the last one first: full ones to the back, others to the front."""
        self.tables.pop(request, None)
        holder = self._holders.pop(request, None)
        for block in reversed(holder.blocks if holder is not None else ()):
            block.refs -= 1
            if not block.refs:
                self._free[block] = None
                if block.node is None and not self._append:
                    self._free.move_to_end(block, last=False)
