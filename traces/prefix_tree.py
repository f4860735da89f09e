"""The distinct blocks of the texts of requests: equal beginnings are one path of a tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

from servesim.core import ClientRequest
from servesim.engine.text_tree import TextNode, attach, find, insert_above
from servesim.engine.texts import Text

Node = TextNode[Any]


class PrefixTree:
    """A tree of texts in blocks of one size. A node is a run of blocks without a branch."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.root: Node = TextNode(None, None, 0, 0)

    def add_all(self, requests: Sequence[ClientRequest]) -> tuple[int, int]:
        """Add the texts of requests; return the number of prompt blocks that the tree had, and of all."""
        seen = total = 0
        for request in requests:
            blocks = request.prompt // self.block_size
            total += blocks
            if request.content is not None:
                seen += min(self.add(Text(request), self.shared_blocks(request))[1], blocks)
        return seen, total

    def shared_blocks(self, request: ClientRequest) -> int:
        """Return how many whole blocks of a request others may have too. Its last token is not computed."""
        assert request.content is not None
        if request.content.answer is None:
            return request.prompt // self.block_size
        return (request.prompt + request.output - 1) // self.block_size

    def add(self, text: Text, blocks: int) -> tuple[Node, int]:
        """Add the first blocks of a text; return the node where those that it had end, and their number."""
        node, had = find(self.root, text, blocks, self.block_size)
        if had < node.end:
            head: Node = TextNode(node.parent, node.text, node.start, had)
            insert_above(head, node, self.block_size)
            node = head
        if had < blocks:
            attach(TextNode(node, text, had, blocks), self.block_size)
        return node, had

    def path(self, request: ClientRequest) -> list[Node]:
        """Return the blocks of a request that was added: those that others may have too, then those of its own."""
        end = (request.prompt + request.output - 1) // self.block_size
        if request.content is None:
            return [TextNode(None, None, 0, end)]
        shared = self.shared_blocks(request)
        node: Optional[Node] = find(self.root, Text(request), shared, self.block_size)[0]
        path: list[Node] = [] if shared == end else [TextNode(None, None, shared, end)]
        while node is not None and node.parent is not None:
            path.append(node)
            node = node.parent
        return path[::-1]
