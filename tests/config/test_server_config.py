"""`server_config` takes effect no matter who names it: over presets, under all other keys of the scenario."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import servesim
import yaml
from servesim.calibrate.replay.replay import top_scenarios
from servesim.cli import main
from servesim.config.layers import read_scenario_file
from servesim.core import BadInput
from servesim.explorer.state import Choice, Origin
from servesim.study.optuna_search import read_search
from servesim.study.sweep_file import read_experiment

from ..commands.running import run_sim

WORKLOAD = {"requests": 6, "arrivals": {"kind": "poisson", "rate": 5}, "lengths": {"prompt": 8, "output": 2}}
SCENARIO = {
    "preset": "mindie-3.0", "workload": WORKLOAD, "policy": {"max_prefill_batch_size": 7},
    "engine": {"num_blocks": 99}, "profile": {"prefill": 0.01, "decode_step": 0.01},
}  # fmt: skip
SETTING = "server_config=config.json"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder with the configuration of a server, a scenario, and a sweep of it."""
    monkeypatch.chdir(tmp_path)
    schedule = {"maxBatchSize": 31, "maxPrefillBatchSize": 5, "cacheBlockSize": 64}
    Path("config.json").write_text(json.dumps({"BackendConfig": {"ScheduleConfig": schedule}}))
    Path("scenario.yaml").write_text(yaml.safe_dump(SCENARIO))
    Path("sweep.yaml").write_text("base: scenario.yaml\nparams: {policy.max_iter_times: [100, 200]}\n")


def as_keys(setting: str) -> dict[str, str]:
    key, _, value = setting.partition("=")
    return {key: value}


def of_run(setting: str) -> dict[str, Any]:
    assert main(["run", "scenario.yaml", "--set", setting, "-o", "out", "-q"]) == 0
    scenario: dict[str, Any] = json.loads(Path("out/manifest.json").read_text())["scenario"]
    return scenario


WAYS: dict[str, Callable[[str], dict[str, Any]]] = {
    "sim run": of_run,
    "settings=": lambda setting: servesim.run("scenario.yaml", settings=as_keys(setting)).scenario,
    "keys": lambda setting: servesim.run({**SCENARIO, **as_keys(setting)}).scenario,
    "compare, capacity": lambda setting: read_scenario_file("scenario.yaml", [setting]),
    "sweep": lambda setting: read_experiment("sweep.yaml", [setting]).tree(1),
    "search": lambda setting: read_search("sweep.yaml", [setting]).experiment.tree(0),
    "explore": lambda setting: Origin("scenario.yaml").tree(Choice(settings=as_keys(setting))),
    "replay": lambda setting: top_scenarios(Path("scenario.yaml"), 1, settings=(setting,))[0][1].model_dump(),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_configuration_lies_over_the_preset_and_under_the_keys_of_the_scenario(way: str) -> None:
    tree = WAYS[way](SETTING)
    assert tree["server_config"] == "config.json"
    assert (tree["policy"]["max_batch_size"], tree["policy"]["max_prefill_batch_size"]) == (31, 7)
    assert (tree["engine"]["block_size"], tree["engine"]["num_blocks"]) == (64, 99)


@pytest.mark.parametrize("way", [way for way in WAYS if way != "sim run"])
def test_a_missing_configuration_is_an_error(way: str) -> None:
    with pytest.raises(BadInput, match=r"gone\.json"):
        WAYS[way]("server_config=gone.json")


def test_another_configuration_replaces_that_of_the_file() -> None:
    Path("other.json").write_text(json.dumps({"BackendConfig": {"ScheduleConfig": {"maxBatchSize": 77}}}))
    for file in ("config.json", "named.yaml"):
        Path("named.yaml").write_text("server_config: config.json\n")
        tree = read_scenario_file(file, ["server_config=other.json"])
        assert (tree["policy"]["max_batch_size"], tree["engine"]["block_size"]) == (77, 128)
    assert read_scenario_file("scenario.yaml", ["server_config=null"])["policy"]["max_prefill_batch_size"] == 7


@pytest.mark.parametrize("command", ["sweep", "search"])
@pytest.mark.parametrize("key", ["params: {server_config: [config.json]}", "baseline: {server_config: config.json}"])
def test_configurations_of_a_sweep_have_one_server(capsys: pytest.CaptureFixture[str], command: str, key: str) -> None:
    Path("two.yaml").write_text(f"base: scenario.yaml\n{key}\n")
    said = run_sim(capsys, command, "two.yaml")
    assert said.code == 2 and said.error.count("\n") == 1
    assert (
        f"two.yaml: {key.partition(':')[0]}: server_config: all configurations share the one of the base" in said.error
    )
