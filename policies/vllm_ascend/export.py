"""A scenario as the command `vllm serve` with a plug-in for Ascend.

The settings of vllm-ascend are the JSON of `--additional-config`, by the scheduler that a policy reproduces.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from servesim.config.exported import MODEL, Exported
from servesim.config.scenario import Scenario
from servesim.core import Policy
from servesim.policies.vllm_v1.export import Plugin, v1_command


class PluginConfig(NamedTuple):
    """Where vllm-ascend reads the settings of a scheduler."""

    section: Sequence[str]  # keys around them
    fields: Sequence[str] = ()  # of the policy, under the same names
    switch: str = "enabled"  # the key that turns the scheduler on
    note: str = ""


SCHEDULER = "scheduler_config"
CONFIGS: dict[str, PluginConfig] = {
    "vllm-ascend": PluginConfig(
        ("ascend_scheduler_config",),
        ("enable_chunked_prefill", "max_long_partial_prefills", "enable_pd_transfer", "decode_max_num_seqs",
         "long_prefill_token_threshold"),
    ),
    "vllm-ascend-short-first": PluginConfig(
        (SCHEDULER, "short_request_first_config"), ("threshold", "long_max_wait_ms")
    ),
    "vllm-ascend-batch-jobs": PluginConfig(
        (SCHEDULER, "batch_job_sched_config"),
        ("max_jobs", "reserve_margin_blocks", "reserve_max_blocks", "low_available_tokens_threshold",
         "short_decode_token_threshold"),
    ),
    "vllm-ascend-profiling-chunk": PluginConfig(
        (SCHEDULER, "profiling_chunk_config"), ("smooth_factor", "min_chunk"),
        note="need_timing is on by default; the simulation is without it",
    ),
    "vllm-ascend-recompute": PluginConfig(
        (SCHEDULER,), switch="recompute_scheduler_enable",
        note="recompute_scheduler_enable: set --kv-transfer-config with kv_role kv_consumer too",
    ),
    "vllm-ascend-balance": PluginConfig((SCHEDULER,), switch="enable_balance_scheduling"),
}  # fmt: skip
DYNAMIC_BATCH = "vllm-ascend-dynamic-batch"
NOT_EXPRESSED = {  # fields that another part of the server sets
    "fitted_a": "vllm-ascend fits it at its start",
    "fitted_b": "vllm-ascend fits it at its start",
    "profile_table": "write these rows to vllm_ascend/core/profile_table.csv",
    "kv_consumer": "without a KV transfer, leave out recompute_scheduler_enable",
}


def ascend_command(scenario: Scenario, model: str = MODEL) -> Exported:
    """Return the command of vLLM V1 with the settings of the plug-in."""
    return v1_command(scenario, model, plugin_of(scenario.policy["name"], scenario.make_policy()))


def plugin_of(name: str, policy: Policy) -> Plugin:
    """Return what the plug-in adds to the command; vllm-mindspore adds nothing."""
    if name == DYNAMIC_BATCH:
        field = "slo_limits_for_dynamic_batch"
        return Plugin(as_flag({"SLO_limits_for_dynamic_batch": getattr(policy, field)}), {field}, (), NOT_EXPRESSED)
    config = CONFIGS.get(name)
    if config is None:
        return Plugin(not_expressed=NOT_EXPRESSED)
    defaults = type(policy)()
    values = {field: getattr(policy, field) for field in config.fields}
    changed = {field: value for field, value in values.items() if value != getattr(defaults, field)}
    settings: Mapping[str, Any] = {config.switch: True, **changed}
    for key in reversed(config.section):
        settings = {key: settings}
    return Plugin(as_flag(settings), config.fields, [config.note] if config.note else (), NOT_EXPRESSED)


def as_flag(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {"--additional-config": json.dumps(settings)}


EXPORTS = dict.fromkeys((*CONFIGS, DYNAMIC_BATCH, "vllm-mindspore"), ascend_command)
