"""A resumed or merged experiment has the same inputs as when it started; names stay inside their folder."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from servesim.calibrate.replay.replay import top_scenarios
from servesim.core import BadInput
from servesim.study.sweep import load_summary, plan_rounds
from servesim.study.sweep_file import read_experiment

from . import sweeps
from .test_search import results, search_file

QUIET = ("-j", 1, "-q", "--no-report")
ROUTER = """from servesim.routers import Router

class First(Router):
    def route(self, request, fleet, random):
        return 0
"""
OWN = "from servesim.policies.llm_serving import LLMServing\n\nclass Mine(LLMServing):\n    pass\n"


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def trace_text(output: int = 5) -> str:
    return "arrival,prompt,output\n" + "".join(f"{k / 4},20,{output + k % 7}\n" for k in range(12))


def write_inputs() -> dict[str, Any]:
    """Write a trace, a policy and a profile; return a scenario that reads them."""
    Path("trace.csv").write_text(trace_text())
    Path("own.py").write_text(OWN)
    Path("costs").mkdir(exist_ok=True)
    Path("costs/profile.yaml").write_text(yaml.safe_dump({"cost": sweeps.COSTS}))
    Path("route.py").write_text(ROUTER)
    Path("pool").mkdir(exist_ok=True)
    Path("pool/profile.yaml").write_text(yaml.safe_dump({"cost": sweeps.COSTS}))
    pools = [{"name": "a", "profile": "pool"}, {"name": "b"}]
    cluster = {"router": "route.py:First", "pools": pools}
    return {"trace": "trace.csv", "policy": {"name": "own.py:Mine"}, "profile": "costs", "cluster": cluster}


CHANGES = {
    "trace trace.csv changed": lambda: Path("trace.csv").write_text(trace_text(6)),
    "trace trace.csv was removed": lambda: Path("trace.csv").unlink(),
    "policy own.py changed": lambda: Path("own.py").write_text(OWN + "\n# changed\n"),
    "profile costs changed": lambda: Path("costs/profile.yaml").write_text(
        yaml.safe_dump({"cost": {**sweeps.COSTS, "decode_step": 0.5}})
    ),
    "profile pool changed": lambda: Path("pool/profile.yaml").write_text(
        yaml.safe_dump({"cost": {**sweeps.COSTS, "decode_step": 0.5}})
    ),
    "router route.py changed": lambda: Path("route.py").write_text(ROUTER + "\n# changed\n"),
}


@pytest.mark.parametrize("command", ["sweep", "search"])
@pytest.mark.parametrize("message", CHANGES)
def test_changed_inputs_are_not_resumed(message: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    if command == "search":
        pytest.importorskip("optuna", reason="needs the extra `search` (optuna)")
    base = write_inputs()
    kinds = {"policy.decode_batch": [2, 4]}
    file = (
        search_file(Path(), base=base, params=kinds, trials=2)
        if command == "search"
        else sweeps.sweep_file(Path(), base=base, params=kinds)
    )
    assert sweeps.sim(command, file, "-o", "out", *QUIET) == 0
    before = {path.name: path.read_bytes() for path in Path("out").iterdir()}
    CHANGES[message]()
    capsys.readouterr()
    assert sweeps.sim(command, file, "-o", "out", "--resume", *QUIET) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"sim: out: {message} since ") and error.count("\n") == 1
    assert {path.name: path.read_bytes() for path in Path("out").iterdir()} == before
    write_inputs()
    assert sweeps.sim(command, file, "-o", "out", "--resume", *QUIET) == 0
    assert sweeps.sim("sweep", "out", *QUIET) == 0 if command == "sweep" else True


@pytest.mark.parametrize("command", ["sweep", "search"])
def test_another_version_and_files_without_digests_do_not_resume(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if command == "search":
        pytest.importorskip("optuna", reason="needs the extra `search` (optuna)")
    file = search_file(Path(), trials=2) if command == "search" else sweeps.sweep_file(Path(), replications=1)
    assert sweeps.sim(command, file, "-o", "out", *QUIET) == 0
    path = Path("out") / ("search.json" if command == "search" else "experiment.json")
    terms = json.loads(path.read_text())
    terms["versions"]["servesim"] = "0.0.9"
    path.write_text(json.dumps(terms))
    capsys.readouterr()
    assert sweeps.sim(command, file, "-o", "out", "--resume", *QUIET) == 2
    assert "0.0.9" in capsys.readouterr().err
    for key, value in (("versions", "0.0.9"), ("inputs", "0.0.9"), ("versions", None)):
        path.write_text(json.dumps({**terms, "versions": {}, key: value}))
        assert sweeps.sim(command, file, "-o", "out", "--resume", *QUIET) == 2
        assert f"{key}: expected" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["../../x", "/tmp/x", "a/b", "..", ".hidden", "", "a\nb", "a # b", "x" * 101, "-x"])
def test_a_name_cannot_leave_its_folder(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweeps.sim("sweep", sweeps.sweep_file(Path(), name=name), *QUIET) == 2
    error = capsys.readouterr().err
    assert "name: expected" in error and error.count("\n") == 1
    assert [path.name for path in Path().iterdir()] == ["sweep.yaml"]


def test_names_and_values_stay_in_the_comments_of_best_yaml() -> None:
    own = "own\nseed: 7\n.py:Mine"
    Path(own.removesuffix(":Mine")).write_text(OWN)
    file = sweeps.sweep_file(Path(), name="knobs 2.1", params={"policy.name": ["llm-serving", own]})
    odd = file.rename("odd\nseed: 9.yaml")
    assert sweeps.sim("sweep", odd, *QUIET) == 0
    file = sweeps.sweep_file(Path(), params={"policy.name": [own], "policy.decode_batch": [8]})
    odd = file.rename("odd\nseed: 9.yaml")
    assert sweeps.sim("sweep", odd, *QUIET) == 0
    assert sorted(path.name for path in Path("runs").iterdir()) == ["knobs 2.1", "odd-seed- 9"]
    for path in Path("runs").glob("*/best.yaml"):
        lines = path.read_text().splitlines()
        assert lines[0].startswith("# The best of ") and lines[1].startswith("# Makespan ")
        assert "seed" not in yaml.safe_load(path.read_text())


def test_the_baseline_gets_as_many_replications_as_the_noisiest_configuration() -> None:
    file = sweeps.sweep_file(Path(), params={"policy.decode_batch": [4]}, ci="1%", replications=3, max_replications=24)
    experiment = read_experiment(file)
    records: dict[tuple[int, int], Any] = {}
    planned: list[tuple[int, int]] = []
    for tasks in plan_rounds(experiment, records):
        planned = [(task.config, task.replication) for task in tasks]
        for config, replication in planned:  # the baseline is constant, the other configuration is not
            makespan = 10.0 if config == 0 else 10.0 + replication % 2
            records[config, replication] = {"metrics": {"makespan": makespan}}
    assert sorted(planned) == [(config, replication) for config in (0, 1) for replication in range(24)]


@pytest.fixture
def _optuna() -> None:
    pytest.importorskip("optuna", reason="needs the extra `search` (optuna)")


def fork_search(file: Path, prepare: Callable[[], None] = lambda: None) -> int:
    """Start a search in a copy of this process, where `prepare` says when it is killed."""
    child = os.fork()
    if child:
        return child
    code = 99
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        prepare()
        code = sweeps.sim("search", file, "-o", "out", "--resume", *QUIET)
    finally:
        os._exit(code)


def kill_after(method: str, call: int) -> None:
    """Kill this process when the study has done this call of `ask` or `tell`."""
    from optuna.study import Study

    original, calls = getattr(Study, method), 0

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        result = original(*args, **options)
        if calls == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(Study, method, counted)


def kill_at(size: int, calls: int) -> None:
    """Kill this process a number of function calls after the journal has this size: anywhere, at any speed."""

    def count(*_: object) -> None:
        nonlocal size, calls
        if written() >= size:
            size, calls = 0, calls - 1
            if calls < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(count)


def status(child: int) -> int:
    """Return the exit status of a process when it has ended."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def written() -> int:
    """Return the bytes of the journal."""
    return os.path.getsize("out/runs.jsonl") if os.path.exists("out/runs.jsonl") else 0


@pytest.mark.slow
@pytest.mark.usefixtures("_optuna")
@pytest.mark.parametrize("sampler", ["tpe", "nsga2"])
def test_a_search_killed_20_times_ends_with_the_files_of_one_that_was_not(sampler: str) -> None:
    base = sweeps.base(workload=sweeps.workload(6))
    file = search_file(Path(), base=base, batch=7, sampler=sampler, trials=60)
    assert sweeps.sim("search", file, "-o", "whole", *QUIET) == 0
    rng = random.Random(11)
    for _ in range(20):
        size, more = written(), rng.randint(0, 1500)
        assert status(fork_search(file, lambda: kill_at(size + more, rng.randint(0, 200)))) == -signal.SIGKILL  # noqa: B023
    assert status(fork_search(file)) == 0
    assert results(Path("out")) == results(Path("whole"))


@pytest.mark.usefixtures("_optuna")
@pytest.mark.parametrize("sampler", ["tpe", "nsga2"])
def test_a_search_killed_inside_a_batch_ends_with_the_files_of_one_that_was_not(sampler: str) -> None:
    base = sweeps.base(workload=sweeps.workload(6))
    file = search_file(Path(), base=base, batch=7, sampler=sampler, trials=30)
    assert sweeps.sim("search", file, "-o", "whole", *QUIET) == 0
    for method, call in (("ask", 3), ("tell", 4), ("tell", 7), ("ask", 10), ("tell", 9), ("ask", 14), ("tell", 2)):
        assert status(fork_search(file, lambda: kill_after(method, call))) == -signal.SIGKILL  # noqa: B023
    assert status(fork_search(file)) == 0
    assert results(Path("out")) == results(Path("whole"))


@pytest.mark.parametrize("command", ["sweep", "search"])
def test_an_experiment_continues_and_reports_from_another_working_folder(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its trace is named by a path that starts at the first working folder."""
    if command == "search":
        pytest.importorskip("optuna", reason="needs the extra `search` (optuna)")
    first, other = tmp_path / "project", tmp_path / "elsewhere" / "deep"
    (first / "inputs").mkdir(parents=True)
    other.mkdir(parents=True)
    (first / "inputs" / "trace.csv").write_text(trace_text(5))
    base = {key: value for key, value in sweeps.base(trace="trace.csv").items() if key != "workload"}
    folder = first / "inputs"
    file = search_file(folder, trials=2, base=base) if command == "search" else sweeps.sweep_file(folder, base=base)
    monkeypatch.chdir(first)
    assert sweeps.sim(command, file.relative_to(first), "-o", "out", *QUIET) == 0
    assert json.loads((first / "out" / "experiment.json").read_text())["working_folder"] == ".."
    kept = ("summary.csv", "best.yaml", *(["experiment.json"] if command == "sweep" else []))
    files = {name: (first / "out" / name).read_bytes() for name in kept}
    monkeypatch.chdir(other)
    out = os.path.relpath(first / "out")
    assert sweeps.sim(command, os.path.relpath(file), "-o", out, "--resume", *QUIET) == 0
    assert command == "search" or sweeps.sim("sweep", out, *QUIET) == 0
    assert {name: (first / "out" / name).read_bytes() for name in files} == files
    capsys.readouterr()
    assert sweeps.sim("report", out) == 0 and sweeps.sim("compare", f"{out}:0", out) == 0
    page = (first / "out" / "report.html").read_text()
    assert '"cdf-0"' in page and '"queues-baseline"' in page  # they need the trace
    assert [scenario.trace.path for _, scenario in top_scenarios(Path(out), 2, True)] == [
        os.path.relpath(first / "inputs" / "trace.csv")
    ] * 2  # fmt: skip


def test_an_experiment_without_files_does_not_name_its_working_folder(tmp_path: Path) -> None:
    assert sweeps.sim("sweep", sweeps.sweep_file(tmp_path, replications=1), "-o", tmp_path / "out", *QUIET) == 0
    assert "working_folder" not in (tmp_path / "out" / "experiment.json").read_text()
    text = (tmp_path / "out" / "experiment.json").read_text()
    (tmp_path / "out" / "experiment.json").write_text(text.replace("{", '{"working_folder": 3,', 1))
    with pytest.raises(BadInput, match="working_folder: expected a path, got 3"):
        load_summary(tmp_path / "out")
