"""The bundled Ascend profile against runs of real servers: those it was fitted on, and those it never saw."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from servesim.calibrate.logs.fit import Judged, judge
from servesim.calibrate.logs.observed_runs import Observed, read_runs
from servesim.config.scenario import scenario_from
from servesim.costs.device_profile import load_profile
from servesim.runs.simulate import simulate

from ...conftest import ROOT

NAME = "ascend910b4-llama2-7b"
RUNS = ROOT / "calibrate" / "profiles" / NAME / "runs.yaml"  # it names logs by their place beside the checkout


@pytest.fixture(scope="module")
def judged(shared: Path) -> dict[str, tuple[Observed, Judged]]:
    profile = load_profile(NAME)
    cold = {run: (c["prefill"], c["decode"]) for run, c in profile.about["fit"]["cold_start"].items()}
    runs = read_runs(RUNS).runs
    return {run.name: (run, judge(run, profile.cost, cold)) for run in runs}


def test_at_most_half_of_the_reported_runs_are_fitted() -> None:
    runs = yaml.safe_load(RUNS.read_text(encoding="utf-8"))["runs"]
    assert sum(run.get("fit", True) for run in runs) == 4  # of the ten rows of reported_runs.csv


def test_every_predicted_run_ends_within_two_percent(judged: dict[str, tuple[Observed, Judged]]) -> None:
    errors = {name: result.error for name, (run, result) in judged.items() if not run.fit}
    assert len(errors) == 9
    assert {name: error for name, error in errors.items() if abs(error) > 0.02} == {}


def test_requests_of_a_predicted_run_are_within_five_and_ten_percent(
    judged: dict[str, tuple[Observed, Judged]],
) -> None:
    _, sunflower = judged["sunflower"]
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
