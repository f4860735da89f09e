"""How much of the prompts of a trace a prefix cache would hold: blocks seen before, and hit rates by cache size.

The cache of the hit rates serves one request after the other and evicts the least recently used block, the last block
of a request first. So the cached blocks of a prompt are always its first ones, and the `size` most recent blocks are
the content of a cache of `size` blocks: one pass over the trace gives the hit rates of all sizes (stack distances).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import numpy as np
from numpy.typing import NDArray
from servesim.core import ClientRequest

from .contents import id_size
from .prefix_tree import Node, PrefixTree
from .trace import Trace, has_field

BLOCK_SIZE = 16  # default tokens per block of vLLM
SIZES = 10  # cache sizes in the table of hit rates


def seen_blocks(requests: Sequence[ClientRequest], block_size: int) -> tuple[int, int]:
    """Return the number of whole prompt blocks that an earlier request had, and of all whole prompt blocks."""
    return PrefixTree(block_size).add_all(requests)


def prefix_reuse(trace: Trace, block_size: int = BLOCK_SIZE) -> Optional[dict[str, Any]]:
    """Return the blocks seen before and the hit rates of a trace; None if its prompts have no contents."""
    if not has_field(trace.requests, "content"):
        return None
    tree = PrefixTree(block_size)
    seen, total = tree.add_all(trace.requests)
    distances, counts = stack_distances(tree, trace.requests)
    tokens = int(trace.prompts.sum())
    # An engine has at least the blocks of its longest request. More than the longest distance finds no more.
    longest = int((trace.prompts + trace.outputs).max()) // block_size
    most = max(longest, int((distances + counts).max(initial=1)))
    sizes = [1 << power for power in range(longest.bit_length(), most.bit_length() + 1)][-SIZES:]
    return {
        "tokens_per_id": id_size(trace.contents),
        "block_size": block_size,
        "blocks": total,
        "seen_blocks": seen / total if total else 0.0,
        "hit_rate": int(counts.sum()) * block_size / tokens,
        "cache_sizes": [
            {
                "blocks": size,
                "tokens": size * block_size,
                "hit_rate": cached_blocks(distances, counts, size) * block_size / tokens,
            }
            for size in sizes
        ],
    }


def cached_blocks(distances: NDArray[np.int64], counts: NDArray[np.int64], size: int) -> int:
    """Return how many blocks of runs with these stack distances a cache of `size` blocks holds."""
    return int(np.clip(size - distances, 0, counts).sum())


def stack_distances(tree: PrefixTree, requests: Sequence[ClientRequest]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the distance and the length of every run of prompt blocks that was used before.

    The distance is the number of blocks that were used after the run: a cache holds the first k blocks of the run if
    its size is at least the distance + k. The last token of a prompt is always computed. Answers are cached too.
    """
    size = tree.block_size
    paths = [tree.path(request) for request in requests]
    order = UseOrder(sum(map(len, paths)))
    distances, counts = [], []
    for request, path in zip(requests, paths):
        lookup = (request.prompt - 1) // size
        for node in path:
            if node not in order.places or node.start >= lookup:
                break
            distances.append(order.blocks_after(node))
            counts.append(min(node.end, lookup) - node.start)
        for node in reversed(path):
            order.use(node)
    return np.array(distances, np.int64), np.array(counts, np.int64)


class UseOrder:
    """Runs of blocks in the order of their last uses: a Fenwick tree of the numbers of blocks."""

    def __init__(self, uses: int) -> None:
        self.places: dict[Node, int] = {}  # of the last uses, in the order of all uses
        self._sums = [0] * (uses + 1)
        self._uses = 0
        self._blocks = 0  # distinct blocks used so far

    def use(self, node: Node) -> None:
        """Make a run the most recently used one."""
        if node in self.places:
            self._add(self.places[node], -node.length)
        self._uses += 1
        self.places[node] = self._uses
        self._add(self._uses, node.length)

    def blocks_after(self, node: Node) -> int:
        """Return the number of blocks in runs that were used after this one."""
        blocks, place = self._blocks, self.places[node]
        while place:
            blocks -= self._sums[place]
            place &= place - 1
        return blocks

    def _add(self, position: int, blocks: int) -> None:
        self._blocks += blocks
        while position < len(self._sums):
            self._sums[position] += blocks
            position += position & -position
