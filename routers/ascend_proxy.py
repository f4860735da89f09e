"""The load-balance proxy of vLLM-Ascend: a prefill and a decode replica for each request.

It weighs a request by the bytes of its HTTP body. The prefill weight is held until the first chunk of the decode side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from servesim.core.native import mypyc_attr

from .router import Asked, Fleet, Memory, OwnCounts, least

PER_TOKEN, CONSTANT = 0.0345, 120.0745  # weight of a prompt of (bytes / 4) tokens


class Weights(Memory):
    """The weights that each replica holds."""

    def __init__(self, replicas: int) -> None:
        super().__init__(replicas)
        self.weights = [0.0] * replicas


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class AscendPrefill(OwnCounts):
    """The prefill replica with the least weight; the first on ties."""

    def memory(self, replicas: int) -> Any:
        return Weights(replicas)

    def weight(self, request: Asked) -> float:
        """Return the weight of a request."""
        return request.size / 4 * PER_TOKEN + CONSTANT

    def choices(self, request: Asked, fleet: Fleet) -> Sequence[int]:
        return least([0.3 * weight for weight in fleet.memory.weights], fleet.present)[:1]

    def sent(self, request: Asked, replica: int, fleet: Fleet) -> None:
        super().sent(request, replica, fleet)
        fleet.memory.weights[replica] += self.weight(request)

    def ended(self, memory: Any, request: Asked, replica: int) -> None:
        super().ended(memory, request, replica)
        memory.weights[replica] = max(0.0, memory.weights[replica] - self.weight(request))


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class AscendDecode(AscendPrefill):
    """The decode replica with the fewest bytes of unfinished requests."""

    def weight(self, request: Asked) -> float:
        return float(request.size)

    def choices(self, request: Asked, fleet: Fleet) -> Sequence[int]:
        return least(fleet.memory.weights, fleet.present)[:1]
