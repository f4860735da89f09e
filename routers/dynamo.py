"""The KV router of NVIDIA Dynamo: the lowest sum of prefill work and of blocks in use."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from .router import Asked, Fleet, Memory, OwnCounts


class Booked(Memory):
    """What the router has booked on each replica, and the blocks that it sent there."""

    def __init__(self, replicas: int) -> None:
        super().__init__(replicas)
        self.prefill_tokens = [0] * replicas  # booked and not done
        self.active: list[Counter[int]] = [Counter() for _ in range(replicas)]  # blocks of unfinished requests
        self.index: list[dict[int, float]] = [{} for _ in range(replicas)]  # block -> when it was sent last
        self.booked: dict[Any, int] = {}  # prefill tokens of a request


@dataclass(frozen=True)
class DynamoKv(OwnCounts):
    """The least cost, or one drawn by cost with a temperature."""

    overlap_score_credit: float = 1.0  # weight of blocks that the replica has
    overlap_score_credit_decay: float = 0.0  # a replica with more prefill work gets less credit
    prefill_load_scale: float = 1.0  # weight of prefill work
    decode_active_request_weight: float = 0.0  # weight of active requests
    router_temperature: float = 0.0  # 0: always the least cost
    block_size: int = 16  # tokens
    router_ttl_secs: float = 120.0  # seconds that the router remembers a text

    @property
    def reads_text(self) -> bool:
        return True

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
        memory, size, blocks = fleet.memory, self.block_size, self.hashes(request)
        least_booked = min([memory.prefill_tokens[replica] for replica in fleet.present])
        request_blocks = -(-request.tokens // size)
        costs = []
        for replica in fleet.present:
            booked, active = memory.prefill_tokens[replica], memory.active[replica]
            extra = (booked - least_booked) / size
            decay = 1 / (1 + self.overlap_score_credit_decay * extra / request_blocks)
            credit = self.overlap_score_credit * decay * self.overlap(blocks, replica, fleet)
            prefill = max(0.0, (booked + request.tokens) / size - credit)
            used = len(active) + sum(block not in active for block in blocks)
            costs.append(
                self.prefill_load_scale * prefill + used + self.decode_active_request_weight * memory.in_flight[replica]
            )
        return costs

    def hashes(self, request: Asked) -> list[int]:
        """Return a hash of the text up to the end of each complete block."""
        unit = self.block_size * len(request.text) // max(1, request.tokens)
        found, chain = [], 0
        for number in range(request.tokens // self.block_size):
            chain = hash((chain, request.text[number * unit : (number + 1) * unit]))
            found.append(chain)
        return found

    def overlap(self, blocks: Sequence[int], replica: int, fleet: Fleet) -> int:
        """Return how many blocks at the beginning of a text a replica was sent."""
        index, oldest = fleet.memory.index[replica], fleet.now - self.router_ttl_secs
        for number, block in enumerate(blocks):
            if index.get(block, -math.inf) < oldest:
                return number
        return len(blocks)

    def sent(self, request: Asked, replica: int, fleet: Fleet) -> None:
        memory, blocks = fleet.memory, self.hashes(request)
        cached = self.overlap(blocks, replica, fleet) * self.block_size
        super().sent(request, replica, fleet)
        memory.booked[request.id] = max(0, request.tokens - cached)
        memory.prefill_tokens[replica] += memory.booked[request.id]
        memory.active[replica].update(blocks)
        memory.index[replica].update(dict.fromkeys(blocks, fleet.now))

    def prefilled(self, memory: Any, request: Asked, replica: int) -> None:
        memory.prefill_tokens[replica] -= memory.booked.pop(request.id, 0)

    def ended(self, memory: Any, request: Asked, replica: int) -> None:
        super().ended(memory, request, replica)
        self.prefilled(memory, request, replica)
        active = memory.active[replica]
        active.subtract(self.hashes(request))
        for block in [block for block in self.hashes(request) if active[block] <= 0]:
            del active[block]
