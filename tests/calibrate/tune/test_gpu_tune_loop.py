"""benchmarks/gpu_tune_loop.py: plan, measure and continue, with a fake backend in place of a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ...conftest import ROOT
from .problems import sweep_tree, write_sweep


def run_script(*words: str) -> str:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_tune_loop.py"), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.slow
def test_one_round_is_planned_measured_and_continued(tmp_path: Path) -> None:
    tree = sweep_tree(requests=12, params={"policy.decode_batch": [4, 16]})
    tree["base"]["workload"]["arrivals"] = {"kind": "burst"}
    tree["base"].pop("profile")
    folder, file = str(tmp_path / "loop"), str(write_sweep(tmp_path, tree))
    top = ["--top", "1", "-j", "1"]
    out = run_script("plan", "-o", folder, "--sweep", file, "--decode-factor", "0.8", *top)
    plan = json.loads((tmp_path / "loop" / "plan.json").read_text())
    assert [name.partition("-")[0] for name in plan] == ["round1"] * len(plan)
    assert "round1-config0-baseline" in plan
    assert f"plan: {folder}/plan.json" in out
    run_script("measure", f"{folder}/plan.json", "-o", str(tmp_path), "--backend", "fake", "--model", "tiny")
    out = run_script("continue", "-o", folder, "--results", str(tmp_path / "results.json.gz"), *top)
    assert out.count("config0-baseline") == 2  # measured now, and in the table
    assert (tmp_path / "loop" / "tuned" / "round-2" / "profile" / "profile.yaml").exists()
