"""The Conductor of Mooncake, as its paper tells it: the least predicted TTFT, with a copy of a better prefix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

from servesim.core.native import mypyc_attr

from .dynamo import Booked, DynamoKv
from .router import REFUSED, Asked, Fleet


class Offer(NamedTuple):
    """What a prefill replica can do for a request."""

    ttft: float  # predicted seconds
    copies: bool  # it copies a prefix of another replica first


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class Conductor(DynamoKv):
    """The prefill replica with the least predicted TTFT. It keeps books as Dynamo's router does."""

    prefill_per_token: float = 1e-4  # seconds
    transfer_per_token: float = 1e-5  # seconds
    threshold: float = 2.0  # best prefix / own prefix from which on a replica copies
    ttft_limit: Optional[float] = None  # seconds; a longer prediction refuses the request

    def choices(self, request: Asked, fleet: Fleet) -> Sequence[int]:
        memory: Booked = fleet.memory
        prefixes = [self.overlap(request, replica, fleet) * self.block_size for replica in fleet.present]
        queues = [memory.prefill_tokens[replica] * self.prefill_per_token for replica in fleet.present]
        found = self.offers(request.tokens, prefixes, queues)
        best = min(range(len(found)), key=lambda place: found[place].ttft)
        refused = self.ttft_limit is not None and found[best].ttft > self.ttft_limit
        return [] if refused else [fleet.present[best]]

    def offers(self, tokens: int, prefixes: Sequence[int], queues: Sequence[float]) -> list[Offer]:
        """Return what each replica can do, given its cached prefix and the seconds of its queue."""
        best, found = max(prefixes), []
        for own, queue in zip(prefixes, queues):
            copies = best > own * self.threshold
            prefix = best if copies else own
            copied = best - own if copies else 0
            seconds = queue + copied * self.transfer_per_token + (tokens - prefix) * self.prefill_per_token
            found.append(Offer(seconds, copies))
        return found

    def route(self, request: Asked, fleet: Fleet, random: Any) -> int:
        """Return the replica, or REFUSED."""
        choices = self.choices(request, fleet)
        return choices[0] if choices else REFUSED
