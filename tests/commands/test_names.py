"""--model and --device on the commands that run scenarios, and `sim models`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from servesim.config.layers import read_scenario_file
from servesim.config.scenario import scenario_from
from servesim.costs.public_devices import DEVICES
from servesim.explorer.state import Origin

from .running import run_sim

WORKLOAD = {"requests": 20, "arrivals": {"kind": "poisson", "rate": 4}, "lengths": {"prompt": 100, "output": 20}}
BASE = {
    "policy": {"name": "vllm-v1"},
    "workload": WORKLOAD,
    "engine": {"device_memory": "H200"},
    "profile": "h200-llama2-7b",
}
NAMES = ("--model", "Llama-3.1-8B", "--device", "L40S")
KEYS = {"model": "Llama-3.1-8B", "device": "L40S"}


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text(yaml.safe_dump(BASE), encoding="utf-8")
    return "base.yaml"


def test_run_has_the_step_times_and_the_memory_of_the_device(base: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = run_sim(capsys, "run", base, *NAMES, "--tensor-parallel", "2", "--precision", "fp8")
    assert said.code == 0 and "l40s-tp2-llama-3.1-8b-float8 was derived" in said.out
    assert "0.9 * 48.3 GB - 4.01 GB weights" in said.error
    said = run_sim(capsys, "run", base, *NAMES, "--set", "engine.num_blocks=500", "--set", "engine.device_memory=null")
    assert said.code == 0 and "engine.num_blocks" not in said.error
    assert "device A100: A100-80GB" in run_sim(capsys, "run", base, "--device", "A100").error


def test_all_commands_take_the_published_precision(base: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The matrices and embeddings of gpt-oss-120b have 116.8e9 weights, of 17 / 32 bytes in mxfp4."""
    names, weights = ("--model", "gpt-oss-120b", "--device", "H200"), "62.0 GB weights of gpt-oss-120b"
    said = run_sim(capsys, "run", base, *names)
    assert said.code == 0 and weights in said.error and "h200-gpt-oss-120b-mxfp4 was derived" in said.out
    said = run_sim(capsys, "calibrate", "derive", *names, "-o", "derived")
    assert said.code == 0 and weights in said.out
    assert run_sim(capsys, "config", "init", "first.yaml", *names).code == 0
    assert weights in run_sim(capsys, "run", "first.yaml").error
    assert "--quantization" not in run_sim(capsys, "export", "first.yaml", "--to", "vllm").out  # it is in config.json
    assert "234 GB weights" in run_sim(capsys, "run", base, *names, "--precision", "bf16").error


def test_profile_says_what_the_names_are_derived_from(base: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = run_sim(capsys, "run", base, "--profile", "ascend910b4-llama2-7b", "--model", "qwen2.5-7b")
    assert said.code == 0 and "derived by arithmetic from ascend910b4-llama2-7b (other model)" in said.out


def test_the_winner_of_a_sweep_and_the_scenario_of_a_capacity_have_the_names(
    base: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("sweep.yaml").write_text("base: base.yaml\nparams: {policy.max_num_seqs: [2, 64]}\n", encoding="utf-8")
    commands = {
        "sweep": ("sweep.yaml", "--set", "profile.precision=fp8"),
        "capacity": (base, "--subject-to", "p99_ttft_ms <= 5000", "--rates", "4,8"),
    }
    for command, words in commands.items():
        said = run_sim(capsys, command, *words, *NAMES, "-o", command, "--no-report", "-j", "1", "--quiet")
        assert said.code == 0, said.error
        best = scenario_from(read_scenario_file(Path(command) / "best.yaml"))
        precision = {"precision": "fp8"} if command == "sweep" else {}
        assert best.profile == {**KEYS, **precision}
        assert best.engine.device_memory == DEVICES["L40S"].memory


def test_the_first_scenario_names_them_and_has_the_defaults_of_the_device(capsys: pytest.CaptureFixture[str]) -> None:
    for device, slots in (("H100", 1024), ("L40S", 256)):
        said = run_sim(capsys, "config", "init", "--model", "llama-3.1-8b", "--device", device)
        tree = yaml.safe_load(said.out)
        assert tree["profile"] == {"model": "llama-3.1-8b", "device": device}
        assert tree["policy"]["max_num_seqs"] == slots
        assert "device_memory" not in tree["engine"]
        assert scenario_from(tree).engine.device_memory == DEVICES[device].memory


@pytest.mark.parametrize("file", [None, "base.yaml"])
def test_a_page_opens_with_them(base: str, file: str | None) -> None:
    origin = Origin(file)
    choice = origin.first_state(settings={"profile": json.dumps(KEYS)})
    _, scenario = origin.scenario(choice)
    assert isinstance(scenario.profile, dict) and scenario.profile["device"] == "L40S"
    assert scenario.engine.device_memory == DEVICES["L40S"].memory


def test_the_list_has_every_public_model_and_device(capsys: pytest.CaptureFixture[str]) -> None:
    listed = json.loads(run_sim(capsys, "models", "--json").out)
    assert listed["devices"].keys() == DEVICES.keys() and "micro" not in listed["models"]
    sizes = {"parameters": 8_029_995_008, "layers": 32, "context": 131072}
    assert listed["models"]["llama-3.1-8b"] == {**sizes, "precision": "bfloat16"}
    assert {name for name, model in listed["models"].items() if model["precision"] == "mxfp4"} == {
        "gpt-oss-20b",
        "gpt-oss-120b",
    }
