"""The endpoint picker of llm-d: scores between 0 and 1, times weights; the highest sum wins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from servesim.core.native import mypyc_attr

from .recent_blocks import RecentBlocks
from .router import CHARACTERS_PER_TOKEN, Asked, Fleet, Memory, Replica, Router, Run

QUEUE_LIMIT = 128  # waiting requests from which on the score `load` is 0
LOAD_SHARE = 0.5  # highest score of `load`


class BlocksMemory(Memory):
    """The blocks of text that each replica was sent."""

    def __init__(self, replicas: int) -> None:
        super().__init__(replicas)
        self.blocks = [RecentBlocks() for _ in range(replicas)]


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class LlmD(Router):
    """Weighted scores of the queue, the KV cache, the load and the prefix."""

    queue: float = 2.0  # weight of the score of waiting requests
    kv: float = 2.0  # weight of free KV blocks
    prefix: float = 3.0  # weight of the known part of the text
    load: float = 0.0  # weight of the load-aware score
    block_size_tokens: int = 16  # of the text
    max_prefix_blocks: int = 256  # later blocks do not count
    lru_blocks_per_replica: int = 31250  # blocks that the router remembers

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
        prefixes = self.prefix_scores(request, fleet) if self.prefix else {}
        sums = dict.fromkeys(said, 0.0)
        for replica, about in said.items():
            if self.queue:
                sums[replica] += self.queue * queues[replica]
            if self.kv:
                sums[replica] += self.kv * (1 - about.kv_usage)
            if prefixes:
                sums[replica] += self.prefix * prefixes[replica]
            if self.load:
                sums[replica] += self.load * load_score(about.waiting)
        return sums

    def prefix_scores(self, request: Asked, fleet: Fleet) -> dict[int, float]:
        """Return the share of the text that each replica was sent; empty: the text has no block."""
        matched, blocks = self.matched(request, fleet)
        return {replica: count / blocks for replica, count in matched.items()} if blocks else {}

    def matched(self, request: Asked, fleet: Fleet) -> tuple[dict[int, int], int]:
        """Return how many blocks of a text each replica has, up to one that none has, and how many the text has."""
        counts, runs = dict.fromkeys(fleet.present, 0), self.runs(request)
        for run in runs:
            held = [
                (found.start, min(found.end, run.blocks), replica)
                for replica in fleet.present
                for found in fleet.memory.blocks[replica].ranges(run)
                if found.start < run.blocks
            ]
            reached = 0
            for start, end, _ in sorted(held):
                if start > reached:
                    break
                reached = max(reached, end)
            for start, end, replica in held:
                counts[replica] += max(0, min(end, reached) - start)
            if reached < run.blocks:
                break
        return counts, sum([run.blocks for run in runs])

    def runs(self, request: Asked) -> list[Run]:
        """Return the first blocks of a text. The last one may be shorter, but not the only one."""
        size = self.block_size_tokens * CHARACTERS_PER_TOKEN
        found: list[Run] = []
        left = self.max_prefix_blocks if request.length >= size else 0
        for run in request.runs(size, True):
            if left <= 0:
                break
            found.append(Run(run.key, min(run.blocks, left)))
            left -= run.blocks
        return found

    def sent(self, request: Asked, replica: int, fleet: Fleet) -> None:
        super().sent(request, replica, fleet)
        if self.prefix and not self.reads_caches:
            fleet.memory.blocks[replica].use(self.runs(request), replica, fleet.now, self.lru_blocks_per_replica)


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class LlmDPrecise(LlmD):
    """The scores of llm-d, with the prefixes that the replicas have: they send an event for each block."""

    @property
    def reads_caches(self) -> bool:
        return True

    def prefix_scores(self, request: Asked, fleet: Fleet) -> dict[int, float]:
        """Return 1 for the longest prefix and 0 for the shortest one of those that have any."""
        size = self.block_size_tokens
        found = {replica: fleet.cached(replica) // size for replica in fleet.present}
        counts = [blocks for blocks in found.values() if blocks]
        low, high = min(counts, default=0), max(counts, default=0)
        if low == high:
            return {replica: float(blocks > 0) for replica, blocks in found.items()}
        return {replica: max(0, blocks - low) / (high - low) for replica, blocks in found.items()}


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
