"""The bundled Ascend profile against runs of real servers: those it was fitted on, and those it never saw."""

from __future__ import annotations

from pathlib import Path

import yaml
from servesim.calibrate.logs.fit import Judged, judge
from servesim.calibrate.logs.observed_runs import Observed, read_runs
from servesim.config.overrides import merge
from servesim.config.scenario import scenario_from
from servesim.costs.device_profile import load_profile
from servesim.runs.simulate import simulate

from ...conftest import ROOT

NAME = "ascend910b4-llama2-7b"
RUNS = ROOT / "calibrate" / "profiles" / NAME / "runs.yaml"  # it names logs by their place beside the checkout


def judged() -> dict[str, tuple[Observed, Judged]]:
    """Return every run of the file, and how far its prediction is off."""
    profile = load_profile(NAME)
    cold = {run: (c["prefill"], c["decode"]) for run, c in profile.about["fit"]["cold_start"].items()}
    runs = read_runs(RUNS).runs
    return {run.name: (run, judge(run, profile.cost, cold)) for run in runs}


def test_at_most_half_of_the_reported_runs_are_fitted() -> None:
    runs = yaml.safe_load(RUNS.read_text(encoding="utf-8"))["runs"]
    assert sum(run.get("fit", True) for run in runs) == 4  # of the ten rows of reported_runs.csv


def test_every_reported_total_is_predicted_within_two_percent_with_lengths_like_the_real_ones() -> None:
    """The lengths are drawn from the quantiles of the real ones, so this needs no data."""
    tree = yaml.safe_load(RUNS.read_text(encoding="utf-8"))
    errors = {}
    for run in tree["runs"]:
        if "total" in run:
            scenario = merge({**tree["scenario"], "profile": NAME}, run["scenario"])
            asked = scenario["workload"]["contest"]
            scenario["workload"] = {"contest": {key: asked[key] for key in asked if key != "lengths"}}
            errors[run["name"]] = simulate(scenario_from(scenario)).measures.makespan / run["total"] - 1
    assert len(errors) == 10
    assert {name: error for name, error in errors.items() if abs(error) > 0.02} == {}


def test_every_predicted_run_and_its_requests_are_as_close_as_stated(shared: Path) -> None:
    found = judged()
    errors = {name: result.error for name, (run, result) in found.items() if not run.fit}
    assert len(errors) == 9
    assert {name: error for name, error in errors.items() if abs(error) > 0.02} == {}
    _, sunflower = found["sunflower"]
    assert sunflower.e2e is not None
    assert sunflower.e2e < 0.05
    assert sunflower.ttft is not None
    assert sunflower.ttft < 0.10


def test_runs_left_out_of_the_fit_were_predicted_within_two_percent() -> None:
    left_out = load_profile(NAME).about["fit"]["left_out"]
    assert [row["run"] for row in left_out] == ["armit", "ccdd", "debias-20", "debias-50"]
    assert all(abs(row["error"]) < 0.02 for row in left_out)


def test_the_totals_are_those_that_were_reported(shared: Path) -> None:
    text = (shared / "data" / "ascend910b4" / "reported_runs.csv").read_text(encoding="utf-8")
    runs = yaml.safe_load(RUNS.read_text(encoding="utf-8"))["runs"]
    assert [run["name"] for run in runs if "total" in run and str(run["total"]) not in text] == []


def test_the_profile_is_warm_unless_told_otherwise() -> None:
    cold = load_profile(NAME).about["fit"]["cold_start"]["ccdd"]
    base = {"policy": {"decode_batch": 64}, "workload": {"contest": {"X": 5, "T": 4}}, "profile": NAME}
    engine = {"prefill_gears": [4096]}
    warm = simulate(scenario_from({**base, "engine": engine}))
    chilled = simulate(scenario_from({**base, "engine": {**engine, "cold_start": cold}}))
    longer = chilled.measures.makespan - warm.measures.makespan
    # During the first calls more requests arrive, so their decodes are shared and a little is made up for.
    assert 25.0 < longer < 31.0


def test_a_batch_beyond_what_was_measured_is_named() -> None:
    tree = {"policy": {"decode_batch": 256}, "workload": {"contest": {"X": 5, "T": 10}}, "profile": NAME}
    run = simulate(scenario_from({**tree, "engine": {"prefill_gears": [4096]}}))
    assert "decode_rows 256 (measured 1 to 128)" in run.outside
