"""Bad input: one line with the file, the key and the expected value; exit code 2; no incomplete files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Callable

import pytest

from .running import Said, run_sim

GOOD = "workload: {contest: {X: 5, T: 2}}\npolicy: {name: llm-serving, decode_batch: 4}\n"

SCENARIOS = {
    "an unknown key": (GOOD + "engin: {}\n", "engin: unknown key; known: name, trace, workload, policy"),
    "an unknown key inside": (GOOD + "engine: {num_bloks: 3}\n", "engine.num_bloks: unknown key; known: num_blocks"),
    "a wrong type": (GOOD + "engine: {num_blocks: many}\n", "engine.num_blocks: expected a valid integer"),
    "zero blocks": (GOOD + "engine: {num_blocks: 0}\n", "engine.num_blocks: expected greater than 0, got 0"),
    "only the null block": (
        GOOD + "engine: {num_blocks: 1}\n",
        "engine.num_blocks: expected more than 1 (reserved by this engine), got 1",
    ),
    "a policy field out of range": (GOOD.replace("4}", "0}"), "policy.decode_batch: expected at least 1, got 0"),
    "a policy field of a wrong type": (GOOD.replace("4}", "four}"), "policy.decode_batch: expected int, got 'four'"),
    "a policy field not a number": (
        GOOD.replace("decode_batch: 4", "delay_factor: .nan"),
        "policy.delay_factor: expected",
    ),
    "an unknown policy field": (GOOD.replace("decode_batch", "decode_bach"), "policy.decode_bach: unknown key"),
    "an unknown policy": (GOOD.replace("llm-serving", "lm-serving"), "no policy 'lm-serving'; known: vllm-v1"),
    "an unknown choice": (
        GOOD.replace("decode_batch: 4", "victim: tallest"),
        "policy.victim: expected one of shortest",
    ),
    "a policy file that is not there": (GOOD.replace("llm-serving", "mine.py:Mine"), "mine.py: no such file"),
    "an unknown preset": (GOOD + "preset: missing\n", "preset 'missing': no such preset; known:"),
    "an unknown profile": (GOOD + "profile: abacus\n", "profile abacus: no such bundled profile"),
    "an unknown cost": (GOOD + "profile: {prefil: 1}\n", "profile.prefil: unknown key; known: base, prefill"),
    "a cost that is no number": (GOOD + "profile: {prefill: soon}\n", "profile.prefill: expected a number of seconds"),
    "invalid YAML": ("policy: {name: [\n", "not valid YAML"),
    "a list": ("- 1\n", "expected a mapping of scenario keys, got list"),
    "an empty file": ("", "expected a mapping of scenario keys, got an empty file"),
    "trace and workload": (GOOD + "trace: x.csv\n", "expected one of trace and workload, got both"),
    "neither": ("policy: llm-serving\n", "expected a trace or a workload, got neither"),
    "a trace that is not there": ("trace: nowhere.csv\n", "nowhere.csv"),
}

TRACES = {
    "a negative length": ("arrival_s,prompt_tokens,output_tokens\n0,5,5\n1,-3,5\n", "3"),
    "an arrival that is no number": ("arrival_s,prompt_tokens,output_tokens\n0,5,5\nnan,3,5\n", "3"),
    "an unsorted trace": ("arrival_s,prompt_tokens,output_tokens\n1,5,5\n0,3,5\n", "3"),
    "no rows": ("arrival_s,prompt_tokens,output_tokens\n", "no"),
    "an empty file": ("", "empty"),
}


@pytest.fixture
def sim(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., Said]:
    """Return a function that runs `sim` in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return lambda *args: run_sim(capsys, *args)


def assert_one_clear_line(said: Said, expected: str) -> None:
    assert said.code == 2, said.error
    assert len(said.error.strip().splitlines()) == 1
    assert expected in said.error


@pytest.mark.parametrize("case", SCENARIOS)
def test_bad_scenario_gives_one_line(case: str, tmp_path: Path, sim: Callable[..., Said]) -> None:
    text, expected = SCENARIOS[case]
    (tmp_path / "scenario.yaml").write_text(text)
    result = sim("run", "scenario.yaml", "-o", "out", "--decisions", "log.jsonl")
    assert_one_clear_line(result, expected)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["scenario.yaml"], "something was half-written"


@pytest.mark.parametrize("case", TRACES)
def test_bad_trace_gives_one_line_with_the_row(case: str, tmp_path: Path, sim: Callable[..., Said]) -> None:
    text, expected = TRACES[case]
    (tmp_path / "trace.csv").write_text(text)
    result = sim("run", "--trace", "trace.csv", "-o", "out")
    assert_one_clear_line(result, expected)
    assert "trace.csv" in result.error
    assert not (tmp_path / "out").exists()


def test_missing_scenario_gives_one_line(tmp_path: Path, sim: Callable[..., Said]) -> None:
    assert_one_clear_line(sim("run", "nowhere.yaml"), "nowhere.yaml: no such file")


@pytest.mark.parametrize("setting", ["policy.delay_factor", "=3", "engine.num_blocks=[1"])
def test_bad_setting_gives_one_line(setting: str, sim: Callable[..., Said]) -> None:
    assert_one_clear_line(sim("run", "-X", "5", "-T", "2", "--set", setting), f"--set {setting}")


def test_output_folder_that_is_a_file_gives_one_line(tmp_path: Path, sim: Callable[..., Said]) -> None:
    (tmp_path / "out").write_text("mine")
    assert_one_clear_line(sim("run", "-X", "5", "-T", "2", "-o", "out"), "expected a folder")
    assert (tmp_path / "out").read_text() == "mine"


def test_command_exits_with_2_and_no_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "servesim", "run", "nowhere.yaml"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr == "sim: nowhere.yaml: no such file\n"
