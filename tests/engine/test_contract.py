"""Every policy follows the contract, for random requests and settings: held plans, conservation, both clocks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servesim.core import Request
from servesim.core.content import content_of_pieces
from servesim.policies import POLICIES
from servesim.testing import (
    ContractWorld,
    check_conservation,
    check_held_plans,
    check_hold,
    check_live_matches_simulated,
    check_policy,
)

from ..policy_values import VALUES, known_fields, policy_fields


@st.composite
def worlds(draw: st.DrawFn) -> ContractWorld:
    """Draw requests with simultaneous arrivals, few KV blocks and a front-end lag."""
    gaps = draw(st.lists(st.sampled_from([0.0, 0.0, 0.012, 0.1, 0.5]), min_size=1, max_size=14))
    requests, now = [], 0.0
    for id, gap in enumerate(gaps):
        now += gap
        output = draw(st.integers(1, 12))
        limit = output + draw(st.sampled_from([0, 3]))
        fails = draw(st.sampled_from([None, None, None, None, None, 1, 3]))
        prompt, priority = draw(st.integers(1, 20)), draw(st.integers(0, 2))
        text, shared = draw(st.sampled_from([None, None, "a", "b"])), draw(st.integers(0, prompt))
        content = None if text is None else content_of_pieces([(text, shared), (id, prompt - shared)])
        job = draw(st.sampled_from([None, "a", "b", "c"]))  # of vllm-ascend, in the id
        name = id if job is None else f"{id}#job_name[{job}]#"
        requests.append(
            Request(name, now, prompt, output, limit, priority=priority, content=content, fails_at_token=fails)
        )
    return ContractWorld(
        requests,
        blocks=draw(st.integers(10, 40)),
        block_size=draw(st.sampled_from([1, 2, 4])),
        host_blocks=draw(st.sampled_from([0, 40])),
        max_model_len=draw(st.sampled_from([40, 64])),
        lag=draw(st.integers(1, 4)),
        end_lag=draw(st.booleans()),
        rejects=draw(st.sampled_from([True, None])),
    )


CHECKS = {
    check.__name__: check for check in (check_held_plans, check_hold, check_conservation, check_live_matches_simulated)
}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=8)
@given(data=st.data())
def test_random_settings_follow_the_contract(name: str, check: str, data: st.DataObject) -> None:
    kind = POLICIES[name]
    CHECKS[check](kind(**data.draw(policy_fields(kind))), data.draw(worlds()))


@pytest.mark.parametrize("name", POLICIES)
def test_random_settings_cover_all_fields(name: str) -> None:
    assert set(known_fields(POLICIES[name])) <= set(VALUES)


@pytest.mark.parametrize("name", POLICIES)
def test_default_settings_follow_the_contract(name: str) -> None:
    for seed in range(4):
        check_policy(POLICIES[name](), seed, lag=1 + seed % 2, blocks=40 + 8 * seed)
