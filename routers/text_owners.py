"""The tree of SGLang's router: which replica was sent which text.

A node is a piece of text with the replicas that own it and a stamp for each. `last` is the replica that created a leaf.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Optional

STAMP_EVERY = 8  # a match renews the stamp of its owner once in this number of ticks


class Node:
    """A piece of text below its parent."""

    __slots__ = ("children", "last", "parent", "stamps", "text")

    def __init__(self, parent: Optional[Node], text: str) -> None:
        self.parent = parent
        self.text = text
        self.children: dict[str, Node] = {}  # by their first character
        self.stamps: dict[int, int] = {}  # of the replicas that own it
        self.last: Optional[int] = None


class TextOwners:
    """One tree for all replicas."""

    def __init__(self) -> None:
        self.root = Node(None, "")
        self.sizes: dict[int, int] = {}  # characters of each replica
        self._tick = 0

    def insert(self, text: str, owner: int) -> None:
        """Note that a replica was sent a text."""
        self._tick += 1
        node, at = self.root, 0
        node.stamps.setdefault(owner, 0)
        while at < len(text):
            child = node.children.get(text[at])
            if child is None:
                node.children[text[at]] = self._leaf(node, text[at:], owner)
                return
            shared = shared_length(text, at, child.text)
            if shared < len(child.text):
                child = split(child, shared)
            if owner not in child.stamps:
                child.stamps[owner] = 0
                self._add(owner, shared)
            node, at = child, at + shared
        node.stamps[owner] = self._tick

    def _leaf(self, parent: Node, text: str, owner: int) -> Node:
        leaf = Node(parent, text)
        leaf.stamps[owner] = self._tick
        leaf.last = owner
        self._add(owner, len(text))
        return leaf

    def _add(self, owner: int, length: int) -> None:
        self.sizes[owner] = self.sizes.get(owner, 0) + length

    def find(self, text: str) -> tuple[int, Optional[int]]:
        """Return how many characters of a text are in the tree, and the owner of the node in which they end."""
        node, at = self._walk(text)
        return at, owner_of(node)

    def touch(self, text: str) -> None:
        """Renew what a match renews: the owner of the node in which it ends, and once in a while its stamp."""
        node, _ = self._walk(text)
        owner = node.last = owner_of(node)
        self._tick += 1
        if owner is not None and self._tick % STAMP_EVERY == 0:
            node.stamps[owner] = self._tick

    def _walk(self, text: str) -> tuple[Node, int]:
        node, at = self.root, 0
        while at < len(text):
            child = node.children.get(text[at])
            if child is None:
                break
            shared = shared_length(text, at, child.text)
            node, at = child, at + shared
            if shared < len(child.text):
                break
        return node, at

    def remove(self, owner: int) -> None:
        """Remove a replica that is gone."""
        self.evict(0, owner)
        self.root.stamps.pop(owner, None)

    def evict(self, limit: int, only: Optional[int] = None) -> None:
        """Remove the oldest texts of each replica that owns more characters than the limit."""
        for owner in [only] if only is not None else list(self.sizes):
            if self.sizes.get(owner, 0) > limit:
                self._evict(owner, limit)

    def _evict(self, owner: int, limit: int) -> None:
        ends = [(node.stamps[owner], number, node) for number, node in enumerate(self._ends(owner))]
        heapify(ends)
        number = len(ends)
        while ends and self.sizes[owner] > limit:
            _, _, node = heappop(ends)
            parent = node.parent
            if parent is None:
                return
            del node.stamps[owner]
            self.sizes[owner] -= len(node.text)
            if not node.stamps and not node.children:
                del parent.children[node.text[0]]
            if owner in parent.stamps and not any(owner in child.stamps for child in parent.children.values()):
                number += 1
                heappush(ends, (parent.stamps[owner], number, parent))

    def _ends(self, owner: int) -> list[Node]:
        """Return the nodes of a replica below which it owns nothing."""
        found, left = [], [self.root]
        while left:
            node = left.pop()
            own = [child for child in node.children.values() if owner in child.stamps]
            left += own
            if not own and node.parent is not None:
                found.append(node)
        return found


def owner_of(node: Node) -> Optional[int]:
    """Return the replica that created a node, or another owner if it is not one any more."""
    return node.last if node.last in node.stamps else next(iter(node.stamps), None)


def split(node: Node, length: int) -> Node:
    """Put a new node with the first characters of a node above it; it has the same owners. Return it."""
    upper = Node(node.parent, node.text[:length])
    upper.stamps, upper.last = dict(node.stamps), node.last
    assert node.parent is not None
    node.parent.children[node.text[0]] = upper
    node.parent, node.text = upper, node.text[length:]
    upper.children[node.text[0]] = node
    return upper


def shared_length(text: str, start: int, other: str) -> int:
    """Return how many characters of a text from `start` on are those of another text."""
    low, high = 0, min(len(other), len(text) - start)
    if text.startswith(other[:high], start):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if text.startswith(other[low:middle], start + low):
            low = middle
        else:
            high = middle
    return low
