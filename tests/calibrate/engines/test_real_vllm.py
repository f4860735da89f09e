"""The real vLLM of SERVESIM_VLLM_PYTHON: the policy `engine` and `sim policies prove`. `make vllm` installs one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ...commands.running import run_sim
from .running import SCENARIO, rows

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not os.environ.get("SERVESIM_VLLM_PYTHON"), reason="needs SERVESIM_VLLM_PYTHON, an interpreter with vLLM"
    ),
]
SHARED = SCENARIO.replace("enable_prefix_caching: false, ", "").replace(
    "limit: 30", "limit: 30, prefixes: {count: 2, tokens: [10, 40]}"
)
PREEMPTS_OLDEST = """
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import SchedulingPolicy

class PreemptsOldest(AsyncScheduler):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.policy = SchedulingPolicy.PRIORITY

    def add_request(self, request):
        request.priority = -len(self.requests)
        super().add_request(request)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own.yaml").write_text(SHARED)
    (tmp_path / "engine.yaml").write_text(SHARED.replace("name: vllm-v1", "name: engine, engine: vllm"))
    (tmp_path / "own.py").write_text(PREEMPTS_OLDEST)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_real_scheduler_in_the_loop_gives_the_same_requests(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_sim(capsys, "run", "own.yaml", "-o", "ours").code == 0
    theirs = run_sim(capsys, "run", "engine.yaml", "-o", "theirs")
    assert theirs.code == 0, theirs.error
    assert rows(folder, "ours") == rows(folder, "theirs")
    assert sum(int(row["preemptions"]) for row in rows(folder, "ours")) > 3


def test_all_decisions_equal_those_of_the_installed_version(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_sim(capsys, "policies", "prove", "vllm-v1", "--store", "proof.json")
    assert result.code == 0, result.out + result.error
    proof = json.loads((folder / "proof.json").read_text())
    assert proof["equal"] == proof["steps"] >= 10_000 and proof["scenarios"] == 40
    assert min(proof["asynchronous"], proof["cached"], proof["preemptions"]) >= 100
    assert min(proof["drafted"], proof["windowed"]) >= 10_000


def test_a_changed_rule_of_the_real_scheduler_is_found(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--scenario", "own.yaml", "--store", "proof.json")
    result = run_sim(capsys, "policies", "prove", "vllm-v1", *words, "--scheduler-cls", "own.py:PreemptsOldest")
    assert result.code == 3, result.error
    found = json.loads((folder / "proof.json").read_text())["difference"]
    assert found["engine"]["preempted"][0][0] == found["policy"]["running"][0]
