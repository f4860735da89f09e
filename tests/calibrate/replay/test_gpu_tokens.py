"""The token benchmark for GPUs, with a small model on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ...conftest import ROOT


@pytest.mark.slow
def test_answers_are_equal_and_the_broken_allocator_is_found(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_tokens.py"), "--out", str(tmp_path), "--model", "micro"]
    options = ["--device", "cpu", "--requests", "8", "--sample", "3", "--policies", "stock", "vllm-swap", "vllm-v1"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "broken allocator: found" in done.stdout
    results = json.loads((tmp_path / "tokens.json").read_text())
    assert [results["runs"][name]["equal"] for name in ("stock", "vllm-swap", "vllm-v1")] == [3, 3, 3]
    assert results["broken_allocator_found"] is True
