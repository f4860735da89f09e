"""vLLM's schedulers: every recording reproduced decision by decision, and the cross-checks between versions."""

from __future__ import annotations

from typing import Any

import pytest

from servesim.core import Policy
from servesim.registry import make_policy, preset

from .recordings import ENGINES, Played, compare, load, names, play

RENAMED = {"reserve_full_isl": "scheduler_reserve_full_isl"}
ENGINE_KNOBS = {"block_size", "num_blocks", "num_cpu_blocks", "max_model_len", "chunked"}


def vllm(version: str, knobs: dict[str, Any]) -> Policy:
    """Return the preset of a version with a recording's knobs."""
    version = version.removeprefix("v") + ("-chunked" if knobs.get("chunked") else "")
    fields = {RENAMED.get(key, key): value for key, value in knobs.items() if key not in ENGINE_KNOBS}
    return make_policy({**preset(f"vllm-{version}")["policy"], **fields})


ENGINES["vllm-v0-scheduler-only"] = lambda meta: vllm(meta["version"], meta["knobs"])


@pytest.mark.parametrize("name", names("vllm-v0"))
def test_every_decision_of_v0_is_reproduced(name: str) -> None:
    recording = load(name)
    played = play(recording)
    compare(recording, played, unlisted_victims=recording.knobs.get("policy") == "priority")
