"""MindIE's config.json as a scenario, and the settings of a scenario written into a config.json.

The scheduler of MindIE 3.0.0 reads the keys of KEYS, two keys that become `stage_policy`, and the plugin `splitfuse`.
An absent key has the value that MindIE ships. The other keys of the file change no decision; they stay as they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import PurePath
from typing import Any, NamedTuple, Optional, cast

from servesim.config.families import ConfigFile
from servesim.core import BadInput
from servesim.files.read import parse_json, quote

from .round import STAGE_POLICIES  # in the order of stageSelectPolicy

DEPLOY, SCHEDULE, MODEL = "ModelDeployConfig", "ScheduleConfig", "ModelConfig"
SPLIT_FUSE = "splitfuse"
LARGEST = 2**32 - 1


class Key(NamedTuple):
    """A key of config.json: its section, the key of the scenario, the shipped value and the range of its values.

    None as shipped value: without the key, the scenario has no such limit.
    """

    section: str
    scenario: str
    shipped: Any
    low: int = 0  # no range for a switch
    high: int = 0


KEYS = {
    "cacheBlockSize": Key(SCHEDULE, "engine.block_size", 128, 1, 128),
    "maxSeqLen": Key(DEPLOY, "engine.max_model_len", 2560, 1, LARGEST),
    "maxInputTokenLen": Key(DEPLOY, "policy.max_input_token_len", None, 1, 4_194_304),
    "maxIterTimes": Key(SCHEDULE, "policy.max_iter_times", 512, 1, LARGEST),
    "maxBatchSize": Key(SCHEDULE, "policy.max_batch_size", 200, 1, 819_200),
    "maxPrefillBatchSize": Key(SCHEDULE, "policy.max_prefill_batch_size", 50, 0, 819_200),
    "maxPrefillTokens": Key(SCHEDULE, "policy.max_prefill_tokens", 8192, 1, 4_194_304),
    "prefillTimeMsPerReq": Key(SCHEDULE, "policy.prefill_time_ms_per_req", 150, 0, 1000),
    "decodeTimeMsPerReq": Key(SCHEDULE, "policy.decode_time_ms_per_req", 50, 0, 1000),
    "maxPreemptCount": Key(SCHEDULE, "policy.max_preempt_count", 0, 0, 819_200),
    "maxQueueDelayMicroseconds": Key(SCHEDULE, "policy.max_queue_delay_microseconds", 5000, 500, 1_000_000),
    "maxFirstTokenWaitTime": Key(SCHEDULE, "policy.max_first_token_wait_time", 2500, 0, 3_600_000),
    "prefillChunkSize": Key(SCHEDULE, "policy.prefill_chunk_size", 0, 0, 4_194_304),
    "longPrefillTokenThreshold": Key(SCHEDULE, "policy.long_prefill_token_threshold", 1024, 0, 8192),
    "maxLongPartialPrefills": Key(SCHEDULE, "policy.max_long_partial_prefills", 8, 0, 64),
    "prefillExpectedTime": Key(SCHEDULE, "policy.prefill_expected_time", 1500, 1, 10_000),
    "decodeExpectedTime": Key(SCHEDULE, "policy.decode_expected_time", 50, 1, 10_000),
    "dynamicBatchSizeEnable": Key(SCHEDULE, "policy.dynamic_batch_size", False),
}
CHECKED = {  # no key of a scenario: the first two become stage_policy, the others are only checked
    "stageSelectPolicy": Key(SCHEDULE, "", 0, 0, 2),
    "supportSelectBatch": Key(SCHEDULE, "", False),
    "prefillPolicyType": Key(SCHEDULE, "", 0, 0, 0),
    "decodePolicyType": Key(SCHEDULE, "", 0, 0, 0),
    "cpuMemSize": Key(MODEL, "", 5, 0, LARGEST),
    "npuMemSize": Key(MODEL, "", -1, -1, 2**31 - 1),
}
Values = dict[str, Any]


def from_mindie(tree: Mapping[str, Any], where: str) -> Values:
    """Return the scenario of a server with this configuration; raise BadInput if the server does not start with it."""
    keys = {**KEYS, **CHECKED}
    values = {name: check_value(section_of(tree, key.section, where), name, key, where) for name, key in keys.items()}
    check_together(values, where)
    mode = mapping_of(tree.get("ServerConfig", {}), f"{where}: ServerConfig").get("inferMode", "standard")
    if mode != "standard":
        raise BadInput(f"{where}: ServerConfig.inferMode: expected standard, got {quote(mode)}, which is not simulated")
    result: Values = {"policy": {"name": "mindie"}, "engine": {}}
    for name, key in KEYS.items():
        section, _, field = key.scenario.partition(".")
        result[section][field] = values[name]
    result["policy"]["stage_policy"] = STAGE_POLICIES[
        1 if values["supportSelectBatch"] else values["stageSelectPolicy"]
    ]
    result["policy"]["split_fuse"] = SPLIT_FUSE in plugins_of(tree, where)
    return result


def to_mindie(policy: Values, engine: Values, base: Optional[Values], model: Optional[str] = None) -> Values:
    """Return a configuration with the settings of a scenario: the base with the keys that differ, else all keys."""
    config = deepcopy(base or {})
    old, new = from_mindie(config, "server_config"), {"policy": policy, "engine": engine}
    for name, key in KEYS.items():
        section, _, field = key.scenario.partition(".")
        value = new[section].get(field)
        if value is not None and (base is None or value != old[section][field]):
            new_section(config, key.section)[name] = value
    schedule, kind, split = new_section(config, SCHEDULE), policy["stage_policy"], policy["split_fuse"]
    if base is None or kind != old["policy"]["stage_policy"]:
        schedule["supportSelectBatch"] = kind == "throughput"
        if kind == "latency" or "stageSelectPolicy" in schedule:
            schedule["stageSelectPolicy"] = STAGE_POLICIES.index(kind)
    if split != old["policy"]["split_fuse"]:
        others = [name for name in plugins_of(config, "server_config") if name != SPLIT_FUSE]
        set_plugins(new_section(config, MODEL), [*others, *[SPLIT_FUSE] * split])
        schedule["templateType"] = "Mix" if split else "Standard"
    if model is not None:
        new_section(config, MODEL).update(modelName=PurePath(model).name, modelWeightPath=model)
    return config


def check_value(section: Mapping[str, Any], name: str, key: Key, where: str) -> Any:
    """Return the value of a key, the shipped one if it is absent; raise BadInput if MindIE does not accept it."""
    value = section.get(name, key.shipped)
    if value is None and name not in section:
        return None
    is_switch, is_bool = isinstance(key.shipped, bool), isinstance(value, bool)
    in_range = isinstance(value, int) and not is_bool and key.low <= value <= key.high
    if is_bool if is_switch else in_range:
        return value
    numbers = f"a whole number from {key.low} to {key.high}" if key.low < key.high else f"{key.low}"
    expected = "true or false" if is_switch else numbers
    raise BadInput(f"{where}: {path_of(key.section)}.{name}: expected {expected}, got {quote(value)}")


def check_together(values: Values, where: str) -> None:
    """Raise BadInput for values that MindIE does not accept together."""
    for name, low, high in (
        ("maxPrefillBatchSize", None, "maxBatchSize"),
        ("maxPreemptCount", None, "maxBatchSize"),
        ("maxIterTimes", None, "maxSeqLen"),
        ("maxPrefillTokens", "maxInputTokenLen", None),
    ):
        value, bound = values[name], low or high or ""
        if values[bound] is None:
            continue
        if (low and value < values[low]) or (high and value > values[high]):
            side = f"at {'least' if low else 'most'} {bound} ({values[bound]})"
            raise BadInput(f"{where}: {path_of(KEYS[name].section)}.{name}: expected {side}, got {value}")
    if values["maxPreemptCount"] and not values["cpuMemSize"]:
        path = f"{path_of(MODEL)}.cpuMemSize"
        raise BadInput(f"{where}: {path}: expected more than 0 with maxPreemptCount {values['maxPreemptCount']}, got 0")


def path_of(section: str) -> str:
    """Return the path of a section in the file."""
    return f"BackendConfig.{DEPLOY}.{MODEL}[0]" if section == MODEL else f"BackendConfig.{section}"


def section_of(tree: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    """Return a section; one that is absent is empty. Of several models, the first one counts."""
    outer = DEPLOY if name == MODEL else name
    backend = mapping_of(tree.get("BackendConfig", {}), f"{where}: BackendConfig")
    section = mapping_of(backend.get(outer, {}), f"{where}: {path_of(outer)}")
    if name != MODEL:
        return section
    models = section.get(MODEL, [{}])
    if not isinstance(models, list) or not models:
        raise BadInput(f"{where}: {path_of(DEPLOY)}.{MODEL}: expected a list of models, got {quote(models)}")
    return mapping_of(models[0], f"{where}: {path_of(MODEL)}")


def mapping_of(value: Any, where: str) -> Mapping[str, Any]:
    """Return a value that must be a mapping."""
    if not isinstance(value, Mapping):
        raise BadInput(f"{where}: expected a mapping, got {quote(value)}")
    return value


def new_section(config: Values, name: str) -> Values:
    """Return a section to write into; create it if it is absent."""
    backend = config.setdefault("BackendConfig", {})
    section: Values = backend.setdefault(DEPLOY if name == MODEL else name, {})
    return cast(Values, section.setdefault(MODEL, [{}])[0]) if name == MODEL else section


def plugins_of(tree: Mapping[str, Any], where: str) -> list[str]:
    """Return the plugins of the model. `plugin_params` is a JSON text in the JSON file."""
    params = section_of(tree, MODEL, where).get("plugin_params") or {}
    path = f"{where}: {path_of(MODEL)}.plugin_params"
    if isinstance(params, str):
        params = parse_json(path, params)
    names = mapping_of(params, path).get("plugin_type", "")
    return [name.strip() for name in str(names).split(",") if name.strip()]


def set_plugins(model: Values, names: list[str]) -> None:
    """Write the plugins of a model; their other parameters stay."""
    params = model.pop("plugin_params", None) or {}
    is_text = isinstance(params, str) or not params
    params = {**(json.loads(params) if isinstance(params, str) else params), "plugin_type": ",".join(names)}
    if names:
        model["plugin_params"] = json.dumps(params) if is_text else params


def other_plugins(tree: Mapping[str, Any], where: str) -> Optional[str]:
    """Return which plugins of a configuration the run does not have."""
    names = [name for name in plugins_of(tree, where) if name != SPLIT_FUSE]
    return f"plugins that are not simulated: {', '.join(names)}" if names else None


CONFIG_FILE = ConfigFile(
    "the config.json of MindIE", from_mindie, other_plugins,
    "npuMemSize gives no number of KV blocks without the model, so the run has {blocks:,}: set engine.num_blocks "
    "(npuBlockNum of the server), or engine.device_memory",
)  # fmt: skip
