"""Reference implementation of SGLang's radix cache, token by token and as simple as possible.

It shares no code with the engine: a node has a list of tokens, every walk compares them one by one, and an eviction
looks at all leaves. Memory is counted in tokens, and each node has its own time, as in SGLang 0.4.6 (`alike` False) or
the time of the walk, as in 0.5.18.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Optional


class Part:
    """A node of the tree."""

    def __init__(self, parent: Optional[Part], tokens: list[Hashable], time: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.children: dict[Any, Part] = {}
        self.locks = 0
        self.time = time


class RadixTree:
    """The tree, its clock, and the tokens that can be evicted."""

    def __init__(self, page: int, alike: bool) -> None:
        self.page = page
        self.alike = alike
        self.clock = 0
        self.root = Part(None, [], 0)
        self.evicted = 0

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    def whole(self, count: int) -> int:
        return count - count % self.page

    def _walk(self, tokens: Sequence[Hashable]) -> tuple[Part, int]:
        """Use the tokens as far as they are known: their last node and their number."""
        tokens = tokens[: self.whole(len(tokens))]
        time, node, done = self.tick(), self.root, 0
        while done < len(tokens) and tuple(tokens[done : done + self.page]) in node.children:
            node = node.children[tuple(tokens[done : done + self.page])]
            node.time = time if self.alike else self.tick()
            same = 0
            while same < len(node.tokens) and tokens[done + same : done + same + 1] == node.tokens[same : same + 1]:
                same += 1
            same = self.whole(same)
            done += same
            if same < len(node.tokens):
                return self._split(node, same), done
        return node, done

    def _split(self, node: Part, count: int) -> Part:
        upper = Part(node.parent, node.tokens[:count], self.tick())
        upper.locks = node.locks
        node.parent.children[tuple(node.tokens[: self.page])] = upper
        node.tokens = node.tokens[count:]
        node.parent = upper
        upper.children[tuple(node.tokens[: self.page])] = node
        return upper

    def match(self, tokens: Sequence[Hashable]) -> tuple[Part, int]:
        return self._walk(tokens)

    def insert(self, tokens: Sequence[Hashable]) -> tuple[Part, int]:
        """Return the last node, and how many tokens the tree had."""
        tokens = tokens[: self.whole(len(tokens))]
        node, had = self._walk(tokens)
        if had < len(tokens):
            leaf = Part(node, list(tokens[had:]), self.tick())
            node.children[tuple(tokens[had : had + self.page])] = leaf
            node = leaf
        return node, had

    def lock(self, node: Optional[Part], change: int) -> None:
        while node is not None:
            node.locks += change
            node = node.parent

    def parts(self) -> list[Part]:
        found, todo = [], list(self.root.children.values())
        while todo:
            found.append(todo.pop())
            todo += found[-1].children.values()
        return found

    @property
    def evictable(self) -> int:
        return sum(len(part.tokens) for part in self.parts() if not part.locks)

    def evict(self, count: int) -> int:
        gone = 0
        while gone < count:
            leaves = [part for part in self.parts() if not part.children and not part.locks]
            if not leaves:
                break
            oldest = min(leaves, key=lambda part: part.time)
            del oldest.parent.children[tuple(oldest.tokens[: self.page])]
            gone += len(oldest.tokens)
        self.evicted += gone
        return gone

    def depth_first(self, ends: Sequence[tuple[Any, Part]]) -> list[Any]:
        """Order requests by weight; `ends`: the last node of each."""

        def weight(node: Part) -> int:
            return sum(end is node for _, end in ends) + sum(weight(child) for child in node.children.values())

        def visit(node: Part) -> list[Any]:
            order: list[Any] = []
            for child in sorted(node.children.values(), key=lambda child: -weight(child)):
                order += visit(child)
            return order + [request for request, end in ends if end is node]

        return visit(self.root)
