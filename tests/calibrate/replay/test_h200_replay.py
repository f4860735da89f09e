"""The GPU replay benchmark on a fake backend: every recorded run is in the table.

The clock is virtual: a busy machine would delay steps, and a fit rejects times that do not follow from their shapes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pytest
from servesim.calibrate.device.backend import MODELS
from servesim.calibrate.device.fake import FakeBackend

from ...conftest import ROOT
from ..conftest import VirtualTime

COST = {"base": 5e-4, "prefill_token": 2e-6, "decode_row": 1e-5, "context": 1e-8, "swap_block": 1e-5}


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch, virtual_time: VirtualTime) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield
    for name in ("replay_settings", "replay_session", "replay_table"):
        sys.modules.pop(name, None)


@pytest.mark.slow
def test_every_requested_setting_is_in_the_table(
    scripts: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from replay_session import Recorder, ReplaySession, save  # type: ignore[import-not-found]
    from replay_settings import WORKLOADS, runs  # type: ignore[import-not-found]
    from replay_table import compare_all  # type: ignore[import-not-found]

    backend = FakeBackend(COST)
    backend.load(MODELS["tiny"], 3001, 16, 4)
    session = ReplaySession(backend, MODELS["tiny"], argparse.Namespace(blocks=3000, limit=6, no_in_situ=False))
    session.probe.points = session.probe.points[::40]
    session.probe.seconds = {index: [] for index in range(len(session.probe.points))}
    about = {**backend.describe(), "versions": {}, "dtype": "none", "kernels": "none", "date": "today"}
    recorder = Recorder(tmp_path)
    recorder.put("about.json", about)
    planned = runs(["alpaca", "calm"], ["stock", "chunked"])
    assert planned[-1] == ("calm", "stock", True)
    for workload, setting, again in planned:
        session.calibrate_slice()
        result = session.run(setting, workload, session.requests(workload), 4)
        recorder.put(f"{'again/' if again else ''}{workload}/{setting}.json.gz", result)
    save(recorder, session)
    assert compare_all(argparse.Namespace(compare=str(tmp_path), profile=None, write=str(tmp_path / "table.md"))) == 0
    rows = [line.split(" | ")[:2] for line in (tmp_path / "table.md").read_text().splitlines() if line.startswith("| ")]
    for workload in ("alpaca", "calm"):
        settings = [setting for name, setting in rows if name == f"| {workload}"]
        assert settings[:2] == [
            setting for setting in WORKLOADS[workload]["settings"] if setting in ("stock", "chunked")
        ]
        assert settings[-1] == "**run-to-run variation**"
    assert "host" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("workload", ["prefixes", "prefix-burst", "turns", "steps-light", "steps-busy"])
def test_a_recorded_run_has_the_decisions_of_its_simulation(
    workload: str, scripts: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from replay_session import Recorder, ReplaySession
    from replay_settings import WORKLOADS
    from replay_table import compare_all

    settings = WORKLOADS[workload]["settings"]
    backend = FakeBackend(COST)
    backend.load(MODELS["tiny"], 3001, 16, 4)
    session = ReplaySession(backend, MODELS["tiny"], argparse.Namespace(blocks=3000, limit=20, no_in_situ=False))
    recorder = Recorder(tmp_path)
    recorder.put(
        "about.json", {**backend.describe(), "versions": {}, "dtype": "none", "kernels": "none", "date": "now"}
    )
    requests = session.requests(workload)
    results = {setting: session.run(setting, workload, requests, 4) for setting in settings}
    for setting, result in results.items():
        recorder.put(f"{workload}/{setting}.json.gz", result)
    recorder.write()
    profile = "h200-llama2-7b"
    assert compare_all(argparse.Namespace(compare=str(tmp_path), profile=profile, write=None)) == 0
    said = capsys.readouterr().out
    for setting in settings:
        calls = len(results[setting]["told"]["calls"])
        assert f"| {calls} of {calls} |" in said
        assert f"{calls} of {calls} model calls match with measured step times" in said
    if "async" in settings:
        assert count_waiting(results["sync"]) == 0
        assert count_waiting(results["async"]) > calls // 2
        return
    cache = results["vllm-v1"]["told"]["prefix_cache"]
    assert 0 < cache["hits"] < cache["queries"]
    assert f"prefix cache: {cache['hits']} hits in {cache['queries']} tokens" in said
    assert results["no-cache"]["told"]["prefix_cache"] is None


def count_waiting(recorded: dict[str, Any]) -> int:
    """Return the number of model calls that were launched before the call before them had ended."""
    calls = recorded["told"]["calls"]
    return sum(call[1] == before[2] for before, call in zip(calls, calls[1:]))
