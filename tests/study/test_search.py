"""Search: Optuna trials on the simulator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from servesim.study.executor import Serial
from servesim.study.ranking import Summary
from servesim.study.sweep import load_summary, sweep
from servesim.study.sweep_file import read_experiment

from ..study import sweeps


def search_file(folder: Path, **keys: Any) -> Path:
    params = {"policy.decode_batch": {"integers": [1, 32]}, "policy.order": ["arrival", "longest-output"]}
    path = folder / "search.yaml"
    tree = {"base": sweeps.base(), "params": params, "objectives": ["makespan"], "trials": 24, **keys}
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return path


def trials(folder: Path) -> list[tuple[int, str, Any]]:
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    storage = JournalStorage(JournalFileBackend(str(folder / "study.journal")))
    study = optuna.load_study(study_name="search", storage=storage)
    done = [t for t in study.get_trials() if t.state.name != "FAIL"]
    return [(k, t.state.name, (tuple(t.params.items()), t.values)) for k, t in enumerate(done)]


@pytest.fixture(autouse=True)
def _library() -> None:
    pytest.importorskip("optuna", reason="needs the extra `search` (optuna)")


def test_a_search_comes_within_1_percent_of_the_full_grid_and_writes_the_files_of_a_sweep(tmp_path: Path) -> None:
    assert sweeps.sim("search", search_file(tmp_path), "-o", tmp_path / "out", "-j", 1, "-q") == 0
    grid = {"policy.decode_batch": {"range": [1, 32], "step": 1}, "policy.order": ["arrival", "longest-output"]}
    experiment = read_experiment(sweeps.sweep_file(tmp_path, params=grid, replications=1))
    exhaustive = Summary(experiment, sweep(experiment, tmp_path / "all", Serial())).rows[0].mean("makespan")
    assert load_summary(tmp_path / "out").rows[0].mean("makespan") <= 1.01 * exhaustive
    assert sweeps.sim("run", tmp_path / "out/best.yaml") == 0
    assert sweeps.sim("report", tmp_path / "out") == 0
    journal = [json.loads(line) for line in (tmp_path / "out/runs.jsonl").read_text().splitlines()]
    keys = [(json.dumps(run["assignment"], sort_keys=True), run["replication"]) for run in journal]
    assert len(keys) == len(set(keys)), "a configuration was run twice"


def test_a_resumed_search_proposes_the_same_trials(tmp_path: Path) -> None:
    file = search_file(tmp_path, trials=24, batch=4)
    assert sweeps.sim("search", file, "-o", tmp_path / "whole", "-j", 1, "-q", "--no-report") == 0
    from servesim.study import optuna_search as module

    original = module.run_batch
    calls = 0

    def interrupted(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            study, space = args[1], args[0].space
            study.ask(space)  # stays running, as after a kill
            raise KeyboardInterrupt
        original(*args)

    module.run_batch = interrupted
    try:
        assert sweeps.sim("search", file, "-o", tmp_path / "parts", "-j", 1, "-q", "--no-report") == 130
    finally:
        module.run_batch = original
    assert sweeps.sim("search", file, "-o", tmp_path / "parts", "-j", 1, "-q", "--no-report", "--resume") == 0
    assert trials(tmp_path / "parts") == trials(tmp_path / "whole")
    for name in ("runs.jsonl", "summary.csv", "best.yaml"):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_several_objectives_give_a_front(tmp_path: Path) -> None:
    file = search_file(tmp_path, objectives=["makespan", "mean_tpot_ms"])
    assert sweeps.sim("search", file, "-o", tmp_path / "out", "-j", 1, "-q", "--no-report") == 0
    assert len((tmp_path / "out/pareto.csv").read_text().splitlines()) >= 3


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"params": {}}, "params: expected at least one key to search over"),
        ({"params": {"policy.decode_batch": {"integers": [1]}}}, "expected [low, high], got [1]"),
        ({"params": {"policy.decode_batch": {"normal": [1, 2]}}}, "expected one of range, uniform, loguniform"),
        ({"sampler": "guess"}, "sampler: expected 'auto', 'tpe', 'nsga2' or 'random', got 'guess'"),
        ({"tirals": 3}, "tirals: unknown key; known: name, base, params"),
    ],
)
def test_a_bad_search_file_gives_a_one_line_error(
    tmp_path: Path, keys: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweeps.sim("search", search_file(tmp_path, **keys), "-o", tmp_path / "out", "-j", 1) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_search_is_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = search_file(tmp_path, trials=2)
    assert sweeps.sim("search", file, "-o", tmp_path / "out", "-j", 1, "-q", "--no-report") == 0
    assert sweeps.sim("search", file, "-o", tmp_path / "out", "-j", 1, "-q") == 2
    assert "already holds a search; continue with --resume" in capsys.readouterr().err
    more = ("-j", 1, "-q", "--no-report", "--resume", "--trials", 5)
    assert sweeps.sim("search", file, "-o", tmp_path / "out", *more) == 0
    assert len(trials(tmp_path / "out")) == 5


@pytest.mark.parametrize("keys", [{}, {"sampler": "nsga2", "objectives": ["makespan", "busy_s"]}])
def test_a_search_prefers_trials_that_meet_the_constraints(tmp_path: Path, keys: dict[str, Any]) -> None:
    """Large batches have the smallest makespan, but only batches up to about 8 meet the bound."""
    bound = {"subject_to": ["mean_tpot_ms <= 32"], **keys}
    assert (
        sweeps.sim("search", search_file(tmp_path, **bound), "-o", tmp_path / "out", "-j", 1, "-q", "--no-report") == 0
    )
    summary = load_summary(tmp_path / "out")
    assert summary.winner is not None and summary.winner.feasible and summary.winner.mean("mean_tpot_ms") <= 32
    assert any(not row.feasible for row in summary.rows)
    best = yaml.safe_load((tmp_path / "out/best.yaml").read_text())
    assert best["policy"]["decode_batch"] > 1
    assert (
        sweeps.sim("search", search_file(tmp_path, **bound, trials=26), "-o", tmp_path / "out", "-q", "--resume") == 0
    )


def test_a_request_rate_is_no_parameter_of_a_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = search_file(tmp_path, params={"workload.arrivals.rate": {"uniform": [1, 9]}})
    assert sweeps.sim("search", file, "-o", tmp_path / "out") == 2
    assert "a request rate is not a setting that can win" in capsys.readouterr().err
