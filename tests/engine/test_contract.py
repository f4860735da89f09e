"""Every policy keeps the contract: leaps, conservation, purity, both clocks; over random requests and settings."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from servesim.core import ORDERS, Policy, Request
from servesim.policies import POLICIES
from servesim.testing import Setting, check_conservation, check_leaps, check_policy, check_two_clocks, check_word

# What the fields may be, by name; a policy is drawn with those of them that it has.
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
    "mend_delay": st.booleans(),
    "evicted": st.sampled_from(["front", "ranked", "swapped"]),
    "serve_first": st.sampled_from(["swapped", "waiting", "older"]),
    "victim": st.sampled_from(["shortest", "longest", "newest", "oldest", "fewest-blocks"]),
    "open_above": st.integers(0, 2),
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
    "mend_flush": st.booleans(),
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
    """Draw a policy of one family, every field that has values here among them."""
    known = {field.name for field in fields(kind)}
    chosen = draw(st.sets(st.sampled_from(sorted(known & set(VALUES))), max_size=6))
    try:
        return kind(**{name: draw(VALUES[name]) for name in sorted(chosen)})
    except ValueError:  # a value that this family does not know
        return kind()


@st.composite
def worlds(draw: st.DrawFn) -> Setting:
    """Draw a small world: ties in arrival, little memory, slow front ends."""
    gaps = draw(st.lists(st.sampled_from([0.0, 0.0, 0.012, 0.1, 0.5]), min_size=1, max_size=14))
    requests, now = [], 0.0
    for id, gap in enumerate(gaps):
        now += gap
        output = draw(st.integers(1, 12))
        limit = output + draw(st.sampled_from([0, 3]))
        fails = draw(st.sampled_from([None, None, None, None, None, 1, 3]))
        prompt, priority = draw(st.integers(1, 20)), draw(st.integers(0, 2))
        requests.append(Request(id, now, prompt, output, limit, priority=priority, fails=fails))
    return Setting(
        requests,
        blocks=draw(st.integers(10, 40)),
        block_size=draw(st.sampled_from([1, 2, 4])),
        host_blocks=draw(st.sampled_from([0, 40])),
        max_model_len=draw(st.sampled_from([40, 64])),
        lag=draw(st.integers(1, 4)),
        end_lag=draw(st.booleans()),
        refuses=draw(st.sampled_from([True, None])),
    )


CHECKS = {check.__name__: check for check in (check_leaps, check_word, check_conservation, check_two_clocks)}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(data=st.data())
def test_the_contract_holds_for_any_setting(name: str, check: str, data: st.DataObject) -> None:
    CHECKS[check](data.draw(policies(POLICIES[name])), data.draw(worlds()))


@pytest.mark.parametrize("name", POLICIES)
def test_the_contract_holds_as_shipped(name: str) -> None:
    for seed in range(4):
        check_policy(POLICIES[name](), seed, lag=1 + seed % 2, blocks=40 + 8 * seed)
