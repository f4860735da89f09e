"""Scenarios with the policy `sglang` as a command that starts SGLang. The flags are those of SGLang 0.4.6."""

from __future__ import annotations

from typing import Any

from servesim.core import field_values

from .exported import MODEL, Exported, changed_engine_keys, changed_fields, note_on_blocks, shell_command
from .scenario import Scenario

SERVER = "SGLang 0.4.6"
FIELDS = {
    "schedule_policy", "max_prefill_tokens", "chunked_prefill_size", "max_running_requests",
    "schedule_conservativeness", "enable_mixed_chunk",
}  # fmt: skip
ENVIRONMENT = {  # field -> variable that SGLang reads at its start
    "init_new_token_ratio": "SGLANG_INIT_NEW_TOKEN_RATIO",
    "min_new_token_ratio_factor": "SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR",
    "new_token_ratio_decay_steps": "SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS",
    "clip_max_new_tokens": "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION",
}
FIXED = {"retract_decode_steps": "20 in the code of SGLang 0.4.6"}


def sglang_command(scenario: Scenario, model: str = MODEL) -> Exported:
    """Return the command of a scenario with the policy `sglang`."""
    policy: Any = scenario.make_policy()
    engine = scenario.engine
    defaults = field_values(type(policy)())
    changed = {field: name for field, name in ENVIRONMENT.items() if getattr(policy, field) != defaults[field]}
    missing = changed_fields(policy, FIELDS | set(ENVIRONMENT), FIXED)
    missing += changed_engine_keys(engine, {"block_size", "max_model_len"})
    known_order = policy.schedule_policy == "fcfs"
    if not known_order:
        missing.append(f"policy.schedule_policy={policy.schedule_policy}: the command of 0.4.6 does not accept it")
    whole_prompts = policy.chunked_prefill_size is None
    flags = {
        "--schedule-policy": policy.schedule_policy if known_order else None,
        "--schedule-conservativeness": policy.schedule_conservativeness,
        "--max-prefill-tokens": policy.max_prefill_tokens,
        "--chunked-prefill-size": -1 if whole_prompts else policy.chunked_prefill_size,
        "--max-running-requests": policy.max_running_requests,
        "--enable-mixed-chunk": policy.enable_mixed_chunk or None,
        "--context-length": engine.max_model_len,
        "--page-size": engine.block_size,
        "--max-total-tokens": engine.num_blocks * engine.block_size,
        "--disable-radix-cache": True,
        "--disable-overlap-schedule": True,
    }
    notes = [
        "--disable-radix-cache, --disable-overlap-schedule: as simulated; the real server may be faster without them",
        "not validated: the policy was written from the source code of SGLang",
        *note_on_blocks(scenario, "--max-total-tokens"),
    ]
    environment = {name: getattr(policy, field) for field, name in changed.items()}
    command = shell_command(["python", "-m", "sglang.launch_server", "--model-path", model], flags, environment)
    return Exported(SERVER, "sglang.sh", command, notes, missing)
