"""The radix cache as a policy sees it while it plans a step: what is cached, and what the plan so far would lock.

How it works. A plan is only a proposal, so nothing here uses, splits or locks a node. What has an effect on the tree is
part of the plan: the requests that were looked up, in order, and the blocks that must be free (core/plan.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from servesim.core import NOT_CACHED, CachedPrefix, CacheDraft, Chunk, Request
from servesim.engine.texts import equal_tokens

from .radix_cache import Node, RadixCache


class RadixDraft(CacheDraft):
    """The draft of one step. The policy starts it again in each step."""

    __slots__ = ("_locked", "_unlocked", "cache")

    def __init__(self, cache: RadixCache) -> None:
        self.cache = cache
        self._locked: dict[Node, int] = {}  # nodes without a lock, and how many of their blocks the plan locks
        self._unlocked: dict[Node, int] = {}  # locks that the plan removes

    def start(self, chunks: Iterable[Chunk] = (), decodes: bool = True) -> None:
        self._locked.clear()
        self._unlocked.clear()

    def find(self, request: Request, free: int) -> CachedPrefix:
        cache = self.cache
        text = cache.text_of(request)
        if text is None:
            return NOT_CACHED
        node, blocks = cache.find(text, cache.most_cached_blocks(request))
        idle, end = 0, blocks
        while node.parent is not None and not node.locks:
            locked = self._locked.get(node, 0)
            idle += max(0, end - node.start - locked)
            if locked:  # those above it are locked too
                break
            node, end = node.parent, node.start
        return CachedPrefix(blocks * cache.pool.block_size, idle, False, blocks)

    def admit(self, request: Request, prefix: CachedPrefix, tokens: int) -> None:
        text = self.cache.text_of(request)
        if text is None:
            return
        node, end = self.cache.find(text, prefix.blocks_in_cache)
        while node.parent is not None and not node.locks and self._locked.get(node, 0) < end - node.start:
            self._locked[node] = end - node.start
            node, end = node.parent, node.start

    def preempt(self, request: Request, tokens: int, blocks: int = 0) -> int:
        node = self.cache.nodes.get(request, self.cache.root)
        blocks = request.blocks - node.end
        while node.parent is not None:
            self._unlocked[node] = unlocked = self._unlocked.get(node, 0) + 1
            if unlocked == node.locks:
                blocks += node.length
            node = node.parent
        return blocks

    def matched(self, request: Request, tokens: int) -> int:
        text = self.cache.text_of(request)
        return 0 if text is None else self.cache.cached_tokens(text, tokens)

    def common_tokens(self, request: Request, other: Request, limit: int) -> int:
        text, other_text = self.cache.text_of(request), self.cache.text_of(other)
        if text is None or other_text is None:
            return 0
        return min(limit, equal_tokens(text, other_text, 0, limit))

    def by_weight(self, lookups: Sequence[tuple[Request, int]]) -> list[Request]:
        root, size = self.cache.root, self.cache.pool.block_size
        weights: dict[Node, int] = {}
        own: dict[Node, list[tuple[int, Request]]] = {}
        for request, tokens in lookups:
            text = self.cache.text_of(request)
            node, end = (root, 0) if text is None else self.cache.find(text, tokens // size)
            own.setdefault(node, []).append((-end, request))
            while node.parent is not None:
                weights[node] = weights.get(node, 0) + 1
                node = node.parent
        ordered: list[Request] = []
        stack = [root]  # a node is visited twice: before and after its children
        open_nodes: set[Node] = set()
        while stack:
            node = stack[-1]
            if node not in open_nodes:
                open_nodes.add(node)
                children = [child for child in node.children.values() if child in weights]
                children.sort(key=lambda child: (-weights[child], child.added))
                stack += reversed(children)
            else:
                stack.pop()
                # a lookup that ends inside a node would split it, and the lower part comes first
                ordered += [request for _, request in sorted(own.get(node, ()), key=lambda pair: pair[0])]
        return ordered
