"""Export a scenario to a real server: `sim export`, and `--emit-config` of sweeps and searches.

The result is a command with flags, or a configuration file. What the server has no setting for is listed as
`not expressed`. Settings with which the server does not start are refused. The flags are those of the policy's version
for the V1 engine of vLLM and for SGLang, and of vLLM 0.8.5 for the v0 engine, the last version that the policies were
compared with. The rules of an older version of v0 are listed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Optional

from servesim.core import BadInput, Policy, field_values
from servesim.files.checked import format_bytes
from servesim.files.read import show_path
from servesim.files.write import yaml_text
from servesim.policies.vllm_v1 import SETTING_SINCE, VLLMV1

from .export_ascend import CONFIGS, DYNAMIC_BATCH, NOT_EXPRESSED, plugin_flags
from .exported import MODEL, Exported, changed_engine_keys, changed_fields, note_on_blocks, shell_command
from .layers import Tree, read_mapping
from .llm_serving_yaml import from_llm_serving, to_llm_serving
from .memory import model_memory
from .mindie_json import from_mindie, is_mindie, to_mindie
from .scenario import Scenario, scenario_from

V0 = "vLLM 0.8.5 (v0 engine)"
BLOCK_SIZES = (1, 8, 16, 32, 64, 128)  # of older versions; 0.11.1 and later also accept 256
ANY_BLOCK_SIZE = (0, 18, 0)
VLLM_ENGINE_KEYS = {"block_size", "max_model_len", "host_blocks", "host_cache", "data_parallel_size"}
V1_FIELDS = {
    "max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill", "long_prefill_token_threshold",
    "scheduler_reserve_full_isl", "watermark", "policy", "enable_prefix_caching", "version", "max_num_active_seqs",
    "long_prefill_token_threshold_adaptive", "async_scheduling",
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
OFFLOADING = "--kv-offloading-size: vLLM copies a block to the host when it is full; simulated: when it is evicted"


def vllm_command(scenario: Scenario, model: str = MODEL) -> Exported:
    """Return the `vllm serve` command of a scenario with a policy of vLLM."""
    v0 = scenario.policy["name"] in ("vllm", "vllm-chunked")
    return v0_command(scenario, model) if v0 else v1_command(scenario, model)


def v1_command(scenario: Scenario, model: str) -> Exported:
    """Return the command of the V1 engine. One more block than simulated: V1 never uses the first one."""
    policy: Any = scenario.make_policy()
    engine, host = scenario.engine, scenario.engine.host_cache
    plugin, plugin_fields, plugin_notes = plugin_flags(scenario.policy["name"], policy)
    by_default = policy.is_since((0, 14, 0))  # asynchronous scheduling
    reserve = switch("scheduler-reserve-full-isl", policy.scheduler_reserve_full_isl)
    flags = {
        **token_flags(policy),
        "--max-num-active-seqs": policy.max_num_active_seqs,
        "--long-prefill-token-threshold": policy.long_prefill_token_threshold or None,
        "--long-prefill-token-threshold-adaptive": policy.long_prefill_token_threshold_adaptive or None,
        **(reserve if policy.is_since(SETTING_SINCE["scheduler_reserve_full_isl"]) else {}),
        "--watermark": policy.watermark or None,
        **switch("enable-chunked-prefill", policy.enable_chunked_prefill),
        "--scheduling-policy": policy.policy,
        **memory_flags(scenario, engine.num_blocks + 1),
        **switch("enable-prefix-caching", policy.enable_prefix_caching),
        "--kv-offloading-size": None if host is None else blocks_gib(scenario, host.blocks),
        **({} if policy.async_scheduling == by_default else switch("async-scheduling", policy.async_scheduling)),
        "--data-parallel-size": engine.data_parallel_size if engine.data_parallel_size > 1 else None,
        **plugin,
    }
    notes = [*plugin_notes, *memory_notes(scenario), *note_on_whole_prompts(scenario, policy.enable_chunked_prefill)]
    if host is not None:
        notes.insert(0, OFFLOADING)
    if by_default and not policy.async_scheduling:
        notes.insert(0, f"--no-async-scheduling: {AS_SIMULATED.format('plan a step while the last one runs')}")
    missing = changed_fields(policy, V1_FIELDS | plugin_fields, NOT_EXPRESSED)
    missing += changed_engine_keys(engine, VLLM_ENGINE_KEYS)
    if not policy.is_since(ANY_BLOCK_SIZE):
        sizes = (*BLOCK_SIZES, 256) if policy.is_since((0, 11, 1)) else BLOCK_SIZES
        missing += refuse_block_size(flags, engine.block_size, sizes, policy.version)
    if engine.host_blocks:
        missing.append(f"engine.host_blocks={engine.host_blocks}: V1 does not swap")
    command = shell_command(["vllm", "serve", model], flags, {})
    server = f"vLLM {policy.version} (V1 engine)" if type(policy) is VLLMV1 else policy.traits.engine
    return Exported(server, "vllm.sh", command, notes, missing)


def refuse_block_size(flags: dict[str, Any], size: int, sizes: Sequence[int], version: str) -> list[str]:
    """Remove a block size that the version does not accept from the flags, and return why."""
    if size in sizes:
        return []
    del flags["--block-size"]
    return [f"engine.block_size={size}: vLLM {version} accepts {', '.join(map(str, sizes))}"]


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
    missing = changed_fields(policy, V0_FIELDS, V0_RULES) + changed_engine_keys(engine, VLLM_ENGINE_KEYS)
    flags.update(memory_flags(scenario, engine.num_blocks))
    missing += refuse_block_size(flags, engine.block_size, BLOCK_SIZES, "0.8.5")
    try:
        flags["--swap-space"] = blocks_gib(scenario, engine.host_blocks) if engine.host_blocks else 0
    except BadInput:
        missing.append(f"engine.host_blocks={engine.host_blocks}: set engine.model to compute --swap-space in GiB")
    flags.update(switch("enable-prefix-caching", False))
    command = shell_command(["vllm", "serve", model], flags, {"VLLM_USE_V1": 0})
    notes = [
        *memory_notes(scenario),
        *note_on_whole_prompts(scenario, chunked or policy.max_num_batched_tokens is None),
    ]
    return Exported(V0, "vllm.sh", command, notes, missing)


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


def blocks_gib(scenario: Scenario, blocks: int) -> float:
    """Return the host memory of KV blocks in GiB; raise BadInput if the model is not known."""
    engine = scenario.engine
    size = blocks * engine.block_size * model_memory(engine.model, scenario.profile).per_token
    return float(f"{size / 2**30:.6g}")


def note_on_whole_prompts(scenario: Scenario, no_limit: bool) -> list[str]:
    """Return a note if vLLM compares the token budget with the maximum length of the model, which is not known here."""
    if no_limit or scenario.engine.max_model_len is not None:
        return []
    return [
        "without chunked prefill, vLLM starts only if --max-num-batched-tokens is at least the maximum length of the "
        "model; set engine.max_model_len"
    ]


def memory_notes(scenario: Scenario) -> list[str]:
    """Return what to know about the number of KV blocks."""
    engine = scenario.engine
    if engine.device_memory is None:
        return note_on_blocks(scenario, "--num-gpu-blocks-override")
    size = format_bytes(engine.device_memory)
    return [f"simulated with {engine.num_blocks:,} KV blocks on {size}; compare it with the number that vLLM prints"]


SGLANG_FIELDS = {
    "version", "schedule_policy", "max_prefill_tokens", "chunked_prefill_size", "max_running_requests",
    "schedule_conservativeness", "enable_mixed_chunk", "disable_radix_cache", "disable_overlap_schedule",
    "prefill_decode_interval",
}  # fmt: skip
SGLANG_VARIABLES = {  # field -> variable that SGLang reads at its start
    "init_new_token_ratio": "SGLANG_INIT_NEW_TOKEN_RATIO",
    "min_new_token_ratio_factor": "SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR",
    "new_token_ratio_decay_steps": "SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS",
    "clip_max_new_tokens": "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION",
}
SGLANG_REASONS = {
    "retract_decode_steps": "20 in the code of SGLang 0.4.6",
    "ignore_eos": "a field of the requests, not of the server",
}


def sglang_command(scenario: Scenario, model: str = MODEL) -> Exported:
    """Return the command of a scenario with the policy `sglang`."""
    policy: Any = scenario.make_policy()
    engine = scenario.engine
    defaults = field_values(type(policy)())
    variables = dict(SGLANG_VARIABLES)
    if not policy.is_old:
        variables["retract_decode_steps"] = "SGLANG_RETRACT_DECODE_STEPS"
    changed = {field: name for field, name in variables.items() if getattr(policy, field) != defaults[field]}
    missing = changed_fields(policy, SGLANG_FIELDS | set(variables), SGLANG_REASONS)
    missing += changed_engine_keys(engine, {"block_size", "max_model_len"})
    known_order = policy.schedule_policy != "lof" or not policy.is_old
    if not known_order:
        missing.append(f"policy.schedule_policy={policy.schedule_policy}: the command of 0.4.6 does not accept it")
    whole_prompts = policy.chunked_prefill_size is None
    flags = {
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
    command = shell_command(["python", "-m", "sglang.launch_server", "--model-path", model], flags, environment)
    return Exported(f"SGLang {policy.version}", "sglang.sh", command, notes, missing)


ADAPTER = "not a key of llm-serving; python -m servesim.calibrate.adapter runs the policy in the server"


def llm_serving_file(scenario: Scenario, model: str = MODEL) -> Exported:
    """Return the YAML configuration of llm-serving. What it cannot say is missing if the file is read back."""
    config = to_llm_serving(scenario.policy, scenario.engine.model_dump())
    again = scenario_from(from_llm_serving(config, "llm-serving"))
    policies = field_values(scenario.make_policy()), field_values(again.make_policy())
    missing = [f"policy.{name}={value}: {ADAPTER}" for name, value in policies[0].items() if value != policies[1][name]]
    defaults = type(scenario.engine)()
    for name in (
        "host_blocks", "decode_buckets", "reject_oversized", "start", "cold_start", "sampling", "max_model_len",
    ):  # fmt: skip
        value = getattr(scenario.engine, name)
        if value not in (getattr(again.engine, name), getattr(defaults, name)):
            missing.append(f"engine.{name}: not a key of llm-serving")
    notes = [] if model == MODEL else [f"model {model}: set model_name and the paths of the model"]
    notes += note_on_blocks(scenario, "num_blocks")
    return Exported("llm-serving, contest version of 2024", "llm-serving.yaml", yaml_text(config), notes, missing)


NO_BASE = "only the keys of the scheduler; to change a copy of your own file, add --set server_config=config.json"
ASYNC = "start the server with MINDIE_ASYNC_SCHEDULING_ENABLE=1: asynchronous scheduling is not a key of config.json"


def mindie_file(scenario: Scenario, model: str = MODEL) -> Exported:
    """Return MindIE's config.json: the file of the scenario with the changed keys, else all keys of the scheduler."""
    file, engine, policy = scenario.server_config, scenario.engine, field_values(scenario.make_policy())
    tree = {} if file is None else read_mapping(file, "configuration")
    base = tree if is_mindie(tree) else None
    config = to_mindie(policy, engine.model_dump(), base, None if model == MODEL else model)
    missing = changed_engine_keys(engine, {"block_size", "max_model_len", "host_blocks"})
    if not refusals_of(scenario):  # else `export_scenario` says why the server does not start
        again = field_values(scenario_from(from_mindie(config, file or "config.json")).make_policy())
        lost = [name for name, value in policy.items() if value != again[name] and name != "async_scheduling"]
        missing += [f"policy.{name}={policy[name]}: not a key of config.json" for name in lost]
    blocks = f"simulated with {engine.num_blocks:,} KV blocks and {engine.host_blocks:,} in host memory; compare them"
    notes = [
        *([NO_BASE] if base is None else []),
        *([ASYNC] if policy["async_scheduling"] else []),
        *(
            note_on_blocks(scenario, "npuMemSize")
            or [f"{blocks} with npuBlockNum and cpuBlockNum in the log of the server"]
        ),
    ]
    text = json.dumps(config, indent=4, ensure_ascii=False) + "\n"
    return Exported("MindIE 3.0.0", "mindie.json", text, notes, missing, has_comments=False)


class Target(NamedTuple):
    """A server, and the policies that reproduce its scheduler."""

    policies: tuple[str, ...]
    export: Callable[..., Exported]


TARGETS = {
    "vllm": Target(("vllm-v1", "vllm", "vllm-chunked", *CONFIGS, DYNAMIC_BATCH, "vllm-mindspore"), vllm_command),
    "sglang": Target(("sglang",), sglang_command),
    "llm-serving": Target(("llm-serving",), llm_serving_file),
    "mindie": Target(("mindie",), mindie_file),
}


def exporter_of(scenario: Scenario, target: str) -> Callable[..., Exported]:
    """Return the function that exports a scenario; raise BadInput for a policy of another engine."""
    policies, export = TARGETS[target]
    name = scenario.policy["name"]
    if name not in policies:
        fits = next((f"; export it to {other}" for other, (names, _) in TARGETS.items() if name in names), "")
        article = "an" if target[0] in "al" else "a"
        known = " and ".join(filter(None, (", ".join(policies[:-1]), policies[-1])))
        raise BadInput(f"policy {show_path(name)}: only {known} policies have {article} {target} configuration{fits}")
    return export


def export_scenario(scenario: Scenario, target: str, model: str = MODEL) -> Exported:
    """Return the settings of a server that runs a scenario; raise BadInput if the server does not start with them."""
    exported = exporter_of(scenario, target)(scenario, model)
    refusals = refusals_of(scenario)
    if refusals:
        raise BadInput(f"{exported.server} does not start with these settings: {'; '.join(refusals)}")
    return exported


def refusals_of(scenario: Scenario, policy: Optional[Policy] = None) -> list[str]:
    """Return why the real engine of a scenario's policy does not start; empty if it starts, or if there is none."""
    engine = scenario.engine
    policy = scenario.make_policy() if policy is None else policy
    return policy.engine_refusals(engine.block_size, engine.max_model_len)


def export_text(tree: Tree, target: str, model: str = MODEL, source: str = "a scenario") -> str:
    """Return the command or the configuration file of a server as text; `source` names where it comes from."""
    if target not in TARGETS:
        raise BadInput(f"server {target!r}: expected one of {', '.join(TARGETS)}")
    return export_scenario(scenario_from(tree), target, model).render(source)
