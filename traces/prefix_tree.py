"""A tree of contents in blocks: equal beginnings of prompts are one path. A node is a run of blocks without a branch.

The work to add a content is proportional to its pieces and branches, not to its blocks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterator

from servesim.core.content import Content


class Node:
    """The blocks from `start` to before `end` of all contents that pass here."""

    __slots__ = ("children", "content", "end", "position", "start")

    def __init__(self, content: Content, start: int, end: int) -> None:
        self.content = content  # one of the contents that pass here
        self.start = start
        self.end = end
        self.children: dict[Hashable, Node] = {}  # by their first block
        self.position = 0  # place of its last use in the order of uses; 0: never used


class PrefixTree:
    """The distinct blocks of contents."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.root = Node(Content((), ()), 0, 0)

    def add(self, content: Content, blocks: int) -> int:
        """Add the first blocks of a content; return how many of them were in the tree."""
        node, place, piece = self.root, 0, 0
        while place < blocks:
            key = self._key(content, place)
            child = node.children.get(key)
            if child is None:
                node.children[key] = Node(content, place, blocks)
                return place
            tokens, piece = equal_tokens(child.content, content, piece, min(child.end, blocks) * self.block_size)
            place = tokens // self.block_size
            if place < child.end:
                child = self._split(node, key, place)
            node = child
        return place

    def path(self, content: Content, blocks: int) -> Iterator[Node]:
        """Yield the nodes of the first blocks of a content that was added."""
        node, place = self.root, 0
        while place < blocks:
            node = node.children[self._key(content, place)]
            yield node
            place = node.end

    def _key(self, content: Content, place: int) -> Hashable:
        start = place * self.block_size
        return token_key(content, start, start + self.block_size)

    def _split(self, parent: Node, key: Hashable, place: int) -> Node:
        """Cut a child before block `place`; return its first part."""
        rest = parent.children[key]
        first = parent.children[key] = Node(rest.content, rest.start, place)
        first.children[self._key(rest.content, place)] = rest
        rest.start = place
        return first


def token_key(content: Content, start: int, end: int) -> Hashable:
    """Return what the tokens from `start` to before `end` are: texts, positions in them, and numbers of tokens."""
    names, ends = content.names, content.ends
    piece = bisect_right(ends, start)
    offset = start - (ends[piece - 1] if piece else 0)
    if ends[piece] >= end:
        return names[piece], offset, end - start
    parts: list[Hashable] = []
    while start < end:
        stop = min(end, ends[piece])
        parts.append((names[piece], offset, stop - start))
        start, offset, piece = stop, 0, piece + 1
    return tuple(parts)


def equal_tokens(one: Content, other: Content, piece: int, limit: int) -> tuple[int, int]:
    """Return the number of equal tokens at the beginning, at most `limit`, and the piece in which they end.

    The pieces before `piece` are known to be equal.
    """
    names, other_names, ends, other_ends = one.names, other.names, one.ends, other.ends
    count = min(len(names), len(other_names))
    while piece < count:
        start = ends[piece - 1] if piece else 0
        if start >= limit:
            return limit, piece - 1
        if names[piece] != other_names[piece]:
            return start, piece
        if ends[piece] != other_ends[piece]:
            return min(ends[piece], other_ends[piece], limit), piece
        piece += 1
    return min(ends[count - 1], limit), max(0, count - 1)
