"""Search: Optuna trials on the simulator, successive halving over the trace, and capacity by bisection."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from servesim.core import BadInput
from servesim.execution.executor import Serial
from servesim.runs.request_rate import scenario_at_rate
from servesim.searches.capacity import CapacitySearch
from servesim.statistics.constraints import Bound, parse_bound
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
    from servesim.searches import optuna_search as module

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


def test_successive_halving_runs_only_the_better_trials_on_the_full_trace(tmp_path: Path) -> None:
    file = search_file(tmp_path, halving={"start": 0.1, "factor": 3}, trials=30)
    assert sweeps.sim("search", file, "-o", tmp_path / "out", "-j", 1, "-q", "--no-report") == 0
    states = [state for _, state, _ in trials(tmp_path / "out")]
    assert states.count("PRUNED") >= 10 and states.count("COMPLETE") >= 3
    full_runs = len((tmp_path / "out/runs.jsonl").read_text().splitlines())
    assert full_runs <= states.count("COMPLETE") + 1


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
        ({"halving": True, "objectives": ["makespan", "busy_s"]}, "halving: expected exactly one objective, got 2"),
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


@pytest.mark.parametrize("keys", [{}, {"sampler": "nsga2", "objectives": ["makespan", "busy_s"]}, {"halving": True}])
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
    assert "a request rate is a load, not a setting that can win" in capsys.readouterr().err


def constant(rate: float, requests: int = 200) -> dict[str, Any]:
    """A D/D/1 queue: one request at a time, 0.1 s each (a prefill of 0.04 s and two decodes of 0.03 s)."""
    lengths = {"kind": "fixed", "prompt": 10, "output": 3}
    workload = {"requests": requests, "arrivals": {"kind": "constant", "rate": rate}, "lengths": lengths}
    costs = {"kind": "linear", "prefill": 0.04, "decode_step": 0.03}
    return {"workload": workload, "policy": {"name": "llm-serving"}, "profile": costs}


def test_bisection_finds_the_theoretical_capacity() -> None:
    search = CapacitySearch(constant(1.0), [parse_bound("p99_ttft_ms<=45")], 1, Serial())
    best = search.find_rate(0.01)
    assert best is not None and best.rate == pytest.approx(10.0, rel=0.011)
    miss = search.first_miss(best)
    assert miss is not None and miss.rate >= 10.0 and best.rate <= 10.0
    from_above = CapacitySearch(constant(80.0), [parse_bound("p99_ttft_ms<=45")], 1, Serial()).find_rate(0.01)
    assert from_above is not None and from_above.rate == pytest.approx(10.0, rel=0.011)


def test_a_bound_that_no_rate_meets_exits_with_3_and_one_that_all_meet_has_no_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "scenario.yaml"
    path.write_text(yaml.safe_dump(constant(1.0, 20)))
    assert sweeps.sim("search", path, "--meet", "p99_ttft_ms<=30", "-j", 1) == 3
    assert "no tested rate meets p99_ttft_ms <= 30: at 0.0002441 req/s, p99_ttft_ms is 40.0" in capsys.readouterr().out
    assert sweeps.sim("search", path, "--meet", "failed<=0", "-j", 1) == 0
    assert "every tested rate meets the bounds" in capsys.readouterr().out


def test_attainment_of_an_slo_can_be_a_bound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "scenario.yaml"
    path.write_text(yaml.safe_dump(constant(1.0)))
    words = ("--meet", "attainment>=0.99", "--goodput", "e2el:150", "-o", tmp_path / "out", "-j", 1, "--steady")
    assert sweeps.sim("search", path, *words) == 0
    assert "highest rate that meets attainment >= 0.99: " in capsys.readouterr().out
    best_scenario = yaml.safe_load((tmp_path / "out/best.yaml").read_text())
    assert best_scenario["workload"]["arrivals"]["rate"] == pytest.approx(10.0, rel=0.02)
    assert sweeps.sim("search", path, "--meet", "attainment>=0.99", "-j", 1) == 2
    assert "the run has no attainment" in capsys.readouterr().err


def test_a_workload_with_a_rate_key_gets_the_new_rate() -> None:
    contest = scenario_at_rate({"workload": {"contest": {"X": 0.5, "T": 3000}}}, 1.0, 2.0)
    assert contest == {"workload": {"contest": {"X": 1.0, "T": 1500.0}}}
    arrivals = {"kind": "poisson", "rate": 2.0}
    timed = scenario_at_rate({"workload": {"duration": 60.0, "arrivals": arrivals}}, 3.0, 1.5)
    assert timed == {"workload": {"duration": 40.0, "arrivals": {"kind": "poisson", "rate": 3.0}}}
    assert scenario_at_rate({"trace": "x.csv"}, 3.5, 2.0) == {"trace": {"path": "x.csv", "rate": 3.5}}
    assert scenario_at_rate({"workload": {"mix": []}}, 3.5, 2.0) is None


CONTEST = {"contest": {"X": 0.1, "T": 600}}  # 60 requests; the client rounds its gaps to 10 ms


@pytest.mark.parametrize("kind", ["poisson", "contest"])
def test_the_printed_rate_is_that_of_best_yaml_and_every_rate_is_kept(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "scenario.yaml", tmp_path / "out"
    tree = constant(1.0)
    tree["workload"]["arrivals"] = {"kind": "poisson", "rate": 0.7}
    if kind == "contest":
        tree["workload"] = CONTEST
    path.write_text(yaml.safe_dump(tree))
    words = ("--meet", "p95_ttft_ms <= 300", "--meet", "failed <= 0", "-o", out, "-j", 1, "--precision", "5%")
    assert sweeps.sim("search", path, *words) == 0
    text = capsys.readouterr().out
    workload = yaml.safe_load((out / "best.yaml").read_text())["workload"]
    rate = workload["contest"]["X"] if kind == "contest" else workload["arrivals"]["rate"]
    assert f"highest rate that meets p95_ttft_ms <= 300, failed <= 0: {rate} req/s\n" in text
    with (out / "rates.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert f"{len(rows)} rates tried:" in text and (out / "rates.png").stat().st_size > 0
    assert max(float(row["rate"]) for row in rows if row["meets"] == "1") == rate
    assert sweeps.sim("run", out / "best.yaml", "--json") == 0
    best = next(row for row in rows if float(row["rate"]) == rate)
    assert json.loads(capsys.readouterr().out)["p95_ttft_ms"] == pytest.approx(float(best["p95_ttft_ms"]), rel=1e-9)


@pytest.mark.parametrize("text", ["p99_ttft_ms", "p99_ttft_ms<500", "p99_ttft_ms<=fast", "speed<=3"])
def test_a_bad_bound_is_an_error(text: str) -> None:
    with pytest.raises(BadInput, match="--meet"):
        parse_bound(text, "--meet")
    assert parse_bound(" p99_ttft_ms <= 5e2 ") == Bound("p99_ttft_ms", "<=", 500.0)


def test_requests_without_a_rate_are_an_error() -> None:
    burst = {"requests": 5, "arrivals": {"kind": "burst"}, "lengths": {"kind": "fixed", "prompt": 1, "output": 1}}
    with pytest.raises(
        BadInput, match="expected requests with a rate, but they wait for each other or all arrive at once"
    ):
        CapacitySearch({"workload": burst}, [], 1, Serial())
