"""The KV router of NVIDIA Dynamo: the lowest sum of prefill work and of blocks in use."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from servesim.core.native import mypyc_attr

from .router import Asked, Fleet, Memory, OwnCounts, Run


class Booked(Memory):
    """What the router has booked on each replica, and the blocks that it sent there."""

    def __init__(self, replicas: int) -> None:
        super().__init__(replicas)
        self.prefill_tokens = [0] * replicas  # booked and not done
        self.active: list[dict[int, list[int]]] = [{} for _ in range(replicas)]  # run -> blocks of unfinished requests
        self.active_blocks = [0] * replicas  # different ones
        # run -> blocks that were sent, and when: fewer blocks later
        self.index: list[dict[int, list[tuple[int, float]]]] = [{} for _ in range(replicas)]
        self.booked: dict[Any, int] = {}  # prefill tokens of a request

    def start(self, replica: int, runs: Sequence[Run]) -> None:
        """Add the blocks of a request."""
        active = self.active[replica]
        for key, blocks in runs:
            counts = active.setdefault(key, [])
            self.active_blocks[replica] += max(0, blocks - max(counts, default=0))
            counts.append(blocks)

    def end(self, replica: int, runs: Sequence[Run]) -> None:
        """Remove the blocks of a request."""
        active = self.active[replica]
        for key, blocks in runs:
            counts = active[key]
            counts.remove(blocks)
            self.active_blocks[replica] -= max(0, blocks - max(counts, default=0))
            if not counts:
                del active[key]

    def missing(self, replica: int, runs: Sequence[Run]) -> int:
        """Return how many blocks of a text no unfinished request has."""
        active = self.active[replica]
        return sum([max(0, blocks - max(active.get(key, ()), default=0)) for key, blocks in runs])

    def note(self, replica: int, runs: Sequence[Run], now: float) -> None:
        """Note that a replica was sent a text."""
        index = self.index[replica]
        for key, blocks in runs:
            known = index.setdefault(key, [])
            while known and known[-1][0] <= blocks:
                known.pop()
            known.append((blocks, now))


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class DynamoKv(OwnCounts):
    """The least cost, or one drawn by cost with a temperature."""

    overlap_score_credit: float = 1.0  # weight of blocks that the replica has
    overlap_score_credit_decay: float = 0.0  # a replica with more prefill work gets less credit
    prefill_load_scale: float = 1.0  # weight of prefill work
    decode_active_request_weight: float = 0.0  # weight of active requests
    router_temperature: float = 0.0  # 0: always the least cost
    block_size: int = 16  # tokens
    use_kv_events: bool = True  # the replicas send an event for each cached block; False: the router knows what it sent
    router_ttl_secs: float = 120.0  # without events: how long it expects a block to be cached

    @property
    def reads_caches(self) -> bool:
        return self.use_kv_events

    @property
    def reads_first_tokens(self) -> bool:
        return True

    def memory(self, replicas: int) -> Any:
        return Booked(replicas)

    def choices(self, request: Asked, fleet: Fleet) -> Sequence[int]:
        if self.router_temperature:
            return fleet.present
        costs = self.costs(request, fleet)
        lowest = min(costs)
        return [replica for replica, cost in zip(fleet.present, costs) if cost == lowest]

    def route(self, request: Asked, fleet: Fleet, random: Random) -> int:
        if not self.router_temperature:
            return super().route(request, fleet, random)
        costs = self.costs(request, fleet)
        low, high = min(costs), max(costs)
        width = (high - low) * self.router_temperature
        weights = [math.exp(-(cost - low) / width) if width else 1.0 for cost in costs]
        return random.choices(fleet.present, weights)[0]

    def costs(self, request: Asked, fleet: Fleet) -> list[float]:
        """Return the cost of each replica that may be chosen."""
        memory, size, runs = fleet.memory, self.block_size, self.runs(request)
        least_booked = min([memory.prefill_tokens[replica] for replica in fleet.present])
        request_blocks = -(-request.tokens // size)
        costs = []
        for replica in fleet.present:
            booked = memory.prefill_tokens[replica]
            extra = (booked - least_booked) / size
            decay = 1 / (1 + self.overlap_score_credit_decay * extra / request_blocks)
            credit = self.overlap_score_credit * decay * self.overlap(request, replica, fleet)
            prefill = max(0.0, (booked + request.tokens) / size - credit)
            used = memory.active_blocks[replica] + memory.missing(replica, runs)
            costs.append(
                self.prefill_load_scale * prefill + used + self.decode_active_request_weight * memory.in_flight[replica]
            )
        return costs

    def runs(self, request: Asked) -> list[Run]:
        """Return the complete blocks of a text."""
        return request.runs(max(1, self.block_size * request.length // max(1, request.tokens)))

    def overlap(self, request: Asked, replica: int, fleet: Fleet) -> int:
        """Return how many blocks at the beginning of a text a replica has, as far as the router knows."""
        if self.use_kv_events:
            return fleet.cached(replica) // self.block_size
        index, oldest, found = fleet.memory.index[replica], fleet.now - self.router_ttl_secs, 0
        for key, blocks in self.runs(request):
            known = max([sent for sent, when in index.get(key, ()) if when >= oldest], default=0)
            found += min(blocks, known)
            if known < blocks:
                break
        return found

    def sent(self, request: Asked, replica: int, fleet: Fleet) -> None:
        memory, runs = fleet.memory, self.runs(request)
        cached = self.overlap(request, replica, fleet) * self.block_size
        super().sent(request, replica, fleet)
        memory.booked[request.id] = max(0, request.tokens - cached)
        memory.prefill_tokens[replica] += memory.booked[request.id]
        memory.start(replica, runs)
        if not self.use_kv_events:
            memory.note(replica, runs, fleet.now)

    def prefilled(self, memory: Any, request: Asked, replica: int) -> None:
        memory.prefill_tokens[replica] -= memory.booked.pop(request.id, 0)

    def ended(self, memory: Any, request: Asked, replica: int) -> None:
        super().ended(memory, request, replica)
        self.prefilled(memory, request, replica)
        memory.end(replica, self.runs(request))
