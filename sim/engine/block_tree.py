"""Cached KV blocks by content: a tree of texts. Runs of blocks, not single blocks, so a prompt costs its branches.

How it works. A node is a number of blocks that follow one another in a text; its children continue the text in
different ways. A run is a sequence of real blocks that hold the text of a node, from its start. The same requests hold
all blocks of a run, so a hit that ends inside a run splits it. Two requests that compute the same text side by side
keep two runs in one node: blocks are never merged. The runs of a node are in the order in which their blocks were
cached, and a hit uses, at each place, the first run that reaches it.

Why it is exact. Blocks leave the cache from the end of a text only (a request holds all blocks before its last one), so
a run always starts where its node starts. Generated tokens fill blocks without a call: the blocks of a decoding
request are added when its node is read (`update`). Requests that decode together advance together, so the one
with more tokens has cached its blocks first.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable
from typing import Final, Optional

from servesim.core import FOREVER, Request

from .cohort import Cohort
from .texts import Text, block_key, equal_tokens, piece_at

NO_DRAFT: Final = -1


class Run:
    """Blocks that hold the first `length` blocks of a node. Without a node, no request can find them."""

    __slots__ = ("after", "before", "cut", "draft", "hashed", "head", "length", "node", "pins", "refs")

    def __init__(self, node: Optional[Node], length: int, refs: int, hashed: bool = True) -> None:
        self.node = node
        self.length = length
        self.refs = refs  # requests that hold these blocks
        self.hashed = hashed  # False: partly filled or never used
        self.head: Optional[Run] = None  # the blocks before these, if the run was split
        self.before: Optional[Run] = None  # neighbours in the free list
        self.after: Optional[Run] = None
        self.draft = 0  # number of the draft that the next two belong to
        self.cut = 0  # blocks at the end that this draft takes
        self.pins = 0  # requests that this draft adds to the holders

    def insert_before(self, other: Run) -> None:
        """Enter the free list, directly before another run."""
        before = other.before
        assert before is not None
        self.before, self.after = before, other
        before.after = other.before = self

    def unlink(self) -> None:
        """Leave the free list."""
        assert self.before is not None and self.after is not None
        self.before.after, self.after.before = self.after, self.before
        self.before = self.after = None

    def length_in(self, draft: int) -> int:
        """Return the number of blocks that a draft has left."""
        return self.length - self.cut if self.draft == draft else self.length

    def refs_in(self, draft: int) -> int:
        return self.refs + self.pins if self.draft == draft else self.refs

    def add_to_draft(self, draft: int, cut: int, pins: int) -> None:
        """Take blocks at the end, or add holders, in a draft."""
        if self.draft != draft:
            self.draft, self.cut, self.pins = draft, 0, 0
        self.cut += cut
        self.pins += pins


class Node:
    """Blocks [start, start + length) of a text."""

    __slots__ = ("children", "growers", "key", "length", "parent", "runs", "start", "text")

    def __init__(self, parent: Optional[Node], key: Hashable, text: Optional[Text], start: int) -> None:
        self.parent = parent
        self.key = key  # among the children of its parent
        self.text = text
        self.start = start
        self.length = 0  # of its longest run
        self.runs: list[Run] = []  # in the order in which their blocks were cached
        self.children: dict[Hashable, Node] = {}
        self.growers: list[Holding] = []  # running requests whose last full block is here


class Holding:
    """The cached blocks of a running request, from the first to its last full block."""

    __slots__ = ("counts", "end", "node", "piece", "request", "run", "runs", "text")

    def __init__(self, request: Request, text: Text, node: Node) -> None:
        self.request = request
        self.text = text
        self.node = node  # with its last full block
        self.end = 0  # full blocks that the tree has
        self.piece = 0  # the piece of the text after them, or an earlier one
        self.runs: list[Run] = []  # a run stands for itself and, if it was split since, for the parts before it
        self.counts: list[int] = []  # blocks of each
        self.run: Optional[Run] = None  # the last run, if the request has filled it itself

    def add(self, run: Run, blocks: int) -> None:
        self.runs.append(run)
        self.counts.append(blocks)
        self.end += blocks

    def extend(self, run: Run, blocks: int) -> None:
        run.length += blocks
        self.counts[-1] += blocks
        self.end += blocks

    def last_to_first(self) -> list[Run]:
        """Return all runs that it holds, the last one first."""
        runs = []
        for index in range(len(self.runs) - 1, -1, -1):
            run: Optional[Run] = self.runs[index]
            blocks = self.counts[index]
            while blocks > 0:
                assert run is not None
                runs.append(run)
                blocks -= run.length
                run = run.head
            assert blocks == 0, "a run was cut while a request held it"
        return runs


class Match:
    """The cached blocks of a text."""

    __slots__ = ("blocks", "idle", "may_grow")

    def __init__(self, blocks: int, idle: int, may_grow: bool) -> None:
        self.blocks = blocks
        self.idle = idle  # of these, blocks that no request holds
        self.may_grow = may_grow  # a running request may soon add the next block


class BlockTree:
    """The tree, and the requests that add to it."""

    __slots__ = ("block_size", "cohort", "root")

    def __init__(self, block_size: int, cohort: Cohort) -> None:
        self.block_size = block_size
        self.cohort = cohort
        self.root = Node(None, None, None, 0)

    def match(self, text: Text, limit: int, draft: int, decoding_before: int = FOREVER) -> Match:
        """Return how many of the first `limit` blocks of a text are cached. `decoding_before`: see `update`."""
        size, node, end, piece, idle = self.block_size, self.root, 0, 0, 0
        above = node
        if node.growers:
            self.update(node, decoding_before)
        while end < limit:
            piece = piece_at(text, piece, end * size)
            key = block_key(text, piece, end * size, size)
            child = node.children.get(key)
            if child is None:
                break
            if child.growers:
                self.update(child, decoding_before)
                child = node.children[key]  # the update may have split it
            most = min(self._equal_blocks(text, child, piece), limit) - end
            at = 0
            for run in child.runs:
                length = run.length_in(draft)
                if length > at:
                    if length > most:
                        length = most
                    if run.refs_in(draft) == 0:
                        idle += length - at
                    at = length
                    if at >= most:
                        break
            above, node = node, child
            end += at
            if at < child.length:
                break
        return Match(end, idle, end < limit and bool(node.growers or above.growers))

    def _equal_blocks(self, text: Text, node: Node, piece: int) -> int:
        """Return how many blocks of a text equal the text of a node, counted from the start of the text."""
        assert node.text is not None
        end = node.start + node.length
        return min(end, equal_tokens(text, node.text, piece, end * self.block_size) // self.block_size)

    def pin(self, text: Text, blocks: int, draft: int) -> tuple[list[Run], Node]:
        """Return the runs of the first blocks of a text, which `match` has found, and their last node.

        Nodes are split, so that each run is used as a whole.
        """
        size, node, end, piece = self.block_size, self.root, 0, 0
        runs: list[Run] = []
        while end < blocks:
            piece = piece_at(text, piece, end * size)
            node = node.children[block_key(text, piece, end * size, size)]
            count = min(first_run(node, draft).length_in(draft), blocks - end)
            if count < node.length:
                node = self.split(node, count)
            runs.append(first_run(node, draft))
            end += count
        return runs, node

    def split(self, node: Node, blocks: int) -> Node:
        """Give the first blocks of a node a node of their own, and return it."""
        parent, text, size = node.parent, node.text, self.block_size
        assert parent is not None and text is not None and 0 < blocks < node.length
        head = Node(parent, node.key, text, node.start)
        head.length = blocks
        parent.children[node.key] = head
        runs, node.runs = node.runs, []
        for run in runs:
            if run.length <= blocks:
                run.node = head
                head.runs.append(run)
            else:
                head.runs.append(split_run(run, head, blocks))
                node.runs.append(run)
        growers, node.growers = node.growers, []
        node.start += blocks
        node.length -= blocks
        for holding in growers:
            holding.node = node if holding.end > node.start else head
            holding.node.growers.append(holding)
        start = node.start * size
        node.key = block_key(text, bisect_right(text.ends, start), start, size)
        node.parent = head
        head.children[node.key] = node
        return head

    def update(self, node: Node, decoding_before: int) -> None:
        """Add the full blocks of the requests whose last block is in a node.

        Decoding requests before this place in the running queue are one token further: their step has been decided.
        A request enters a node after those whose last block is there were updated. So no request that is further in the
        same text is in a node above.
        """
        growers = list(node.growers)
        if len(growers) > 1:  # the one with more tokens has cached its blocks first
            growers.sort(key=lambda holding: (-self.known_tokens(holding.request, 0), holding.request._admission))
        for holding in growers:
            tokens = self.known_tokens(holding.request, decoding_before)
            self.register(holding, tokens // self.block_size, decoding_before)

    def known_tokens(self, request: Request, decoding_before: int) -> int:
        """Return the cached tokens whose value the scheduler knew when it decided their step."""
        if request.decodes and request._admission < decoding_before:
            return request.cached + 1 - request.in_flight
        return request.cached - self.cohort.unknown_tokens(request)

    def register(self, holding: Holding, blocks: int, decoding_before: int) -> None:
        """Add blocks of a request up to this number."""
        while holding.end < blocks:
            node, run, more = holding.node, holding.run, blocks - holding.end
            at = holding.end - node.start
            if run is not None and run.refs > 1:
                run = None  # it has its length for all who hold it
            if at < node.length:
                if run is not None:
                    more = min(more, self._equal_after(holding, node))
                    if more > 0 and not has_longer_after(node, run):
                        holding.extend(run, more)
                        continue
                self.split(node, at)
            elif run is not None and node.text is holding.text and not node.children:
                holding.extend(run, more)
                node.length += more
                continue
            self._enter_child(holding, blocks, decoding_before)

    def _equal_after(self, holding: Holding, node: Node) -> int:
        """Return how many blocks after the last one of a request equal those of its node."""
        holding.piece = piece_at(holding.text, holding.piece, holding.end * self.block_size)
        return self._equal_blocks(holding.text, node, holding.piece) - holding.end

    def _enter_child(self, holding: Holding, blocks: int, decoding_before: int) -> None:
        """Continue after the end of a node: in the child with the same text, or in a new one."""
        node, text, size, end = holding.node, holding.text, self.block_size, holding.end
        holding.piece = piece_at(text, holding.piece, end * size)
        key = block_key(text, holding.piece, end * size, size)
        child = node.children.get(key)
        if child is None:
            child = node.children[key] = Node(node, key, text, end)
            child.length = count = blocks - end
        else:
            if child.growers:
                self.update(child, decoding_before)
                child = node.children[key]  # the update may have split it
            count = min(blocks, self._equal_blocks(text, child, holding.piece)) - end
        run = Run(child, count, 1)
        child.runs.append(run)
        node.growers.remove(holding)
        child.growers.append(holding)
        holding.node, holding.run = child, run
        holding.add(run, count)

    def remove_last(self, run: Run, blocks: int) -> None:
        """Remove the last blocks of a run that no request holds."""
        node = run.node
        assert node is not None and run.refs == 0
        was_longest = run.length == node.length
        run.length -= blocks
        if not run.length:
            node.runs.remove(run)
        if was_longest:
            length = max([other.length for other in node.runs], default=0)
            assert length == node.length or not node.children, "a block was evicted before the blocks after it"
            node.length = length
            if not length:
                assert node.parent is not None
                del node.parent.children[node.key]


def first_run(node: Node, draft: int) -> Run:
    """Return the run that was cached first, of those that have blocks."""
    for run in node.runs:
        if run.length_in(draft) > 0:
            return run
    raise AssertionError("a node without blocks")


def has_longer_after(node: Node, run: Run) -> bool:
    """Whether a run that was cached later is longer: then it has the next block first."""
    runs = node.runs
    return any(other.length > run.length for other in runs[runs.index(run) + 1 :])


def split_run(run: Run, node: Node, blocks: int) -> Run:
    """Move the first blocks of a run to a run of their own, and return it."""
    head = Run(node, blocks, run.refs)
    run.length -= blocks
    head.head, run.head = run.head, head
    head.draft, head.pins = run.draft, run.pins
    cut = min(run.cut, run.length)
    head.cut, run.cut = run.cut - cut, cut
    if run.after is not None:  # in the free list, the end of a text comes before its beginning
        head.insert_before(run.after)
    return head
