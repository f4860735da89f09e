"""Schedulers of vllm-ascend and vllm-mindspore: every recorded decision is reproduced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from servesim.config.registry import make_policy
from servesim.core import Policy

from .recordings import ENGINES, Recording, compare, load, recording_names, reproduce

RENAMED = {
    "chunked": "enable_chunked_prefill", "prefix_caching": "enable_prefix_caching",
    "slo_limit": "slo_limits_for_dynamic_batch", "short_threshold": "threshold",
}  # fmt: skip
NOT_OF_POLICY = {"block_size", "num_blocks", "max_model_len", "stop_by_eos", "ranks"}
ASCEND, MINDSPORE = "vllm-ascend ", "vllm-mindspore EnhancedScheduler"


def ascend(name: str, meta: dict[str, Any], **more: Any) -> Policy:
    """Return a policy with the settings of a recording."""
    knobs = {RENAMED.get(key, key): value for key, value in meta["knobs"].items() if key not in NOT_OF_POLICY}
    if "long_max_wait" in knobs:
        knobs["long_max_wait_ms"] = 1000 * knobs.pop("long_max_wait")  # a tick is a second
    fields = {"enable_chunked_prefill": False, "enable_prefix_caching": False, "async_scheduling": False, **knobs}
    return make_policy({"name": name, **fields, **more})


def dynamic_batch(meta: dict[str, Any]) -> Policy:
    return ascend("vllm-ascend-dynamic-batch", meta, profile_table=meta.get("profile_table", ()))


def profiling_chunk(meta: dict[str, Any]) -> Policy:
    fitted = meta["fitted"]
    return ascend("vllm-ascend-profiling-chunk", meta, fitted_a=fitted["a"], fitted_b=fitted["b"])


ENGINES[f"{ASCEND}SchedulerDynamicBatch"] = dynamic_batch
ENGINES[f"{ASCEND}ShortRequestFirst queue on the stock Scheduler"] = lambda meta: ascend(
    "vllm-ascend-short-first", meta
)
ENGINES[f"{ASCEND}BatchJobAwareScheduler"] = lambda meta: ascend("vllm-ascend-batch-jobs", meta)
ENGINES[f"{ASCEND}ProfilingChunkScheduler"] = profiling_chunk
ENGINES[f"{ASCEND}RecomputeScheduler"] = lambda meta: ascend("vllm-ascend-recompute", meta)
ENGINES[f"{ASCEND}RecomputeScheduler, no KV transfer"] = lambda meta: ascend(
    "vllm-ascend-recompute", meta, kv_consumer=False
)
ENGINES[f"{ASCEND}AscendScheduler"] = lambda meta: ascend("vllm-ascend", meta, version=meta["version"])
ENGINES[MINDSPORE] = lambda meta: ascend("vllm-mindspore", meta)
ENGINES[f"{ASCEND}BalanceScheduler"] = lambda meta: ascend("vllm-ascend-balance", meta)


@pytest.mark.parametrize("name", recording_names("vllm-", folder="ascend"))
def test_every_decision_of_ascend_is_reproduced(name: str) -> None:
    recording = load(name)
    played = reproduce(recording)
    if recording.meta["error"] == "stuck":  # the last entry says that nothing runs any more
        last = recording.steps.pop()
        assert played.stuck is not None and not last["sched"] and last["t"] == played.stuck.now
    else:
        assert played.stuck is None
    compare(recording, played)


# Decisions of the real classes in cases that the recordings lack, with the same virtual clock.
SMALL_CASES: dict[str, Any] = json.loads(Path(__file__).with_name("ascend_decisions.json").read_text())


@pytest.mark.parametrize("name", SMALL_CASES)
def test_decisions_of_the_real_classes_in_small_cases_are_reproduced(name: str) -> None:
    recording = Recording(**SMALL_CASES[name])
    played = reproduce(recording)
    compare(recording, played)
    if recording.meta["error"]:
        assert played.stuck is not None and "vllm-ascend raises an error" in str(played.stuck)
        assert played.stuck.now == recording.meta["error_t"]
    else:
        assert played.stuck is None
