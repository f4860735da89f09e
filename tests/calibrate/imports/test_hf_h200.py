"""The step log of a foreign engine (Hugging Face continuous batching on an H200): import, fit, simulate again."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from servesim.cli import main

from ...conftest import ROOT

POLICY = "examples/hf_fifo.py:HuggingFaceFifo"


@pytest.mark.slow  # the fit of a whole profile; test_step_logs.py does the same with a small log
def test_the_run_of_a_foreign_engine_is_simulated_again(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bounds are the stated ones: makespan 2 %, mean TPOT 3 %, mean TTFT 10 %."""
    data = shared / "data" / "measured" / "hf-h200"
    monkeypatch.chdir(ROOT)
    steps = ["calibrate", "import", "steps", str(data / "steps.jsonl.gz"), "--model", "llama2-7b"]
    assert main([*steps, "-o", str(tmp_path / "profile")]) == 0
    command = ["run", "--trace", str(data / "requests.csv"), "--policy", POLICY, "--set", f"profile={tmp_path}/profile"]
    settings = ["--set", "engine.num_blocks=3000", "--set", "engine.block_size=32"]
    assert main([*command, *settings, "-o", str(tmp_path / "run")]) == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text(encoding="utf-8"))
    with open(data / "requests.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    sent, first, end, output = (
        np.array([float(row[key]) for row in rows]) for key in ("arrival_s", "first_token_s", "end_s", "output_tokens")
    )
    assert result["makespan"] == pytest.approx(end.max() - sent.min(), rel=0.02)
    assert result["mean_tpot_ms"] == pytest.approx(1e3 * ((end - first) / (output - 1)).mean(), rel=0.03)
    assert result["mean_ttft_ms"] == pytest.approx(1e3 * (first - sent).mean(), rel=0.10)
    assert result["mean_e2el_ms"] == pytest.approx(1e3 * (end - sent).mean(), rel=0.03)


def test_the_policy_follows_the_contract(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    settings = ["--set", "max_batch_tokens=64", "--set", "max_requests_per_batch=8"]
    for sharing in ("false", "true"):
        command = ["policies", "check", POLICY, *settings, "--set", f"allow_block_sharing={sharing}"]
        assert main(command) == 0, capsys.readouterr()


def test_shared_blocks_are_found_after_the_step_that_fills_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two equal prompts in one step share nothing; later ones find all whole blocks before their last token."""
    monkeypatch.chdir(ROOT)
    rows = ["a,0,100,20,system:96", "b,0,100,20,system:96", "c,0.1,100,20,system:96", "d,0.2,96,20,system:96"]
    trace = tmp_path / "trace.csv"
    trace.write_text("\n".join(["id,arrival_s,prompt_tokens,output_tokens,content", *rows]))
    cost = '{"prefill": 0.01, "prefill_token": 0.0001, "decode_step": 0.01}'
    command = ["run", "--trace", str(trace), "--policy", POLICY, "--set", f"profile={cost}"]
    settings = ["--set", "engine.num_blocks=64", "--set", "engine.block_size=32"]
    settings += ["--set", "policy.allow_block_sharing=true", "-o", str(tmp_path / "run")]
    assert main([*command, *settings]) == 0
    with open(tmp_path / "run" / "requests.csv", encoding="utf-8") as file:
        cached = [int(row["cached_tokens"]) for row in csv.DictReader(file)]
    assert cached == [0, 0, 96, 64]
