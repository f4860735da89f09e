"""Configurations that the real engine refuses at its start: one test before the runs, the reason, and no run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from servesim.study import pilot_runs

from . import sweeps

POLICY = {"name": "vllm-v1", "max_num_seqs": 16}
REASON = "max_num_batched_tokens (64) is below max_num_seqs (128)"
PARAMS = {"policy.max_num_batched_tokens": [64, 512], "policy.max_num_seqs": [32, 128]}
QUICK = ("-j", 1, "-q", "--no-report")


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "runs.jsonl").read_text().splitlines()]


def study_file(folder: Path, **keys: Any) -> Path:
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump({"base": sweeps.base(policy=POLICY), "params": PARAMS, "replications": 2, **keys}))
    return path


@pytest.mark.parametrize("command", ["sweep", "search"])
def test_a_refused_configuration_does_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    keys = {"trials": 12, "sampler": "random"} if command == "search" else {}
    out, file = tmp_path / "out", study_file(tmp_path, **keys)
    assert sweeps.sim(command, file, "-o", out, *QUICK) == 0
    text = capsys.readouterr().out
    assert f"does not start: max_num_batched_tokens=64 max_num_seqs=128: {REASON}" in text and ", 8 runs;" in text
    refused = [line for line in lines(out) if "refused" in line]
    assert [line["refused"] for line in refused] == [[REASON]] * 2 and not any("metrics" in line for line in refused)
    before = (out / "summary.csv").read_bytes()
    assert sweeps.sim(command, file, "-o", out, *QUICK, "--resume") == 0
    assert before == (out / "summary.csv").read_bytes() and len(lines(out)) == 10
    capsys.readouterr()
    assert sweeps.sim("report", out) == 0


def test_no_rate_is_tested_for_a_refused_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pilot_runs, "MIN_REQUESTS", 40)
    monkeypatch.setattr(pilot_runs, "MIN_TURNOVER", 2)
    out = tmp_path / "out"
    words = ("--rates", "2,8", "--precision", "20%", "--subject-to", "p99_ttft_ms <= 200")
    assert sweeps.sim("sweep", study_file(tmp_path), "-o", out, *QUICK, *words) == 0
    text = capsys.readouterr().out
    assert f"max_num_batched_tokens=64 max_num_seqs=128: {REASON}" in text
    [row] = [line for line in text.splitlines() if line.endswith("  does not start")]
    assert row.split()[1:4] == ["does", "not", "start"], "instead of a capacity"
    assert {line["rate"] for line in lines(out) if "refused" in line} == {2.0, 8.0}


def test_a_refused_baseline_is_named_and_the_others_are_ranked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = sweeps.base(policy={"name": "vllm-v1", "max_num_seqs": 128, "max_num_batched_tokens": 64})
    file = study_file(tmp_path, base=base, ci="5%", max_replications=4)
    assert sweeps.sim("sweep", file, "-o", tmp_path / "out", *QUICK) == 0
    assert "; the baseline does not start" in capsys.readouterr().out


def test_a_refused_scenario_is_one_line_in_capacity_compare_and_validate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = {"name": "vllm-v1", "max_num_seqs": 128, "max_num_batched_tokens": 64}
    file = tmp_path / "scenario.yaml"
    file.write_text(yaml.safe_dump(sweeps.base(policy=policy)))
    for words in (("capacity", "--subject-to", "p99_ttft_ms <= 200", "-o", tmp_path / "out"), ("compare", file)):
        assert sweeps.sim(words[0], file, *words[1:], "-j", 1, "-q") == 2
        said = capsys.readouterr()
        assert not said.out and said.err.endswith(f": the real engine does not start: {REASON}\n")
    assert not (tmp_path / "out").exists()
    assert sweeps.sim("config", "validate", file) == 0
    assert capsys.readouterr().out.endswith(f"does not start: {REASON}\n")
