from collections.abc import Sequence
from dataclasses import dataclass

from servesim.routers import Asked, Fleet, Router


@dataclass(frozen=True)
class Spill(Router):
    """The replica with the longest cached prefix, unless it is too busy; else the one with the fewest requests."""

    most: int = 8  # requests that a replica may have more than the idlest one

    def choices(self, request: Asked, fleet: Fleet) -> Sequence[int]:
        loads = fleet.memory.in_flight
        idlest = min(fleet.present, key=lambda replica: loads[replica])
        allowed = [replica for replica in fleet.present if loads[replica] <= loads[idlest] + self.most]
        best = max(allowed, key=fleet.cached)
        return [best if fleet.cached(best) > 0 else idlest]
