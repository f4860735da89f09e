"""The bundled Ascend profile against runs of real servers: fitted runs and predicted runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from servesim.calibrate.logs.fit import RunError, run_error
from servesim.calibrate.logs.observed_runs import ObservedRun, read_runs
from servesim.calibrate.logs.residuals import predict
from servesim.config.layers import merge
from servesim.config.scenario import scenario_from
from servesim.core import BadInput
from servesim.costs.device_profile import load_profile
from servesim.runs.simulate import simulate

from ...conftest import ROOT

NAME = "ascend910b4-llama2-7b"
RUNS = ROOT / "calibrate" / "profiles" / NAME / "runs.yaml"  # its logs are next to the checkout


def predict_runs() -> dict[str, tuple[ObservedRun, RunError]]:
    """Return every run of the file with the error of its prediction."""
    profile = load_profile(NAME)
    cold = {run: (c["prefill"], c["decode"]) for run, c in profile.about["fit"]["cold_start"].items()}
    runs = read_runs(RUNS).runs
    return {run.name: (run, run_error(run, predict(run, profile.cost, cold.get(run.name, (0.0, 0.0))))) for run in runs}


def test_at_most_half_of_the_reported_runs_are_fitted() -> None:
    runs = yaml.safe_load(RUNS.read_text(encoding="utf-8"))["runs"]
    assert sum(run.get("fit", True) for run in runs) == 4  # of the ten rows of reported_runs.csv


def test_every_reported_total_is_predicted_within_two_percent_with_synthetic_lengths() -> None:
    """Lengths come from the quantiles of the real ones, so this needs no data."""
    tree = yaml.safe_load(RUNS.read_text(encoding="utf-8"))
    errors = {}
    for run in tree["runs"]:
        if "total" in run:
            scenario = merge({**tree["scenario"], "profile": NAME}, run["scenario"])
            contest = scenario["workload"]["contest"]
            scenario["workload"] = {"contest": {key: contest[key] for key in contest if key != "lengths"}}
            errors[run["name"]] = simulate(scenario_from(scenario)).measures.makespan / run["total"] - 1
    assert len(errors) == 10
    assert {name: error for name, error in errors.items() if abs(error) > 0.02} == {}


def test_predicted_runs_and_their_requests_are_within_the_stated_errors(shared: Path) -> None:
    runs = predict_runs()
    errors = {name: result.error for name, (run, result) in runs.items() if not run.fit}
    assert len(errors) == 9
    assert {name: error for name, error in errors.items() if abs(error) > 0.02} == {}
    _, sunflower = runs["sunflower"]
    assert sunflower.e2e is not None
    assert sunflower.e2e < 0.05
    assert sunflower.ttft is not None
    assert sunflower.ttft < 0.10


def test_runs_left_out_of_the_fit_were_predicted_within_two_percent() -> None:
    left_out = load_profile(NAME).about["fit"]["left_out"]
    assert [row["run"] for row in left_out] == ["armit", "ccdd", "debias-20", "debias-50"]
    assert all(abs(row["error"]) < 0.02 for row in left_out)


def test_totals_match_the_reported_ones(shared: Path) -> None:
    text = (shared / "data" / "ascend910b4" / "reported_runs.csv").read_text(encoding="utf-8")
    runs = yaml.safe_load(RUNS.read_text(encoding="utf-8"))["runs"]
    assert [run["name"] for run in runs if "total" in run and str(run["total"]) not in text] == []


def test_the_scenario_says_whether_the_server_starts_cold() -> None:
    base = {"policy": {"decode_batch": 64}, "workload": {"contest": {"X": 5, "T": 4}}, "profile": NAME}

    def makespan(**engine: object) -> float:
        scenario = scenario_from({**base, "engine": {"prefill_buckets": [4096], **engine}})
        return float(simulate(scenario).measures.makespan)

    assert makespan(start="warm") == makespan()
    assert 27.0 < makespan(start="cold") - makespan() < 34.0
    assert makespan(start="cold", cold_start={"prefill": 1.0}) < makespan(start="cold")
    with pytest.raises(BadInput, match=r"engine.start: expected 'cold' or 'warm', got 'hot'"):
        makespan(start="hot")
    with pytest.raises(BadInput, match="expected no cold_start with start: warm"):
        makespan(start="warm", cold_start={"prefill": 1.0})
    base["profile"] = "h200-llama2-7b"
    with pytest.raises(BadInput, match="profile h200-llama2-7b has no seconds of a cold start"):
        makespan(start="cold")
