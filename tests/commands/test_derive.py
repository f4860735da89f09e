"""`sim calibrate derive` on the command line: the written profile is used and marked, and wrong input is one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from .running import run_sim

CONFIG = {
    "num_hidden_layers": 4, "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128,
    "intermediate_size": 8192, "moe_intermediate_size": 1024, "num_experts": 16, "num_experts_per_tok": 2,
    "vocab_size": 32000,
}  # fmt: skip
SCENARIO = {
    "workload": {"requests": 20, "arrivals": {"kind": "poisson", "rate": 20}, "lengths": {"prompt": 100, "output": 20}},
    "policy": {"name": "vllm-v1"},
    "engine": {"sampling": "top_p"},
}


def test_a_derived_profile_runs_and_every_output_says_that_it_is_derived(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "l40s"
    arguments = ("--model", "Qwen/Qwen3-14B", "--device", "L40S", "--front-end", "0.005", "-o", str(folder))
    said = run_sim(capsys, "calibrate", "derive", *arguments)
    assert said.code == 0 and "derived by arithmetic from h200-llama3.1-8b" in said.out and "KV blocks" in said.out
    assert "verdict: for ranking only" in said.out
    said = run_sim(capsys, "calibrate", "check", str(folder))
    assert said.code == 0 and "derived by arithmetic" in said.out and "every kind of step" in said.out
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text(yaml.safe_dump({**SCENARIO, "profile": str(folder)}), encoding="utf-8")
    said = run_sim(capsys, "run", str(scenario), "-o", str(tmp_path / "run"))
    assert said.code == 0 and "it was not measured" in said.out
    said = run_sim(capsys, "run", str(scenario), "--json")
    assert any("it was not measured" in text for text in json.loads(said.out)["warnings"])


def test_a_model_can_be_given_as_its_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": CONFIG}), encoding="utf-8")
    said = run_sim(capsys, "calibrate", "derive", "--model", str(tmp_path), "-o", str(tmp_path / "out"))
    assert said.code == 0, said.error
    model = yaml.safe_load((tmp_path / "out" / "profile.yaml").read_text(encoding="utf-8"))["model"]
    assert (model["experts"], model["experts_per_token"], model["intermediate"], model["head"]) == (16, 2, 1024, 128)


def test_weights_of_an_unknown_method_are_one_line_with_the_path_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "my_config.json"
    file.write_text(json.dumps({**CONFIG, "quantization_config": {"quant_method": "awq"}}), encoding="utf-8")
    derive = ("calibrate", "derive", "--model", str(file), "--device", "H100", "-o", str(tmp_path / "out"))
    said = run_sim(capsys, *derive)
    assert said.code == 2 and said.error.count("\n") == 1
    assert f"{file}: quantization_config: expected quant_method mxfp4 or fp8, or a precision" in said.error
    assert run_sim(capsys, *derive, "--precision", "int8").code == 0
