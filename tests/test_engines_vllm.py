"""vLLM's schedulers: every recording reproduced decision by decision, and the cross-checks between versions."""

from __future__ import annotations

from typing import Any

import pytest
from servesim.core import Policy
from servesim.registry import make_policy, preset

from .recordings import ENGINES, compare, load, names, play

RENAMED = {"reserve_full_isl": "scheduler_reserve_full_isl"}
ENGINE_KNOBS = {"block_size", "num_blocks", "num_cpu_blocks", "max_model_len", "chunked"}


def vllm(name: str, knobs: dict[str, Any], **more: Any) -> Policy:
    """Return a preset with a recording's knobs."""
    fields = {RENAMED.get(key, key): value for key, value in knobs.items() if key not in ENGINE_KNOBS}
    return make_policy({**preset(name)["policy"], **fields, **more})


def v0(version: str, knobs: dict[str, Any], **more: Any) -> Policy:
    return vllm(f"vllm-{version.removeprefix('v')}{'-chunked' if knobs.get('chunked') else ''}", knobs, **more)


def v1(knobs: dict[str, Any], **more: Any) -> Policy:
    return vllm("vllm-v1-0.32", knobs, enable_chunked_prefill=knobs.get("chunked", False), **more)


ENGINES["vllm-v0-scheduler-only"] = lambda meta: v0(meta["version"], meta["knobs"])
ENGINES["vllm-v1-scheduler-only"] = lambda meta: v1(meta["knobs"])


@pytest.mark.parametrize("name", names("vllm-v0"))
def test_every_decision_of_v0_is_reproduced(name: str) -> None:
    recording = load(name)
    played = play(recording)
    compare(recording, played, unlisted_victims=recording.knobs.get("policy") == "priority")


@pytest.mark.parametrize("name", names("vllm-v1"))
def test_every_decision_of_v1_is_reproduced(name: str) -> None:
    recording = load(name)
    compare(recording, play(recording))
