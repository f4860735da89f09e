"""The prefix-cache router of the AIBrix gateway."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

from .router import Asked, Fleet, Memory, OwnCounts, least

BLOCK = 4  # characters
MAX_BLOCKS = 200_000
MAX_AGE = 1200.0  # seconds


class BlockOwners(Memory):
    """The replicas of each block of text, least recently used block first."""

    def __init__(self, replicas: int) -> None:
        super().__init__(replicas)
        self.owners: OrderedDict[int, dict[int, float]] = OrderedDict()  # block -> replica -> when


@dataclass(frozen=True)
class AibrixPrefixCache(OwnCounts):
    """The best match among replicas that are not too busy; else the least requests."""

    imbalance: int = 8  # requests between the busiest and the idlest replica
    deviations: float = 1.0  # standard deviations above the mean that a matched replica may have

    @property
    def reads_text(self) -> bool:
        return True

    def memory(self, replicas: int) -> Any:
        return BlockOwners(replicas)

    def choices(self, request: Asked, fleet: Fleet) -> Sequence[int]:
        return self.matched_choices(self.percentages(request.text, fleet), fleet)

    def matched_choices(self, percentages: dict[int, int], fleet: Fleet) -> Sequence[int]:
        """Return the choices, given how much of the text each replica has."""
        loads, present = fleet.memory.in_flight, list(fleet.present)
        counts = [loads[replica] for replica in present]
        candidates = present if max(counts) - min(counts) <= self.imbalance else least(loads, present)
        mean = sum(counts) / len(counts)
        variance = sum((count - mean) ** 2 for count in counts) / max(1, len(counts) - 1)
        limit = mean + self.deviations * sqrt(variance)
        allowed = [r for r in candidates if percentages.get(r) and loads[r] <= limit]
        if not allowed:
            return least(loads, present)
        best = min((-percentages[r], loads[r]) for r in allowed)
        return [r for r in allowed if (-percentages[r], loads[r]) == best]

    def percentages(self, text: str, fleet: Fleet) -> dict[int, int]:
        """Return how many percent of the blocks of a text each replica was sent, from the beginning on."""
        blocks, matched = hashes(text), {}
        owners = set(fleet.present)
        for number, block in enumerate(blocks, 1):
            known = fleet.memory.owners.get(block, {})
            owners &= {replica for replica, time in known.items() if time >= fleet.now - MAX_AGE}
            if not owners:
                break
            matched.update(dict.fromkeys(owners, 100 * number // len(blocks)))
        return matched

    def sent(self, request: Asked, replica: int, fleet: Fleet) -> None:
        super().sent(request, replica, fleet)
        owners = fleet.memory.owners
        for block in hashes(request.text):
            owners.setdefault(block, {})[replica] = fleet.now
            owners.move_to_end(block)
            if len(owners) > MAX_BLOCKS:
                owners.popitem(last=False)


def hashes(text: str) -> list[int]:
    """Return a hash of the text up to the end of each complete block."""
    found, chain = [], 0
    for start in range(0, len(text) - BLOCK + 1, BLOCK):
        chain = hash((chain, text[start : start + BLOCK]))
        found.append(chain)
    return found
