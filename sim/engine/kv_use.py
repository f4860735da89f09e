"""Use of the KV cache: blocks that requests hold, and tokens stored in them, summed over the model calls of a run.

How it works. Blocks are allocated when a step starts, so their number is constant during a model call. A call adds its
blocks and its tokens, which include those that it computes. Means are means over model calls.

Why it is exact. All sums are whole numbers, so fast-forward can add the steps of a segment in any order. A sum weighted
by the seconds of the calls would need two more operations per step. Standard library, Python 3.9.
"""

from __future__ import annotations

from collections.abc import Sequence

from servesim.core import BlockPool


class KvUse:
    """The sums of one server."""

    __slots__ = ("absent", "block_sum", "groups", "peak_blocks", "shared_sum", "token_sum", "tokens")

    def __init__(self) -> None:
        self.tokens = 0  # stored on the device now, in one KV cache group
        self.groups = 1  # a token counts in each of these
        self.absent = 0  # tokens that groups do not store: a window has left them behind, or requests share a block
        self.block_sum = 0
        self.token_sum = 0
        self.shared_sum = 0  # blocks that the sequences of a request saved by sharing
        self.peak_blocks = 0

    def count(self, tokens: int, blocks: int) -> None:
        """Count a step that computes these tokens while requests hold these blocks."""
        self.tokens += tokens
        self.token_sum += self.tokens * self.groups - self.absent
        self.block_sum += blocks
        if blocks > self.peak_blocks:
            self.peak_blocks = blocks

    def add_steps(self, steps: int, live: int, blocks: int, more_sum: int) -> None:
        """Count steps that compute `live` tokens each. The first one holds `blocks`; the others hold more.

        `more_sum` is the sum of these additional blocks over all steps.
        """
        self.block_sum += blocks * steps + more_sum
        self.token_sum += self.tokens * steps + live * (steps * (steps + 1) // 2)
        self.tokens += live * steps


def kv_metrics(servers: Sequence[tuple[KvUse, BlockPool, int]]) -> dict[str, float]:
    """Return the metrics of a run from the sums, the blocks and the model calls of each server.

    The peak is that of the fullest server.
    """
    uses = [use for use, _, _ in servers]
    blocks = sum([use.block_sum for use in uses])
    tokens, shared = sum([use.token_sum for use in uses]), sum([use.shared_sum for use in uses])
    if not blocks:
        return {}
    return {
        "mean_kv_usage": blocks / sum([calls * pool.total for _, pool, calls in servers]),
        "peak_kv_usage": max([use.peak_blocks / pool.total for use, pool, _ in servers]),
        "kv_fragmentation": 1 - tokens / sum([use.block_sum * pool.block_size for use, pool, _ in servers]),
        "peak_kv_blocks": max([use.peak_blocks for use in uses]),
        "mean_kv_tokens": tokens / sum([calls for _, _, calls in servers]),
        **({"kv_sharing": shared / (blocks + shared)} if shared else {}),
    }
