"""The GPU benchmarks of sampling and of tokens, without a GPU."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from servesim.calibrate.device.backend import MODELS
from servesim.calibrate.device.fake import FakeBackend

from ...conftest import ROOT

COST = {"base": 4e-3, "prefill_token": 2e-6, "decode_row": 1e-5, "context": 1e-8, "swap_block": 1e-5}
TERMS = {"device": {"step": 5e-4, "row": 0.0}, "host": {"step": 4e-3, "row": 1e-4}}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu_sampling

    monkeypatch.setattr(gpu_sampling, "load", load)
    yield gpu_sampling
    for name in ("gpu_sampling", "h200_replay", "replay_settings", "replay_session", "replay_table"):
        sys.modules.pop(name, None)


def load(args: argparse.Namespace, variant: str) -> Any:
    """Return a session on a fake backend."""
    from replay_session import ReplaySession  # type: ignore[import-not-found]

    backend = FakeBackend(COST, sampling=variant, sampling_terms=TERMS)
    backend.load(MODELS["tiny"], args.blocks + 1, 16, 4)
    return ReplaySession(
        backend, MODELS["tiny"], argparse.Namespace(blocks=args.blocks, limit=args.limit, no_in_situ=False)
    )


@pytest.mark.live
def test_both_variants_are_measured_and_compared(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--blocks", "400", "--limit", "10", "--repeats", "1", "--rows", "8", "--points", "10"]
    monkeypatch.setattr(sys, "argv", ["gpu_sampling.py", "--out", str(tmp_path), *words])
    assert script.main() == 0
    table = tmp_path / "table.md"
    monkeypatch.setattr(sys, "argv", ["gpu_sampling.py", "--compare", str(tmp_path), "--write", str(table)])
    assert script.main() == 0
    text = table.read_text(encoding="utf-8")
    rows = re.findall(r"^\| (alpaca|calm) \| (device|host) \| 1 \|", text, re.MULTILINE)
    assert rows == [("alpaca", "device"), ("alpaca", "host"), ("calm", "device"), ("calm", "host")]
    gains = re.findall(r"^\| alpaca \| (?:measured|simulated) \| (\S+) %", text, re.MULTILINE)
    assert len(gains) == 2
    assert all(float(gain) < -10 for gain in gains)  # the device variant is faster in both
    printed = capsys.readouterr().out
    section = json.loads(next(line for line in printed.splitlines() if line.startswith("sampling: "))[10:])
    assert section["used"] == "device"
    assert section["terms"]["host"]["step"] > 2 * section["terms"]["device"]["step"]


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
