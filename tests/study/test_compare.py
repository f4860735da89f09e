"""`sim compare`: pairs, printed sentences, and the exit code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

import pytest
import yaml
from servesim.config.scenario import scenario_from
from servesim.runs.run_folder import run_data
from servesim.runs.simulate import simulate
from servesim.statistics.intervals import Interval
from servesim.statistics.objective import Objective
from servesim.statistics.two_samples import RelativeChange, TwoSamples
from servesim.study.compare import Difference, compare, default_objectives
from servesim.study.compared_runs import ComparedRuns, batch_means, single_run
from servesim.traces.export import export
from servesim.traces.make.synth import synthesise

from . import sweeps

PAIRED = TwoSamples([1.0, 2.0], [1.0, 2.0], True)
LOW, HIGH = Objective("makespan", "min"), Objective("output_throughput", "max")


def scenario(folder: Path, name: str, **policy: object) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(sweeps.base(policy={"name": "llm-serving", **policy})))
    return path


def stored_run(tree: dict[str, Any]) -> ComparedRuns:
    """Return a run as its folder would have it."""
    run = simulate(scenario_from(tree))
    return single_run("run", run.result(), list(run_data(run).requests.values()), tree)


def runs_of(name: str, by_seed: Mapping[int, Mapping[str, float]]) -> ComparedRuns:
    """Return runs with these metrics."""
    return ComparedRuns(name, [{"seed": seed, "metrics": metrics} for seed, metrics in by_seed.items()])


def test_equal_scenarios_are_the_same_in_every_metric(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = scenario(tmp_path, "a", decode_batch=2), scenario(tmp_path, "b", decode_batch=2, group_width=9)
    assert sweeps.sim("compare", a, b, "-j", 1, "--replications", 3) == 0
    text = capsys.readouterr().out
    assert "A and B are the same in every metric. 3 pairs of replications" in text


def test_a_better_policy_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = scenario(tmp_path, "a"), scenario(tmp_path, "b", decode_batch=4)
    words = ("compare", a, b, "-j", 1, "--replications", 4, "--metric", "makespan", "--metric", "mean_tpot_ms")
    assert sweeps.sim(*words) == 0
    text = capsys.readouterr().out
    assert f"By makespan, {b} is " in text and "% better (interval -" in text
    assert f"{b} is worse in mean_tpot_ms." in text
    assert sweeps.sim(*words, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["metrics"]["makespan"]["pairs"] == 4 and result["metrics"]["makespan"]["relative"] < -0.3


def test_the_interval_of_the_draws_decides_if_there_is_one_run_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trace file without randomness: B - A is smaller than its uncertainty, but not 0."""
    arrivals = {"kind": "gamma", "rate": 20, "burstiness": 0.5}
    lengths = {"kind": "lognormal", "prompt": {"mean": 500, "sd": 500, "max": 3000}, "output": {"mean": 60, "sd": 50}}
    export(synthesise({"requests": 300, "arrivals": arrivals, "lengths": lengths}), tmp_path / "trace.csv")
    for name, tokens in (("a", 8192), ("b", 2000)):
        policy = {"name": "vllm-v1", "max_num_batched_tokens": tokens}
        tree = {
            "trace": str(tmp_path / "trace.csv"),
            "policy": policy,
            "profile": "h200-llama2-7b",
            "engine": {"num_blocks": 4000},
        }
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(tree))
    words = ("compare", tmp_path / "a.yaml", tmp_path / "b.yaml", "-j", 1, "--metric", "mean_ttft_ms")
    assert sweeps.sim(*words, "--intervals", "--json") == 0
    row = json.loads(capsys.readouterr().out)["metrics"]["mean_ttft_ms"]
    assert 0 < abs(row["difference"]) < row["half_width"]
    assert row["outcome"] == "not significant" and row["relative_low"] < 0 < row["relative_high"]
    assert sweeps.sim(*words) == 0
    assert "One run each, not tested against the error of the cost model" in capsys.readouterr().out


def test_the_interval_of_the_draws_decides_for_metrics_that_can_be_0() -> None:
    for a, b in ((0.0, 3.0), (3.0, 0.0)):
        relative = RelativeChange(float("inf") if a == 0 else -1.0)
        wide = Difference(LOW, a, b, Interval(b - a, 5.0, 1), relative, TwoSamples([a], [b], True), [b - a])
        assert wide.outcome == "not significant"
        assert replace(wide, change=Interval(b - a, 1.0, 1)).outcome in ("better", "worse")


def test_runs_in_folders_are_paired_by_batches_of_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, batch in (("a", 1), ("b", 4)):
        assert sweeps.sim("run", scenario(tmp_path, name, decode_batch=batch), "-o", tmp_path / name) == 0
    assert sweeps.sim("compare", tmp_path / "a", tmp_path / "b", "-j", 1, "--metric", "mean_e2el_ms") == 0
    assert "20 pairs of batches" in capsys.readouterr().out
    assert sweeps.sim("compare", tmp_path / "a", tmp_path / "a", "-j", 1) == 0
    assert "the same in every metric" in capsys.readouterr().out


@pytest.mark.parametrize("rate", [pytest.param(5.0, marks=pytest.mark.slow), 12.0])
def test_runs_with_other_requests_are_not_paired_and_rarely_significant(rate: float) -> None:
    """One configuration with two seeds: 5 % of the pairs may be significant. Of 60 pairs, 95 % of samples have up to 6.

    Paired by id, in batches that were taken as independent, 47 of 60 were significant at 12 req/s.
    """
    workload = {**sweeps.workload(120, rate), "lengths": {"kind": "fixed", "prompt": 30, "output": 20}}
    tree = sweeps.base(workload=workload, policy={"name": "llm-serving", "decode_batch": 4})
    runs = [stored_run({**tree, "seed": seed}) for seed in range(120)]
    metrics = [Objective(name, "min") for name in ("mean_ttft_ms", "mean_e2el_ms")]
    pairs = [compare(a, b, metrics) for a, b in zip(runs[::2], runs[1::2])]
    assert not any(row.values.paired for rows in pairs for row in rows)
    for number in range(len(metrics)):
        outcomes = [rows[number].outcome for rows in pairs]
        assert set(outcomes) <= {"better", "worse", "not significant"}
        assert sum(outcome != "not significant" for outcome in outcomes) <= 6


def test_a_difference_between_runs_with_other_requests_is_found_if_it_is_large() -> None:
    costs, policy = ({**sweeps.COSTS, "decode_step": step} for step in (0.06, 0.02)), {"name": "vllm-v1"}
    slow, fast = (sweeps.base(policy=policy, profile=cost, workload=sweeps.workload(200)) for cost in costs)
    a, b = stored_run({**slow, "seed": 1}), stored_run({**fast, "seed": 2})
    e2el, makespan = compare(a, b, [Objective("mean_e2el_ms", "min"), LOW])
    assert e2el.outcome == "better" and e2el.values.basis == "other requests, not paired: 20 batches and 20 batches"
    assert makespan.outcome == "not tested"
    assert makespan.describe().endswith("% is not tested (one run each, with other requests)")
    same = stored_run({**fast, "seed": 1})
    e2el, makespan = compare(a, same, [Objective("mean_e2el_ms", "min"), LOW])
    assert e2el.values.basis == "20 pairs of batches" and makespan.describe().endswith("better (one run each)")


def test_replications_with_other_seeds_are_two_samples() -> None:
    a = runs_of("a", {seed: {"makespan": 10.0 + seed % 3} for seed in range(6)})
    b = runs_of("b", {seed: {"makespan": 11.0 + seed % 3} for seed in range(6, 12)})
    (difference,) = compare(a, b, [LOW])
    assert difference.outcome == "not significant" and difference.change.half_width == pytest.approx(1.15, abs=0.01)
    assert difference.values.basis == "other requests, not paired: 6 replications and 6 replications"


def test_configurations_of_a_sweep_are_paired_by_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert sweeps.sim("sweep", sweeps.sweep_file(tmp_path), "-o", out, "-j", 1, "--no-report") == 0
    summary = (out / "summary.csv").read_text().splitlines()
    expected = float(dict(zip(summary[0].split(","), summary[1].split(",")))["makespan_difference"])
    capsys.readouterr()
    assert sweeps.sim("compare", f"{out}:0", out, "-j", 1, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["metrics"]["makespan"]["difference"] == pytest.approx(expected, rel=1e-12)
    assert sweeps.sim("compare", f"{out}:0", out / "best.yaml", "-j", 1, "--replications", 3, "--json") == 0
    assert json.loads(capsys.readouterr().out)["metrics"] == result["metrics"]
    assert sweeps.sim("compare", f"{out}:99", out, "-j", 1) == 2
    assert "no configuration 99, only 0 to 6" in capsys.readouterr().err


def test_further_percentiles_of_scenarios_and_of_stored_runs_agree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A scenario computes them in the run, a folder from its requests; both equal those of `sim run`."""
    files, option = [scenario(tmp_path, name, decode_batch=batch) for name, batch in (("a", 2), ("b", 4))], "37.5,99.9"
    for file in files:
        assert sweeps.sim("run", file, "-o", file.with_suffix(""), "-q") == 0
        assert sweeps.sim("run", file, "-o", file.with_suffix(".all"), "-q", "--metric-percentiles", option) == 0
    capsys.readouterr()
    stored = [json.loads((file.with_suffix(".all") / "result.json").read_text()) for file in files]
    words = ("-j", 1, "--metric", "makespan", "--metric-percentiles", option, "--json")
    assert sweeps.sim("compare", *files, "--replications", 1, *words) == 0
    simulated = json.loads(capsys.readouterr().out)["metrics"]
    assert sweeps.sim("compare", *(file.with_suffix("") for file in files), *words) == 0
    folders = json.loads(capsys.readouterr().out)["metrics"]
    latencies = ("ttft", "tpot", "itl", "e2el")
    assert list(simulated) == ["makespan", *(f"{q}_{name}_ms" for name in latencies for q in ("p37.5", "p99.9"))]
    assert set(simulated) - set(folders) == {"p37.5_itl_ms", "p99.9_itl_ms"}  # a folder has no single gaps
    for metric, row in simulated.items():
        assert [row["a"], row["b"]] == [result[metric] for result in stored]
    for metric, row in folders.items():
        assert [row["a"], row["b"]] == pytest.approx([result[metric] for result in stored], rel=1e-9)


def test_a_metric_that_one_side_lacks_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, out = scenario(tmp_path, "a"), tmp_path / "a"
    assert sweeps.sim("run", a, "-o", out, "-q") == 0
    capsys.readouterr()
    assert sweeps.sim("compare", a, out, "-j", 1, "--replications", 1, "--metric", "makespan", "--metric", "mfu") == 0
    text = capsys.readouterr().out
    assert "makespan" in text and "mfu" not in text
    assert sweeps.sim("compare", a, out, "-j", 1, "--replications", 1, "--metric", "mfu") == 2
    assert "have none of mfu in common" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("objective", "change", "limits", "text"),
    [
        (LOW, Interval(0.0, 0.0, 5), (0.0, 0.0), "the same"),
        (LOW, Interval(-4.0, 1.0, 5), (-0.05, -0.03), "B is 4.00 % better (interval -5.00 to -3.00 %)"),
        (HIGH, Interval(-4.0, 1.0, 5), (-0.05, -0.03), "B is 4.00 % worse (interval -5.00 to -3.00 %)"),
        (LOW, Interval(1.0, 2.0, 5), (-0.01, 0.03), "the difference is not significant (interval -1.00 to +3.00 %)"),
        (HIGH, Interval(2.5, None, 1), (None, None), "B is 2.50 % better (one run each)"),
        (
            LOW,
            Interval(-0.49, 0.1, 9),
            (-0.0059, -0.0039),
            "no difference: -0.49 % is below 0.5 % (interval -0.59 to -0.39 %)",
        ),
        (
            LOW,
            Interval(0.1, 0.2, 9),
            (-0.001, 0.003),
            "no difference: +0.10 % is below 0.5 % (interval -0.10 to +0.30 %)",
        ),
        (LOW, Interval(0.1, 9.0, 9), (-0.09, 0.1), "the difference is not significant (interval -9.00 to +10.00 %)"),
        (HIGH, Interval(0.3, None, 1), (None, None), "no difference: +0.30 % is below 0.5 % (one run each)"),
    ],
)
def test_a_difference_is_described(
    objective: Objective, change: Interval, limits: tuple[Optional[float], Optional[float]], text: str
) -> None:
    relative = RelativeChange(change.mean / 100, *limits)
    described = Difference(objective, 100.0, 100.0 + change.mean, change, relative, PAIRED).describe()
    assert described == text


@pytest.mark.parametrize(
    ("changes", "slos", "first"),
    [
        ({}, ({}, {}), ["mean_e2el_ms", "p99_ttft_ms", "makespan"]),
        ({}, ({"ttft": 500}, {"ttft": 500}), ["request_goodput", "p99_ttft_ms", "makespan"]),
        ({}, ({"ttft": 500}, {}), ["mean_e2el_ms", "p99_ttft_ms", "makespan"]),
        ({"workload": {"requests": 10, "concurrency": 2, "lengths": sweeps.LENGTHS}}, ({}, {}),
         ["makespan", "mean_ttft_ms", "output_throughput"]),
    ],
)  # fmt: skip
def test_the_first_metric_fits_the_load(
    changes: dict[str, Any], slos: tuple[dict[str, Any], dict[str, Any]], first: list[str]
) -> None:
    a, b = (stored_run(sweeps.base(**changes, slo=slo)) for slo in slos)
    assert [objective.metric for objective in default_objectives(a, b)][:3] == first


def test_an_interval_of_a_throughput_never_falls_below_minus_100_percent() -> None:
    """Two noisy pairs: the t interval of the difference reaches far below -100 % of A."""
    a = runs_of("a", {1: {"output_throughput": 100.0}, 2: {"output_throughput": 140.0}})
    b = runs_of("b", {1: {"output_throughput": 60.0}, 2: {"output_throughput": 30.0}})
    (difference,) = compare(a, b, [HIGH])
    mean, low, high = difference.relative
    assert difference.change.mean - (difference.change.half_width or 0) < -difference.a
    assert low is not None and high is not None and -1 < low < mean == 45 / 120 - 1 < 0 < high
    assert difference.outcome == "not significant"


def test_a_metric_that_is_0_in_a_has_no_percentage() -> None:
    a = runs_of("a", {1: {"preemptions": 0.0}, 2: {"preemptions": 0.0}})
    b = runs_of("b", {1: {"preemptions": 3.0}, 2: {"preemptions": 3.0}})
    (difference,) = compare(a, b, [Objective("preemptions", "min")])
    assert difference.describe() == "B is worse (A is 0)"
    (back,) = compare(b, a, [Objective("preemptions", "min")])
    assert back.describe() == "B is 100.00 % better (B is 0)"


def test_only_runs_with_the_same_seed_are_paired() -> None:
    a = runs_of("a", {1: {"makespan": 10.0}, 2: {"makespan": 20.0}, 3: {"makespan": 99.0}})
    b = runs_of("b", {2: {"makespan": 22.0}, 1: {"makespan": 12.0}, 4: {"makespan": 0.0}})
    (difference,) = compare(a, b, [LOW])
    assert difference.change == (2.0, 0.0, 2) and (difference.a, difference.b) == (15.0, 17.0)


def test_batch_means_average_over_consecutive_arrivals() -> None:
    fixed = {"output": 3, "outcome": "finished"}
    times = [{"id": str(k), "arrival": float(k), "first_token": k + 1.0, "finish": k + 3.0} for k in range(80)]
    means = batch_means([{**fixed, **row} for row in times])
    assert means == {"mean_ttft_ms": [1000.0] * 20, "mean_e2el_ms": [3000.0] * 20, "mean_tpot_ms": [1000.0] * 20}


def test_the_notes_name_the_profiles_of_all_servers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The profile of the scenario is that of no pool."""
    derived = {"model": "llama-3.1-8b", "device": "H100"}
    pools = [{"name": "old", "profile": derived}, {"name": "new", "profile": {**derived, "device": "H200"}}]
    tree = sweeps.base(policy={"name": "vllm-v1"}, workload=sweeps.workload(20, 5.0))
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    a.write_text(json.dumps({**tree, "profile": "h200-llama2-7b"}), encoding="utf-8")
    b.write_text(json.dumps({**tree, "profile": {"base": 0.1}, "cluster": {"pools": pools}}), encoding="utf-8")
    words = ("compare", a, b, "-j", 1, "--replications", 2, "--intervals", 2, "-o", tmp_path)
    assert sweeps.sim(*words) == 0
    said = capsys.readouterr()
    names = ("h200-llama2-7b", "h100-llama-3.1-8b", "h200-llama-3.1-8b")
    assert [name for name in names if f"note: profile {name} was " in said.out] == list(names), said.out
    assert "no stored uncertainty" not in said.err, said.err  # that of the scenario has none
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert all(name in page for name in names)
    run = tmp_path / "run"
    assert sweeps.sim("run", b, "-o", run) == 0
    profiles = json.loads((run / "manifest.json").read_text(encoding="utf-8"))["profiles"]
    assert [profile["name"] for profile in profiles] == [*names[1:]]
