"""Use of the KV cache: blocks that requests hold, and tokens stored in them, summed over the model calls of a run.

How it works. Blocks are allocated when a step starts, so their number is constant during a model call. A call adds its
blocks and its tokens, which include those that it computes. Means are means over model calls.

Why it is exact. All sums are whole numbers, so fast-forward can add the steps of a segment in any order. A sum weighted
by the seconds of the calls would need two more operations per step. Standard library, Python 3.9.
"""

from __future__ import annotations

from servesim.core import BlockPool


class KvUse:
    """The sums of one server."""

    __slots__ = ("block_sum", "peak_blocks", "shared_sum", "token_sum", "tokens")

    def __init__(self) -> None:
        self.tokens = 0  # stored on the device now
        self.block_sum = 0
        self.token_sum = 0
        self.shared_sum = 0  # blocks that the sequences of a request saved by sharing
        self.peak_blocks = 0

    def add_steps(self, steps: int, live: int, blocks: int, more_sum: int) -> None:
        """Count steps that compute `live` tokens each. The first one holds `blocks`; the others hold more.

        `more_sum` is the sum of these additional blocks over all steps.
        """
        self.block_sum += blocks * steps + more_sum
        self.token_sum += self.tokens * steps + live * (steps * (steps + 1) // 2)
        self.tokens += live * steps

    def add(self, other: KvUse) -> None:
        """Add the sums of another server of the same size; the peak is that of the fuller one."""
        self.block_sum += other.block_sum
        self.token_sum += other.token_sum
        self.shared_sum += other.shared_sum
        self.peak_blocks = max(self.peak_blocks, other.peak_blocks)

    def metrics(self, pool: BlockPool, calls: int) -> dict[str, float]:
        """Return the metrics of a run with this number of model calls."""
        if not self.block_sum:
            return {}
        return {
            "mean_kv_usage": self.block_sum / (calls * pool.total),
            "peak_kv_usage": self.peak_blocks / pool.total,
            "kv_fragmentation": 1 - self.token_sum / (self.block_sum * pool.block_size),
            "peak_kv_blocks": self.peak_blocks,
            "mean_kv_tokens": self.token_sum / calls,
            **({"kv_sharing": self.shared_sum / (self.block_sum + self.shared_sum)} if self.shared_sum else {}),
        }
