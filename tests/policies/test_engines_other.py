"""Sarathi-Serve, DeepSpeed-MII and LightLLM: the policies reproduce every recorded decision."""

from __future__ import annotations

from typing import Any, Optional

import pytest
from servesim.config.registry import make_policy, preset
from servesim.config.scenario import scenario_from
from servesim.core import Policy
from servesim.policies import POLICIES

from .recordings import ENGINES, compare, load, play, recording_names, reproduce


def sarathi(meta: dict[str, Any]) -> Policy:
    """Return the policy for one of Sarathi-Serve's schedulers."""
    knobs = meta["knobs"]
    seqs, chunk = knobs["max_num_seqs"], knobs["max_num_batched_tokens"]
    if meta["policy"] == "faster_transformer":
        return POLICIES["static"](max_num_seqs=seqs)
    if meta["policy"] == "orca":
        return POLICIES["orca"](max_num_seqs=seqs, reserve="model")
    name = "sarathi" if meta["policy"] == "sarathi" else "sarathi-alternating"
    return POLICIES[name](max_num_seqs=seqs, chunk_size=chunk)


def mii(meta: dict[str, Any]) -> Policy:
    """Return the policy for DeepSpeed-MII."""
    knobs = meta["knobs"]
    return POLICIES["splitfuse"](
        max_ragged_batch_size=knobs["max_num_batched_tokens"], max_ragged_sequence_count=knobs["max_num_seqs"]
    )


def lightllm(meta: dict[str, Any]) -> Policy:
    """Return the policy for LightLLM."""
    knobs = {key: value for key, value in meta["knobs"].items() if key not in ("max_total_token_num", "splitfuse")}
    split = meta["knobs"].get("splitfuse")
    if split:
        knobs.update(splitfuse_mode=True, splitfuse_block_size=split)
    return POLICIES["lightllm"](**knobs)


ENGINES["sarathi-serve-scheduler-only"] = sarathi
ENGINES["deepspeed-mii-ragged-batching"] = mii
ENGINES["lightllm-router"] = lightllm


@pytest.mark.parametrize("name", recording_names("sarathi"))
def test_every_decision_of_sarathi_is_reproduced(name: str) -> None:
    recording = load(name)
    compare(recording, reproduce(recording))


@pytest.mark.parametrize("name", recording_names("lightllm"))
def test_every_decision_of_lightllm_is_reproduced(name: str) -> None:
    recording = load(name)
    played = reproduce(recording)
    for row in played.rows:  # LightLLM runs and records the last token of a prompt as a decode
        row["sched"] = [[id, tokens, "D" if tokens == 1 else "P"] for id, tokens, _ in row["sched"]]
    compare(recording, played)


@pytest.mark.parametrize("name", recording_names("deepspeed"))
def test_every_step_of_mii_is_reproduced(name: str) -> None:
    recording = load(name)
    played = reproduce(recording)
    actual, expected = ([comparable_step(step) for step in busy(steps)] for steps in (played.rows, recording.steps))
    assert actual == expected
    for id, first, end, _ in recording.per_request:
        request = played.requests[id]
        assert (request.first_token, request.finish) == (first, end), id


def busy(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the steps of MII's loop that did something, without the last flush."""
    ran = [step for step in steps if step["sched"] or step.get("flushed") or step.get("preempted")]
    return ran if ran[-1]["sched"] else ran[:-1]


def comparable_step(step: dict[str, Any]) -> tuple[Any, ...]:
    """Return the fields that both sides record. In MII a preemption is a step that flushes and runs nothing."""
    preempted = [id for id, _ in step.get("preempted", ())]
    return step["t"], step["sched"], {*preempted, *step.get("flushed", ())}, step["free_after"]


NO_PRESSURE = [  # 60 requests, blocks for all of them: policy, settings, steps with a model call, finish time
    ("orca", {"max_num_seqs": 16, "reserve": "model"}, 144, 1_364_086),
    ("orca", {"max_num_seqs": 16}, 144, 1_364_086),
    ("sarathi", {"max_num_seqs": 16, "chunk_size": 512}, 144, 1_364_086),
    ("splitfuse", {"max_ragged_sequence_count": 16, "max_ragged_batch_size": 512}, 144, 1_364_086),
    ("static", {"max_num_seqs": 16}, 211, 1_699_086),
]


@pytest.mark.parametrize(("name", "knobs", "steps", "end"), NO_PRESSURE)
def test_without_pressure_steps_and_finish_time_match_the_real_engines(
    name: str, knobs: dict[str, Any], steps: int, end: int
) -> None:
    played = play(load("no_pressure__v0.4.2"), POLICIES[name](**knobs))
    assert (len(played.busy_steps), played.finish_time) == (steps, end)


def test_without_pressure_lightllm_waits_for_every_tenth_decode() -> None:
    policy = POLICIES["lightllm"](batch_max_tokens=512, running_max_req_size=16)
    played = play(load("no_pressure__v0.4.2"), policy, num_blocks=2000 * 16, block_size=1)
    assert (len(played.busy_steps), played.finish_time) == (165, 1_469_086)


PRESSURE = [  # 640 tokens of KV cache: steps with a model call, preemptions, finish time (None: not recorded)
    ("orca", {"max_num_seqs": 16, "reserve": "model"}, 3181, 0, None),
    ("sarathi", {"max_num_seqs": 16, "chunk_size": 512}, 588, 57, 4_452_447),
    ("splitfuse", {"max_ragged_sequence_count": 16, "max_ragged_batch_size": 512}, None, None, 4_539_047),
]


@pytest.mark.parametrize(("name", "knobs", "steps", "preemptions", "end"), PRESSURE)
def test_under_pressure_steps_preemptions_and_finish_time_match_the_real_engines(
    name: str, knobs: dict[str, Any], steps: Optional[int], preemptions: Optional[int], end: Optional[int]
) -> None:
    played = play(load("kv_pressure__v0.4.2"), POLICIES[name](**knobs))
    assert steps in (None, len(played.busy_steps))
    assert preemptions in (None, played.preemptions)
    assert end in (None, played.finish_time)


def test_under_pressure_lightllm_never_pauses_a_request() -> None:
    policy = POLICIES["lightllm"](batch_max_tokens=512, running_max_req_size=16)
    played = play(load("kv_pressure__v0.4.2"), policy, num_blocks=640, block_size=1)
    assert (played.preemptions, played.finish_time) == (0, 4_260_447)


@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        ("sarathi", {"max_num_seqs": 16, "chunk_size": 64}),
        ("splitfuse", {"max_ragged_sequence_count": 16, "max_ragged_batch_size": 64}),
    ],
)
def test_without_pressure_chunked_prefill_gives_the_same_schedule_in_both_engines(
    name: str, knobs: dict[str, Any]
) -> None:
    played = play(load("chunked__v0.4.2"), POLICIES[name](**knobs))
    assert (len(played.busy_steps), played.finish_time) == (234, 2_615_977)


def test_presets_are_the_policies_validated_by_recordings() -> None:
    assert make_policy(preset("fastgen")["policy"]) == POLICIES["splitfuse"]()
    assert make_policy(preset("lightllm-2024")["policy"]) == POLICIES["lightllm"]()
    assert make_policy(preset("sarathi")["policy"]) == POLICIES["sarathi"]()
    assert make_policy(preset("faster-transformer")["policy"]) == POLICIES["static"]()
    assert make_policy(preset("orca")["policy"]) == POLICIES["orca"]()
    assert make_policy(preset("sglang-0.4.6")["policy"]) == POLICIES["sglang"](version="0.4.6")
    assert make_policy(preset("sglang-0.5.18")["policy"]) == POLICIES["sglang"]()


CONTEST = {
    "contest-baseline": {"decode_batch": 1},
    "yyds": {"decode_batch": 64, "delay_factor": 0.5, "delay_variant": "contest", "preempted_to": "swapped"},
    "moon": {"decode_batch": 128, "prefill_batch": 8, "order": "longest-output", "preempted_to": "sorted"},
    "debias": {"decode_batch": 50},
    "xidian": {"decode_batch": 96},
}


@pytest.mark.parametrize("name", CONTEST)
def test_contest_presets_have_the_settings_of_the_teams(name: str) -> None:
    scenario = scenario_from(preset(name))
    assert scenario.make_policy() == POLICIES["llm-serving"](**CONTEST[name])
    engine = scenario.engine
    assert (engine.num_blocks, engine.block_size, engine.max_model_len) == (1024, 16, 4096)
    assert (engine.prefill_buckets, engine.client_timeout) == ([4096], 600)
    assert (engine.front_end.lag, engine.front_end.end_lag) == (7, True)
