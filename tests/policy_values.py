"""Random policies: values of all fields, for steps of 10 ms and of 1 s."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from hypothesis import strategies as st
from servesim.core import ORDERS, Policy

VALUES: dict[str, Sequence[Any]] = {
    "order": ORDERS,
    "group_width": [4, 64],
    "aging": [0.0, 0.5, 10.0],
    "max_wait": [None, 0.05, 0.5, 3.0],
    "decode_batch": range(1, 7),
    "prefill_batch": range(1, 4),
    "delay_factor": [0.0, 0.5, 2.0],
    "delay_variant": ["none", "queue", "request", "contest"],
    "delay_scope": ["queue", "request", "request-unless-idle"],
    "fix_delay_bugs": [False, True],
    "preempted_to": ["front", "sorted", "swapped"],
    "refill_from": ["swapped", "waiting", "older"],
    "victim": ["shortest", "longest", "newest", "oldest", "fewest-blocks"],
    "admission_hysteresis": range(3),
    "strategy": ["paged", "continuous", "static", "static-paged"],
    "max_num_seqs": range(1, 9),
    "max_num_active_seqs": [None, 2],
    "max_num_batched_tokens": [12, 24, 96, 128, 512],
    "preemption_mode": [None, "recompute", "swap"],
    "append_rule": ["any_free", "touched"],
    "watermark": [0.0, 0.01, 0.1],
    "sort_running": [False, True],
    "swap_order": ["swapped", "arrival"],
    "padded_prefill": [False, True],
    "max_paddings": [4, 256],
    "ignored_step": [False, True],
    "fail_infeasible": [False, True],
    "free_failed_swaps": [False, True],
    "answer_failed_swaps": [False, True],
    "examine_at_full_budget": [False, True],
    "policy": ["fcfs", "priority"],
    "max_num_partial_prefills": range(1, 4),
    "enable_chunked_prefill": [False, True],
    "enable_prefix_caching": [False, True],
    "async_scheduling": [False, True],
    "pipeline_parallel_size": [1, 2, 4],
    "prefix_cache_retention_interval": [0, None, 4, 64],
    "num_speculative_tokens": [0, 1, 3, 7],
    "speculative_method": ["ngram", "eagle", "eagle3", "mtp", "draft_model"],
    "mtp_modules": [1, 2],
    "scheduler_reserve_full_isl": [False, True],
    "long_prefill_token_threshold": [0, 4, 12],
    "long_prefill_token_threshold_adaptive": [False, True],
    "max_long_partial_prefills": [1, 2, 8],
    "enable_pd_transfer": [False, True],
    "decode_max_num_seqs": [0, 12],
    "slo_limits_for_dynamic_batch": [-1.0, 3.0],
    "profile_table": [(), ((8, 1, 16, 1.0), (8, 4, 12, 2.0), (64, 2, 5, 2.0), (64, 8, 9, 3.0), (64, 8, 24, 4.0))],
    "threshold": [4, 10],
    "long_max_wait_ms": [0.0, 40.0, 2000.0],
    "max_jobs": [2, 20],
    "reserve_margin_blocks": range(3),
    "reserve_max_blocks": [0, 3, 8],
    "low_available_tokens_threshold": [0, 8, 20, 4096],
    "short_decode_token_threshold": [5, 32],
    "fitted_a": [0.0, 0.0001, 0.01],
    "fitted_b": [0.0, 0.01, 0.5],
    "smooth_factor": [0.5, 1.0],
    "min_chunk": [1, 4, 64],
    "kv_consumer": [False, True],
    "chunk_size": range(2, 41),
    "enable_dynamic_chunking_schedule": [False, True],
    "low_chunk_size": [None, 3],
    "high_chunk_size": [None, 16],
    "chunk_schedule_max_tokens": [None, 20],
    "chunk_schedule_stages": [None, 3],
    "pad_finished": [False, True],
    "batch_waiting_time": [0.0, 0.05, 2.0],
    "n_slots": [None, 64, 128],
    "reserve": ["request", "model"],
    "max_ragged_batch_size": [8, 24, 768],
    "max_ragged_sequence_count": [2, 5, 512],
    "max_tracked_sequences": [3, 2048],
    "wait_for_flush": [False, True],
    "batch_max_tokens": [None, 24, 64],
    "running_max_req_size": [2, 5, 1000],
    "max_wait_tokens": [1, 3, 10],
    "router_token_ratio": [0.0, 0.5, 0.9],
    "router_max_new_token_len": [2, 1024],
    "splitfuse_mode": [False, True],
    "splitfuse_block_size": [4, 256],
    "schedule_policy": ["fcfs", "lof"],
    "version": ["0.4.6", "0.5.18", "0.9.1", "0.11.0", "0.13.0", "0.20.0", "0.25.1", "0.32.0"],
    "disable_radix_cache": [False, True],
    "chunked_prefill_size": [None, 8, 8192],
    "max_running_requests": [None, 3],
    "enable_mixed_chunk": [False, True],
    "disable_overlap_schedule": [False, True],
    "prefill_decode_interval": [0, 2],
    "ignore_eos": [False, True],
    "schedule_conservativeness": [0.1, 1.0],
    "init_new_token_ratio": [0.3, 0.7],
    "min_new_token_ratio_factor": [0.14, 1.0],
    "new_token_ratio_decay_steps": [5, 600],
    "retract_decode_steps": [2, 20],
    "clip_max_new_tokens": [4, 4096],
    "max_batch_size": [2, 5, 256],
    "max_prefill_batch_size": [0, 1, 4],
    "max_prefill_tokens": [8, 64, 8192],
    "stage_policy": ["prefill-first", "throughput", "latency"],
    "prefill_time_ms_per_req": [0, 150, 2000],
    "decode_time_ms_per_req": [0, 1, 50, 2000],
    "max_preempt_count": [0, 1, 8],
    "max_queue_delay_microseconds": [500, 5000, 100_000, 200_000],
    "max_first_token_wait_time": [0, 100, 2500],
    "split_fuse": [False, True],
    "prefill_chunk_size": [0, 3, 8, 16],
    "prefill_expected_time": [50, 1500],
    "decode_expected_time": [10, 50],
    "dynamic_batch_size": [False, True],
    "max_iter_times": [4, 512],
    "max_input_token_len": [20, 2048],
}


def known_fields(kind: type[Policy]) -> list[str]:
    """Return the names of a policy's fields."""
    return sorted(field.name for field in fields(kind))


def accepted(kind: type[Policy], values: dict[str, Any]) -> dict[str, Any]:
    """Return values of fields without those that the policy does not accept, or not with the others."""
    values = dict(values)
    while True:
        try:
            kind(**values)
            return values
        except ValueError as error:
            name = str(error).partition(":")[0]
            del values[name if name in values else next(reversed(values))]


def random_fields(rng: random.Random, kind: type[Policy]) -> dict[str, Any]:
    """Return values of up to eight fields."""
    names = known_fields(kind)
    chosen = rng.sample(names, rng.randint(0, min(8, len(names))))
    return accepted(kind, {name: rng.choice(VALUES[name]) for name in chosen})


@st.composite
def policy_fields(draw: st.DrawFn, kind: type[Policy]) -> dict[str, Any]:
    """Draw values of up to eight fields, for Hypothesis."""
    chosen = draw(st.sets(st.sampled_from(known_fields(kind)), max_size=8))
    return accepted(kind, {name: draw(st.sampled_from(VALUES[name])) for name in sorted(chosen)})
