"""Sarathi-Serve, DeepSpeed-MII and LightLLM: our policies decide as the recorded engines did."""

from __future__ import annotations

from typing import Any, Optional

import pytest
from servesim.config.registry import make_policy, preset
from servesim.config.scenario import scenario_from
from servesim.core import Policy
from servesim.policies import POLICIES

from .recordings import ENGINES, compare, load, names, play


def sarathi(meta: dict[str, Any]) -> Policy:
    """Return the policy for one of the schedulers that Sarathi-Serve ships."""
    knobs = meta["knobs"]
    seqs, chunk = knobs["max_num_seqs"], knobs["max_num_batched_tokens"]
    if meta["policy"] == "faster_transformer":
        return POLICIES["static"](max_num_seqs=seqs)
    if meta["policy"] == "orca":
        return POLICIES["orca"](max_num_seqs=seqs, reserve="model")
    name = "sarathi" if meta["policy"] == "sarathi" else "sarathi-alternating"
    return POLICIES[name](max_num_seqs=seqs, chunk_size=chunk)


def mii(meta: dict[str, Any]) -> Policy:
    """Return MII's policy."""
    knobs = meta["knobs"]
    return POLICIES["splitfuse"](
        max_ragged_batch_size=knobs["max_num_batched_tokens"], max_ragged_sequence_count=knobs["max_num_seqs"]
    )


def lightllm(meta: dict[str, Any]) -> Policy:
    """Return LightLLM's policy."""
    knobs = {key: value for key, value in meta["knobs"].items() if key not in ("max_total_token_num", "splitfuse")}
    split = meta["knobs"].get("splitfuse")
    if split:
        knobs.update(splitfuse_mode=True, splitfuse_block_size=split)
    return POLICIES["lightllm"](**knobs)


ENGINES["sarathi-serve-scheduler-only"] = sarathi
ENGINES["deepspeed-mii-ragged-batching"] = mii
ENGINES["lightllm-router"] = lightllm


@pytest.mark.parametrize("name", names("sarathi"))
def test_every_decision_of_sarathi_is_the_recorded_one(name: str) -> None:
    recording = load(name)
    compare(recording, play(recording))


@pytest.mark.parametrize("name", names("lightllm"))
def test_every_decision_of_lightllm_is_the_recorded_one(name: str) -> None:
    recording = load(name)
    played = play(recording)
    for row in played.rows:  # LightLLM runs, and calls, the last token of a prompt by itself a decode
        row["sched"] = [[id, tokens, "D" if tokens == 1 else "P"] for id, tokens, _ in row["sched"]]
    compare(recording, played)


@pytest.mark.parametrize("name", names("deepspeed"))
def test_every_pass_of_mii_is_the_recorded_one(name: str) -> None:
    recording = load(name)
    played = play(recording)
    assert [passed(row) for row in turns(played.rows)] == [passed(step) for step in turns(recording.steps)]
    for id, first, end, _ in recording.per_request:
        request = played.requests[id]
        assert (request.first_token, request.finish) == (first, end), id


def turns(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what MII's loop did, without the rounds in which it only looked, and the flush after the last end."""
    ran = [step for step in steps if step["sched"] or step.get("flushed") or step.get("preempted")]
    return ran if ran[-1]["sched"] else ran[:-1]


def passed(step: dict[str, Any]) -> tuple[Any, ...]:
    """Return a pass as both sides tell it: an eviction is a round that flushes and runs nothing."""
    evicted = [id for id, _ in step.get("preempted", ())]
    return step["t"], step["sched"], {*evicted, *step.get("flushed", ())}, step["free_after"]


NO_PRESSURE = [  # 60 requests, memory for all of them: policy, its knobs, busy steps, end
    ("orca", {"max_num_seqs": 16, "reserve": "model"}, 144, 1_364_086),
    ("orca", {"max_num_seqs": 16}, 144, 1_364_086),
    ("sarathi", {"max_num_seqs": 16, "chunk_size": 512}, 144, 1_364_086),
    ("splitfuse", {"max_ragged_sequence_count": 16, "max_ragged_batch_size": 512}, 144, 1_364_086),
    ("static", {"max_num_seqs": 16}, 211, 1_699_086),
]


@pytest.mark.parametrize(("name", "knobs", "steps", "end"), NO_PRESSURE)
def test_without_pressure_steps_and_end_are_those_of_the_real_engines(
    name: str, knobs: dict[str, Any], steps: int, end: int
) -> None:
    played = play(load("no_pressure__v0.4.2"), POLICIES[name](**knobs))
    assert (len(played.busy), played.end) == (steps, end)


def test_without_pressure_lightllm_waits_for_every_tenth_decode() -> None:
    policy = POLICIES["lightllm"](batch_max_tokens=512, running_max_req_size=16)
    played = play(load("no_pressure__v0.4.2"), policy, num_blocks=2000 * 16, block_size=1)
    assert (len(played.busy), played.end) == (165, 1_469_086)


PRESSURE = [  # the same, 640 tokens of memory: busy steps, evictions (None: not told), end (None: not told)
    ("orca", {"max_num_seqs": 16, "reserve": "model"}, 3181, 0, None),
    ("sarathi", {"max_num_seqs": 16, "chunk_size": 512}, 588, 57, 4_452_447),
    ("splitfuse", {"max_ragged_sequence_count": 16, "max_ragged_batch_size": 512}, None, None, 4_539_047),
]


@pytest.mark.parametrize(("name", "knobs", "steps", "evictions", "end"), PRESSURE)
def test_under_pressure_steps_preemptions_and_end_are_those_of_the_real_engines(
    name: str, knobs: dict[str, Any], steps: Optional[int], evictions: Optional[int], end: Optional[int]
) -> None:
    played = play(load("kv_pressure__v0.4.2"), POLICIES[name](**knobs))
    assert steps in (None, len(played.busy))
    assert evictions in (None, played.evictions)
    assert end in (None, played.end)


def test_under_pressure_lightllms_estimate_never_pauses_anybody() -> None:
    policy = POLICIES["lightllm"](batch_max_tokens=512, running_max_req_size=16)
    played = play(load("kv_pressure__v0.4.2"), policy, num_blocks=640, block_size=1)
    assert (played.evictions, played.end) == (0, 4_260_447)


@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        ("sarathi", {"max_num_seqs": 16, "chunk_size": 64}),
        ("splitfuse", {"max_ragged_sequence_count": 16, "max_ragged_batch_size": 64}),
    ],
)
def test_chunked_without_pressure_is_the_same_schedule_everywhere(name: str, knobs: dict[str, Any]) -> None:
    played = play(load("chunked__v0.4.2"), POLICIES[name](**knobs))
    assert (len(played.busy), played.end) == (234, 2_615_977)


@pytest.mark.parametrize("name", names("sarathi", "lightllm", "deepspeed"))
def test_leaps_change_nothing_about_a_recording(name: str) -> None:
    recording = load(name)
    single, leapt = play(recording), play(recording, leaps=True)
    for id, request in single.requests.items():
        other = leapt.requests[id]
        assert (request.first_token, request.finish, request.evictions) == (
            other.first_token,
            other.finish,
            other.evictions,
        )


def test_presets_are_the_policies_that_the_recordings_prove() -> None:
    assert make_policy(preset("fastgen")["policy"]) == POLICIES["splitfuse"]()
    assert make_policy(preset("lightllm-2024")["policy"]) == POLICIES["lightllm"]()
    assert make_policy(preset("sarathi")["policy"]) == POLICIES["sarathi"]()
    assert make_policy(preset("faster-transformer")["policy"]) == POLICIES["static"]()
    assert make_policy(preset("orca")["policy"]) == POLICIES["orca"]()
    assert make_policy(preset("sglang-0.4.6")["policy"]) == POLICIES["sglang"]()


CONTEST = {
    "contest-baseline": {"decode_batch": 1},
    "yyds": {"decode_batch": 64, "delay_factor": 0.5, "delay_variant": "contest", "evicted": "swapped"},
    "moon": {"decode_batch": 128, "prefill_batch": 8, "order": "longest-output", "evicted": "ranked"},
    "debias": {"decode_batch": 50},
    "xidian": {"decode_batch": 96},
}


@pytest.mark.parametrize("name", CONTEST)
def test_contest_presets_are_llm_serving_as_the_teams_ran_it(name: str) -> None:
    scenario = scenario_from(preset(name))
    assert scenario.make_policy() == POLICIES["llm-serving"](**CONTEST[name])
    engine = scenario.engine
    assert (engine.num_blocks, engine.block_size, engine.max_model_len) == (1024, 16, 4096)
    assert (engine.prefill_gears, engine.lost_after) == ([4096], 600)
    assert (engine.front_end.lag, engine.front_end.end_lag) == (7, True)
