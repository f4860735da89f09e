"""Mutated inputs of every command: no traceback, no hang, no partial file. benchmarks/fuzz.py tries 20,000 of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from servesim import cli

from .conftest import ROOT

BENCHMARKS = ROOT / "benchmarks"


@pytest.mark.slow
def test_500_mutated_inputs_are_accepted_or_rejected_with_one_line() -> None:
    command = [sys.executable, str(BENCHMARKS / "fuzz.py"), "--count", "500", "--hang", "300"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


LONG = "x" * 300
BY_FUZZING = {
    "a long name of a trace": ["trace", "inspect", LONG],
    "a long name of an output folder": ["run", "-X", "1", "-T", "2", "-o", LONG],
    "a long name of a profile": ["calibrate", "check", "x" * 5000],
    "a trace without a path": ["calibrate", "logs", "runs.yaml"],
    "a journal that is a FIFO": ["report", "swept"],
    "tables that are a FIFO": ["calibrate", "import", "vidur", "fifo.npz", "-o", "out"],
    "a number as a key": ["capacity", "number.yaml", "--subject-to", "makespan<=1", "-j", "1", "-q"],
}


@pytest.mark.parametrize("argv", BY_FUZZING.values(), ids=BY_FUZZING)
def test_inputs_found_by_fuzzing_are_rejected_with_one_line(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = "{name: a, log: a.csv, scenario: {trace: {limit: 3}}}"
    Path("runs.yaml").write_text(f"cost: {{kind: linear, base: 0.1}}\nfree: [base]\nruns: [{run}]\n")
    Path("a.csv").write_text("ttft_s,e2e_s\n0.1,0.2\n")
    os.mkfifo("fifo.npz")
    Path("number.yaml").write_text("workload: {contest: {X: 1, T: 2}}\nengine: {31: 5, num_blocks: 64}\n")
    base = "{workload: {contest: {X: 1, T: 2}}}"
    Path("sweep.yaml").write_text(f"base: {base}\nparams: {{policy.decode_batch: [1, 2]}}\n")
    if argv[0] == "report":
        assert cli.main(["sweep", "sweep.yaml", "-o", "swept", "-j", "1", "-q", "--no-report"]) == 0
        capsys.readouterr()
        Path("swept/runs.jsonl").unlink()
        os.mkfifo("swept/runs.jsonl")
    before = sorted(tmp_path.iterdir())
    assert cli.main(argv) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("sim: ") and len(lines) == 1, lines
    assert sorted(tmp_path.iterdir()) == before


def test_a_sweep_in_which_no_request_is_served_writes_its_report_and_says_that_there_is_no_winner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    base = "{workload: {contest: {X: 1, T: 3}}, engine: {client_timeout: 0.000001}}"
    Path("sweep.yaml").write_text(f"base: {base}\nparams: {{policy.decode_batch: [1, 2]}}\n")
    assert cli.main(["sweep", "sweep.yaml", "-o", "out", "-j", "1", "-q"]) == 1
    assert "value of mean_ttft_ms, for example because no request finished" in capsys.readouterr().out
    page = Path("out/report.html").read_text()
    assert 'cx="nan"' not in page
