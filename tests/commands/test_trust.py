"""Policies in files are code: only commands that run scenarios execute it, outside the working folder with --trust."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Callable

import pytest
import servesim
from servesim.cli import main
from servesim.config.user_code import allow_code, load_module
from servesim.core import BadInput
from servesim.study.single_run import Task, context_json, run_tasks

from ..conftest import ROOT
from .running import Said, run_sim

EXAMPLE = (ROOT / "examples" / "my_policy.py").read_text(encoding="utf-8")
WORKLOAD = "workload: {requests: 3, arrivals: {kind: burst}, lengths: {prompt: 8, output: 2}}\n"
COST = "profile: {base: 0.001}\n"
WORKLOAD_TREE = {"workload": {"requests": 3, "arrivals": {"kind": "burst"}, "lengths": {"prompt": 8, "output": 2}}}
READING = (
    ("config", "validate", "scenario.yaml"), ("config", "schema"), ("report", "out"), ("plot", "out", "-o", "plots"),
    ("verify", "replayed/sim", "replayed/live"), ("compare", "run", "run"), ("compare", "out:0", "out:1"),
)  # fmt: skip
RUNNING = (
    ("run", "scenario.yaml"), ("sweep", "sweep.yaml", "-j", "1", "-q", "-o", "new"), ("sweep", "out", "-q", "-j", "1"),
    ("search", "search.yaml", "-j", "1", "-q", "-o", "new"),
    ("capacity", "scenario.yaml", "--subject-to", "makespan<=9"),
    ("compare", "scenario.yaml", "scenario.yaml", "-j", "1"), ("replay", "scenario.yaml", "--backend", "fake"),
    ("replay", "--from", "out/best.yaml", "--backend", "fake"), ("replay", "--from", "out", "--backend", "fake"),
    ("serve", "scenario.yaml", "--backend", "fake", "--port", "0"), ("policies", "show", "POLICY"),
    ("policies", "check", "POLICY"),
)  # fmt: skip


class Place:
    """A folder with a policy file that leaves a mark when it is executed."""

    def __init__(self, folder: Path) -> None:
        self.mark = folder / "executed"
        self.work, self.other = folder / "work", folder / "other"
        for part in (self.work, self.other):
            part.mkdir(parents=True)
            (part / "mine.py").write_text(f"{EXAMPLE}\nopen({str(self.mark)!r}, 'w').close()\n")
        self.write("mine.py:Gather")

    def write(self, policy: str) -> None:
        """Write a scenario, a sweep and a search that name a policy."""
        scenario = f"policy: {{name: '{policy}'}}\n{WORKLOAD}{COST}"
        (self.work / "scenario.yaml").write_text(scenario)
        sweep = "base: scenario.yaml\nparams: {policy.batch: [4, 8]}\n"
        (self.work / "sweep.yaml").write_text(sweep)
        (self.work / "search.yaml").write_text(sweep + "trials: 2\n")

    def forget(self) -> None:
        """Forget that the policy file was executed."""
        load_module.cache_clear()
        self.mark.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Folders of runs, sweeps and a replay of a user's policy."""
    place = Place(tmp_path_factory.mktemp("results"))
    before = os.getcwd()
    os.chdir(place.work)
    try:
        quick = ("-j", "1", "-q", "--no-report")
        for line in (
            ("run", "scenario.yaml", "-o", "run"), ("sweep", "sweep.yaml", *quick, "-o", "out"),
            ("replay", "scenario.yaml", "--backend", "fake", "--warm-up", "1", "-o", "replayed", "--quiet"),
        ):  # fmt: skip
            assert main(line) == 0, line
    finally:
        os.chdir(before)
    return place


@pytest.fixture
def place(results: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A copy of the folders, as the working folder."""
    place = Place(tmp_path / "place")
    shutil.copytree(results.work, place.work, dirs_exist_ok=True)
    (place.work / "mine.py").write_text((place.other / "mine.py").read_text())
    monkeypatch.chdir(place.work)
    place.forget()
    return place


@pytest.fixture
def sim(capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    """Return a function that runs `sim`."""

    return lambda *args: run_sim(capsys, *args)


def move_outside(place: Place) -> str:
    """Let all files of the working folder name a policy file outside of it; return its name."""
    outside = f"{place.other / 'mine.py'}:Gather"
    (place.work / "mine.py").unlink()
    for file in (place.work / "out" / "experiment.json", place.work / "out" / "best.yaml"):
        text = file.read_text().replace("../mine.py:Gather", "mine.py:Gather")  # best.yaml: relative to its folder
        file.write_text(text.replace("mine.py:Gather", outside))
    place.write(outside)
    return outside


@pytest.mark.parametrize("line", READING, ids=" ".join)
def test_reading_executes_no_policy(line: Sequence[str], place: Place, sim: Callable[..., Said]) -> None:
    said = sim(*line)
    assert said.code == 0, said.error
    assert not place.mark.exists()


@pytest.mark.parametrize("line", RUNNING, ids=" ".join)
def test_policy_outside_the_folder_needs_trust(line: Sequence[str], place: Place, sim: Callable[..., Said]) -> None:
    outside = move_outside(place)
    journal = (place.work / "out" / "runs.jsonl").read_bytes()
    said = sim(*(outside if word == "POLICY" else word for word in line))
    assert (said.code, said.error.count("\n")) == (2, 1), said.error
    assert f"{place.other / 'mine.py'} is outside the working folder" in said.error
    assert "use --trust" in said.error
    assert not place.mark.exists()
    assert not (place.work / "new").exists()
    assert (place.work / "out" / "runs.jsonl").read_bytes() == journal, "a refused run was recorded"


def test_search_over_policies_is_refused_before_the_first_trial(place: Place, sim: Callable[..., Said]) -> None:
    pytest.importorskip("optuna", reason="needs the extra `search` (optuna)")
    listed = "base: scenario.yaml\nparams: {policy.name: [orca, '../other/mine.py:Gather']}\ntrials: 2\n"
    (place.work / "scenario.yaml").write_text(WORKLOAD + COST)
    (place.work / "search.yaml").write_text(listed)
    said = sim("search", "search.yaml", "-j", "1", "-q", "-o", "new")
    assert (said.code, said.error.count("\n")) == (2, 1), said.error
    assert "is outside the working folder" in said.error
    assert not place.mark.exists()
    assert not (place.work / "new").exists()
    assert sim("search", "search.yaml", "-j", "1", "-q", "-o", "new", "--trust").code == 0


def test_links_do_not_lead_outside(place: Place, sim: Callable[..., Said]) -> None:
    (place.work / "link.py").symlink_to(place.other / "mine.py")
    for name in ("link.py:Gather", "../other/mine.py:Gather"):
        said = sim("run", "scenario.yaml", "--policy", name)
        assert (said.code, place.mark.exists()) == (2, False)
        assert f"{place.other / 'mine.py'} is outside the working folder" in said.error


def test_trust_reaches_worker_processes(place: Place, sim: Callable[..., Said]) -> None:
    outside = move_outside(place)
    (place.work / "out" / "runs.jsonl").unlink()
    assert sim("sweep", "out", "-j", "2", "-q", "--trust", "--no-report").code == 0
    records = [json.loads(line) for line in (place.work / "out" / "runs.jsonl").read_text().splitlines()]
    assert {record.get("error") for record in records} == {None}
    assert place.mark.exists()
    said = sim("replay", "scenario.yaml", "--backend", "fake", "--warm-up", "0", "--quiet", "--trust")
    assert said.code == 0, said.error
    assert sim("policies", "show", outside, "--trust").code == 0


def test_permission_is_part_of_the_task(place: Place) -> None:
    """Workers of a dask cluster run tasks in threads of other processes, in other folders."""
    tree = {"policy": {"name": "mine.py:Gather"}, **WORKLOAD_TREE}
    denied = context_json(tree)
    with allow_code():
        allowed = context_json(tree)
    os.chdir(place.other)
    with ThreadPoolExecutor(1) as thread:
        with allow_code(trust=True):
            assert "not loaded" in thread.submit(run_tasks, denied, [Task(0, 0, {})]).result()[0]["error"]
        assert not place.mark.exists()
        assert "error" not in thread.submit(run_tasks, allowed, [Task(0, 0, {})]).result()[0]


def test_python_functions_have_the_same_rule(place: Place) -> None:
    outside = f"{place.other / 'mine.py'}:Gather"
    calls: list[Callable[[bool], object]] = [
        lambda trust: servesim.run("scenario.yaml", policy=outside, trust=trust),
        lambda trust: servesim.sweep("sweep.yaml", base={"policy": outside}, trust=trust),
        lambda trust: servesim.replay("scenario.yaml", backend="fake", settings={"policy.name": outside}, trust=trust),
        lambda trust: servesim.load("out").run(trust=trust),  # type: ignore[union-attr, call-arg]
        lambda trust: servesim.compare("scenario.yaml", "scenario.yaml", replications=1, trust=trust),
        lambda trust: servesim.check("scenario.yaml", subject_to="makespan <= 9", replications=1, trust=trust),
        lambda trust: servesim.capacity("scenario.yaml", subject_to="makespan <= 9", trust=trust),
        lambda trust: servesim.search("search.yaml", trust=trust),
    ]
    move_outside(place)
    (place.work / "sweep.yaml").write_text("params: {policy.batch: [4, 8]}\n")
    for call in calls:
        with pytest.raises(BadInput, match="outside the working folder"):
            call(False)
    assert not place.mark.exists()
    assert servesim.run("scenario.yaml", trust=True).metrics["completed"] == 3
    assert place.mark.exists()


def test_policy_objects_need_no_permission(place: Place) -> None:
    from servesim.policies import POLICIES

    done = servesim.run(WORKLOAD_TREE, policy=POLICIES["orca"]())
    assert done.metrics["completed"] == 3
