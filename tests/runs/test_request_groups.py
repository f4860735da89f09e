"""Metrics of one priority or one session: in result.json, as objective and bound, and as columns of the requests."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from servesim.cli import main
from servesim.config.scenario import scenario_from
from servesim.core import BadInput
from servesim.runs.run_folder import read_requests, read_result, write_run
from servesim.runs.simulate import Run, simulate
from servesim.statistics.constraints import parse_bound
from servesim.statistics.objective import parse_objective

SCENARIO = {
    "workload": {
        "requests": 120, "arrivals": {"kind": "poisson", "rate": 40}, "lengths": {"prompt": 64, "output": 16},
        "priorities": {0: 0.3, 5: 0.7},
    },
    "policy": {"name": "vllm-v1", "order": "priority", "max_num_seqs": 4},
    "profile": {"base": 0.01, "prefill_token": 1e-4},
    "slo": {"ttft": 2000},
}  # fmt: skip


@pytest.fixture(scope="module")
def run() -> Run:
    return simulate(scenario_from(SCENARIO, "test"))


@pytest.mark.parametrize("priority", [0, 5])
def test_the_metrics_of_a_priority_are_those_of_its_requests(run: Run, priority: int) -> None:
    result = run.result()
    inside = [request for request in run.requests if request.priority == priority]
    ttft = np.array([1e3 * (request.first_token - request.sent) for request in inside if request.first_token])
    assert result[f"completed[priority={priority}]"] == len(inside)
    assert result[f"failed[priority={priority}]"] == 0
    assert result[f"mean_ttft_ms[priority={priority}]"] == pytest.approx(ttft.mean())
    assert result[f"p99_ttft_ms[priority={priority}]"] == pytest.approx(np.percentile(ttft, 99))
    assert result[f"attainment[priority={priority}]"] == pytest.approx(float((ttft <= 2000).mean()))


def test_a_priority_policy_can_be_judged(run: Run) -> None:
    """Without groups, the order of priorities looks like a small change of the pooled TTFT."""
    arrival = simulate(scenario_from({**SCENARIO, "policy": {"name": "vllm-v1", "max_num_seqs": 4}}, "test")).result()
    result = run.result()
    assert result["p99_ttft_ms[priority=0]"] < 0.5 * arrival["p99_ttft_ms[priority=0]"]
    assert result["p99_ttft_ms[priority=5]"] > arrival["p99_ttft_ms[priority=5]"]


def test_a_further_percentile_is_computed_for_groups_too(run: Run) -> None:
    run.measures.add_percentiles([99.9])
    assert run.result()["p99.9_ttft_ms[priority=5]"] >= run.result()["p99_ttft_ms[priority=5]"]


def test_one_priority_makes_no_groups() -> None:
    workload = {key: value for key, value in SCENARIO["workload"].items() if key != "priorities"}  # type: ignore[attr-defined]
    result = simulate(scenario_from({**SCENARIO, "workload": workload}, "test")).result()
    assert not [key for key in result if "[" in key]


def test_sessions_have_metrics() -> None:
    workload = {
        "requests": 40, "arrivals": {"kind": "closed", "users": 4, "think_time": 0.1},
        "lengths": {"prompt": 64, "output": 16},
    }  # fmt: skip
    run = simulate(scenario_from({**SCENARIO, "workload": workload}, "test"))
    sessions = {request.session for request in run.requests}
    assert len(sessions) == 4
    assert sum(run.result()[f"completed[session={session}]"] for session in sessions) == 40


def test_the_files_have_priority_and_session(run: Run, tmp_path: Path) -> None:
    write_run(run, tmp_path / "out")
    rows = read_requests(tmp_path / "out" / "requests.csv")
    assert [row["priority"] for row in rows.values()] == [request.priority for request in run.requests]
    assert {row["session"] for row in rows.values()} == {None}
    assert read_result(tmp_path / "out" / "result.json")["p99_ttft_ms[priority=0]"] is not None
    data = json.loads((tmp_path / "out" / "result.json").read_text())
    data["p99_ttft_ms[priority=0]"] = "fast"
    (tmp_path / "out" / "result.json").write_text(json.dumps(data))
    with pytest.raises(BadInput, match=r"p99_ttft_ms\[priority=0\]: expected a number or null"):
        read_result(tmp_path / "out" / "result.json")


def test_a_sweep_ranks_and_bounds_by_the_metric_of_a_priority(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "base.yaml").write_text(json.dumps(SCENARIO))
    (tmp_path / "sweep.yaml").write_text(
        "base: base.yaml\nparams: {policy.order: [arrival, priority]}\n"
        "objectives: ['p99_ttft_ms[priority=0]']\nsubject_to: ['p99_ttft_ms[priority=5] <= 1e6']\n"
    )
    out = tmp_path / "out"
    assert main(["sweep", str(tmp_path / "sweep.yaml"), "-q", "-j", "1", "-o", str(out), "--no-report"]) == 0
    assert "p99_ttft[priority=0] (" in capsys.readouterr().out
    assert "order: priority" in (out / "best.yaml").read_text()
    header = (out / "summary.csv").read_text().splitlines()[0]
    assert "p99_ttft_ms[priority=5]" in header and "p99_e2el_ms[priority=0]" in header
    assert (
        main(["sweep", str(tmp_path / "sweep.yaml"), "-q", "-j", "1", "-o", str(out), "--no-report", "--resume"]) == 0
    )


@pytest.mark.parametrize(
    "name", ["makespan[priority=0]", "p99_itl_ms[priority=0]", "p99_ttft_ms[colour=0]", "p99_ttft_ms[0]"]
)
def test_other_groups_are_no_metrics(name: str) -> None:
    with pytest.raises(BadInput, match="no metric"):
        parse_objective(name)
    with pytest.raises(BadInput, match="no metric"):
        parse_bound(f"{name} <= 3")
