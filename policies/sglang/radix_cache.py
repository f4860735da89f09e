"""The radix cache of SGLang: a tree of texts whose nodes own KV blocks, locks of running requests, eviction of leaves.

How it works. A request that is admitted locks the nodes of its cached prefix. When its prompt, or a piece of it, is
computed, the tree takes over its blocks; those that the tree already had are freed. The rest follows when the request
ends. Blocks of the tree are not free: if a step lacks blocks, leaves without a lock are evicted as a whole, those
first that were not used for the longest time.

Why it is exact. Every walk through the tree is a use, also that of a request which then waits, and splits the node in
which it ends. SGLang 0.4.6 gives each node of a walk a later time than its parent, 0.5.18 gives all the same: only
leaves are evicted, and of two leaves at most one is on a walk, so one number per walk is enough. A leaf that a walk
adds is younger than the lower part of the node that it splits.
A request without content shares nothing. So its blocks enter the tree only when it is retracted, because then it can
find them again. When it ends, no request looks for its text: it waits for its eviction in a list outside the tree, in
the order of the walks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import Optional

from servesim.core import BlockPool, Chunk, Request
from servesim.engine.kv_cache import KvCache
from servesim.engine.text_tree import TextNode, attach, check_nodes, find, insert_above
from servesim.engine.texts import Text


class Node(TextNode["Node"]):
    """A part of a text, and the blocks that hold it."""

    __slots__ = ("added", "listed", "locks", "used")

    def __init__(self, parent: Optional[Node], text: Optional[Text], start: int, end: int, walk: int) -> None:
        super().__init__(parent, text, start, end)
        self.added = walk  # number of the walk that added it to its parent
        self.used = walk  # number of the last walk
        self.locks = 0  # running requests that use it
        self.listed = False  # whether it is in the list of leaves


class OwnText:
    """The text of a request that shares nothing, without the nodes that it would have in the tree."""

    __slots__ = ("added", "ends", "next", "used")

    def __init__(self, walk: int) -> None:
        self.added = walk  # number of the first walk
        self.used = walk  # and of the last
        self.ends: list[int] = []  # blocks before the end of each node
        self.next: Optional[OwnText] = None  # the text that ended after it


class RadixCache(KvCache):
    """The tree of one server."""

    __slots__ = ("_alone", "_leaves", "_listings", "_newest", "_oldest", "_walks", "nodes", "root")

    def __init__(self, pool: BlockPool, evicts_need: bool) -> None:
        super().__init__(pool)
        self.counts_evictable = True
        self.root = Node(None, None, 0, 0, 0)
        self._alone: dict[Request, OwnText] = {}  # running requests that share nothing
        # texts that no request looks for are a list in the order of their last walk: first and last one
        self._oldest: Optional[OwnText] = None
        self._newest: Optional[OwnText] = None
        self.nodes: dict[Request, Node] = {}  # running requests, and the last node that they lock
        self.evicts_missing = not evicts_need  # otherwise all blocks that a step needs are evicted, if one is missing
        self._walks = 0
        self._listings = 0
        # heap of the leaves without a lock: the walk that used them when they were listed, a number, the node
        self._leaves: list[tuple[int, int, Node]] = []

    def find(self, text: Text, blocks: int) -> tuple[Node, int]:
        """Return how many of the first blocks of a text the tree has, and the node in which they end."""
        return find(self.root, text, blocks, self.pool.block_size)

    def cached_tokens(self, text: Text, tokens: int) -> int:
        size = self.pool.block_size
        return self.find(text, tokens // size)[1] * size

    def _walk(self, text: Text, blocks: int) -> Node:
        """Use the first blocks of a text, as far as the tree has them. Return the node at whose end they end."""
        node, end = self.find(text, blocks)
        self._walks += 1
        if end < node.end:
            node.used = self._walks
            node = self._split(node, end)
        above: Optional[Node] = node
        while above is not None:
            above.used = self._walks
            above = above.parent
        return node

    def _split(self, node: Node, end: int) -> Node:
        """Give the blocks of a node before block `end` of the text a node of their own, and return it."""
        head = Node(node.parent, node.text, node.start, end, node.added)
        head.locks = node.locks
        insert_above(head, node, self.pool.block_size)
        return head

    def _insert(self, text: Text, blocks: int) -> tuple[Node, int]:
        """Add the first blocks of a text. Return its last node, and how many blocks the tree had."""
        node = self._walk(text, blocks)
        had = node.end
        if had < blocks:
            self._walks += 1
            node = Node(node, text, had, blocks, self._walks)
            attach(node, self.pool.block_size)
            self.pool.evictable += node.length
            self._list(node)
        return node, had

    def _add_alone(self, text: Text, own: OwnText) -> None:
        """Add a text that no other request shares."""
        node = self.root
        for end in own.ends:
            if end > node.end:
                node = Node(node, text, node.end, end, own.added)
                node.used = own.used
                attach(node, self.pool.block_size)
        self.pool.evictable += node.end
        self._list(node)

    def _list(self, node: Node) -> None:
        """Note that a node may be evicted next, if it is a leaf without a lock."""
        if not (node.listed or node.locks or node.children or node.parent is None):
            node.listed = True
            self._listings += 1
            heappush(self._leaves, (node.used, self._listings, node))

    def _lock(self, node: Node) -> int:
        """Lock a node and those above it. Return how many of their blocks had no lock."""
        taken = 0
        while node.parent is not None:
            if not node.locks:
                taken += node.length
            node.locks += 1
            node = node.parent
        self.pool.evictable -= taken
        return taken

    def _unlock(self, node: Node) -> int:
        """Unlock a node and those above it. Return how many of their blocks have no lock any more."""
        given = 0
        while node.parent is not None:
            node.locks -= 1
            if not node.locks:
                given += node.length
                self._list(node)
            node = node.parent
        self.pool.evictable += given
        return given

    def find_cached(self, request: Request) -> tuple[int, int]:
        text = self.text_of(request)
        blocks = 0 if text is None else self.find(text, self.most_cached_blocks(request))[1]
        return blocks * self.pool.block_size, blocks

    def look_up(self, request: Request, tokens: int) -> None:
        text = self.text_of(request)
        if text is not None:
            self._walk(text, tokens // self.pool.block_size)

    def admit(self, request: Request, cached: int, decodes: bool = True) -> int:
        self.stats.count(request, cached)
        if not cached:
            return 0
        text, size = self.text_of(request), self.pool.block_size
        assert text is not None, f"the plan uses {cached} cached tokens, and {request} shares no text"
        node, found = self.find(text, self.most_cached_blocks(request))
        assert cached <= found * size and not cached % size, (
            f"{request}: {cached} cached tokens planned, {found * size} found"
        )
        if cached < node.end * size:
            node = self._walk(text, cached // size)
        self.nodes[request] = node
        return self._lock(node)

    def make_room(self, blocks: int, taken: int = 0) -> None:
        free = self.pool.free + taken
        if free < blocks:
            self.evict(blocks - free if self.evicts_missing else blocks)

    def make_room_for(self, chunks: Sequence[Chunk], decodes: int, decode_blocks: int) -> None:
        # SGLang counts up to a block per prompt and per decode too many, if a block has several tokens.
        pool = self.pool
        if chunks:
            need = taken = 0
            for chunk in chunks:
                cached = chunk.request._cached
                need += chunk.tokens if pool.block_size == 1 else chunk.tokens + pool.block_size
                taken += pool.blocks_for(cached + chunk.tokens) - pool.blocks_for(cached)
            self.make_room(pool.blocks_for(need), taken + decode_blocks)
        self.make_room(decodes, decode_blocks)
        assert pool.free >= 0, f"the step needs {-pool.free} more blocks than are free"

    def evict(self, blocks: int) -> None:
        """Evict leaves without a lock, until at least this number of blocks is gone."""
        leaves, own = self._leaves, self._oldest
        while blocks > 0 and (leaves or own is not None):
            if own is not None and (not leaves or own.used < leaves[0][0]):
                blocks -= self._evict_own(own, blocks)
                own = self._oldest
                continue
            used, _, node = heappop(leaves)
            node.listed = False
            if used != node.used:
                self._list(node)
            elif not node.locks and not node.children:
                assert node.parent is not None
                del node.parent.children[node.key]
                blocks -= node.length
                self._free_evicted(node.length)
                self._list(node.parent)

    def _evict_own(self, own: OwnText, blocks: int) -> int:
        """Evict the oldest text outside the tree from its end, until these blocks are gone. Return their number."""
        ends, evicted = own.ends, 0
        while ends and evicted < blocks:
            end = ends.pop()
            evicted += end - ends[-1] if ends else end
        if not ends:
            self._oldest = own.next
        self._free_evicted(evicted)
        return evicted

    def _free_evicted(self, blocks: int) -> None:
        self.pool.free += blocks
        self.pool.evictable -= blocks
        self.stats.evicted_blocks += blocks

    def keep(self, request: Request, tokens: int) -> int:
        text, size = self.text_of(request), self.pool.block_size
        if text is None:
            self._keep_alone(request, self._alone.get(request), tokens)
            return 0
        before = self.nodes.get(request, self.root)
        node, had = self._insert(text, tokens // size)
        self.pool.free += had - before.end
        taken = self._lock(node)
        self._unlock(before)
        self.nodes[request] = node
        return (taken - (node.end - before.end)) * size

    def release(self, request: Request, known: int, may_return: bool) -> int:
        size, text = self.pool.block_size, self.text_of(request)
        if text is None:
            self._release_alone(request, known, may_return)
            return known
        node = self.nodes.pop(request, self.root)
        own = request._blocks - node.end
        if not may_return:
            if known:
                own -= known // size - self._insert(text, known // size)[1]
            self._texts.pop(request, None)
        self.pool.free += own
        request._blocks = 0
        return known - (node.end - self._unlock(node)) * size

    def _keep_alone(self, request: Request, own: Optional[OwnText], tokens: int) -> OwnText:
        """Note that the first tokens of a request that shares nothing would now be in the tree."""
        self._walks += 1
        if own is None:
            own = self._alone[request] = OwnText(self._walks)
        own.used = self._walks
        own.ends.append(tokens // self.pool.block_size)
        return own

    def _release_alone(self, request: Request, known: int, may_return: bool) -> None:
        """Release the blocks of a request that shares nothing."""
        own, cached = self._alone.get(request), 0
        if may_return:  # from now on, it can find its own blocks again
            self._texts[request] = Text(request)
        elif known:
            own = self._keep_alone(request, own, known)
        if own is not None:
            del self._alone[request]
            cached = own.ends[-1]
            if may_return:
                self._add_alone(self._texts[request], own)
            elif cached:
                self.pool.evictable += cached
                self._append_own(own)
        self.pool.free += request._blocks - cached
        request._blocks = 0

    def _append_own(self, own: OwnText) -> None:
        """Add a text to the list of those that no request looks for."""
        if self._oldest is None or self._newest is None:
            self._oldest = own
        else:
            self._newest.next = own
        self._newest = own

    def clear(self) -> None:
        self.evict(self.pool.evictable)

    def check(self, running: Iterable[Request], tokens: int) -> None:
        pool, cached, idle = self.pool, 0, 0
        locks: dict[Node, int] = {}
        for last in self.nodes.values():
            above: Optional[Node] = last
            while above is not None:
                locks[above] = locks.get(above, 0) + 1
                above = above.parent
        own, walk = self._oldest, 0
        while own is not None:
            assert own.ends == sorted(own.ends) and own.used > walk, "texts in a wrong order"
            cached += own.ends[-1]
            idle += own.ends[-1]
            walk = own.used
            own = own.next
        for node in check_nodes(self.root):
            assert node.locks == locks.get(node, 0), f"{node.locks} locks, {locks.get(node, 0)} requests"
            assert node.listed or node.locks or node.children, "a leaf without a lock can never be evicted"
            cached += node.length
            idle += 0 if node.locks else node.length
        assert idle == pool.evictable, f"{idle} cached blocks without a lock, {pool.evictable} counted"
        held = 0
        for request in running:
            end = self.nodes[request].end if request in self.nodes else 0
            held += request.blocks - end
            tokens -= request.cached - end * pool.block_size
        assert tokens == (cached - idle) * pool.block_size, f"wrong number of stored tokens: {tokens} in the tree"
        lost = pool.total - held - cached - pool.free
        assert lost == pool.lost, f"{held} held + {cached} cached + {pool.free} free, {lost - pool.lost} are lost"
