"""The vLLM policies on random scenarios: the same decisions as a second, plain telling of the rules, leaps or not."""

from __future__ import annotations

import random
from typing import Any

import pytest
from servesim.policies import POLICIES

from .recordings import Played, Recording, compare, play
from .vllm_reference import V1, Engine, Job
from .vllm_v0_reference import V0, Chunked

COST = {"c0": 5000, "per_prefill_token": 100, "per_decode_seq": 200, "per_swap_block": 300}
TELLINGS: dict[str, type[Engine]] = {"vllm": V0, "vllm-chunked": Chunked, "vllm-v1": V1}


def scenario(rng: random.Random, family: str) -> tuple[list[list[Any]], dict[str, Any], dict[str, Any]]:
    """Return requests, memory and a policy's fields: often tight, often with ties, sometimes impossible."""
    size, longest = rng.choice([1, 2, 4, 8, 16]), rng.choice([64, 128, 256])
    span, grain = rng.choice([0, 20_000, 200_000, 1_000_000]), rng.choice([1, 1, 50_000])
    requests: list[list[Any]] = []
    for index in range(rng.randint(1, 40)):
        prompt = rng.randint(1, longest - 1 if rng.random() < 0.1 else longest // 2)
        output = rng.choice([1, *[rng.randint(1, longest - prompt)] * 9])
        requests.append([f"r{index:03d}", rng.randint(0, span) // grain * grain, prompt, output, rng.randint(0, 3)])
    requests.sort(key=lambda request: request[1])
    need = max(-(-(prompt + output) // size) for _, _, prompt, output, _ in requests)
    blocks = rng.choice([max(1, need - 2), need + 1, need + 2, need * 2, need * 3, need * 6, need + 150])
    memory = {"block_size": size, "num_blocks": blocks, "max_model_len": longest, "num_cpu_blocks": 0}
    fields: dict[str, Any] = {"max_num_seqs": rng.choice([1, 2, 4, 8, 16, 64])}
    fields["watermark"] = rng.choice([0.0, 0.01, 0.05, 0.1])
    if family == "vllm-v1":
        fields.update(v1_fields(rng, longest))
        return requests, memory, fields
    fields.update(v0_fields(rng))
    if fields["preemption_mode"] == "swap":
        memory["num_cpu_blocks"] = rng.choice([0, blocks, blocks * 10])
    fields.update(default_fields(rng, longest) if family == "vllm" else chunked_fields(rng, longest))
    return requests, memory, fields


def v1_fields(rng: random.Random, longest: int) -> dict[str, Any]:
    chunked = rng.random() < 0.7
    return {
        "enable_chunked_prefill": chunked,
        "max_num_batched_tokens": rng.choice([16, 64, 128, longest]) if chunked else longest,
        "scheduler_reserve_full_isl": rng.random() < 0.5,
        "long_prefill_token_threshold": rng.choice([0, 0, 1, 8, 32]),
        "policy": rng.choice(["fcfs", "priority"]),
    }


def v0_fields(rng: random.Random) -> dict[str, Any]:
    return {
        "delay_factor": rng.choice([0.0, 0.0, 0.5, 2.0]),
        "preemption_mode": rng.choice([None, "swap", "recompute"]),
        "sort_running": rng.random() < 0.5,
        "swap_order": rng.choice(["arrival", "swapped"]),
        "append_rule": rng.choice(["any_free", "touched"]),
        "fail_infeasible": rng.random() < 0.7,
    }


def default_fields(rng: random.Random, longest: int) -> dict[str, Any]:
    priority = rng.random() < 0.3
    return {
        "max_num_batched_tokens": rng.choice([longest, longest // 2, longest * 3]),
        "delay_scope": rng.choice(["queue", "request", "request-unless-idle"]),
        "padded_prefill": rng.random() < 0.3,
        "max_paddings": rng.choice([0, 16, 256]),
        "ignored_step": rng.random() < 0.3,
        **({"policy": "priority", "sort_running": False} if priority else {}),
    }


def chunked_fields(rng: random.Random, longest: int) -> dict[str, Any]:
    return {
        "max_num_batched_tokens": rng.choice([4, 16, 64, longest]),
        "delay_scope": rng.choice(["queue", "request-unless-idle"]),
    }


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("family", TELLINGS)
def test_two_tellings_of_the_rules_decide_alike(family: str, seed: int) -> None:
    requests, memory, fields = scenario(random.Random(seed), family)
    jobs = [Job(*request) for request in requests]
    if POLICIES[family]().traits.rejects_oversized:
        room = memory["num_blocks"] * memory["block_size"]
        jobs = [job for job in jobs if job.prompt + job.output - 1 <= room]
    told = TELLINGS[family]({**memory, **fields}, jobs, COST)
    told.run()
    recording = Recording({"knobs": memory, "cost": COST}, requests, told.rows)
    if fields.get("swap_order") == "arrival":  # the engine sorts the swapped when it looks at them, the policy as well
        for row in told.rows:
            del row["swapped"]
    policy = POLICIES[family](**fields)
    played = play(recording, policy)
    if told.error == "endless":  # a livelock: we stop it where nothing was written for long
        turns = min(len(told.rows), len(played.rows))
        recording.steps, played.rows = told.rows[:turns], played.rows[:turns]
        compare(recording, played)
        return
    compare(recording, played)
    assert (told.error is None) == (played.stuck is None), (told.error, played.stuck)
    if told.error is None:
        assert [(job.first, job.end, job.preemptions) for job in jobs] == [ends(played, job.id) for job in jobs]
    leapt = play(recording, policy, leaps=True)
    assert str(leapt.stuck) == str(played.stuck)
    assert {id: ends(leapt, id) for id in leapt.requests} == {id: ends(played, id) for id in played.requests}


def ends(played: Played, id: str) -> tuple[Any, ...]:
    request = played.requests[id]
    return request.first_token, request.finish if request.outcome == "finished" else None, request.evictions
