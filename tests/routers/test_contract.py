"""The router contract: built-in routers follow it, and mistakes of a user's router are found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Any

import pytest
from servesim.routers import ROUTERS, Asked, Fleet, Router
from servesim.routers.router import fewest, least, random_below
from servesim.testing import check_router

COUNT = count()


@pytest.mark.parametrize("name", ROUTERS)
def test_built_in_routers_follow_the_contract(name: str) -> None:
    check_router(ROUTERS[name]())


@dataclass(frozen=True)
class Outside(Router):
    def choices(self, request: Asked, fleet: Fleet) -> Sequence[int]:
        return [4]


@dataclass(frozen=True)
class HiddenState(Router):
    def choices(self, request: Asked, fleet: Fleet) -> Sequence[int]:
        return [fleet.present[next(COUNT) % len(fleet.present)]]


@dataclass(frozen=True)
class ChangesMemory(Router):
    def choices(self, request: Asked, fleet: Fleet) -> Sequence[int]:
        fleet.memory.in_flight[0] += 1
        return fleet.present[:1]


@dataclass(frozen=True)
class LearnsSecretly(Router):
    @property
    def learns(self) -> bool:
        return False

    def choices(self, request: Asked, fleet: Fleet) -> Sequence[int]:
        return [min(fleet.present, key=lambda replica: fleet.memory.reported[replica].kv_usage)]


@dataclass(frozen=True)
class WaitsForTokens(Router):
    def memory(self, replicas: int) -> Any:
        memory = super().memory(replicas)
        memory.reported = []
        return memory

    def choices(self, request: Asked, fleet: Fleet) -> Sequence[int]:
        return [fleet.present[sum(fleet.memory.in_flight) % len(fleet.present)]]

    def prefilled(self, memory: Any, request: Asked, replica: int) -> None:
        memory.in_flight[replica] -= 1


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Outside, r"chose \[4\], expected some of \[0\]"),
        (HiddenState, "returned two different choices for the same request"),
        (ChangesMemory, "changed its memory in a choice"),
        (LearnsSecretly, "expected learns to return True"),
        (WaitsForTokens, "expected reads_first_tokens to return True"),
    ],
)
def test_mistakes_are_found(kind: type[Router], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_router(kind())


def test_choices_are_those_of_the_library() -> None:
    ours, theirs, rng = Random("a"), Random("a"), Random("b")
    for limit in [*range(1, 70), 1000]:
        assert [random_below(ours, limit) for _ in range(5)] == [theirs.choice(range(limit)) for _ in range(5)]
        counts = [rng.randint(0, 3) for _ in range(limit)]
        assert fewest(counts, range(limit)) == least(counts, range(limit))
