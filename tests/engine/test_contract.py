"""Every policy follows the contract, for random requests and settings: fast-forward, conservation, both clocks."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from servesim.core import ORDERS, Policy, Request
from servesim.policies import POLICIES
from servesim.testing import (
    ContractWorld,
    check_conservation,
    check_fast_forward,
    check_hold,
    check_live_matches_simulated,
    check_policy,
)

# Field name -> values; a random policy uses those of the fields that it has.
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "order": st.sampled_from(list(ORDERS)),
    "group_width": st.sampled_from([4, 64]),
    "aging": st.sampled_from([0.0, 0.5, 10.0]),
    "max_wait": st.sampled_from([None, 0.05, 0.5]),
    "decode_batch": st.integers(1, 6),
    "prefill_batch": st.integers(1, 3),
    "delay_factor": st.sampled_from([0.0, 0.5, 2.0]),
    "delay_variant": st.sampled_from(["none", "queue", "request", "contest"]),
    "delay_scope": st.sampled_from(["queue", "request", "request-unless-idle"]),
    "fix_delay_bugs": st.booleans(),
    "preempted_to": st.sampled_from(["front", "ranked", "swapped"]),
    "refill_from": st.sampled_from(["swapped", "waiting", "older"]),
    "victim": st.sampled_from(["shortest", "longest", "newest", "oldest", "fewest-blocks"]),
    "admission_hysteresis": st.integers(0, 2),
    "strategy": st.sampled_from(["paged", "continuous", "static", "static-paged"]),
    "max_num_seqs": st.integers(1, 8),
    "max_num_batched_tokens": st.sampled_from([96, 128, 512]),
    "preemption_mode": st.sampled_from([None, "recompute", "swap"]),
    "append_rule": st.sampled_from(["any_free", "touched"]),
    "watermark": st.sampled_from([0.0, 0.01, 0.1]),
    "sort_running": st.booleans(),
    "swap_order": st.sampled_from(["swapped", "arrival"]),
    "padded_prefill": st.booleans(),
    "max_paddings": st.sampled_from([4, 256]),
    "ignored_step": st.booleans(),
    "policy": st.sampled_from(["fcfs", "priority"]),
    "max_num_partial_prefills": st.integers(1, 3),
    "enable_chunked_prefill": st.booleans(),
    "scheduler_reserve_full_isl": st.booleans(),
    "long_prefill_token_threshold": st.sampled_from([0, 4, 12]),
    "chunk_size": st.integers(2, 40),
    "pad_finished": st.booleans(),
    "batch_waiting_time": st.sampled_from([0.0, 0.05]),
    "n_slots": st.sampled_from([None, 64, 128]),
    "reserve": st.sampled_from(["request", "model"]),
    "max_ragged_batch_size": st.sampled_from([8, 24, 768]),
    "max_ragged_sequence_count": st.sampled_from([2, 5, 512]),
    "wait_for_flush": st.booleans(),
    "batch_max_tokens": st.sampled_from([None, 24, 64]),
    "running_max_req_size": st.sampled_from([2, 5, 1000]),
    "max_wait_tokens": st.sampled_from([1, 3, 10]),
    "router_token_ratio": st.sampled_from([0.0, 0.5, 0.9]),
    "router_max_new_token_len": st.sampled_from([2, 1024]),
    "splitfuse_mode": st.booleans(),
    "splitfuse_block_size": st.sampled_from([4, 256]),
    "schedule_policy": st.sampled_from(["fcfs", "lof"]),
    "chunked_prefill_size": st.sampled_from([-1, 8, 8192]),
    "max_running_requests": st.sampled_from([None, 3]),
    "enable_mixed_chunk": st.booleans(),
    "max_batch_size": st.sampled_from([2, 5, 256]),
    "max_tokens_per_batch": st.sampled_from([24, 8192]),
    "proactive_offloading": st.booleans(),
    "use_skip_join": st.booleans(),
    "starvation_threshold": st.sampled_from([0.2, 3.0]),
    "starvation_period": st.sampled_from([3, 1000]),
}


@st.composite
def policies(draw: st.DrawFn, kind: type[Policy]) -> Policy:
    """Draw a policy of one kind with random values of up to six fields."""
    known = {field.name for field in fields(kind)}
    chosen = draw(st.sets(st.sampled_from(sorted(known & set(VALUES))), max_size=6))
    values = {name: draw(VALUES[name]) for name in sorted(chosen)}
    while True:
        try:
            return kind(**values)
        except ValueError as error:  # a value that this policy does not accept, or not with the others
            del values[str(error).partition(":")[0]]


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
        requests.append(Request(id, now, prompt, output, limit, priority=priority, fails_at_token=fails))
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
    check.__name__: check
    for check in (check_fast_forward, check_hold, check_conservation, check_live_matches_simulated)
}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data())
def test_random_settings_follow_the_contract(name: str, check: str, data: st.DataObject) -> None:
    CHECKS[check](data.draw(policies(POLICIES[name])), data.draw(worlds()))


@pytest.mark.parametrize("name", POLICIES)
def test_default_settings_follow_the_contract(name: str) -> None:
    for seed in range(4):
        check_policy(POLICIES[name](), seed, lag=1 + seed % 2, blocks=40 + 8 * seed)
