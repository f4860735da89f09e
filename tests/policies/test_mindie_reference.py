"""MindIE-LLM: on random settings and requests, the policy decides every round as a plain restatement of the rules."""

from __future__ import annotations

import random
from typing import Any

import pytest

from ..conftest import seeds
from . import test_engines_mindie  # noqa: F401  it maps the engine to its policy
from .mindie_reference import MindIE
from .recordings import Recording, compare, play, reproduce

MAX_ROUNDS = 900  # below the 1,000 calls without a token after which a run ends: with SplitFuse, some make no progress


def draw_case(seed: int) -> tuple[dict[str, Any], list[list[Any]], dict[str, int]]:
    """Return random settings, requests and step costs."""
    rng = random.Random(seed)
    size, longest = rng.choice([1, 4, 16, 64, 128]), rng.choice([64, 128, 512])
    mixed = rng.random() < 0.3
    knobs: dict[str, Any] = {
        "cacheBlockSize": size, "maxBatchSize": rng.choice([2, 4, 8, 16, 32]), "maxSeqLen": longest,
        "maxPrefillBatchSize": rng.choice([0, 1, 2, 8]), "enableChunkedPrefill": mixed,
        "maxPrefillTokens": rng.choice([8, 32, 64, 300, 1024]), "activateAsyncInference": rng.random() < 0.25,
        "npuBlockNum": max(1, rng.choice([longest // 2, longest, 2 * longest, 8 * longest]) // size),
        "maxQueueDelayMicroseconds": rng.choice([500, 5000, 5000, 20000]),
        "maxFirstTokenWaitTime": rng.choice([0, 50, 2500]),
    }  # fmt: skip
    if knobs["activateAsyncInference"]:  # no preemption: the rules for tokens in flight then are not certain
        knobs["npuBlockNum"] = 64 * longest // size + 64
    knobs["maxPrefillBatchSize"] = min(knobs["maxPrefillBatchSize"], knobs["maxBatchSize"])
    if rng.random() < 0.4:
        knobs["maxPreemptCount"] = rng.choice([1, 4])
        knobs["cpuBlockNum"] = rng.choice([2, 10, 100])
    if mixed:
        knobs["prefillChunkSize"] = rng.choice([0, 0, 5, 40])
        knobs["longPrefillTokenThreshold"] = rng.choice([10, 1024])
        knobs["maxLongPartialPrefills"] = rng.choice([1, 8])
    else:
        knobs["stageSelectPolicy"] = rng.choice([0, 0, 1, 2])
        knobs["prefillTimeMsPerReq"] = rng.choice([0, 150, 1000])
        knobs["decodeTimeMsPerReq"] = rng.choice([0, 1, 50])
        knobs["prefillExpectedTime"], knobs["decodeExpectedTime"] = rng.choice([(1500, 50), (100, 20), (300, 8)])
        knobs["dynamicBatchSizeEnable"] = rng.random() < 0.25
    now, gap, outputs = 0, rng.choice([0, 2000, 10000, 100000]), rng.choice([2, 20, 200])
    requests = []
    for number in range(rng.choice([5, 20, 40])):
        now += int(rng.expovariate(1 / gap)) if gap else 0
        arrival = now // 100 * 100 + number if gap else 0  # never exactly at the end of a step: times here are floats
        prompt = rng.randint(1, longest // 2)
        requests.append([f"r{number}", arrival, prompt, rng.randint(1, min(outputs, longest - prompt)), 0])
    cost = {"c0": rng.choice([1000, 5000]), "per_prefill_token": 100, "per_decode_seq": 200, "per_swap_block": 300}
    return knobs, requests, cost


def reference(seed: int) -> Recording:
    """Return what the restatement decides."""
    knobs, requests, cost = draw_case(seed)
    engine = MindIE(knobs, requests, cost)
    engine.run(MAX_ROUNDS)
    steps = [{key: value for key, value in step.items() if key != "empty"} for step in engine.steps]
    ended = engine.error is not None or len(steps) < MAX_ROUNDS
    meta = {"engine": "mindie-llm-scheduler-only", "clock": "1 tick = 1 us", "knobs": knobs, "cost": cost}
    return Recording({**meta, "error": engine.error}, requests, steps, engine.per_request() if ended else [])


@pytest.mark.parametrize(
    "seed", [*seeds(20, 60, 25), 196]
)  # 25: prompts of both kinds; 196: a prefill round without seats, then a late head
def test_every_round_is_as_restated(seed: int) -> None:
    recording = reference(seed)
    played = reproduce(recording) if recording.per_request else play(recording)
    if recording.meta["error"] is not None:
        assert played.stuck is not None and recording.meta["error"].partition(": ")[2] in str(played.stuck)
    if not recording.per_request:  # cut
        del played.rows[len(recording.steps) :]
    compare(recording, played)
