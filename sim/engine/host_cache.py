"""Host memory behind the prefix cache: blocks that left the device, until others need their place.

How it works. A block whose text the device gives up is stored here, and the block that was stored or used longest ago
is dropped if there are too many. A hit copies the block to the device; the copy here stays. As on the device, runs of
blocks are stored, not single blocks: a tree of texts has one run per node, and all runs are in one list, the next to be
dropped first. A node without a run is the beginning of a text whose end is here, for example because the device still
has the beginning. Blocks of texts that no request can ask for have no node, but they take up space.

Why it is exact. The end of a text leaves the device before its beginning, so in each run the last block is dropped
first. What a step evicts arrives before the next decision (`settle`): a plan uses what was here when it was made.
"""

from __future__ import annotations

from typing import Optional

from .block_tree import BlockTree, Node, Run
from .texts import Text, block_key, piece_at


class HostCache:
    """The blocks in the host memory of one server."""

    __slots__ = ("_arriving", "_copied", "blocks", "copied_blocks", "copies", "ends", "tree", "used")

    def __init__(self, blocks: int, tree: BlockTree) -> None:
        self.blocks = blocks
        self.used = 0
        self.tree = tree  # without blocks yet
        self.ends = Run(None, 0, 0)  # the runs are a ring: the next to be dropped after it, the newest before it
        self.ends.before = self.ends.after = self.ends
        self.copied_blocks = 0  # to the device, in all steps
        self.copies = 0  # steps that copied blocks
        self._copied = 0  # blocks, in this step
        self._arriving: list[tuple[Optional[Text], int, int]] = []  # blocks [start, end) of texts

    def receive(self, run: Run, blocks: int) -> None:
        """Store the last blocks of a run, which the device gives up."""
        node = run.node
        end = run.length if node is None else node.start + run.length
        self._arriving.append((None if node is None else node.text, end - blocks, end))

    def settle(self) -> None:
        """Store the blocks that have arrived since the last decision."""
        for text, start, end in self._arriving:
            if text is None:
                Run(None, end - start, 0).insert_before(self.ends)
                self.used += end - start
            else:
                self._use(text, start, end)
            self._drop(self.used - self.blocks)
        self._arriving.clear()

    def find(self, text: Text, start: int, limit: int) -> int:
        """Return the end of the blocks from `start` on that are here, at most `limit`."""
        size, node, end, piece = self.tree.block_size, self.tree.root, 0, 0
        while end < limit:
            piece = piece_at(text, piece, end * size)
            child = node.children.get(block_key(text, piece, end * size, size))
            if child is None:
                break
            equal = min(self.tree._equal_blocks(text, child, piece), limit)
            if equal > start and not child.runs:
                break
            end, node = equal, child
            if end < child.start + child.length:
                break
        return max(start, end)

    def copy(self, text: Text, start: int, end: int) -> None:
        """Copy blocks to the device."""
        found = self.find(text, start, end)
        assert found == end, f"the plan uses blocks {start} to {end} of the host, which has them up to {found}"
        self._use(text, start, end)
        self._copied += end - start

    def take_copied(self) -> int:
        """Return the number of blocks that this step copies."""
        copied, self._copied = self._copied, 0
        self.copied_blocks += copied
        self.copies += copied > 0
        return copied

    def _use(self, text: Text, start: int, end: int) -> None:
        """Make blocks the newest ones, the first of them last. Those that are not here are stored."""
        for node in reversed(self._nodes(text, start, end)):
            if node.runs:
                run = node.runs[0]
                run.unlink()
            else:
                run = Run(node, node.length, 0)
                node.runs.append(run)
                self.used += node.length
            run.insert_before(self.ends)
            self._join_child(node)

    def _nodes(self, text: Text, start: int, end: int) -> list[Node]:
        """Return the nodes of the blocks [start, end) of a text. Nodes are split or created as needed."""
        size, node, at, piece = self.tree.block_size, self.tree.root, 0, 0
        nodes: list[Node] = []
        while at < end:
            piece = piece_at(text, piece, at * size)
            key = block_key(text, piece, at * size, size)
            stop = start if at < start else end
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = Node(node, key, text, at)
                child.length = stop - at
            else:
                equal = min(self.tree._equal_blocks(text, child, piece), stop) - at
                if equal < child.length:
                    child = self.tree.split(child, equal)
            if at >= start:
                nodes.append(child)
            node, at = child, at + child.length
        return nodes

    def _join_child(self, node: Node) -> None:
        """Make a node and its only child one node, if their runs follow each other: they are dropped in this order."""
        child, parent, run = next(iter(node.children.values()), None), node.parent, node.runs[0]
        if child is None or len(node.children) > 1 or not child.runs or child.runs[0] is not run.before:
            return
        assert parent is not None
        run.unlink()
        tail = child.runs[0]
        tail.length += run.length
        tail.head = None
        child.start, child.key, child.parent = node.start, node.key, parent
        child.length += node.length
        parent.children[node.key] = child

    def _drop(self, blocks: int) -> None:
        """Drop the blocks that were used longest ago."""
        while blocks > 0:
            run = self.ends.after
            assert run is not None
            node, count = run.node, min(blocks, run.length)
            blocks -= count
            self.used -= count
            if node is None:
                run.length -= count
            elif count < run.length:
                self.tree.split(node, node.length - count)  # the run is now the end
            if node is not None or not run.length:
                run.unlink()
            if node is not None:
                node.runs.clear()
                remove_empty(node)

    def check(self) -> None:
        """Verify the number of blocks, and that the list has exactly the runs of the tree."""
        self.settle()
        runs: set[Run] = set()
        nodes = list(self.tree.root.children.values())
        while nodes:
            node = nodes.pop()
            assert node.parent is not None and node.parent.children[node.key] is node
            assert node.start == node.parent.start + node.parent.length, "a node of the host is at a wrong place"
            assert node.runs or node.children, "a node of the host has no block"
            assert all(run.node is node and run.length == node.length for run in node.runs), "wrong run of the host"
            runs.update(node.runs)
            nodes += node.children.values()
        used, run = 0, self.ends.after
        while run is not None and run is not self.ends:
            used += run.length
            runs ^= set() if run.node is None else {run}
            run = run.after
        assert not runs, "the list and the tree of the host have different blocks"
        assert used == self.used <= self.blocks, f"{used} blocks on the host, {self.used} counted, limit {self.blocks}"


def remove_empty(node: Node) -> None:
    """Remove a node without blocks, and those above it that only led to it."""
    parent = node.parent
    while parent is not None and not node.runs and not node.children:
        del parent.children[node.key]
        node, parent = parent, parent.parent
