"""The endpoint picker of llm-d: scores between 0 and 1, times weights; the highest sum wins."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .router import CHARACTERS_PER_TOKEN, Asked, Fleet, Memory, Replica, Router

QUEUE_LIMIT = 128  # waiting requests from which on the score `load` is 0
LOAD_SHARE = 0.5  # highest score of `load`


class BlocksMemory(Memory):
    """The blocks of text that each replica was sent, least recently used first."""

    def __init__(self, replicas: int) -> None:
        super().__init__(replicas)
        self.blocks: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(replicas)]


@dataclass(frozen=True)
class LlmD(Router):
    """Weighted scores of the queue, the KV cache, the load and the prefix."""

    queue: float = 2.0
    kv: float = 2.0
    prefix: float = 3.0
    load: float = 0.0
    block_size_tokens: int = 16
    max_prefix_blocks: int = 256
    lru_blocks_per_replica: int = 31250

    @property
    def reads_text(self) -> bool:
        return True

    @property
    def report_interval(self) -> float:
        return 0.05

    def memory(self, replicas: int) -> Any:
        return BlocksMemory(replicas)

    def choices(self, request: Asked, fleet: Fleet) -> Sequence[int]:
        scores = self.scores(request, fleet)
        best = max(scores.values())
        return [replica for replica, score in scores.items() if score == best]

    def scores(self, request: Asked, fleet: Fleet) -> dict[int, float]:
        """Return the weighted sum of each replica."""
        said = {replica: fleet.memory.reported[replica] for replica in fleet.present}
        queues = queue_scores(said) if self.queue else {}
        matched, blocks = self.matched(request.text, fleet) if self.prefix else ({}, 0)
        sums = dict.fromkeys(said, 0.0)
        for replica, about in said.items():
            if self.queue:
                sums[replica] += self.queue * queues[replica]
            if self.kv:
                sums[replica] += self.kv * (1 - about.kv_usage)
            if self.prefix and blocks:
                sums[replica] += self.prefix * (matched[replica] / blocks)
            if self.load:
                sums[replica] += self.load * load_score(about.waiting)
        return sums

    def matched(self, text: str, fleet: Fleet) -> tuple[dict[int, int], int]:
        """Return how many blocks of a text each replica has, and how many the text has."""
        counts, hashes = dict.fromkeys(fleet.present, 0), self.hashes(text)
        for block in hashes:
            owners = [replica for replica in fleet.present if block in fleet.memory.blocks[replica]]
            if not owners:
                break
            for replica in owners:
                counts[replica] += 1
        return counts, len(hashes)

    def hashes(self, text: str) -> list[int]:
        """Return a hash of the text up to the end of each block. The last one may be shorter, but not the only one."""
        size = self.block_size_tokens * CHARACTERS_PER_TOKEN
        starts = range(0, len(text) if len(text) >= size else 0, size)
        found, chain = [], 0
        for start in starts[: self.max_prefix_blocks]:
            chain = hash((chain, text[start : start + size]))
            found.append(chain)
        return found

    def sent(self, request: Asked, replica: int, fleet: Fleet) -> None:
        super().sent(request, replica, fleet)
        if not self.prefix:
            return
        blocks = fleet.memory.blocks[replica]
        for block in self.hashes(request.text):
            blocks[block] = None
            blocks.move_to_end(block)
            if len(blocks) > self.lru_blocks_per_replica:
                blocks.popitem(last=False)


def queue_scores(replicas: dict[int, Replica]) -> dict[int, float]:
    """Return 1 for the shortest queue and 0 for the longest one."""
    lengths = [about.waiting for about in replicas.values()]
    low, high = min(lengths), max(lengths)
    if low == high:
        return dict.fromkeys(replicas, 1.0)
    return {replica: (high - about.waiting) / (high - low) for replica, about in replicas.items()}


def load_score(waiting: int) -> float:
    """Return a score that falls with the waiting requests."""
    return LOAD_SHARE * (1 - min(waiting, QUEUE_LIMIT) / QUEUE_LIMIT)


def prefills_remotely(size: int, matched_blocks: int, threshold: int, block_size: int = 16) -> bool:
    """Whether a prompt of `size` bytes goes to a prefill replica; `threshold` counts uncached tokens, 0: never."""
    tokens = size // CHARACTERS_PER_TOKEN
    return threshold > 0 and tokens >= threshold and tokens - matched_blocks * block_size >= threshold
