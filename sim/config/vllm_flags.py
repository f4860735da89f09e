"""Scenarios with a policy of vLLM as `vllm serve` commands.

The flags are those of vLLM 0.32 for the V1 engine, and of 0.8.5 for the v0 engine: the last versions that the policies
were compared with. A scenario with the rules of an older version has the same flags, and its rules are listed.
"""

from __future__ import annotations

from typing import Any

from servesim.core import BadInput
from servesim.files.byte_sizes import format_bytes

from .exported import MODEL, Exported, changed_engine_keys, changed_fields, note_on_blocks, shell_command
from .memory import model_memory
from .scenario import Scenario

V1, V0 = "vLLM 0.32 (V1 engine)", "vLLM 0.8.5 (v0 engine)"
V0_BLOCK_SIZES = (1, 8, 16, 32, 64, 128)
ENGINE_KEYS = {"block_size", "max_model_len", "host_blocks"}
V1_FIELDS = {
    "max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill", "long_prefill_token_threshold",
    "scheduler_reserve_full_isl", "watermark", "policy",
}  # fmt: skip
V0_FIELDS = {
    "max_num_seqs", "max_num_batched_tokens", "delay_factor", "preemption_mode", "policy", "max_num_partial_prefills",
    "max_long_partial_prefills", "long_prefill_token_threshold",
}  # fmt: skip
OTHER_VERSION = "a rule of another version of vLLM; 0.8.5 has another one"
V0_RULES = {
    **dict.fromkeys(
        ("padded_prefill", "max_paddings", "ignored_step", "delay_scope", "sort_running", "swap_order", "append_rule",
         "fail_infeasible", "examine_at_full_budget", "answer_failed_swaps"), OTHER_VERSION
    ),
    "watermark": "0.01 in the code of vLLM",
    "free_failed_swaps": "vLLM never frees these blocks",
}  # fmt: skip
AS_SIMULATED = "as simulated: vLLM's default is to {}; the real server may be faster with it"


def vllm_command(scenario: Scenario, model: str = MODEL) -> Exported:
    """Return the `vllm serve` command of a scenario with a policy of vLLM."""
    return v1_command(scenario, model) if scenario.policy["name"] == "vllm-v1" else v0_command(scenario, model)


def v1_command(scenario: Scenario, model: str) -> Exported:
    """Return the command of the V1 engine. One more block than simulated: V1 never uses the first one."""
    policy: Any = scenario.make_policy()
    flags = {
        **token_flags(policy),
        "--long-prefill-token-threshold": policy.long_prefill_token_threshold or None,
        **switch("scheduler-reserve-full-isl", policy.scheduler_reserve_full_isl),
        "--watermark": policy.watermark or None,
        **switch("enable-chunked-prefill", policy.enable_chunked_prefill),
        "--scheduling-policy": policy.policy,
        **memory_flags(scenario, scenario.engine.num_blocks + 1),
        **switch("enable-prefix-caching", False),
        **switch("async-scheduling", False),
    }
    notes = [
        f"--no-async-scheduling: {AS_SIMULATED.format('plan a step while the last one runs')}",
        f"--no-enable-prefix-caching: {AS_SIMULATED.format('reuse the KV cache of equal prefixes')}",
        *memory_notes(scenario),
    ]
    missing = changed_fields(policy, V1_FIELDS, {}) + changed_engine_keys(scenario.engine, ENGINE_KEYS)
    if scenario.engine.host_blocks:
        missing.append(f"engine.host_blocks={scenario.engine.host_blocks}: V1 does not swap")
    return Exported(V1, "vllm.sh", shell_command(["vllm", "serve", model], flags, {}), notes, missing)


def v0_command(scenario: Scenario, model: str) -> Exported:
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
    missing = changed_fields(policy, V0_FIELDS, V0_RULES) + changed_engine_keys(engine, ENGINE_KEYS)
    flags.update(memory_flags(scenario, engine.num_blocks))
    if engine.block_size not in V0_BLOCK_SIZES:
        del flags["--block-size"]
        sizes = ", ".join(map(str, V0_BLOCK_SIZES))
        missing.append(f"engine.block_size={engine.block_size}: vLLM 0.8.5 accepts {sizes}")
    try:
        flags["--swap-space"] = swap_gib(scenario)
    except BadInput:
        missing.append(f"engine.host_blocks={engine.host_blocks}: set engine.model to compute --swap-space in GiB")
    flags.update(switch("enable-prefix-caching", False))
    command = shell_command(["vllm", "serve", model], flags, {"VLLM_USE_V1": 0})
    return Exported(V0, "vllm.sh", command, memory_notes(scenario), missing)


def token_flags(policy: Any) -> dict[str, Any]:
    return {"--max-num-seqs": policy.max_num_seqs, "--max-num-batched-tokens": policy.max_num_batched_tokens}


def memory_flags(scenario: Scenario, blocks: int) -> dict[str, Any]:
    """Return the flags of the KV cache: the fraction of the memory if the scenario has one, else the blocks."""
    engine = scenario.engine
    flags: dict[str, Any] = {"--max-model-len": engine.max_model_len, "--block-size": engine.block_size}
    if engine.device_memory is None:
        return {**flags, "--num-gpu-blocks-override": blocks}
    fraction = engine.gpu_memory_utilization
    return {**flags, "--gpu-memory-utilization": 0.9 if fraction is None else f"{fraction:g}"}


def switch(name: str, on: bool) -> dict[str, bool]:
    """Return --NAME or --no-NAME."""
    return {f"--{name}" if on else f"--no-{name}": True}


def swap_gib(scenario: Scenario) -> float:
    """Return the host memory of the swapped blocks in GiB; raise BadInput if the model is not known."""
    engine = scenario.engine
    if not engine.host_blocks:
        return 0
    size = engine.host_blocks * engine.block_size * model_memory(engine.model, scenario.profile).per_token
    return float(f"{size / 2**30:.6g}")


def memory_notes(scenario: Scenario) -> list[str]:
    """Return what to know about the number of KV blocks."""
    engine = scenario.engine
    if engine.device_memory is None:
        return note_on_blocks(scenario, "--num-gpu-blocks-override")
    size = format_bytes(engine.device_memory)
    return [f"simulated with {engine.num_blocks:,} KV blocks on {size}; compare it with the number that vLLM prints"]
