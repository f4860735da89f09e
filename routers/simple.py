"""Routers of textbooks: in turn, at random, least requests, the better one of two, and sticky sessions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Optional

from servesim.core.native import mypyc_attr

from .router import Asked, Fleet, Memory, OwnChoices, OwnCounts, fewest


class TurnMemory(Memory):
    """The number of requests so far."""

    def __init__(self, replicas: int) -> None:
        super().__init__(replicas)
        self.turn = 0


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class RoundRobin(OwnChoices):
    """Each replica in turn."""

    def memory(self, replicas: int) -> Any:
        return TurnMemory(replicas)

    def choices(self, request: Asked, fleet: Fleet) -> Sequence[int]:
        memory: TurnMemory = fleet.memory
        return [fleet.present[memory.turn % len(fleet.present)]]

    def sent(self, request: Asked, replica: int, fleet: Fleet) -> None:
        super().sent(request, replica, fleet)
        memory: TurnMemory = fleet.memory
        memory.turn += 1


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class RandomReplica(OwnChoices):
    """Any replica."""

    def choices(self, request: Asked, fleet: Fleet) -> Sequence[int]:
        return fleet.present


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class LeastRequests(OwnCounts):
    """The replica with the fewest unanswered requests of this router; ties at random."""

    def choices(self, request: Asked, fleet: Fleet) -> Sequence[int]:
        return fewest(fleet.memory.in_flight, fleet.present)


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class PowerOfTwo(OwnCounts):
    """Two replicas at random, of which the one with fewer unanswered requests."""

    def choices(self, request: Asked, fleet: Fleet) -> Sequence[int]:
        loads, present = fleet.memory.in_flight, fleet.present
        if len(present) == 1:
            return present
        most = max([loads[replica] for replica in present])
        heaviest = [replica for replica in present if loads[replica] == most]
        return present if len(heaviest) > 1 else [replica for replica in present if replica != heaviest[0]]

    def route(self, request: Asked, fleet: Fleet, random: Random) -> int:
        loads, present = fleet.memory.in_flight, fleet.present
        if len(present) == 1:
            return present[0]
        first, second = random.sample(present, 2)
        return first if loads[first] <= loads[second] else second


class StickyMemory(Memory):
    """The replica of each key."""

    def __init__(self, replicas: int) -> None:
        super().__init__(replicas)
        self.replica_of: dict[str, int] = {}


@mypyc_attr(allow_interpreted_subclasses=True)
@dataclass(frozen=True)
class Sticky(OwnCounts):
    """A session stays on its replica; a new one, and a request without a session, goes to the least loaded."""

    def memory(self, replicas: int) -> Any:
        return StickyMemory(replicas)

    def choices(self, request: Asked, fleet: Fleet) -> Sequence[int]:
        known: Optional[int] = None if request.key is None else fleet.memory.replica_of.get(request.key)
        return self.new_choices(request, fleet) if known is None or known not in fleet.present else [known]

    def new_choices(self, request: Asked, fleet: Fleet) -> Sequence[int]:
        """Return the choices for a request without a known replica."""
        return fewest(fleet.memory.in_flight, fleet.present)

    def sent(self, request: Asked, replica: int, fleet: Fleet) -> None:
        super().sent(request, replica, fleet)
        if request.key is not None:
            fleet.memory.replica_of[request.key] = replica
