"""Fits to reported means and quantiles, to stages, to closed loops and to logs of servers without a queue."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from servesim.calibrate.logs import problem
from servesim.calibrate.logs.fit import LogFit, fit_logs
from servesim.calibrate.logs.observed_runs import read_runs
from servesim.calibrate.logs.problem import value_of, with_values
from servesim.calibrate.logs.residuals import QueueTimes, RequestLatencies, residuals_of
from servesim.cli import main
from servesim.config.scenario import scenario_from
from servesim.core import BadInput, Shape, StepCost
from servesim.costs.derived import NoisyCost
from servesim.costs.device_profile import Profile, load_profile
from servesim.costs.linear import LinearCost
from servesim.costs.mapping import cost_from
from servesim.runs.run_folder import write_run
from servesim.runs.simulate import Run, simulate

from ...conftest import ROOT

KNOWN = LinearCost(base=0.008, prefill_token=6e-5, decode_row=2e-4, context=1e-8)
START = {"kind": "linear", "base": 0.005, "prefill_token": 1e-4, "decode_row": 1e-4, "context": 1e-8}
FREE = ["base", "prefill_token", "decode_row"]
COMMON: dict[str, Any] = {"policy": {"name": "vllm-v1", "max_num_seqs": 64}, "engine": {"num_blocks": 20000}}
LENGTHS = {"prompt": [200, 400], "output": [40, 80]}
STAGES = {"stages": [{"rate": 2, "seconds": 30}, {"rate": 6, "seconds": 30}], "lengths": LENGTHS}


def run_of(workload: dict[str, Any], cost: StepCost = KNOWN) -> Run:
    return simulate(scenario_from({**COMMON, "workload": workload}), profile=Profile("known", cost))


def closed(concurrency: int) -> dict[str, Any]:
    return {"concurrency": concurrency, "requests": 5 * concurrency, "lengths": LENGTHS}


def figures(run: Run, *names: str) -> dict[str, float]:
    result = run.result()
    return {name: float(result[name]) for name in names}


def write_runs(folder: Path, runs: list[dict[str, Any]], free: Any = FREE) -> Path:
    tree = {"scenario": COMMON, "cost": START, "free": free, "runs": runs}
    (folder / "runs.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    return folder / "runs.yaml"


def check_recovered(fit: LogFit, tolerance: float = 0.03) -> None:
    for name, value in zip(fit.names, fit.values):
        if name in FREE:
            assert value == pytest.approx(getattr(KNOWN, name), rel=tolerance), name


def test_costs_are_recovered_from_the_means_of_two_closed_loops(tmp_path: Path) -> None:
    entries = []
    for count in (4, 12, 48):
        reported = figures(run_of(closed(count)), "mean_ttft_ms", "mean_tpot_ms")
        scenario = {"workload": closed(count)}
        entries.append({"name": f"c{count}", "scenario": scenario, "reported": reported, "fit": count != 12})
    fit = fit_logs(read_runs(write_runs(tmp_path, entries)), leave_out=False)
    check_recovered(fit)
    [between] = fit.predicted
    for name, (measured, predicted) in between.figures.items():
        assert predicted == pytest.approx(measured, rel=0.02), name


def test_quantiles_and_itl_are_fitted(tmp_path: Path) -> None:
    names = ("median_ttft_ms", "p90_ttft_ms", "mean_itl_ms", "p99_itl_ms", "mean_e2el_ms", "p75_e2el_ms")
    entries = []
    for rate in (2, 8):
        workload = {"requests": 150, "arrivals": {"kind": "poisson", "rate": rate}, "lengths": LENGTHS}
        run = run_of(workload)
        values = figures(run, *names[:5])
        values["p75_e2e_ms"] = 1e3 * float(np.percentile(run.measures.e2el, 75))  # another name of e2el
        entries.append({"name": f"r{rate}", "scenario": {"workload": workload}, "reported": values})
    fit = fit_logs(read_runs(write_runs(tmp_path, entries)), leave_out=False)
    check_recovered(fit, 0.1)  # quantiles of 150 requests determine costs less well than means do
    assert set(fit.fitted[0].figures) == set(names)
    errors = [predicted / measured - 1 for run in fit.fitted for measured, predicted in run.figures.values()]
    assert float(np.abs(errors).max()) < 0.05


def test_every_stage_has_its_own_figures(tmp_path: Path) -> None:
    run = run_of(STAGES)
    sent = np.array([r.sent for r in run.requests]) - run.requests[0].sent
    reported = []
    for stage in ((sent < 30), (sent >= 30)):
        means = run.measures.ttft[stage].mean(), run.measures.e2el[stage].mean()
        reported.append({"mean_ttft_ms": 1e3 * float(means[0]), "mean_e2el_ms": 1e3 * float(means[1])})
    entry = {"name": "staged", "scenario": {"workload": STAGES}, "reported": reported}
    fit = fit_logs(read_runs(write_runs(tmp_path, [entry])), leave_out=False)
    assert set(fit.fitted[0].figures) == {f"stage {k} mean_{name}_ms" for k in (0, 1) for name in ("ttft", "e2el")}
    for name, (measured, predicted) in fit.fitted[0].figures.items():
        assert predicted == pytest.approx(measured, rel=0.02), name


def unsaturated_log(folder: Path, requests: int = 400, cost: StepCost = KNOWN) -> dict[str, Any]:
    workload = {"requests": requests, "arrivals": {"kind": "poisson", "rate": 5}, "lengths": LENGTHS}
    write_run(run_of(workload, cost), folder / "run")
    return {"name": "a", "scenario": {"workload": workload}, "log": "run/requests.csv"}


def test_costs_are_recovered_from_the_log_of_a_server_without_a_queue(tmp_path: Path) -> None:
    spec = read_runs(write_runs(tmp_path, [unsaturated_log(tmp_path)]))
    [part] = residuals_of(spec.runs[0], spec.spread)
    assert isinstance(part, RequestLatencies)
    fit = fit_logs(spec, leave_out=False)
    check_recovered(fit, 0.05)
    assert fit.fitted[0].e2e is not None
    assert fit.fitted[0].e2e < 0.02


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_the_intervals_of_a_log_without_a_queue_hold(tmp_path: Path, seed: int) -> None:
    """A row takes 2 % of a step: its derivative is clear only in larger steps than that of the base."""
    noisy = NoisyCost(KNOWN, {kind: [0.92, 1.0, 1.08] for kind in ("prefill", "decode", "mixed")}, seed)
    fit = fit_logs(read_runs(write_runs(tmp_path, [unsaturated_log(tmp_path, 250, noisy)])), leave_out=False)
    for k, name in enumerate(FREE):
        low, high = fit.interval(k)
        assert low <= getattr(KNOWN, name) <= high, name
        assert fit.values[k] == pytest.approx(getattr(KNOWN, name), rel=0.12), name
        assert high - low < getattr(KNOWN, name), "the interval is too wide"


def test_a_log_with_a_queue_is_compared_in_stretches_of_time(tmp_path: Path) -> None:
    workload = {"requests": 200, "arrivals": {"kind": "burst"}, "lengths": LENGTHS}
    write_run(run_of(workload), tmp_path / "run")
    entry = {"name": "a", "scenario": {"workload": workload, "policy": {"max_num_seqs": 8}}, "log": "run/requests.csv"}
    run = run_of(workload)
    assert len(run.requests) == 200
    tree = {**COMMON, "policy": {"name": "vllm-v1", "max_num_seqs": 8}, "workload": workload}
    write_run(simulate(scenario_from(tree), profile=Profile("known", KNOWN)), tmp_path / "run")
    [part] = residuals_of(read_runs(write_runs(tmp_path, [entry])).runs[0], 0.005)
    assert isinstance(part, QueueTimes)


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the number of requests of every simulation of a fit."""
    counts: list[int] = []
    predict = problem.predict

    def count(run: Any, *rest: Any) -> Any:
        counts.append(len(run.trace.requests))
        return predict(run, *rest)

    monkeypatch.setattr(problem, "predict", count)
    return counts


@pytest.mark.slow
def test_a_long_log_is_simulated_in_full_only_near_the_solution(tmp_path: Path, simulated: list[int]) -> None:
    """5,000 requests take less than a minute: about 0.2 s per simulation of all of them."""
    fit = fit_logs(read_runs(write_runs(tmp_path, [unsaturated_log(tmp_path, 5000)])), leave_out=False)
    check_recovered(fit, 0.05)
    assert sum(simulated) < 100 * 5000
    assert simulated.count(5000) < 60


def test_the_result_file_of_a_load_generator_is_a_log(tmp_path: Path) -> None:
    workload = {"requests": 60, "arrivals": {"kind": "poisson", "rate": 5}, "lengths": LENGTHS}
    run = run_of(workload)
    result = {
        "input_lens": [r.prompt for r in run.requests],
        "output_lens": [r.written for r in run.requests],
        "ttfts": [r.first_token - r.sent for r in run.requests],
        "itls": [[(r.client_end - r.first_token) / (r.written - 1)] * (r.written - 1) for r in run.requests],
        "start_times": [50.0 + r.sent for r in run.requests],
        "errors": ["timeout", *[""] * 59],
    }
    (tmp_path / "result.json").write_text(json.dumps(result), encoding="utf-8")
    [observed] = read_runs(write_runs(tmp_path, [{"name": "a", "log": "result.json"}])).runs
    assert len(observed.trace.requests) == 59  # without the failed one, which was sent first
    start = run.requests[1].sent
    assert observed.end == pytest.approx([r.client_end - start for r in run.requests[1:]], abs=1e-9)


def test_the_command_writes_reported_figures_and_their_errors(tmp_path: Path, capsys: Any) -> None:
    entries = [
        {"name": f"c{count}", "scenario": {"workload": closed(count)}, "fit": count != 16,
         "reported": figures(run_of(closed(count)), "mean_ttft_ms", "mean_tpot_ms")}
        for count in (8, 16, 32)
    ]  # fmt: skip
    file = write_runs(tmp_path, entries)
    assert main(["calibrate", "logs", str(file), "-q", "--no-cross-validation", "-o", str(tmp_path / "out")]) == 0
    assert "predicted: c16 mean_tpot_ms" in capsys.readouterr().out
    about = load_profile(tmp_path / "out").about
    assert set(about["error"]) == {"mean_ttft_ms", "mean_tpot_ms"}
    assert about["error"]["mean_tpot_ms"]["mean"] < 0.03
    [between] = about["fit"]["predicted"]
    assert between["ttft_error"] == pytest.approx(about["error"]["mean_ttft_ms"]["mean"], rel=1e-4)
    assert main(["calibrate", "check", str(tmp_path / "out")]) == 0


def test_parameters_of_a_cost_model_in_parts() -> None:
    tree = {
        "kind": "parts",
        "prefill": {"tokens": [[1, 0.01], [512, 0.05]]},
        "decode": {"rows": [[1, 0.02]], "live": 1e-4},
    }
    cost = cost_from(tree, "cost")
    assert value_of(cost, "prefill.tokens.512") == 0.05
    assert value_of(cost, "decode.live") == 1e-4
    changed = with_values(cost, ["prefill.tokens.512", "decode.live", "host.step"], [0.07, 2e-4, 0.001])
    names = ("prefill.tokens.1", "prefill.tokens.512", "decode.live", "decode.rows.1", "host.step")
    assert [value_of(changed, name) for name in names] == [0.01, 0.07, 2e-4, 0.02, 0.001]
    shape = Shape(decode_rows=4, decode_live=4)
    assert cost.seconds(shape) == pytest.approx(0.02 + 4e-4)
    assert with_values(cost, ["decode.live"], [2e-4]).seconds(shape) == pytest.approx(0.02 + 8e-4)  # nothing is cached
    curve = with_values(cost, ["prefill.tokens.1", "prefill.tokens.512"], [0.02, 0.08])
    assert curve.seconds(Shape(1, 512, 512)) == pytest.approx(0.08)
    assert [value_of(curve, name) for name in names[:2]] == [0.02, 0.08]
    assert with_values(cost, [], []) == cost
    with pytest.raises(BadInput, match=r"a point of the table: prefill\.tokens\.1, prefill\.tokens\.512"):
        value_of(cost, "prefill.tokens.64")
    with pytest.raises(BadInput, match=r"unknown parameter 'decode\.lives'; known: prefill\.tokens"):
        value_of(cost, "decode.lives")


def load_benchmark() -> Any:
    """Load benchmarks/closed_loops.py; benchmarks are not part of the package."""
    path = ROOT / "benchmarks" / "closed_loops.py"
    spec = importlib.util.spec_from_file_location("closed_loops", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_public_curves_are_predicted_between_their_ends(shared: Path) -> None:
    """Four curves of dense models; the benchmark has all of them."""
    benchmark = load_benchmark()
    curves = benchmark.read_curves(shared / "data" / "measured" / "aiconfigurator-silicon" / "points.csv.gz")
    assert len(curves) == 37
    errors = []
    for name in ("ce3ecd447", "ca49eeee0", "c716fcabb", "c43a5ae8f"):
        errors += benchmark.errors_of(
            fit_logs(benchmark.runs_of(curves[name]), leave_out=False).predicted, "mean_tpot_ms"
        )
    assert len(errors) == 12
    assert float(np.median(np.abs(errors))) < 0.05
