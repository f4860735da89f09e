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

from .block_tree import BlockTree, Node, Run, RunList
from .text_tree import check_nodes, find
from .texts import Text


class HostCache:
    """The blocks in the host memory of one server."""

    __slots__ = ("_arriving", "_copied", "blocks", "copied_blocks", "copies", "order", "tree", "used")

    def __init__(self, blocks: int, tree: BlockTree) -> None:
        self.blocks = blocks
        self.used = 0
        self.tree = tree  # without blocks yet
        self.order = RunList()  # the next to be dropped first
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
                self.order.append(Run(None, end - start, 0))
                self.used += end - start
            else:
                self._use(text, start, end)
            self._drop(self.used - self.blocks)
        self._arriving.clear()

    def find(self, text: Text, start: int, limit: int) -> int:
        """Return the end of the blocks from `start` on that are here, at most `limit`."""
        node, end = find(self.tree.root, text, limit, self.tree.block_size)
        at = end
        while at > start:
            assert node.parent is not None
            if not node.runs:
                end = node.start
            at, node = node.start, node.parent
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
        above = self.tree.reach(self.tree.root, text, start)
        node = self.tree.reach(above, text, end)
        while node is not above:
            assert node.parent is not None
            if node.runs:
                run = node.runs[0]
                run.unlink()
            else:
                run = Run(node, node.length, 0)
                node.runs.append(run)
                self.used += node.length
            self.order.append(run)
            self._join_child(node)
            node = node.parent

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
        parent.children[node.key] = child

    def _drop(self, blocks: int) -> None:
        """Drop the blocks that were used longest ago."""
        while blocks > 0:
            run = self.order.first
            assert run is not None
            node, count = run.node, min(blocks, run.length)
            blocks -= count
            self.used -= count
            if node is None:
                run.length -= count
            elif count < run.length:
                self.tree.split(node, node.end - count)  # the run is now the end
            if node is not None or not run.length:
                run.unlink()
            if node is not None:
                node.runs.clear()
                remove_empty(node)

    def check(self) -> None:
        """Verify the number of blocks, and that the list has exactly the runs of the tree."""
        self.settle()
        runs: set[Run] = set()
        for node in check_nodes(self.tree.root):
            assert node.runs or node.children, "a node of the host has no block"
            assert all(run.node is node and run.length == node.length for run in node.runs), "wrong run of the host"
            runs.update(node.runs)
        listed = self.order.runs()
        used = sum(run.length for run in listed)
        assert runs == {run for run in listed if run.node is not None}, "the list and the tree have different blocks"
        assert used == self.used <= self.blocks, f"{used} blocks on the host, {self.used} counted, limit {self.blocks}"


def remove_empty(node: Node) -> None:
    """Remove a node without blocks, and those above it that only led to it."""
    parent = node.parent
    while parent is not None and not node.runs and not node.children:
        del parent.children[node.key]
        node, parent = parent, parent.parent
