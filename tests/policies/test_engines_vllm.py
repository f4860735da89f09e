"""vLLM's schedulers: every recorded decision is reproduced, and versions are compared with each other."""

from __future__ import annotations

from typing import Any

import pytest
from servesim.config.registry import make_policy, preset, presets
from servesim.core import Policy
from servesim.policies.vllm_v1 import VLLMV1

from .recordings import ENGINES, compare, load, play, recording_names, reproduce

RENAMED = {
    "reserve_full_isl": "scheduler_reserve_full_isl", "v1_watermark": "watermark",
    "spec_method": "speculative_method", "mtp_layers": "mtp_modules",
    "retention_interval": "prefix_cache_retention_interval",
}  # fmt: skip
ENGINE_KNOBS = {"block_size", "num_blocks", "num_cpu_blocks", "max_model_len", "chunked", "groups"}
# What follows from the method of speculation, and its name here.
DRAFTING = {
    "num_lookahead_tokens": "lookahead", "draft_slots": "slots", "drop_last_hit_block": "drops_last_hit",
    "prefill_lookahead": "prefill_lookahead",
}  # fmt: skip


def vllm(name: str, knobs: dict[str, Any], **more: Any) -> Policy:
    """Return a preset with the settings of a recording."""
    fields = {RENAMED.get(key, key): value for key, value in knobs.items() if key not in {*ENGINE_KNOBS, *DRAFTING}}
    return make_policy({**preset(name)["policy"], **fields, **more})


def v0(version: str, knobs: dict[str, Any], **more: Any) -> Policy:
    return vllm(f"vllm-{version.removeprefix('v')}{'-chunked' if knobs.get('chunked') else ''}", knobs, **more)


def v1(knobs: dict[str, Any], version: str = "0.32.0", **more: Any) -> Policy:
    """Return the preset of a version of V1, or that of 0.32 with another version."""
    # The oldest recordings are without these and do not say so.
    settings = {"enable_prefix_caching": False, "async_scheduling": False, **knobs}
    name = f"vllm-v1-{version.rpartition('.')[0]}"
    chosen = name if name in presets() else "vllm-v1-0.32"
    return vllm(chosen, settings, enable_chunked_prefill=knobs.get("chunked", False), **{"version": version, **more})


ENGINES["vllm-v0-scheduler-only"] = lambda meta: v0(meta["version"], meta["knobs"])
ENGINES["vllm-v1-scheduler-only"] = lambda meta: v1(meta["knobs"], meta["version"])


@pytest.mark.parametrize("name", recording_names("vllm-v0"))
def test_every_decision_of_v0_is_reproduced(name: str) -> None:
    recording = load(name)
    played = reproduce(recording)
    compare(recording, played, unlisted_victims=recording.knobs.get("policy") == "priority")


@pytest.mark.parametrize("name", recording_names("vllm-v1"))
def test_every_decision_of_v1_is_reproduced(name: str) -> None:
    recording = load(name)
    compare(recording, reproduce(recording))


@pytest.mark.parametrize("name", recording_names("vllm-v1", folder="prefix"))
def test_every_decision_of_v1_with_its_prefix_cache_is_reproduced(name: str) -> None:
    recording = load(name)
    compare(recording, reproduce(recording))


@pytest.mark.parametrize("name", recording_names("vllm-v1", folder="hybrid"))
def test_every_decision_of_v1_with_kv_cache_groups_is_reproduced(name: str) -> None:
    recording = load(name)
    compare(recording, reproduce(recording))


def test_one_group_of_full_attention_is_the_cache_without_groups() -> None:
    names = [name for folder in ("prefix", "spec") for name in recording_names("vllm-v1", folder=folder)]
    for name in names:
        recording = load(name)
        recording.knobs["groups"] = [None]
        compare(recording, play(recording))


@pytest.mark.parametrize("name", recording_names("vllm-v1", folder="versions"))
def test_every_decision_of_other_versions_of_v1_is_reproduced(name: str) -> None:
    recording = load(name)
    compare(recording, reproduce(recording))


@pytest.mark.parametrize("name", recording_names("vllm-v1", folder="spec"))
def test_every_decision_of_v1_with_speculation_is_reproduced(name: str) -> None:
    recording = load(name)
    policy = v1(recording.knobs)
    assert isinstance(policy, VLLMV1)
    assert {knob: getattr(policy.drafting, name) for knob, name in DRAFTING.items()}.items() <= recording.knobs.items()
    compare(recording, reproduce(recording))


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("chunked_kv_pressure__v1-0.14.0", {"version": "0.19.0", "scheduler_reserve_full_isl": True}),
        ("eviction_order_tree__v1-0.23.0", {"version": "0.24.0"}),  # order of the free list
        ("preempted_finds_own_blocks__v1-0.19.0", {"version": "0.27.0"}),  # the same, and what statistics count
        ("sessions_pressure__v1-0.11.0", {"version": "0.11.1"}),  # statistics: preempted requests apart
        ("only_request_threshold__v1-0.27.0", {"version": "0.31.0"}),
        ("threshold_adaptive__v1-0.32.0", {"long_prefill_token_threshold_adaptive": False}),
        ("active_seqs__v1-0.32.0", {"max_num_active_seqs": None}),
    ],
)
def test_the_rules_of_another_version_do_not_reproduce_a_recording(name: str, changed: dict[str, Any]) -> None:
    recording = load(f"versions/{name}")
    other = v1(recording.knobs, recording.meta["version"]).replace(**changed)
    with pytest.raises(AssertionError):
        compare(recording, play(recording, other))


@pytest.mark.parametrize("name", recording_names("vllm-v0", folder="groups"))
def test_every_decision_of_parallel_sampling_and_beam_search_is_reproduced(name: str) -> None:
    recording = load(name)
    played = reproduce(recording)
    compare(recording, played)
    assert bool(recording.meta["error"]) == (played.stuck is not None)
    if played.stuck is not None:
        assert "AssertionError" in str(played.stuck)


# -- Versions and settings compared with each other, on the requests of the recordings --------------------------------


def run(name: str, policy: Policy, **memory: Any) -> tuple[int, int, float]:
    """Run the requests of a recording with another policy; return busy steps, preemptions and finish time."""
    played = play(load(name), policy, **memory)
    return len(played.busy_steps), played.preemptions, played.finish_time


V0 = ("0.3.3", "0.4.0", "0.4.2", "0.5.0", "0.8.5")
NO_PRESSURE, KV_PRESSURE, CHUNKED, SWAP = (
    "no_pressure__v0.4.2",
    "kv_pressure__v0.4.2",
    "chunked__v0.4.2",
    "swap__v0.5.0",
)


@pytest.mark.parametrize("version", V0)
def test_all_versions_of_v0_agree_without_delay_and_swap(version: str) -> None:
    assert run(NO_PRESSURE, v0(version, load(NO_PRESSURE).knobs)) == (163, 0, 1_459_086)
    assert run(KV_PRESSURE, v0(version, load(KV_PRESSURE).knobs)) == (688, 107, 5_326_047)


def test_v1_needs_fewer_steps_and_a_watermark_avoids_preemptions() -> None:
    assert run(NO_PRESSURE, v1(load(NO_PRESSURE).knobs)) == (144, 0, 1_364_086)
    assert run(KV_PRESSURE, v1(load(KV_PRESSURE).knobs)) == (582, 33, 4_212_247)
    assert run(KV_PRESSURE, v1(load(KV_PRESSURE).knobs, watermark=0.05))[1:] == (15, 4_098_947)


@pytest.mark.parametrize("version", ["0.4.2", "0.5.0", "0.8.5"])
def test_chunked_prefill_without_pressure_is_the_same_in_all_versions_and_in_v1(version: str) -> None:
    knobs = load(CHUNKED).knobs
    assert run(CHUNKED, v0(version, knobs)) == run(CHUNKED, v1(knobs)) == (234, 0, 2_615_977)


@pytest.mark.parametrize(
    ("version", "knobs", "preemptions", "end"),
    [
        ("0.5.0", {}, 46, 4_282_861),
        ("0.8.5", {}, 69, 4_300_461),
        ("0.5.0", {"sort_running": False, "swap_order": "swapped"}, 40, 4_208_261),
        ("0.8.5", {"sort_running": True, "swap_order": "arrival"}, 73, 4_349_261),
        ("0.5.0", {"preemption_mode": "recompute"}, 120, 5_493_561),
        ("0.8.5", {"preemption_mode": "recompute"}, 120, 5_493_561),
    ],
)
def test_the_newer_block_manager_causes_more_swaps_the_order_does_not(
    version: str, knobs: dict[str, Any], preemptions: int, end: float
) -> None:
    assert run(SWAP, v0(version, {**load(SWAP).knobs, **knobs}))[1:] == (preemptions, end)


@pytest.mark.parametrize(
    ("version", "factor", "batches", "mean"),
    [
        *((version, 0.0, 49, 479_018) for version in ("0.4.0", "0.4.2", "0.8.5")),
        ("0.4.0", 0.5, 54, 503_519),
        ("0.8.5", 0.5, 54, 503_519),
        ("0.4.2", 0.5, 46, 467_948),
        ("0.4.0", 2.0, 49, 503_487),
        ("0.8.5", 2.0, 49, 503_487),
        ("0.4.2", 2.0, 18, 407_751),
    ],
)
def test_the_delay_factor_helps_only_if_it_holds_the_whole_queue(
    version: str, factor: float, batches: int, mean: int
) -> None:
    recording = load("delay_half__v0.4.0")
    played = play(recording, v0(version, {**recording.knobs, "delay_factor": factor}))
    assert sum(row["sched"][0][2] == "P" for row in played.busy_steps) == batches
    latencies = [request.finish - request.arrival for request in played.requests.values() if request.finish is not None]
    assert round(sum(latencies) / 80) == mean


@pytest.mark.parametrize(
    ("version", "factor", "steps"),
    [("0.4.2", 0.0, 234), ("0.4.2", 2.0, 236), ("0.4.2", 50.0, 320), ("0.8.5", 2.0, 234), ("0.8.5", 50.0, 234)],
)
def test_the_delay_factor_has_no_effect_in_newer_chunked_prefill(version: str, factor: float, steps: int) -> None:
    assert run(CHUNKED, v0(version, {**load(CHUNKED).knobs, "delay_factor": factor}))[0] == steps


def test_reserving_whole_prompts_avoids_preemptions_in_v1() -> None:
    name = "chunked_kv_pressure__v1-0.32.0"
    knobs = load(name).knobs
    assert run(name, v1(knobs))[1] == 19
    assert run(name, v1(knobs, scheduler_reserve_full_isl=False))[1] == 112
