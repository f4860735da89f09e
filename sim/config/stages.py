"""Pipeline parallelism in a scenario: its stages are a field of the policy and a key of a profile by name."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final, Optional

from servesim.core import BadInput
from servesim.costs.named_profile import is_named

from .memory import about_profile

STAGES: Final = "pipeline_parallel_size"  # of the policy
IN_PROFILE: Final = "pipeline_parallel"


def with_stages(policy: dict[str, Any], profile: Any, device_memory: Optional[int]) -> tuple[dict[str, Any], Any]:
    """Return policy and profile of a scenario; if one of them has stages, a profile by name and the policy have them.

    Other profiles have the time of a step on all stages, and no time to send data between them.
    """
    named = is_named(profile) and isinstance(profile, Mapping)
    known = profile.get(IN_PROFILE, 1) if named else 1
    if isinstance(profile, str) and policy["name"] == "vllm-v1":  # a stored profile that was derived
        with suppress(BadInput):  # a profile that cannot be read is an error when the scenario runs
            known = int(about_profile(profile).get(IN_PROFILE) or 1)
    stages = policy.get(STAGES, known)
    if not (isinstance(stages, int) and isinstance(known, int)) or stages == known == 1:
        return policy, profile
    if stages != known and known != 1:
        raise BadInput(f"policy.{STAGES}: expected {known}, as profile.{IN_PROFILE}, got {stages}")
    if named:
        profile = {**profile, IN_PROFILE: stages}
    elif device_memory is not None and known == 1:
        key = f"profile: {{measured: ..., {IN_PROFILE}: {stages}}}"
        raise BadInput(f"engine.device_memory: expected {key}, or num_blocks, with policy.{STAGES} {stages}")
    return {**policy, STAGES: stages}, profile


def require_known_stages(stages: int, engine: Any) -> None:
    """Raise BadInput for stages with KV cache groups or with ranks in lock step."""
    groups = engine.kv_cache_groups
    if stages > 1 and groups not in (None, [None]):
        raise BadInput(f"policy.{STAGES}: expected 1 with engine.kv_cache_groups {groups}, got {stages}")
    if stages > 1 and engine.data_parallel_size > 1:
        raise BadInput(f"policy.{STAGES}: expected 1 with engine.data_parallel_size, got {stages}")
