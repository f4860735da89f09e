"""A scenario as the command `vllm serve` of the V1 engine, with the flags of the policy's version."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Optional

from servesim.config.exported import (
    MODEL,
    Exported,
    changed_flags,
    flag_words,
    model_flags,
    not_expressed,
    recorded_server,
    shell_command,
)
from servesim.config.scenario import EngineConfig, Scenario
from servesim.config.speculative import Speculative
from servesim.costs.public_models import HUB
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

from .settings import SETTING_SINCE

ANY_BLOCK_SIZE = (0, 18, 0)
DECIDES_ASYNC = (0, 14, 0)  # without a flag, vLLM itself decides about asynchronous scheduling; never before
MODULE = ("python", "-m", "vllm.entrypoints.openai.api_server")  # that `sim calibrate vllm` starts
FIELDS = {
    "max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill", "long_prefill_token_threshold",
    "scheduler_reserve_full_isl", "watermark", "policy", "enable_prefix_caching", "version", "max_num_active_seqs",
    "long_prefill_token_threshold_adaptive", "async_scheduling", "num_speculative_tokens", "speculative_method",
    "prefix_cache_retention_interval", "pipeline_parallel_size",
}  # fmt: skip
AS_SIMULATED = "as simulated: vLLM's default is to {}; the real server may be faster with it"
OFFLOADING = "--kv-offloading-size: vLLM copies a block to the host when it is full; simulated: when it is evicted"

DRAFT_MODEL = "DRAFT_MODEL"
NAME_DRAFTER = f"--speculative-config: write the name or the folder of your draft model for {DRAFT_MODEL}"
OF_MODEL = {"mtp_modules": "a property of the model"}


class Plugin(NamedTuple):
    """What a plug-in of vLLM adds to the command."""

    flags: Mapping[str, Any] = {}
    fields: Collection[str] = ()  # of the policy, in these flags
    notes: Sequence[str] = ()
    not_expressed: Mapping[str, str] = {}  # field that another part of the server sets -> the reason


def v1_flags(scenario: Scenario, policy: Any) -> dict[str, Any]:
    """Return the flags of the V1 engine. One more block than simulated: V1 never uses the first one."""
    engine, host = scenario.engine, scenario.engine.host_cache
    reserve = switch("scheduler-reserve-full-isl", policy.scheduler_reserve_full_isl)
    interval = policy.prefix_cache_retention_interval
    may_be_async = policy.is_since(DECIDES_ASYNC) or policy.async_scheduling
    return {
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
        **(switch("async-scheduling", policy.async_scheduling) if may_be_async else {}),
        "--prefix-cache-retention-interval": None if interval == 0 else interval or "None",  # 0 is the default
        "--speculative-config": speculative_config(scenario, policy),
        "--pipeline-parallel-size": policy.pipeline_parallel_size if policy.pipeline_parallel_size > 1 else None,
        "--data-parallel-size": engine.data_parallel_size if engine.data_parallel_size > 1 else None,
    }


def speculative_config(scenario: Scenario, policy: Any) -> Optional[str]:
    """Return the JSON of the drafter; None without one. N-gram drafts and MTP need no further model."""
    method, tokens, section = policy.speculative_method, policy.num_speculative_tokens, scenario.speculative
    known = HUB.get(section.model or "") if section is not None else None
    model = {} if method in ("ngram", "mtp") else {"model": known or DRAFT_MODEL}
    return json.dumps({"method": method, **model, "num_speculative_tokens": tokens}) if tokens else None


def v1_command(scenario: Scenario, model: str = MODEL, plugin: Optional[Plugin] = None) -> Exported:
    """Return the command of the V1 engine: that of the recorded server with other flags, if there is one."""
    policy: Any = scenario.make_policy()
    engine, added = scenario.engine, plugin or Plugin()
    flags = {**model_flags(scenario, "--tensor-parallel-size"), **v1_flags(scenario, policy), **added.flags}
    notes = [*added.notes, *vllm_notes(scenario, not policy.enable_chunked_prefill)]
    if engine.host_cache is not None:
        notes.insert(0, OFFLOADING)
    if DRAFT_MODEL in str(flags["--speculative-config"]):
        notes.insert(0, NAME_DRAFTER)
    if policy.is_since(DECIDES_ASYNC) and not policy.async_scheduling and policy.speculative_method != "ngram":
        notes.insert(0, f"--no-async-scheduling: {AS_SIMULATED.format('plan a step while the last one runs')}")
    why = {**OF_MODEL, **added.not_expressed}
    missing = not_expressed(scenario, policy, FIELDS | set(added.fields), why, ENGINE_KEYS)
    if not policy.is_since(ANY_BLOCK_SIZE):
        sizes = (*BLOCK_SIZES, 256) if policy.is_since((0, 11, 1)) else BLOCK_SIZES
        missing += refuse_block_size(flags, engine.block_size, sizes, policy.version)
    if engine.host_blocks:
        missing.append(f"engine.host_blocks={engine.host_blocks}: V1 does not swap")
    title = f"vLLM {policy.version} (V1 engine)" if plugin is None else policy.rules().engine
    server = recorded_server(scenario)
    if server is None:
        command = shell_command(["vllm", "serve", model], flag_words(flags), {})
        return Exported(title, "vllm.sh", command, notes, missing)
    drafts = server.get("speculative")  # if the recorded server has them
    then = scenario.model_copy(update={
        "policy": server["policy"], "engine": EngineConfig(**server["engine"]),
        "speculative": drafts and Speculative(**drafts),
    })  # fmt: skip
    own, *words = server["command"]
    chosen, diff = changed_flags(
        words, v1_flags(then, then.make_policy()), {**v1_flags(scenario, policy), **added.flags}
    )
    start = [*MODULE, "--model", own if model == MODEL else model]
    shown = [note for note in notes if any(note.startswith(line[2:].split()[0]) for line in diff)]
    return Exported(title, "vllm.sh", shell_command(start, chosen, {}), shown, missing, changes=diff)


EXPORTS = {"vllm-v1": v1_command}
