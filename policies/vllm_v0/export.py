"""A scenario as the command `vllm serve` of the v0 engine.

The flags are those of vLLM 0.8.5, the last version that the policies were compared with. The rules of an older version
are listed as not expressed.
"""

from __future__ import annotations

from typing import Any

from servesim.config.exported import MODEL, Exported, flag_words, not_expressed, shell_command
from servesim.config.scenario import Scenario
from servesim.core import BadInput
from servesim.policies.vllm_flags import (
    BLOCK_SIZES,
    ENGINE_KEYS,
    blocks_gib,
    memory_flags,
    refuse_block_size,
    switch,
    token_flags,
    vllm_notes,
)

SERVER = "vLLM 0.8.5 (v0 engine)"
FIELDS = {
    "max_num_seqs", "max_num_batched_tokens", "delay_factor", "preemption_mode", "policy", "max_num_partial_prefills",
    "max_long_partial_prefills", "long_prefill_token_threshold",
}  # fmt: skip
OTHER_VERSION = "a rule of another version of vLLM; 0.8.5 has another one"
RULES = {
    **dict.fromkeys(
        ("padded_prefill", "max_paddings", "ignored_step", "delay_scope", "sort_running", "swap_order", "append_rule",
         "fail_infeasible", "examine_at_full_budget", "answer_failed_swaps"), OTHER_VERSION
    ),
    "watermark": "0.01 in the code of vLLM",
    "free_failed_swaps": "vLLM never frees these blocks",
}  # fmt: skip


def v0_command(scenario: Scenario, model: str = MODEL) -> Exported:
    """Return the command of the v0 engine, with or without chunked prefill."""
    policy: Any = scenario.make_policy()
    chunked, engine = scenario.policy["name"] == "vllm-chunked", scenario.engine
    flags = {
        **token_flags(policy),
        **switch("enable-chunked-prefill", chunked),
        "--scheduler-delay-factor": policy.delay_factor or None,
        "--preemption-mode": policy.preemption_mode,
        "--scheduling-policy": getattr(policy, "policy", "fcfs"),
    }
    if chunked and policy.max_num_partial_prefills > 1:
        flags["--max-num-partial-prefills"] = policy.max_num_partial_prefills
        flags["--max-long-partial-prefills"] = policy.max_long_partial_prefills
        flags["--long-prefill-token-threshold"] = policy.long_prefill_token_threshold or None
    missing = not_expressed(scenario, policy, FIELDS, RULES, ENGINE_KEYS)
    flags.update(memory_flags(scenario, engine.num_blocks))
    missing += refuse_block_size(flags, engine.block_size, BLOCK_SIZES, "0.8.5")
    try:
        flags["--swap-space"] = blocks_gib(scenario, engine.host_blocks) if engine.host_blocks else 0
    except BadInput:
        missing.append(f"engine.host_blocks={engine.host_blocks}: set engine.model to compute --swap-space in GiB")
    flags.update(switch("enable-prefix-caching", False))
    command = shell_command(["vllm", "serve", model], flag_words(flags), {"VLLM_USE_V1": 0})
    notes = vllm_notes(scenario, not chunked and policy.max_num_batched_tokens is not None)
    return Exported(SERVER, "vllm.sh", command, notes, missing)


EXPORTS = {"vllm": v0_command, "vllm-chunked": v0_command}
