"""MindIE's config.json: read as a scenario, written by `sim export`, refused where MindIE refuses it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from servesim.config.export import export_scenario
from servesim.config.layers import read_scenario_file
from servesim.config.scenario import scenario_from
from servesim.core import BadInput, field_values
from servesim.policies import POLICIES
from servesim.policies.mindie.config_file import KEYS, from_mindie, to_mindie

from ..commands.running import run_sim

# A complete file, with other values than the shipped ones for every key of the scheduler.
SCHEDULE: dict[str, Any] = {
    "templateType": "Mix", "templateName": "Standard_LLM", "cacheBlockSize": 64, "maxPrefillBatchSize": 20,
    "maxPrefillTokens": 6000, "prefillTimeMsPerReq": 600, "prefillPolicyType": 0, "decodeTimeMsPerReq": 5,
    "decodePolicyType": 0, "maxBatchSize": 120, "maxIterTimes": 700, "maxPreemptCount": 3,
    "supportSelectBatch": True, "maxQueueDelayMicroseconds": 60000, "maxFirstTokenWaitTime": 900,
    "prefillChunkSize": 256, "longPrefillTokenThreshold": 500, "maxLongPartialPrefills": 4,
    "prefillExpectedTime": 1000, "decodeExpectedTime": 45, "dynamicBatchSizeEnable": True,
}  # fmt: skip
MODEL: dict[str, Any] = {
    "modelName": "qwen", "modelWeightPath": "/data/qwen", "worldSize": 4, "cpuMemSize": 5, "npuMemSize": -1,
    "backendType": "atb", "plugin_params": '{"plugin_type": "splitfuse"}',
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "Version": "1.0.0",
    "ServerConfig": {"ipAddress": "127.0.0.1", "port": 1025, "inferMode": "standard"},
    "BackendConfig": {
        "npuDeviceIds": [[0, 1, 2, 3]],
        "ModelDeployConfig": {"maxSeqLen": 4096, "maxInputTokenLen": 3000, "ModelConfig": [MODEL]},
        "ScheduleConfig": SCHEDULE,
    },
    "LogConfig": {"dynamicLogLevel": ""},
}
REQUESTS = {"requests": 3, "arrivals": {"kind": "burst"}, "lengths": {"prompt": 8, "output": 2}}


def config_with(schedule: dict[str, Any] | None = None, deploy: dict[str, Any] | None = None, **model: Any) -> Any:
    """Return the complete file with other values; None removes a key."""
    config = json.loads(json.dumps(CONFIG))
    backend = config["BackendConfig"]
    for section, changes in (
        (backend["ScheduleConfig"], schedule or {}),
        (backend["ModelDeployConfig"], deploy or {}),
        (backend["ModelDeployConfig"]["ModelConfig"][0], model),
    ):
        section.update(changes)
        for key in [key for key, value in changes.items() if value is None]:
            del section[key]
    return config


def write(path: Path, config: Any) -> str:
    path.write_text(json.dumps(config, indent="\t"))  # tabs are JSON, but not YAML
    return str(path)


def test_every_key_of_the_scheduler_reaches_the_scenario() -> None:
    scenario = from_mindie(CONFIG, "config.json")
    assert scenario["engine"] == {"block_size": 64, "max_model_len": 4096}
    policy = scenario_from(scenario).make_policy()
    shipped = field_values(POLICIES["mindie"]())
    same = [name for name, value in field_values(policy).items() if value == shipped[name]]
    # fields of all policies, and asynchronous scheduling, which is an environment variable of the server
    assert set(same) == {"order", "group_width", "aging", "max_wait", "async_scheduling"}
    assert (policy.stage_policy, policy.split_fuse) == ("throughput", True)  # type: ignore[attr-defined]


def test_an_empty_file_is_what_mindie_ships() -> None:
    scenario = scenario_from(from_mindie({"BackendConfig": {}}, "config.json"))
    assert field_values(scenario.make_policy()) == field_values(POLICIES["mindie"]())
    assert (scenario.engine.block_size, scenario.engine.max_model_len) == (128, 2560)


@pytest.mark.parametrize(
    ("select", "number", "kind"),
    [(False, 0, "prefill-first"), (True, 0, "throughput"), (False, 1, "throughput"), (False, 2, "latency"),
     (True, 2, "throughput")],
)  # fmt: skip
def test_supportSelectBatch_forces_the_throughput_policy(select: bool, number: int, kind: str) -> None:
    config = config_with({"supportSelectBatch": select, "stageSelectPolicy": number})
    assert from_mindie(config, "")["policy"]["stage_policy"] == kind


WRONG_MINDIE: list[dict[str, Any]] = [
    *({"schedule": change} for change in (
        {"maxBatchSize": 0}, {"maxBatchSize": "200"}, {"maxBatchSize": True}, {"supportSelectBatch": 1},
        {"cacheBlockSize": 256}, {"decodePolicyType": 3}, {"maxPrefillTokens": 2999}, {"maxPrefillBatchSize": 121},
        {"maxPreemptCount": 121}, {"maxIterTimes": 5000},
    )),
    {"cpuMemSize": 0}, {"plugin_params": "{splitfuse}"}, {"deploy": {"ModelConfig": []}},
]  # fmt: skip


def test_what_mindie_refuses_is_one_line_with_the_path_of_the_key(expected_errors: Callable[..., None]) -> None:
    expected_errors("mindie", lambda changes: from_mindie(config_with(**changes), "config.json"), WRONG_MINDIE)


@pytest.mark.parametrize("plugins", [None, '{"plugin_type": "prefix_cache"}', '{"plugin_type": "splitfuse"}'])
@pytest.mark.parametrize("kind", ["prefill-first", "throughput", "latency"])
@pytest.mark.parametrize("base", [CONFIG, None])
def test_a_written_file_is_read_as_the_same_scenario(plugins: str | None, kind: str, base: Any) -> None:
    wanted = from_mindie(config_with(plugin_params=plugins), "")
    wanted["policy"]["stage_policy"] = kind
    written = to_mindie(wanted["policy"], wanted["engine"], base)
    assert from_mindie(json.loads(json.dumps(written)), "") == wanted


def test_only_changed_keys_of_the_users_file_are_written() -> None:
    config = config_with({"maxBatchSize": None, "maxIterTimes": None}, plugin_params='{"plugin_type": "la,splitfuse"}')
    tree = from_mindie(config, "")
    assert to_mindie(tree["policy"], tree["engine"], config) == config
    changed = {**tree["policy"], "max_prefill_batch_size": 7, "stage_policy": "prefill-first", "split_fuse": False}
    assert to_mindie(changed, tree["engine"], config) == config_with(
        {"maxBatchSize": None, "maxIterTimes": None, "maxPrefillBatchSize": 7, "supportSelectBatch": False,
         "templateType": "Standard"}, plugin_params='{"plugin_type": "la"}',
    )  # fmt: skip


def test_without_a_file_all_keys_of_the_scheduler_are_written() -> None:
    scenario = scenario_from({"policy": {"name": "mindie", "async_scheduling": True}, "engine": {"num_blocks": 9}})
    exported = export_scenario(scenario, "mindie", "/data/llama")
    backend = json.loads(exported.text)["BackendConfig"]
    assert set(KEYS) <= {*backend["ScheduleConfig"], "maxSeqLen", "maxInputTokenLen"}  # the last one has no value
    assert backend["ModelDeployConfig"]["ModelConfig"][0] == {"modelName": "llama", "modelWeightPath": "/data/llama"}
    assert [note.partition(":")[0] for note in exported.notes] == [
        "only the keys of the scheduler; to change a copy of your own file, add --set server_config=config.json",
        "start the server with MINDIE_ASYNC_SCHEDULING_ENABLE=1",
        "simulated with 9 KV blocks and 0 in host memory; compare them with npuBlockNum and cpuBlockNum in the log of "
        "the server",
    ]


def test_what_the_file_cannot_express_is_listed() -> None:
    scenario = scenario_from({"policy": {"name": "mindie", "order": "shortest-prompt"}, "engine": {"num_blocks": 9}})
    assert export_scenario(scenario, "mindie").not_expressed == [
        "policy.order=shortest-prompt: not a key of config.json"
    ]


def test_a_value_that_mindie_refuses_is_not_exported(tmp_path: Path) -> None:
    file = write(tmp_path / "config.json", CONFIG)
    tree = {**read_scenario_file(file), "workload": REQUESTS}
    tree["policy"]["max_prefill_tokens"] = 100
    with pytest.raises(BadInput, match=r"max_prefill_tokens \(100\) is below max_input_token_len"):
        export_scenario(scenario_from(tree), "mindie")


def test_max_input_token_len_is_a_limit_of_prompts_and_stays_in_the_file(tmp_path: Path) -> None:
    tree = {**read_scenario_file(write(tmp_path / "config.json", CONFIG)), "workload": REQUESTS}
    assert tree["policy"]["max_input_token_len"] == 3000
    without = write(tmp_path / "without.json", config_with(deploy={"maxInputTokenLen": None}))
    assert read_scenario_file(without)["policy"]["max_input_token_len"] is None
    tree["policy"]["max_input_token_len"] = 2000
    exported = json.loads(export_scenario(scenario_from(tree), "mindie").text)
    assert exported["BackendConfig"]["ModelDeployConfig"]["maxInputTokenLen"] == 2000


def test_a_file_of_another_server_is_no_base(tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text("model_config: {decode_batch_size: [4]}\n")
    tree = {"server_config": str(tmp_path / "other.yaml"), "policy": "mindie", "engine": {"num_blocks": 9}}
    assert set(json.loads(export_scenario(scenario_from(tree), "mindie").text)) == {"BackendConfig"}


def test_a_scenario_may_name_the_file_of_the_server(tmp_path: Path) -> None:
    write(tmp_path / "config.json", CONFIG)
    scenario = tmp_path / "server.yaml"
    scenario.write_text("server_config: config.json\npolicy: {max_batch_size: 33}\nengine: {num_blocks: 77}\n")
    tree = read_scenario_file(scenario)
    assert tree["server_config"] == str(tmp_path / "config.json")
    assert (tree["policy"]["max_batch_size"], tree["policy"]["max_prefill_batch_size"]) == (33, 20)
    assert tree["engine"] == {"block_size": 64, "max_model_len": 4096, "num_blocks": 77}
    scenario.write_text("server_config: server.yaml\n")
    with pytest.raises(BadInput, match=r"server.yaml: expected the config.json of MindIE or the YAML configuration of"):
        read_scenario_file(scenario)


def test_the_winner_of_a_sweep_is_the_users_file_with_other_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_with({"dynamicBatchSizeEnable": False, "maxPreemptCount": 0}, plugin_params=None)
    write(tmp_path / "config.json", config)
    sweep = {
        "base": {"server_config": "config.json", "workload": REQUESTS, "engine": {"num_blocks": 100}},
        "params": {"policy.max_batch_size": [25, 50]},
        "objectives": ["makespan"],
    }
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    monkeypatch.chdir(tmp_path)
    out = Path("out")
    run_sim(capsys, "sweep", "sweep.yaml", "-o", str(out), "--no-report", "-j", "1")
    best = yaml.safe_load((out / "best.yaml").read_text())
    assert best["server_config"] == "../config.json"
    size = best["policy"]["max_batch_size"]
    wanted = config_with(
        {"dynamicBatchSizeEnable": False, "maxPreemptCount": 0, "maxBatchSize": size}, plugin_params=None
    )
    said = run_sim(capsys, "export", str(out), "--to", "mindie")
    assert json.loads(said.out) == wanted
    assert "sim: simulated with 100 KV blocks" in said.error
