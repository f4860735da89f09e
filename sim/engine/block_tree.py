"""Cached KV blocks by content: a tree of texts. Runs of blocks, not single blocks, so a prompt costs its branches.

How it works. A run is a sequence of real blocks that hold the text of a node, from its start. The same requests hold
all blocks of a run, so a hit that ends inside a run splits it. Two requests that compute the same text side by side
keep two runs in one node: blocks are never merged. The runs of a node are in the order in which their blocks were
cached, and a hit uses, at each place, the first run that reaches it.

Why it is exact. Blocks leave the cache from the end of a text only (a request holds all blocks before its last one), so
a run always starts where its node starts. Generated tokens fill blocks without a call: the blocks of a decoding
request are added when its node is read (`update`). Requests that decode together advance together, so the one
with more tokens has cached its blocks first.
"""

from __future__ import annotations

from typing import Final, Optional

from servesim.core import FOREVER, Request

from .cohort import Cohort
from .text_tree import TextNode, attach, equal_blocks, find, insert_above, next_node
from .texts import Text

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
        self.before: Optional[Run] = None  # neighbours in a list
        self.after: Optional[Run] = None
        self.draft = 0  # number of the draft that the next two belong to
        self.cut = 0  # blocks at the end that this draft takes
        self.pins = 0  # requests that this draft adds to the holders

    def insert_before(self, other: Run) -> None:
        """Enter a list, directly before another run."""
        before = other.before
        assert before is not None
        self.before, self.after = before, other
        before.after = other.before = self

    def unlink(self) -> None:
        """Leave its list."""
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


class RunList:
    """Runs in an order: a ring, with the first run after `ends` and the last one before it."""

    __slots__ = ("ends",)

    def __init__(self) -> None:
        self.ends = Run(None, 0, 0)
        self.ends.before = self.ends.after = self.ends

    @property
    def first(self) -> Optional[Run]:
        return self.ends.after if self.ends.after is not self.ends else None

    @property
    def last(self) -> Optional[Run]:
        return self.ends.before if self.ends.before is not self.ends else None

    def append(self, run: Run) -> None:
        run.insert_before(self.ends)

    def runs(self) -> list[Run]:
        """Return all runs, the first one first."""
        runs, run = [], self.ends.after
        while run is not None and run is not self.ends:
            runs.append(run)
            run = run.after
        return runs


class Node(TextNode["Node"]):
    """Blocks of a text, as long as its longest run."""

    __slots__ = ("growers", "runs")

    def __init__(self, parent: Optional[Node], text: Optional[Text], start: int, end: int) -> None:
        super().__init__(parent, text, start, end)
        self.runs: list[Run] = []  # in the order in which their blocks were cached
        self.growers: list[Holding] = []  # running requests whose last full block is here


class Holding:
    """The cached blocks of a running request, from the first to its last full block."""

    __slots__ = ("counts", "end", "node", "request", "run", "runs", "text")

    def __init__(self, request: Request, text: Text, node: Node) -> None:
        self.request = request
        self.text = text
        self.node = node  # with its last full block
        self.end = 0  # full blocks that the tree has
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

    __slots__ = ("block_size", "cohort", "only_registered", "root")

    def __init__(self, block_size: int, cohort: Cohort) -> None:
        self.only_registered = False  # blocks are added by `register` only, not by what requests have computed
        self.block_size = block_size
        self.cohort = cohort
        self.root = Node(None, None, 0, 0)

    def match(self, text: Text, limit: int, draft: int, decoding_before: int = FOREVER) -> Match:
        """Return how many of the first `limit` blocks of a text are cached. `decoding_before`: see `update`."""
        node, end = find(self.root, text, limit, self.block_size)
        if self._update_above(node, decoding_before):
            node, end = find(self.root, text, limit, self.block_size)
        blocks, idle, last, above = end, 0, node, node.parent
        while above is not None:
            most, at, idle_here = end - node.start, 0, 0
            for run in node.runs:
                length = run.length_in(draft)
                if length > at:
                    if length > most:
                        length = most
                    if run.refs_in(draft) == 0:
                        idle_here += length - at
                    at = length
                    if at >= most:
                        break
            if at < most:  # the draft takes the blocks after these
                blocks, idle, last = node.start + at, 0, node
            idle += idle_here
            end, node, above = node.start, above, above.parent
        may_grow = blocks < limit and bool(last.growers or (last.parent is not None and last.parent.growers))
        return Match(blocks, idle, may_grow)

    def _update_above(self, node: Node, decoding_before: int) -> bool:
        """Update a node and those above it. Return whether requests may have added blocks there."""
        updated = False
        above: Optional[Node] = node
        while above is not None:
            if above.growers:
                self.update(above, decoding_before)
                updated = True
            above = above.parent
        return updated

    def pin(self, text: Text, blocks: int, draft: int) -> tuple[list[Run], Node]:
        """Return the runs of the first blocks of a text, which `match` has found, and their last node.

        Nodes are split, so that each run is used as a whole.
        """
        node = self.root
        runs: list[Run] = []
        while node.end < blocks:
            child = next_node(node, text, self.block_size)
            assert child is not None, "a block that was found is gone"
            end = min(child.start + first_run(child, draft).length_in(draft), blocks)
            node = child if end == child.end else self.split(child, end)
            runs.append(first_run(node, draft))
        return runs, node

    def reach(self, above: Node, text: Text, end: int) -> Node:
        """Return the node that ends with block `end` of a text, from a node above. It is split or added as needed."""
        node, found = find(above, text, end, self.block_size)
        if found < node.end:
            node = self.split(node, found)
        return node if found == end else self._add(node, text, end)

    def _add(self, parent: Node, text: Text, end: int) -> Node:
        """Add a node that continues a text after the end of another node."""
        node = Node(parent, text, parent.end, end)
        attach(node, self.block_size)
        return node

    def split(self, node: Node, end: int) -> Node:
        """Give the blocks of a node before block `end` of the text a node of their own, and return it."""
        head = Node(node.parent, node.text, node.start, end)
        insert_above(head, node, self.block_size)
        runs, node.runs = node.runs, []
        for run in runs:
            if run.length <= head.length:
                run.node = head
                head.runs.append(run)
            else:
                head.runs.append(split_run(run, head, head.length))
                node.runs.append(run)
        growers, node.growers = node.growers, []
        for holding in growers:
            holding.node = node if holding.end > end else head
            holding.node.growers.append(holding)
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
        if self.only_registered:
            return 0
        if request.decodes and request._admission < decoding_before:
            return request.cached + 1 - request.in_flight
        return request.cached - self.cohort.unknown_tokens(request)

    def register(self, holding: Holding, blocks: int, decoding_before: int) -> None:
        """Add blocks of a request up to this number."""
        while holding.end < blocks:
            node, run, text, end = holding.node, holding.run, holding.text, holding.end
            if run is not None and run.refs > 1:
                run = None  # it has its length for all who hold it
            if end < node.end:
                if run is not None:
                    more = equal_blocks(node, text, end, blocks, self.block_size) - end
                    if more > 0 and not has_longer_after(node, run):
                        holding.extend(run, more)
                        continue
                self.split(node, end)
            elif run is not None and node.text is text and not node.children:
                holding.extend(run, blocks - end)
                node.end = blocks
                continue
            self._enter_child(holding, blocks, decoding_before)

    def _enter_child(self, holding: Holding, blocks: int, decoding_before: int) -> None:
        """Continue after the end of a node: in the child with the same text, or in a new one."""
        node, text, size = holding.node, holding.text, self.block_size
        child = next_node(node, text, size)
        if child is not None and child.growers:
            self.update(child, decoding_before)
            child = next_node(node, text, size)  # the update may have split it
        if child is None:
            child = self._add(node, text, blocks)
        else:
            blocks = equal_blocks(child, text, holding.end, blocks, size)
        run = Run(child, blocks - holding.end, 1)
        child.runs.append(run)
        node.growers.remove(holding)
        child.growers.append(holding)
        holding.node, holding.run = child, run
        holding.add(run, run.length)

    def remove_last(self, run: Run, blocks: int) -> None:
        """Remove the last blocks of a run that no request holds."""
        node = run.node
        assert node is not None and run.refs == 0
        was_longest = run.length == node.length
        run.length -= blocks
        if not run.length:
            node.runs.remove(run)
        if was_longest:
            end = node.start + max([other.length for other in node.runs], default=0)
            assert end == node.end or not node.children, "a block was evicted before the blocks after it"
            node.end = end
            if end == node.start:
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
    if run.after is not None:  # in its list, the end of a text comes before its beginning
        head.insert_before(run.after)
    return head
