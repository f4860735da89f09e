"""The policies of SGLang's router (model gateway); vllm-router has the same rule of `cache_aware`.

The load of a replica is the number of requests that this router sent and whose answer has not ended. The router keeps
its replicas in an arbitrary order that does not change while none joins or leaves: `order`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Optional

from servesim.core.native import mypyc_attr

from .blake3 import blake3
from .router import Asked, Fleet, Memory, OwnChoices, OwnCounts, fewest, least
from .simple import RandomReplica, RoundRobin, Sticky
from .text_owners import TextOwners

BOUND = 1.25  # of prefix_hash: load of a replica / mean load


def in_order(order: Sequence[int], fleet: Fleet) -> list[int]:
    """Return the replicas that may be chosen, in the order of the router; an empty one is that of their numbers."""
    return [replica for replica in order or fleet.present if replica in fleet.present]


class CacheMemory(Memory):
    """The texts that were sent to the replicas."""

    def __init__(self, replicas: int) -> None:
        super().__init__(replicas)
        self.owners = TextOwners()
        self.pruned_at = 0.0


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class SglangCacheAware(OwnCounts):
    """The replica that was sent the longest part of the text, unless the loads differ too much."""

    order: tuple[int, ...] = ()  # empty: by number
    cache_threshold: float = 0.3  # share of the text that must match
    balance_abs_threshold: int = 64  # the loads differ too much if the largest is more than this above the least ...
    balance_rel_threshold: float = 1.5  # ... and more than this times the least
    eviction_interval_secs: float = 120.0  # seconds between two cuts of the tree to max_tree_size
    max_tree_size: int = 2**26  # characters of a replica

    def memory(self, replicas: int) -> Any:
        return CacheMemory(replicas)

    def choices(self, request: Asked, fleet: Fleet) -> Sequence[int]:
        owner = self.owner(request, fleet)
        if owner is None:
            return fewest(fleet.memory.in_flight, in_order(self.order, fleet))[:1]
        return [owner] if owner in fleet.present else in_order(self.order, fleet)[:1]

    def owner(self, request: Asked, fleet: Fleet) -> Optional[int]:
        """Return the replica of a text that matches well enough; None: the loads decide."""
        if self.is_imbalanced(fleet) or not request.text:
            return None
        matched, owner = fleet.memory.owners.find(request.text)
        return owner if matched / len(request.text) > self.cache_threshold else None

    def is_imbalanced(self, fleet: Fleet) -> bool:
        """Whether the loads differ so much that they alone decide."""
        loads: list[int] = [fleet.memory.in_flight[replica] for replica in fleet.present]
        low, high = min(loads), max(loads)
        return high - low > self.balance_abs_threshold and high > self.balance_rel_threshold * low

    def sent(self, request: Asked, replica: int, fleet: Fleet) -> None:
        memory, owner = fleet.memory, self.owner(request, fleet)
        if not self.is_imbalanced(fleet):
            memory.owners.touch(request.text)
        super().sent(request, replica, fleet)
        if owner is not None and owner not in fleet.present:
            memory.owners.remove(owner)
            return
        memory.owners.insert(request.text, replica)
        if fleet.now - memory.pruned_at >= self.eviction_interval_secs:
            memory.pruned_at = fleet.now
            self.prune(memory)

    def prune(self, memory: Any) -> None:
        """Remove old texts, as the router does at intervals."""
        memory.owners.evict(self.max_tree_size)


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class SglangRoundRobin(RoundRobin):
    """Each replica in turn, in the order of the router."""

    order: tuple[int, ...] = ()  # empty: by number

    def choices(self, request: Asked, fleet: Fleet) -> Sequence[int]:
        order = in_order(self.order, fleet)
        return [order[fleet.memory.turn % len(order)]]


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class SglangManual(Sticky):
    """A routing key stays on its replica; a request without a key goes to any."""

    assignment_mode: Literal["random", "min_load", "min_group"] = "random"

    def new_choices(self, request: Asked, fleet: Fleet) -> Sequence[int]:
        if request.key is None or self.assignment_mode == "random":
            return fleet.present
        if self.assignment_mode == "min_load":
            return fewest(fleet.memory.in_flight, fleet.present)
        keys = [0] * len(fleet.memory.in_flight)
        for replica in fleet.memory.replica_of.values():
            keys[replica] += 1
        return least(keys, fleet.present)


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class SglangConsistentHashing(OwnChoices):
    """A routing key has one replica, found by its hash modulo their number, as release 0.3.2 does over HTTP."""

    order: tuple[int, ...] = ()  # empty: by number

    def choices(self, request: Asked, fleet: Fleet) -> Sequence[int]:
        if request.key is None:
            return fleet.present
        order = in_order(self.order, fleet)
        return [order[int.from_bytes(blake3(request.key.encode())[:8], "little") % len(order)]]


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class SglangPowerOfTwo(RandomReplica):
    """Any replica: over HTTP this router counts no requests, and without token loads both of two are equal."""


def bounded_choice(loads: Sequence[int], hashed: int) -> int:
    """Return the replica of prefix_hash: the hashed one, or the least loaded if its load is too far above the mean."""
    total = sum(loads)
    limit = BOUND * (total + 1) / len(loads)
    if total == 0 or loads[hashed] <= limit:
        return hashed
    allowed = [replica for replica, load in enumerate(loads) if load <= limit]
    return min(allowed, key=lambda replica: loads[replica]) if allowed else hashed


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class SglangPrefixHash(OwnCounts):
    """The beginning of a text has one replica, found by its hash, with bounded loads."""

    order: tuple[int, ...] = ()  # empty: by number
    prefix_token_count: int = 256  # tokens of the beginning

    def choices(self, request: Asked, fleet: Fleet) -> Sequence[int]:
        order = in_order(self.order, fleet)
        beginning = request.text[: self.prefix_token_count * len(request.text) // max(1, request.tokens)]
        hashed = int.from_bytes(blake3(beginning.encode()[:1024])[:8], "little") % len(order)
        return [order[bounded_choice([fleet.memory.in_flight[replica] for replica in order], hashed)]]
