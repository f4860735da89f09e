"""Use of the KV cache: blocks that requests hold, and tokens stored in them, summed over the model calls of a run.

How it works. Blocks are allocated when a step starts, so their number is constant during a model call. A call adds its
blocks and its tokens, which include those that it computes. Means are means over model calls.

All sums are whole numbers, so they are exact. A sum weighted by the seconds of the calls would need two more operations
per step. Standard library, Python 3.9.
"""

from __future__ import annotations

from collections.abc import Sequence

from servesim.core import BlockPool


class KvUse:
    """The sums of one server."""

    __slots__ = ("absent", "block_sum", "groups", "peak_blocks", "shared_sum", "steps", "token_sum", "tokens")

    def __init__(self) -> None:
        self.tokens = 0  # stored on the device now, in one KV cache group
        self.groups = 1  # a token counts in each of these
        self.absent = 0  # tokens that groups do not store: a window has left them behind, or requests share a block
        self.steps = 0
        self.block_sum = 0
        self.token_sum = 0
        self.shared_sum = 0  # blocks that the sequences of a request saved by sharing
        self.peak_blocks = 0

    def count(self, tokens: int, blocks: int) -> None:
        """Count a step that computes these tokens while requests hold these blocks."""
        self.steps += 1
        self.tokens += tokens
        self.token_sum += self.tokens * self.groups - self.absent
        self.block_sum += blocks
        if blocks > self.peak_blocks:
            self.peak_blocks = blocks


def kv_metrics(servers: Sequence[tuple[KvUse, BlockPool]]) -> dict[str, float]:
    """Return the metrics of a run from the sums and the blocks of each server.

    The peak is that of the fullest server.
    """
    uses = [use for use, _ in servers]
    blocks = sum([use.block_sum for use in uses])
    tokens, shared = sum([use.token_sum for use in uses]), sum([use.shared_sum for use in uses])
    if not blocks:
        return {}
    return {
        "mean_kv_usage": blocks / sum([use.steps * pool.total for use, pool in servers]),
        "peak_kv_usage": max([use.peak_blocks / pool.total for use, pool in servers]),
        "kv_fragmentation": 1 - tokens / sum([use.block_sum * pool.block_size for use, pool in servers]),
        "peak_kv_blocks": max([use.peak_blocks for use in uses]),
        "mean_kv_tokens": tokens / sum([use.steps for use in uses]),
        **({"kv_sharing": shared / (blocks + shared)} if shared else {}),
    }
