"""vLLM policies on random scenarios: same decisions as a reference implementation, with and without held plans."""

from __future__ import annotations

import random
from typing import Any

import pytest
from servesim.engine.rules import rules_of
from servesim.policies import POLICIES

from ..conftest import seeds
from .ascend_reference import (
    AscendScheduler,
    BatchJobs,
    DynamicBatch,
    EnhancedScheduler,
    ProfilingChunk,
    Recompute,
    ShortFirst,
)
from .recordings import PlayedRun, Recording, compare, play, reproduce
from .vllm_reference import V1, Engine, Job
from .vllm_v0_reference import V0, Chunked

COST = {"c0": 5000, "per_prefill_token": 100, "per_decode_seq": 200, "per_swap_block": 300}
REFERENCES: dict[str, type[Engine]] = {
    "vllm": V0, "vllm-chunked": Chunked, "vllm-v1": V1, "vllm-ascend": AscendScheduler,
    "vllm-mindspore": EnhancedScheduler, "vllm-ascend-short-first": ShortFirst, "vllm-ascend-batch-jobs": BatchJobs,
    "vllm-ascend-dynamic-batch": DynamicBatch, "vllm-ascend-profiling-chunk": ProfilingChunk,
    "vllm-ascend-recompute": Recompute,
}  # fmt: skip


def scenario(rng: random.Random, family: str) -> tuple[list[list[Any]], dict[str, Any], dict[str, Any]]:
    """Return random requests, memory and policy fields: often few blocks or equal arrivals, sometimes infeasible."""
    size, max_len = rng.choice([1, 2, 4, 8, 16]), rng.choice([64, 128, 256])
    span, grain = rng.choice([0, 20_000, 200_000, 1_000_000]), rng.choice([1, 1, 50_000])
    requests: list[list[Any]] = []
    for index in range(rng.randint(1, 40)):
        prompt = rng.randint(1, max_len - 1 if rng.random() < 0.1 else max_len // 2)
        output = rng.choice([1, *[rng.randint(1, max_len - prompt)] * 9])
        requests.append([f"r{index:03d}", rng.randint(0, span) // grain * grain, prompt, output, rng.randint(0, 3)])
    requests.sort(key=lambda request: request[1])
    need = max(-(-(prompt + output) // size) for _, _, prompt, output, _ in requests)
    blocks = rng.choice([max(1, need - 2), need + 1, need + 2, need * 2, need * 3, need * 6, need + 150])
    memory = {"block_size": size, "num_blocks": blocks, "max_model_len": max_len, "num_cpu_blocks": 0}
    fields: dict[str, Any] = {"max_num_seqs": rng.choice([1, 2, 4, 8, 16, 64])}
    if family in ("vllm-ascend", "vllm-mindspore"):
        return requests, memory, {**fields, **whole_prompt_fields(rng, family, max_len)}
    fields["watermark"] = rng.choice([0.0, 0.01, 0.05, 0.1])
    if family.startswith(("vllm-v1", "vllm-ascend-")):
        fields.update(v1_fields(rng, max_len), async_scheduling=False, version="0.32.0")
        fields.update(ascend_fields(rng, family, max_len, fields["max_num_batched_tokens"]))
        if family == "vllm-ascend-batch-jobs":
            memory["stop_by_eos"] = rng.random() < 0.8
            requests = [[f"#job_name[{rng.choice('abcd')}]#{id}", *row] for id, *row in requests]
        return requests, memory, fields
    fields.update(v0_fields(rng))
    if fields["preemption_mode"] == "swap":
        memory["num_cpu_blocks"] = rng.choice([0, blocks, blocks * 10])
    fields.update(default_fields(rng, max_len) if family == "vllm" else chunked_fields(rng, max_len))
    return requests, memory, fields


def v1_fields(rng: random.Random, max_len: int) -> dict[str, Any]:
    chunked = rng.random() < 0.7
    return {
        "enable_chunked_prefill": chunked,
        "max_num_batched_tokens": rng.choice([16, 64, 128, max_len]) if chunked else max_len,
        "scheduler_reserve_full_isl": rng.random() < 0.5,
        "long_prefill_token_threshold": rng.choice([0, 0, 1, 8, 32]),
        "policy": rng.choice(["fcfs", "priority"]),
        "enable_prefix_caching": False,  # see tests/engine/test_prefix_cache.py
    }


def ascend_fields(rng: random.Random, family: str, max_len: int, tokens: int) -> dict[str, Any]:
    if family == "vllm-ascend-short-first":
        return {"policy": "fcfs", "threshold": max_len // 6, "long_max_wait_ms": rng.choice([0.0, 1e8, 3e8])}
    if family == "vllm-ascend-batch-jobs":
        return {
            "policy": "fcfs",
            "reserve_margin_blocks": rng.choice([0, 2]),
            "reserve_max_blocks": rng.choice([0, 4, 8]),
            "low_available_tokens_threshold": rng.choice([0, 60, 600]),
            "short_decode_token_threshold": rng.choice([10, 32, 200]),
        }
    if family == "vllm-ascend-dynamic-batch":
        rows = [
            (c, d, rng.randint(1, tokens), rng.randint(1, 9)) for c in (16, 32, 64, 128, 256) for d in (1, 2, 8, 16)
        ]
        fields = {"slo_limits_for_dynamic_batch": rng.choice([3.0, 7.0]), "profile_table": tuple(rows)}
        return {**fields, "policy": "fcfs"}  # with priorities the real engine ends after many a preemption
    if family == "vllm-ascend-profiling-chunk":
        a, b = rng.choice([(0.0, 0.0), (1e-3, 0.0), (0.0, 0.5), (1e-3, 0.5), (0.1, 0.5)])
        return {"fitted_a": a, "fitted_b": b, "smooth_factor": rng.choice([0.3, 1.0]), "min_chunk": rng.choice([1, 70])}
    return {}


def whole_prompt_fields(rng: random.Random, family: str, max_len: int) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "max_num_batched_tokens": rng.choice([max_len, max_len // 2, max_len * 3]), "enable_prefix_caching": False,
    }  # fmt: skip
    if family == "vllm-mindspore":
        return {**fields, "policy": rng.choice(["fcfs", "priority"])}
    if rng.random() < 0.3:
        return {**fields, "enable_pd_transfer": True, "decode_max_num_seqs": rng.choice([0, 3, 12])}
    fields["long_prefill_token_threshold"] = rng.choice([0, 8, 40])
    return {**fields, "max_long_partial_prefills": rng.choice([None, 1, 3])}


def v0_fields(rng: random.Random) -> dict[str, Any]:
    return {
        "delay_factor": rng.choice([0.0, 0.0, 0.5, 2.0]),
        "preemption_mode": rng.choice([None, "swap", "recompute"]),
        "sort_running": rng.random() < 0.5,
        "swap_order": rng.choice(["arrival", "swapped"]),
        "append_rule": rng.choice(["any_free", "touched"]),
        "fail_infeasible": rng.random() < 0.7,
        "free_failed_swaps": rng.random() < 0.3,
    }


def default_fields(rng: random.Random, max_len: int) -> dict[str, Any]:
    priority = rng.random() < 0.3
    return {
        "max_num_batched_tokens": rng.choice([max_len, max_len // 2, max_len * 3]),
        "delay_scope": rng.choice(["queue", "request", "request-unless-idle"]),
        "padded_prefill": rng.random() < 0.3,
        "max_paddings": rng.choice([0, 16, 256]),
        "ignored_step": rng.random() < 0.3,
        **({"policy": "priority", "sort_running": False, "preemption_mode": None} if priority else {}),
    }


def chunked_fields(rng: random.Random, max_len: int) -> dict[str, Any]:
    return {
        "max_num_batched_tokens": rng.choice([4, 16, 64, max_len]),
        "delay_scope": rng.choice(["queue", "request-unless-idle"]),
        "examine_at_full_budget": rng.random() < 0.5,
    }


@pytest.mark.parametrize("seed", seeds(10, 25))
@pytest.mark.parametrize("family", REFERENCES)
def test_policy_matches_reference_implementation(family: str, seed: int) -> None:
    requests, memory, fields = scenario(random.Random(seed), family)
    jobs = [Job(*request) for request in requests]
    if rules_of(POLICIES[family]()).rejects_oversized:
        capacity = memory["num_blocks"] * memory["block_size"]
        jobs = [job for job in jobs if job.prompt + job.output - 1 <= capacity]
    reference = REFERENCES[family]({**memory, **fields}, jobs, COST)
    reference.run()
    recording = Recording({"knobs": memory, "cost": COST}, requests, reference.rows)
    if fields.get("swap_order") == "arrival":  # engine and policy sort the swapped queue when they read it
        for row in reference.rows:
            del row["swapped"]
    if fields.get("enable_pd_transfer") or family == "vllm-mindspore":  # some that do not run are still in `running`
        for row in reference.rows:
            del row["running"], row["waiting"], row["swapped"]
    policy = POLICIES[family](**fields)
    played = play(recording, policy) if reference.error == "endless" else reproduce(recording, policy)
    if reference.error == "endless":  # a livelock: the simulator stops it after many steps without a token
        steps = min(len(reference.rows), len(played.rows))
        recording.steps, played.rows = reference.rows[:steps], played.rows[:steps]
        compare(recording, played)
        return
    compare(recording, played)
    assert (reference.error is None) == (played.stuck is None), (reference.error, played.stuck)
    if reference.error is None:
        assert [(job.first_token, job.finish, job.preemptions) for job in jobs] == [
            outcome_of(played, job.id) for job in jobs
        ]


def outcome_of(played: PlayedRun, id: str) -> tuple[Any, ...]:
    request = played.requests[id]
    return request.first_token, request.finish if request.outcome == "finished" else None, request.preemptions
