"""Every llm-serving policy decides the same inside the server, through the adapter, and in the simulation."""

from __future__ import annotations

import random
from typing import Any

import pytest
from servesim.config.registry import preset as preset_keys
from servesim.core.fields import policy_fields
from servesim.core.policy import ORDERS
from servesim.policies.llm_serving import LLMServing

from ...policies.test_llm_serving import play
from .llm_serving_standin import Master
from .test_adapter import run_server

SETTINGS: dict[str, dict[str, Any]] = {
    "stock": {},
    "late-first": {"order": "longest-output", "max_wait": 20.0, "preempted_to": "sorted"},
    "late-first, preempted to the front": {"order": "shortest-prompt", "max_wait": 10.0},
    "preempted to the back": {"preempted_to": "sorted"},
    "longest-first": {"order": "longest-output", "preempted_to": "sorted"},
    "swapped, newest": {"preempted_to": "swapped", "victim": "newest"},
    "swapped, older": {"preempted_to": "swapped", "refill_from": "older", "victim": "longest"},
    "delay": {"delay_factor": 0.5, "delay_variant": "queue", "preempted_to": "swapped"},
    "delay by request": {"delay_factor": 2.0, "delay_variant": "request"},
    "hysteresis": {"admission_hysteresis": 1, "preempted_to": "swapped", "refill_from": "waiting"},
    "several": {"prefill_batch": 3},
    "contest delay": {"delay_factor": 0.5, "delay_variant": "contest", "preempted_to": "swapped"},
    "contest delay, as reported": {
        "delay_factor": 0.5,
        "delay_variant": "contest-as-reported",
        "fix_delay_bugs": True,
        "preempted_to": "swapped",
    },
}


def random_world(rng: random.Random) -> tuple[list[dict[str, Any]], int, int, int]:
    """Return requests, slots, blocks and block size; with few blocks, so that many requests are preempted."""
    requests = [
        {
            "id": f"r{k:02d}",
            "arrival": rng.choice([0.0, float(rng.randint(0, 60))]),
            "prompt_len": rng.randint(1, 12),
            "max_new_tokens": rng.randint(1, 16),
        }
        for k in range(rng.randint(4, 24))
    ]
    return sorted(requests, key=lambda request: request["arrival"]), rng.randint(1, 5), rng.randint(9, 20), 4


def random_settings(rng: random.Random) -> dict[str, Any]:
    """Return any settings of a paged llm-serving policy that the adapter accepts."""
    variant = rng.choice(["none", "queue", "request", "contest", "contest-as-reported"])
    return {
        "order": rng.choice(ORDERS),
        "max_wait": rng.choice([None, 0.0, 5.0, 20.0]),
        "group_width": rng.choice([2, 4, 64]),
        "aging": rng.choice([0.0, 1.0]),
        "prefill_batch": rng.choice([1, 2, 3]),
        "delay_variant": variant,
        "delay_factor": 0.0 if variant == "none" else rng.choice([0.0, 0.5, 2.0]),
        "fix_delay_bugs": variant == "contest-as-reported" or rng.random() < 0.5,
        "preempted_to": rng.choice(["front", "sorted", "swapped"]),
        "refill_from": rng.choice(["swapped", "waiting", "older"]),
        "victim": rng.choice(policy_fields(LLMServing)["victim"].choices),
        "admission_hysteresis": rng.choice([0, 0, 1, 2]),
    }


def compare_with_simulation(
    requests: list[dict[str, Any]], policy: LLMServing, batch: int, blocks: int, size: int, lag: int,
    master: type[Master] = Master,
) -> tuple[int, int]:  # fmt: skip
    """Compare all decisions; return the number of steps and of preemptions; no steps if the simulation is stuck."""
    cost = {"prefill": 3.0, "decode": 1.0}
    steps = list(run_server(requests, cost, policy, batch, blocks, size, max_steps=1500, lag=lag, master=master))
    _, simulated, stuck = play(requests, policy, cost, blocks, size, lag)
    if stuck:
        return 0, 0
    theirs = [(t["t"], t["kind"], t["swapped"], t["inserted"], t["free"]) for t in steps if t["kind"] != "idle"]
    ours = [
        (t["t"], t["kind"], with_slots(t, "preempted"), with_slots(t, "admitted"), t["free_after"])
        for t in simulated if t["kind"] != "idle"
    ]  # fmt: skip
    assert theirs == ours
    return len(ours), sum(len(step[2]) for step in ours)


@pytest.mark.parametrize("lag", [2, 7])  # without a lag, a policy may know when a request arrived during a call
@pytest.mark.parametrize("fields", SETTINGS.values(), ids=SETTINGS)
def test_policy_decides_the_same_in_the_server_and_in_the_simulation(fields: dict[str, Any], lag: int) -> None:
    compared = preempted = 0
    for seed in range(8):
        requests, batch, blocks, size = random_world(random.Random(seed))
        policy = LLMServing(decode_batch=batch, **fields)
        counts = compare_with_simulation(requests, policy, batch, blocks, size, lag)
        compared, preempted = compared + counts[0], preempted + counts[1]
    assert compared > 250
    assert preempted > 5


@pytest.mark.parametrize("lag", [2, 7])
def test_any_settings_decide_the_same_in_the_server_and_in_the_simulation(lag: int) -> None:
    compared = 0
    for seed in range(40):
        rng = random.Random(seed)
        requests, batch, blocks, size = random_world(rng)
        for request in requests:
            fault = rng.choice(["eos_at", "fail_at", *[None] * 8])
            if fault is not None:
                request[fault] = rng.randint(1, request["max_new_tokens"])
        policy = LLMServing(decode_batch=batch, **random_settings(rng))
        compared += compare_with_simulation(requests, policy, batch, blocks, size, lag)[0]
    assert compared > 1600


@pytest.mark.parametrize("preset", ["contest-baseline", "debias", "moon", "xidian", "yyds"])
def test_presets_of_the_family_decide_the_same_in_the_server_and_in_the_simulation(preset: str) -> None:
    fields = {key: value for key, value in preset_keys(preset)["policy"].items() if key != "name"}
    compared = 0
    for seed in range(10):
        requests, batch, blocks, size = random_world(random.Random(seed))
        policy = LLMServing(**{**fields, "decode_batch": batch})
        compared += compare_with_simulation(requests, policy, batch, blocks, size, lag=7)[0]
    assert compared > 300


def with_slots(step: dict[str, Any], key: str) -> list[tuple[Any, Any]]:
    """Return the moved requests of a step of a log, with their slots."""
    ids = [moved[0] for moved in step[key]] if key == "preempted" else step[key]
    return list(zip(ids, step[f"{key}_slots"]))
