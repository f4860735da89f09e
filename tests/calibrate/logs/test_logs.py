"""Step costs from logs: the simulator writes logs with known costs, and the fit recovers them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

import numpy as np
import pytest
import yaml
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from servesim.calibrate.logs.fit import LogFit, fit_logs, jackknife
from servesim.calibrate.logs.least_squares import Solution
from servesim.calibrate.logs.observed_runs import read_runs
from servesim.calibrate.logs.timestamps import read_times
from servesim.cli import main
from servesim.config.scenario import scenario_from
from servesim.core import Shape, StepCost
from servesim.costs.derived import NoisyCost
from servesim.costs.device_profile import Profile, load_profile
from servesim.costs.linear import LinearCost
from servesim.costs.uncertainty import MODEL_SPREAD, TTFT_SPREAD, with_parameters
from servesim.runs.run_folder import write_run
from servesim.runs.simulate import simulate

COMMON = {"engine": {"prefill_buckets": [512], "front_end": {"lag": 7, "end_lag": True}}}
START = LinearCost(prefill=0.05, decode_step=0.02, decode_row=0.0005, decode_live=0.0005)
FREE = ["prefill", "decode_step", "decode_row", "decode_live"]
NOISE = {"prefill": [0.95, 1.0, 1.05], "decode": [0.9, 1.0, 1.1]}


LENGTHS = {
    "kind": "lognormal",
    "prompt": {"mean": 20, "sd": 10, "max": 200},
    "output": {"mean": 30, "sd": 25, "max": 200},
}


def workload(batch: int) -> dict[str, Any]:
    requests = {
        "requests": 120,
        "arrivals": {"kind": "poisson", "rate": 100},  # above the capacity of the server
        "lengths": LENGTHS,
    }
    return {"policy": {"decode_batch": batch}, "workload": requests}


def write_log(folder: Path, cost: StepCost, batch: int, cold: Optional[Mapping[str, float]] = None) -> dict[str, Any]:
    """Simulate a run, write its log as `sim run -o` does, and return its entry for runs.yaml."""
    tree: dict[str, Any] = {**COMMON, **workload(batch)}
    if cold:
        tree["engine"] = {**tree["engine"], "cold_start": cold}
    run = simulate(scenario_from(tree), profile=Profile("known", cost))
    write_run(run, folder / f"batch{batch}")
    return {
        "name": f"batch{batch}",
        "scenario": {"policy": {"decode_batch": batch}},
        "log": f"batch{batch}/requests.csv",
        "cold": bool(cold),
    }


def write_runs(folder: Path, runs: list[dict[str, Any]], start: LinearCost = START) -> Path:
    """Write runs.yaml into the folder."""
    cost = {"kind": "linear", **{name: getattr(start, name) for name in FREE}}
    tree = {"scenario": COMMON, "cost": cost, "free": FREE, "runs": runs}
    (folder / "runs.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    return folder / "runs.yaml"


def fit(folder: Path, runs: list[dict[str, Any]], start: LinearCost = START, leave_out: bool = False) -> LogFit:
    """Fit runs in the folder."""
    return fit_logs(read_runs(write_runs(folder, runs, start)), leave_out=leave_out)


# Every example is a slow fit: always the same examples, without shrinking.
SLOW = settings(derandomize=True, phases=[Phase.explicit, Phase.generate])
costs = st.builds(
    LinearCost,
    prefill=st.floats(0.02, 0.1),
    decode_step=st.floats(0.01, 0.04),
    decode_row=st.floats(0.0003, 0.001),
    decode_live=st.floats(0.0003, 0.001),
)


@settings(SLOW, max_examples=2)
@given(known=costs)
def test_known_costs_are_recovered_within_their_intervals(
    known: LinearCost, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("logs")
    result = fit(folder, [write_log(folder, known, batch) for batch in (24, 4)])
    for k, name in enumerate(FREE):
        low, high = result.interval(k)
        assert low <= getattr(known, name) <= high, name
        assert result.values[k] == pytest.approx(getattr(known, name), rel=0.02)
    assert all(abs(run.error) < 1e-3 for run in result.fitted)


@pytest.mark.slow  # the next test does it for one device
@settings(SLOW, max_examples=4)
@given(known=costs, seed=st.integers(0, 99))
def test_known_costs_are_recovered_from_noisy_logs(
    known: LinearCost, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    check_noisy_logs(tmp_path_factory.mktemp("logs"), known, seed)


def test_the_costs_of_one_device_are_recovered_from_noisy_logs(tmp_path: Path) -> None:
    known = LinearCost(prefill=0.07, decode_step=0.015, decode_row=0.0008, decode_live=0.0004)
    check_noisy_logs(tmp_path, known, 7)


def check_noisy_logs(folder: Path, known: LinearCost, seed: int) -> None:
    runs = [write_log(folder, NoisyCost(known, NOISE, seed + batch), batch) for batch in (24, 4)]
    result = fit(folder, runs)
    for k, name in enumerate(FREE):
        low, high = result.interval(k)
        assert low <= getattr(known, name) <= high, name
        assert (high - low) < 2 * getattr(known, name), "the interval is too wide"


def test_a_cold_start_is_separated_from_the_costs(tmp_path: Path) -> None:
    runs = [write_log(tmp_path, START, 4), write_log(tmp_path, START, 24, {"prefill": 18.0, "decode": 13.0})]
    result = fit(tmp_path, runs)
    assert result.names[4:] == ["cold.batch24.prefill", "cold.batch24.decode"]
    assert result.cold["batch24"] == pytest.approx((18.0, 13.0), abs=0.02)
    assert result.values[0] == pytest.approx(START.prefill, rel=0.01)


def test_costs_are_fitted_to_totals_only(tmp_path: Path) -> None:
    known = replace(START, decode_step=0.03)
    runs = []
    for batch in (2, 8, 24):
        run = simulate(scenario_from({**COMMON, **workload(batch)}), profile=Profile("known", known))
        runs.append({"name": f"b{batch}", "scenario": workload(batch), "total": run.measures.makespan})
    result = fit(tmp_path, runs)
    assert [run.name for run in result.fitted] == ["b2", "b8", "b24"]
    assert all(abs(run.error) < 0.005 for run in result.fitted)
    low, high = result.interval(1)
    assert low <= 0.03 <= high


def test_each_run_is_predicted_from_the_others(tmp_path: Path) -> None:
    runs = [write_log(tmp_path, START, batch) for batch in (2, 8, 24)]
    result = fit(tmp_path, runs, replace(START, decode_live=0.0008), leave_out=True)
    assert [run.name for run in result.left_out] == ["batch2", "batch8", "batch24"]
    assert all(abs(run.error) < 0.01 for run in result.left_out)


def test_standard_errors_come_from_leaving_out_one_run_at_a_time() -> None:
    def solution(*values: float, errors: tuple[float, ...]) -> Solution:
        return Solution(np.array(values), np.diag(np.square(errors)))

    names = ["a", "b", "cold.x.prefill"]
    whole = solution(1.0, 2.0, 5.0, errors=(0.01, 0.01, 0.1))
    without_x = solution(1.1, 8.0, errors=(0.01, 0.5))  # x is the sole source of b: only the prior moves b now
    without_y = solution(1 / 1.1, 2.0, 5.0, errors=(0.01, 0.01, 0.1))
    errors = jackknife([(names[:2], without_x), (names, without_y)], names, whole)
    assert errors == pytest.approx([np.log(1.1), 0.0, 0.0])


def test_runs_that_are_not_fitted_are_predicted(tmp_path: Path) -> None:
    runs = [
        write_log(tmp_path, START, 4),
        write_log(tmp_path, START, 24),
        write_log(tmp_path, START, 12) | {"fit": False},
    ]
    (predicted,) = fit(tmp_path, runs).predicted
    assert predicted.name == "batch12"
    assert abs(predicted.error) < 2e-3


def test_command_writes_a_profile_that_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_runs(tmp_path, [write_log(tmp_path, START, 4), write_log(tmp_path, START, 24)])
    assert main(["calibrate", "logs", str(file), "-o", str(tmp_path / "out"), "-q"]) == 0
    assert "fitted: batch24" in capsys.readouterr().out
    profile = load_profile(tmp_path / "out")
    assert isinstance(profile.cost, LinearCost)
    assert profile.cost.prefill == pytest.approx(START.prefill, rel=0.01)
    assert set(profile.about["fit"]["parameters"]) == set(FREE)
    assert len(profile.uncertainty.draws) == 24
    assert (profile.uncertainty.session, profile.uncertainty.ttft) == (MODEL_SPREAD, TTFT_SPREAD)
    assert profile.about["grid"]["decode_rows"] == [1, 24]  # of the fitted run with the larger batches
    shape = Shape(decode_rows=8, decode_live=8, context=1000)
    times = [with_parameters(profile.cost, draw).seconds(shape) for draw in profile.uncertainty.draws]
    assert float(np.mean(times)) == pytest.approx(profile.cost.seconds(shape), rel=0.01)
    assert 0 < float(np.std(times)) < 0.01 * profile.cost.seconds(shape)  # rows and steps vary in opposite directions


CLIENT_LOG = """\
2025-02-03 04:05:06,000 - a.log - INFO - Start send request, avg interval is 1.0
2025-02-03 04:05:06,100 - a.log - INFO - poisson random interval time is 1.5s
2025-02-03 04:05:07,600 - a.log - INFO - poisson random interval time is 1.0s
2025-02-03 04:05:08,000 - a.log - INFO - first_token_time is 0.4
2025-02-03 04:05:08,100 - a.log - INFO - {'input': 'b', 'resp_text': ' y', 'res_time': 0.5, 'first_token_time': 0.4}
Test Progress --> 1/2
2025-02-03 04:05:08,350 - a.log - INFO - {'input': 'a', 'resp_text': ' x', 'res_time': 2.25, 'first_token_time': 0.75}
Test Progress --> 2/2
2025-02-03 04:05:08,352 - a.log - INFO - All Tasks Done; Exec Time is 2.252
"""


def test_log_of_performance_serving_is_read(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text(CLIENT_LOG, encoding="utf-8")
    times = read_times(tmp_path / "log.txt")
    assert times.request_index.tolist() == [0, 1]
    assert times.arrivals == pytest.approx({0: 0.0, 1: 1.5})
    assert (times.ttft.tolist(), times.e2e.tolist()) == ([0.75, 0.4], [2.25, 0.5])


def test_unfinished_requests_are_left_out(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text("idx,arrival_s,ttft_s,e2e_s\n0,0.0,1.0,2.0\n1,0.5,,\n2,1.0,3.0,4.0\n", encoding="utf-8")
    times = read_times(log)
    assert times.request_index.tolist() == [0, 2]
    assert np.array_equal(times.e2e, [2.0, 4.0])
