"""SGLang: the policy reproduces every recorded decision of 0.4.6 and 0.5.18."""

from __future__ import annotations

from typing import Any

import pytest
from servesim.core import Policy
from servesim.policies import POLICIES

from .recordings import ENGINES, compare, load, recording_names, reproduce

FIELDS = (
    "chunked_prefill_size", "schedule_policy", "schedule_conservativeness", "max_running_requests",
    "max_prefill_tokens", "enable_mixed_chunk", "ignore_eos",
)  # fmt: skip


def sglang(meta: dict[str, Any]) -> Policy:
    """Return the policy for SGLang."""
    knobs = meta["knobs"]
    fields = {name: knobs[name] for name in FIELDS if name in knobs}
    fields["disable_radix_cache"] = not knobs.get("radix_cache")
    fields["disable_overlap_schedule"] = not knobs.get("overlap")
    return POLICIES["sglang"](version=meta["version"].removeprefix("v"), **fields)


ENGINES["sglang-scheduler"] = sglang

NAMES = recording_names("sglang", folder="sglang")


@pytest.mark.parametrize("name", NAMES)
def test_every_decision_of_sglang_is_reproduced(name: str) -> None:
    recording = load(name)
    played = reproduce(recording)
    played.rows = played.busy_steps  # idle turns are not recorded
    compare(recording, played)
