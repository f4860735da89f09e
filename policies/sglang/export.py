"""A scenario as the command of an SGLang server, with the flags of the policy's version."""

from __future__ import annotations

from typing import Any

from servesim.config.exported import (
    MODEL,
    Exported,
    flag_words,
    model_flags,
    not_expressed,
    note_on_blocks,
    shell_command,
)
from servesim.config.scenario import Scenario
from servesim.core import field_values

FIELDS = {
    "version", "schedule_policy", "max_prefill_tokens", "chunked_prefill_size", "max_running_requests",
    "schedule_conservativeness", "enable_mixed_chunk", "disable_radix_cache", "disable_overlap_schedule",
    "prefill_decode_interval",
}  # fmt: skip
VARIABLES = {  # field -> variable that SGLang reads at its start
    "init_new_token_ratio": "SGLANG_INIT_NEW_TOKEN_RATIO",
    "min_new_token_ratio_factor": "SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR",
    "new_token_ratio_decay_steps": "SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS",
    "clip_max_new_tokens": "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION",
}
REASONS = {
    "retract_decode_steps": "20 in the code of SGLang 0.4.6",
    "ignore_eos": "a field of the requests, not of the server",
}


def sglang_command(scenario: Scenario, model: str = MODEL) -> Exported:
    """Return the command of a scenario with the policy `sglang`."""
    policy: Any = scenario.make_policy()
    engine = scenario.engine
    defaults = field_values(type(policy)())
    variables = dict(VARIABLES)
    if not policy.is_old:
        variables["retract_decode_steps"] = "SGLANG_RETRACT_DECODE_STEPS"
    changed = {field: name for field, name in variables.items() if getattr(policy, field) != defaults[field]}
    missing = not_expressed(scenario, policy, FIELDS | set(variables), REASONS, {"block_size", "max_model_len"})
    known_order = policy.schedule_policy != "lof" or not policy.is_old
    if not known_order:
        missing.append(f"policy.schedule_policy={policy.schedule_policy}: the command of 0.4.6 does not accept it")
    whole_prompts = policy.chunked_prefill_size is None
    flags = {
        **model_flags(scenario, "--tp-size"),
        "--schedule-policy": policy.schedule_policy if known_order else None,
        "--schedule-conservativeness": policy.schedule_conservativeness,
        "--max-prefill-tokens": policy.max_prefill_tokens,
        # 0 and -1 mean whole prompts; SGLang also refuses a number that is no multiple of the page size
        "--chunked-prefill-size": -1 if whole_prompts else policy.chunked_prefill_size,
        "--max-running-requests": policy.max_running_requests,
        "--enable-mixed-chunk": policy.enable_mixed_chunk or None,
        "--prefill-decode-interval": policy.prefill_decode_interval or None,
        "--context-length": engine.max_model_len,
        "--page-size": engine.block_size,
        "--max-total-tokens": engine.num_blocks * engine.block_size,
        "--disable-radix-cache": policy.disable_radix_cache or None,
        "--disable-overlap-schedule": policy.disable_overlap_schedule or None,
    }
    notes = note_on_blocks(scenario, "--max-total-tokens")
    environment = {name: getattr(policy, field) for field, name in changed.items()}
    start = ["python", "-m", "sglang.launch_server", "--model-path", model]
    command = shell_command(start, flag_words(flags), environment)
    return Exported(f"SGLang {policy.version}", "sglang.sh", command, notes, missing)


EXPORTS = {"sglang": sglang_command}
