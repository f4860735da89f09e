"""The prefix-cache router of the AIBrix gateway."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from servesim.core.native import mypyc_attr

from .recent_blocks import RecentBlocks
from .router import Asked, Fleet, Memory, OwnCounts, Run, least

BLOCK = 4  # characters
MAX_BLOCKS = 200_000
MAX_AGE = 1200.0  # seconds


class BlockOwners(Memory):
    """The blocks of text that the replicas were sent."""

    def __init__(self, replicas: int) -> None:
        super().__init__(replicas)
        self.blocks = RecentBlocks()


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class AibrixPrefixCache(OwnCounts):
    """The best match among replicas that are not too busy; else the least requests."""

    imbalance: int = 8  # requests between the busiest and the idlest replica
    deviations: float = 1.0  # standard deviations above the mean that a matched replica may have

    def memory(self, replicas: int) -> Any:
        return BlockOwners(replicas)

    def choices(self, request: Asked, fleet: Fleet) -> Sequence[int]:
        return self.matched_choices(self.percentages(request, fleet), fleet)

    def matched_choices(self, percentages: dict[int, int], fleet: Fleet) -> Sequence[int]:
        """Return the choices, given how much of the text each replica has."""
        loads, present = fleet.memory.in_flight, list(fleet.present)
        counts = [loads[replica] for replica in present]
        candidates = present if max(counts) - min(counts) <= self.imbalance else least(loads, present)
        mean = sum(counts) / len(counts)
        variance = sum((count - mean) ** 2 for count in counts) / max(1, len(counts) - 1)
        limit = mean + self.deviations * math.sqrt(variance)
        allowed = [r for r in candidates if percentages.get(r) and loads[r] <= limit]
        if not allowed:
            return least(loads, present)
        best = min((-percentages[r], loads[r]) for r in allowed)
        return [r for r in allowed if (-percentages[r], loads[r]) == best]

    def percentages(self, request: Asked, fleet: Fleet) -> dict[int, int]:
        """Return how many percent of the blocks of a text each replica was sent, from the beginning on."""
        runs = request.runs(BLOCK)
        total = sum([run.blocks for run in runs])
        return {replica: 100 * blocks // total for replica, blocks in self.matched(runs, fleet).items()}

    def matched(self, runs: Sequence[Run], fleet: Fleet) -> dict[int, int]:
        """Return the blocks at the beginning of a text that each replica was sent."""
        blocks: RecentBlocks = fleet.memory.blocks
        matched: dict[int, int] = {}
        owners, oldest, before = list(fleet.present), fleet.now - MAX_AGE, 0
        for run in runs:
            end = 0
            for found in blocks.ranges(run):
                if found.start > end or end == run.blocks:
                    break
                owners = [replica for replica in owners if found.owners.get(replica, -math.inf) >= oldest]
                end = min(found.end, run.blocks)
                for replica in owners:
                    matched[replica] = before + end
            if not owners or end < run.blocks:
                break
            before += end
        return matched

    def sent(self, request: Asked, replica: int, fleet: Fleet) -> None:
        super().sent(request, replica, fleet)
        fleet.memory.blocks.use(request.runs(BLOCK), replica, fleet.now, MAX_BLOCKS)
