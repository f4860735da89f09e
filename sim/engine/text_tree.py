"""A tree of texts, cut into blocks, and the walk of a text through it. All caches that share KV blocks use it.

A node is a number of blocks that follow one another in a text; its children continue the text in different ways. So a
lookup costs the branches on its way, not the blocks. What the blocks of a node are is up to the cache: a subclass.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Generic, Optional, TypeVar

from .texts import Text, block_key, equal_tokens

N = TypeVar("N", bound="TextNode[Any]")


class TextNode(Generic[N]):
    """Blocks [start, end) of a text."""

    __slots__ = ("children", "end", "key", "parent", "start", "text")

    def __init__(self, parent: Optional[N], text: Optional[Text], start: int, end: int) -> None:
        self.parent = parent  # None: the root, which has no blocks
        self.text = text  # one that has these blocks at this place
        self.start = start
        self.end = end
        self.key: Hashable = None  # what its first block says
        self.children: dict[Hashable, N] = {}

    @property
    def length(self) -> int:
        return self.end - self.start


def find(node: N, text: Text, blocks: int, size: int) -> tuple[N, int]:
    """Walk a text from the end of a node on, as far as the tree has its first `blocks` blocks of `size` tokens.

    Return the node in which they end, and how many they are. The text is known to have the blocks up to the first node.
    """
    end = node.end
    while end == node.end and end < blocks:
        child = next_node(node, text, size)
        if child is None:
            break
        node, end = child, equal_blocks(child, text, end, blocks, size)
    return node, end


def next_node(node: N, text: Text, size: int) -> Optional[N]:
    """Return the child with the block of a text that follows the end of a node."""
    child: Optional[N] = node.children.get(block_key(text, node.end * size, size))
    return child


def equal_blocks(node: N, text: Text, known: int, limit: int, size: int) -> int:
    """Return up to which block a text is equal to that of a node, at most `limit`. It is known to be up to `known`."""
    assert node.text is not None
    if limit > node.end:
        limit = node.end
    equal = equal_tokens(text, node.text, known * size, limit * size) // size
    return equal if equal < limit else limit


def attach(node: N, size: int) -> None:
    """Make a node a child of its parent."""
    text, parent = node.text, node.parent
    assert text is not None and parent is not None
    node.key = block_key(text, node.start * size, size)
    parent.children[node.key] = node


def insert_above(head: N, node: N, size: int) -> None:
    """Put a new node that has the first blocks of a node between it and its parent."""
    parent = node.parent
    assert parent is not None and node.start == head.start < head.end < node.end
    head.key = node.key
    parent.children[node.key] = head
    node.start, node.parent = head.end, head
    attach(node, size)


def check_nodes(root: N) -> list[N]:
    """Verify the places of all nodes below the root, and return them."""
    nodes: list[N] = []
    left: list[N] = [*root.children.values()]
    while left:
        node = left.pop()
        parent = node.parent
        assert parent is not None and parent.children[node.key] is node and node.start < node.end
        assert node.start == parent.end, "a block is cached, the block before it is not"
        nodes.append(node)
        left += node.children.values()
    return nodes
