"""36 random scenarios for every policy: equal with and without fast-forward, and on both clocks."""

from __future__ import annotations

import random

import pytest
from servesim.policies import POLICIES
from servesim.testing import ContractWorld, check_fast_forward, check_live_matches_simulated, draw_requests

from ..policy_values import random_fields


def world(rng: random.Random, seed: int) -> ContractWorld:
    """Return a server, often with few KV blocks, and its requests."""
    return ContractWorld(
        draw_requests(seed, rng.choice([12, 24, 40])),
        blocks=rng.choice([12, 24, 40, 64, 200]),
        block_size=rng.choice([1, 4, 16]),
        host_blocks=rng.choice([0, 8, 32]),
        max_model_len=rng.choice([None, 64, 96]),
        lag=rng.choice([1, 1, 3, 7]),
        end_lag=rng.random() < 0.4,
        rejects=rng.choice([True, True, None]),
    )


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_random_scenarios_are_equal_with_and_without_fast_forward_and_on_both_clocks(name: str) -> None:
    rng = random.Random(name)
    for seed in range(36):
        setting, policy = world(rng, seed), POLICIES[name](**random_fields(rng, POLICIES[name]))
        check_fast_forward(policy, setting)
        check_live_matches_simulated(policy, setting)
