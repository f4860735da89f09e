"""504 random scenarios, 36 for every policy: equal with and without fast-forward, and on both clocks."""

from __future__ import annotations

import random
from typing import Any

import pytest
from servesim.policies import POLICIES
from servesim.testing import Setting, check_leaps, check_two_clocks, some_requests


def scenario(chance: random.Random, seed: int) -> tuple[dict[str, Any], Setting]:
    """Return fields of the policy and the server, of which memory is often short."""
    fields: dict[str, Any] = {}
    if chance.random() < 0.3:
        fields["order"] = chance.choice(["shortest-output", "longest-prompt", "priority"])
    if chance.random() < 0.2:
        fields["max_wait"] = chance.choice([0.05, 0.5])
    return fields, Setting(
        some_requests(seed, chance.choice([12, 24, 40])),
        blocks=chance.choice([12, 24, 40, 64, 200]),
        block_size=chance.choice([1, 4, 16]),
        host_blocks=chance.choice([0, 8, 32]),
        max_model_len=chance.choice([None, 64, 96]),
        lag=chance.choice([1, 1, 3, 7]),
        end_lag=chance.random() < 0.4,
        refuses=chance.choice([True, True, None]),
    )


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_random_scenarios_are_equal_with_and_without_fast_forward_and_on_both_clocks(name: str) -> None:
    chance = random.Random(name)
    for seed in range(36):
        fields, setting = scenario(chance, seed)
        policy = POLICIES[name](**fields)
        check_leaps(policy, setting)
        check_two_clocks(policy, setting)
