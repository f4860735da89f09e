"""An installed engine in a worker process: a small vLLM in these tests, the real one in test_real_vllm.py."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Optional

import pytest

from ...commands.running import Said, run_sim
from ...events import wait_until
from ...warm import sim
from ..device.running_workers import running_workers
from .running import FAKE, SCENARIO, interpreter, rows

Capture = pytest.CaptureFixture[str]

SCHEDULERS = """
import os
import time
from vllm.v1.core.scheduler import Scheduler

class PreemptsOldest(Scheduler):
    def victim(self):
        return self.running[0]

class ShortestFirst(Scheduler):
    def schedule(self):
        self.waiting.sort(key=lambda request: request.num_prompt_tokens)
        return super().schedule()

class Raises(Scheduler):
    def schedule(self):
        if len(self.running) > 2:
            raise KeyError("no such block")
        return super().schedule()

class Killed(Scheduler):
    def schedule(self):
        if len(self.running) > 2:
            os.kill(os.getpid(), 9)
        return super().schedule()

class Slow(Scheduler):
    def schedule(self):
        time.sleep(600)

class ReadsTheClock(Scheduler):
    def schedule(self):
        assert all(request.arrival_time <= time.time() for request in self.waiting), "the wall clock"
        assert time.monotonic() < 100
        return super().schedule()

class Speculates(Scheduler):
    def schedule(self):
        output = super().schedule()
        for id in output.num_scheduled_tokens:
            if len(self.requests[id].outputs) > 2:
                output.num_scheduled_tokens[id] += 2
                self.requests[id].num_computed_tokens += 2
        return output
"""


NAME_OF_TEST = "SERVESIM_TEST_FOLDER"  # in the environment of a command and of its worker


@pytest.fixture(scope="module")
def fake_vllm(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter with the small vLLM."""
    return interpreter(tmp_path_factory.mktemp("interpreter"))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, fake_vllm: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with scenarios and schedulers."""
    (tmp_path / "own.yaml").write_text(SCENARIO)
    (tmp_path / "own.py").write_text(SCHEDULERS)
    text = SCENARIO.replace("name: vllm-v1", "name: engine, engine: vllm")
    (tmp_path / "engine.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SERVESIM_VLLM_PYTHON", fake_vllm)
    return tmp_path


def run_process(folder: Path, *words: str, **environment: str) -> Said:
    """Run a command in a process of its own, which must leave no worker."""
    done = subprocess.run(
        [sim(), *words], env={**os.environ, NAME_OF_TEST: str(folder), **environment}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert running_workers(NAME_OF_TEST, folder) == []
    return Said(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize("is_async", ["true", "false"])
def test_the_engine_in_the_loop_gives_the_same_requests_as_the_policy(
    folder: Path, capsys: Capture, is_async: str
) -> None:
    setting = ("--set", f"policy.async_scheduling={is_async}")
    ours = run_sim(capsys, "run", "own.yaml", "-o", "ours", "--json", *setting)
    theirs = run_sim(capsys, "run", "engine.yaml", "-o", "theirs", "--json", *setting)
    assert (ours.code, theirs.code) == (0, 0), theirs.error
    assert rows(folder, "ours") == rows(folder, "theirs")
    assert sum(int(row["preemptions"]) for row in rows(folder, "ours")) > 3
    first, second = json.loads(ours.out), json.loads(theirs.out)
    assert {key for key in first if first[key] != second[key]} == set()
    assert "vLLM 0.32.0 decided" in theirs.error and "per second" in theirs.error


def test_clients_that_give_up_when_others_send_a_request_leave_the_engine(folder: Path, capsys: Capture) -> None:
    setting = ("--set", "engine.client_timeout=0.5", "--set", "workload.arrivals={kind: constant, rate: 20}")
    ours = run_sim(capsys, "run", "own.yaml", "-o", "ours", *setting)
    theirs = run_sim(capsys, "run", "engine.yaml", "-o", "theirs", *setting)
    assert (ours.code, theirs.code) == (0, 0), theirs.error
    assert rows(folder, "ours") == rows(folder, "theirs")
    assert {row["outcome"] for row in rows(folder, "ours")} == {"finished", "lost"}


def test_equal_decisions_are_counted_and_stored_and_shown_in_reports(folder: Path, capsys: Capture) -> None:
    result = run_sim(capsys, "policies", "prove", "vllm-v1", "--scenario", "own.yaml", "--store", "proof.json")
    assert result.code == 0, result.error
    proof = json.loads((folder / "proof.json").read_text())
    assert (
        proof["equal"] == proof["steps"] > 100 and proof["preemptions"] > 3 and proof["asynchronous"] == proof["steps"]
    )
    text = f"decisions checked against the installed vLLM 0.32.0: {proof['steps']:,} of {proof['steps']:,} steps"
    assert f"{proof['steps']:,} of {proof['steps']:,} steps equal in 1 scenarios" in result.out
    assert text in run_sim(capsys, "run", "own.yaml", "--set", "proof=proof.json").out
    (folder / "proved.yaml").write_text(SCENARIO + "proof: proof.json\n")
    (folder / "sweep.yaml").write_text(
        "base: proved.yaml\nparams: {policy.max_num_seqs: [4, 12]}\nobjectives: [makespan]\n"
    )
    assert run_sim(capsys, "sweep", "sweep.yaml", "-o", "out", "-j", "1").code == 0
    assert text in (folder / "out" / "report.html").read_text()
    older = run_sim(capsys, "run", "own.yaml", "--set", "proof=proof.json", "--set", "policy.version=0.27.0")
    assert "proof.json is about vllm-v1 0.32.0, not about vllm-v1 0.27.0" in older.out and text not in older.out


def test_a_changed_rule_is_found_at_its_first_decision_with_both_states(folder: Path, capsys: Capture) -> None:
    words = ("--scheduler-cls", "own.py:PreemptsOldest", "--store", "proof.json")
    result = run_sim(capsys, "policies", "prove", "vllm-v1", "--scenario", "own.yaml", *words)
    assert result.code == 3
    found = json.loads((folder / "proof.json").read_text())["difference"]
    assert "preempted" in found["fields"]
    ours = run_sim(capsys, "run", "own.yaml", "--decisions", "log.jsonl")
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert ours.code == 0
    assert found["step"] == next(line["step"] for line in log if line["preempted"])  # the first preemption
    assert found["engine"]["preempted"][0][0] == found["policy"]["running"][0]
    assert "first difference: own.yaml, step" in result.out
    for label in ("batch", "preempted", "free blocks", "waiting", "running"):
        assert f"\n{label} " in result.out


def test_a_scheduler_class_of_the_user_is_swept_against_the_stock_one(folder: Path) -> None:
    (folder / "sweep.yaml").write_text(
        "base: engine.yaml\n"
        "params: {policy.scheduler_cls: [null, own.py:ShortestFirst], policy.max_num_seqs: [4, 12]}\n"
        "objectives: [mean_ttft_ms]\n"
    )
    result = run_process(folder, "sweep", "sweep.yaml", "-o", "out", "-j", "2")
    assert result.code == 0, result.error
    with (folder / "out" / "summary.csv").open() as file:
        means = {
            (row["policy.scheduler_cls"], row["policy.max_num_seqs"]): float(row["mean_ttft_ms"])
            for row in csv.DictReader(file)
        }
    assert len(means) == 4
    for seats in ("4", "12"):
        assert means["own.py:ShortestFirst", seats] < means["", seats]


FAULTS = [
    ("Raises", None, 1, "policy engine: vllm worker: engine_decide failed, KeyError: 'no such block'"),
    ("Killed", None, 1, "died in engine_decide, killed by SIGKILL"),
    ("Speculates", None, 1, "this is not simulated"),
    ("Missing", None, 2, "policy.scheduler_cls: "),
    ("", sys.executable, 2, "cannot import vllm; install it there, or name another interpreter"),
    ("", "/no/python", 2, "--worker-python: cannot run /no/python: No such file"),
    ("", "/bin/false", 1, "died in open, exit code 1"),
]


@pytest.mark.parametrize(("scheduler", "python", "code", "message"), FAULTS)
def test_a_fault_is_one_line_and_leaves_no_process(
    folder: Path, fake_vllm: str, scheduler: str, python: Optional[str], code: int, message: str
) -> None:
    setting = ("--set", f"policy.scheduler_cls=own.py:{scheduler}") if scheduler else ()
    said = run_process(folder, "run", "engine.yaml", "-q", *setting, SERVESIM_VLLM_PYTHON=python or fake_vllm)
    assert (said.code, said.error.count("\n")) == (code, 1), said.error
    assert message in said.error


def test_a_scheduler_file_outside_the_working_folder_needs_trust(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = folder / "inner"
    inner.mkdir()
    (inner / "engine.yaml").write_text((folder / "engine.yaml").read_text())
    setting = ("--set", f"policy.scheduler_cls={folder}/own.py:ShortestFirst")
    monkeypatch.chdir(inner)
    refused = run_sim(capsys, "run", "engine.yaml", "-q", *setting)
    assert refused.code == 2 and "outside the working folder" in refused.error
    assert run_sim(capsys, "run", "engine.yaml", "-q", "--trust", *setting).code == 0


def test_a_scheduler_that_reads_the_clock_sees_the_simulated_time(folder: Path, capsys: Capture) -> None:
    result = run_sim(capsys, "run", "engine.yaml", "-q", "--set", "policy.scheduler_cls=own.py:ReadsTheClock")
    assert result.code == 0, result.error


def test_only_a_policy_with_the_rules_of_the_engine_can_be_proved(folder: Path, capsys: Capture) -> None:
    result = run_sim(capsys, "policies", "prove", "orca", "-q")
    assert result.code == 2 and "possible: vllm-v1 --engine vllm" in result.error
    other = run_sim(capsys, "policies", "prove", "vllm-v1", "-q", "--scenario", "engine.yaml")
    assert other.code == 2 and "engine.yaml: policy.name: expected vllm-v1, got 'engine'" in other.error


@pytest.mark.parametrize(("version", "rules"), [("0.9.1", "0.11.0"), ("0.33.0rc1", "0.32.0")])
def test_a_version_outside_the_known_range_is_named_and_compared_with_the_nearest_rules(
    folder: Path, capsys: Capture, version: str, rules: str
) -> None:
    shutil.copytree(FAKE, folder / "engine")
    init = folder / "engine" / "vllm" / "__init__.py"
    init.write_text(init.read_text().replace("0.32.0", version))
    own = interpreter(folder, folder / "engine")
    said = run_process(folder, "policies", "prove", "vllm-v1", "--scenario", "own.yaml", SERVESIM_VLLM_PYTHON=own)
    reason = "only the rules of 0.11.0 to 0.32.0 are known"
    assert f"warning: vLLM {version} is compared with the rules of {rules}: {reason}" in said.error


def test_a_killed_command_leaves_no_worker(folder: Path) -> None:
    words = ["run", "engine.yaml", "--set", "policy.scheduler_cls=own.py:Slow"]
    command = [sys.executable, "-m", "servesim", *words]
    process = subprocess.Popen(command, env={**os.environ, NAME_OF_TEST: str(folder)})
    try:
        wait_until(lambda: len(running_workers(NAME_OF_TEST, folder)) == 1, "the worker of the command")
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: running_workers(NAME_OF_TEST, folder) == [], "the end of the worker")
