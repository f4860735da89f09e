"""Simulated against measured: signed errors, their sources, pairs of requests, ranks, and tolerances."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from servesim.calibrate.device.backend import MODELS
from servesim.calibrate.device.fake import FakeBackend
from servesim.calibrate.live.replay_job import replay
from servesim.calibrate.live.setup import replay_arguments
from servesim.calibrate.replay.comparison_text import format_comparison
from servesim.calibrate.replay.measured_run import run_from_result, write_live
from servesim.calibrate.replay.replay import (
    ReplayedScenario,
    as_backend_scenario,
    replay_requests,
    simulate_and_compare,
    top_scenarios,
    write_replay,
)
from servesim.calibrate.replay.verify import (
    MetricRow,
    compare_decisions,
    compare_latency,
    kendall_tau,
    relative_error,
)
from servesim.cli import main
from servesim.config.scenario import Scenario, scenario_from
from servesim.core import BadInput
from servesim.costs.derived import CostWithHost, ScaledCost
from servesim.costs.device_profile import Profile
from servesim.costs.linear import LinearCost
from servesim.costs.parts import DecodePart, HostPart, PartsCost
from servesim.engine.clocks import VirtualClock
from servesim.runs.run_folder import RunData, read_run, run_data

TREE: dict[str, Any] = {
    "workload": {
        "requests": 30,
        "arrivals": {"kind": "poisson", "rate": 8},
        "lengths": {
            "prompt": {"kind": "uniform", "low": 5, "high": 40},
            "output": {"kind": "uniform", "low": 2, "high": 30},
        },
    },
    "policy": {"name": "llm-serving", "decode_batch": 4},
    "engine": {"num_blocks": 40, "block_size": 8},
    "profile": {"base": 0.01, "prefill_token": 0.001, "decode_live": 0.001},
}
TRUE = LinearCost(base=0.01, prefill_token=0.001, decode_live=0.001)  # step cost of the device


def measured(scenario: Scenario, cost: LinearCost = TRUE, limit: int | None = None) -> ReplayedScenario:
    """Replay a scenario on a fake backend with this cost and a virtual clock."""
    scenario = as_backend_scenario(scenario)
    requests = replay_requests(scenario, limit=limit)
    backend = FakeBackend({})
    backend.load(MODELS["tiny"], 600, scenario.engine.block_size, scenario.engine.host_blocks)
    result = replay(backend, replay_arguments(scenario, requests, MODELS["tiny"], 0), clock=VirtualClock(cost))
    run = run_from_result(scenario, Profile("true", cost), requests, json.loads(json.dumps(result)))
    return ReplayedScenario("here", run, run_data(run, run.decisions))


def test_a_comparison_leads_with_the_latency_of_requests_at_a_rate_and_with_the_makespan_of_a_burst() -> None:
    burst = {**TREE, "workload": {**TREE["workload"], "arrivals": {"kind": "burst"}}}
    for tree, lead in ((TREE, ["mean_e2el_ms", "p99_ttft_ms"]), (burst, ["makespan", "mean_ttft_ms"])):
        live = measured(scenario_from(tree))
        simulate_and_compare(live, live.live.requests, Profile("true", TRUE), HostPart())
        assert [row.metric for row in live.comparison.rows[:2]] == lead


def test_error_is_signed_and_relative_to_the_measured_value() -> None:
    assert relative_error(110.0, 100.0) == pytest.approx(0.1)
    assert relative_error(90.0, 100.0) == pytest.approx(-0.1)
    assert relative_error(0.0, 0.0) == 0.0
    assert relative_error(1.0, 0.0) is None
    row = MetricRow("makespan", 110.0, 100.0, 98.0)
    assert row.error == pytest.approx(0.10)
    assert row.from_decisions == pytest.approx(-0.02)
    assert row.from_step_times == pytest.approx(0.12)


def test_wrong_step_times_give_an_error_from_step_times() -> None:
    live = measured(scenario_from(TREE))
    slow = Profile("slow", LinearCost(base=0.012, prefill_token=0.0012, decode_live=0.0012))
    simulate_and_compare(live, live.live.requests, slow, HostPart())
    makespan = live.comparison.row("makespan")
    assert makespan.error is not None
    assert makespan.error > 0.01
    assert makespan.from_step_times == pytest.approx(makespan.error)
    assert live.comparison.calls_matched == (len(live.measured.calls),) * 2


def test_measured_values_are_inside_or_outside_the_intervals() -> None:
    live = measured(scenario_from(TREE))
    simulate_and_compare(live, live.live.requests, Profile("true", TRUE), HostPart(), draws=8)
    assert all(row.inside for row in live.comparison.rows)
    assert "inside the intervals: 21 of 21 measured values" in format_comparison(live.comparison)
    slow = Profile("slow", LinearCost(base=0.015, prefill_token=0.0015, decode_live=0.0015))
    simulate_and_compare(live, live.live.requests, slow, HostPart(), draws=8)
    row = live.comparison.row("mean_tpot_ms")
    assert row.inside is False
    assert row.as_dict()["interval"] == list(row.interval or ())
    text = format_comparison(live.comparison)
    assert "outside: " in text and "mean_tpot_ms +" in text
    simulate_and_compare(live, live.live.requests, slow, HostPart())
    assert "interval" not in format_comparison(live.comparison)
    assert "interval" not in live.comparison.row("mean_tpot_ms").as_dict()


def test_a_profile_of_the_same_session_has_narrower_intervals() -> None:
    live = measured(scenario_from(TREE))
    widths = []
    for same in (False, True):
        simulate_and_compare(live, live.live.requests, Profile("true", TRUE), HostPart(), 8, same)
        low, high = live.comparison.row("mean_e2el_ms").interval or (0.0, 0.0)
        widths.append(high - low)
    assert 0 < widths[1] < widths[0]


def test_the_date_of_a_profile_decides_whether_the_session_is_the_same() -> None:
    now = datetime(2026, 1, 1, 12, tzinfo=timezone.utc)
    dates = {"2026-01-01T11:30:00+00:00": True, "2026-01-01T11:30:00": True, "2026-01-01T10:30:00+00:00": False}
    for date, expected in {**dates, "yesterday": False, None: False}.items():
        assert Profile("true", TRUE, {"date": date}).measured_within(3600, now) is expected


def test_the_measured_host_time_replaces_that_of_the_profile_in_every_draw() -> None:
    cost = PartsCost(decodes=DecodePart(((1.0, 0.01), (8.0, 0.02))), host=HostPart(step=1.0))
    assert CostWithHost(ScaledCost(cost, 2.0), HostPart(0.5)).decode(1, 1, 0) == pytest.approx(0.52)


def test_a_perfect_profile_has_no_error() -> None:
    live = measured(scenario_from(TREE))
    simulate_and_compare(live, live.live.requests, Profile("true", TRUE), HostPart())
    assert live.comparison.decisions.identical
    assert all(row.error == 0.0 for row in live.comparison.rows)
    assert live.comparison.outside(0.0) == []


def test_another_policy_gives_an_error_from_decisions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    live = measured(scenario_from(TREE))
    write_live(live.live, tmp_path / "live")
    other = tmp_path / "other.yaml"
    other.write_text(yaml.safe_dump({**TREE, "policy": {"name": "llm-serving", "decode_batch": 1}}))
    assert main(["run", str(other), "-o", str(tmp_path / "sim")]) == 0
    capsys.readouterr()
    assert main(["verify", str(tmp_path / "sim"), str(tmp_path / "live"), "--json", "--tolerance", "5%"]) == 3
    report = json.loads(capsys.readouterr().out)["comparisons"][0]
    makespan = report["metrics"]["makespan"]
    assert makespan["error"] > 0.05
    assert makespan["from_decisions"] == pytest.approx(makespan["error"], rel=0.2)
    assert abs(makespan["from_step_times"]) < 0.2 * makespan["error"]
    assert report["calls_matched"][0] < report["calls_matched"][1]


def test_requests_are_paired_by_id() -> None:
    def run(**finishes: float) -> RunData:
        rows = {
            id: {"arrival": 1.0, "first_token": 1.5, "finish": finish, "outcome": "finished"}
            for id, finish in finishes.items()
        }
        return RunData({}, rows)

    difference = compare_latency("e2el", run(a=3.0, b=5.0, c=9.0), run(b=4.0, a=3.0, d=7.0))
    assert (difference.count, difference.mean, difference.median) == (2, 0.5, 0.5)
    assert difference.within == 0.5
    assert difference.worst[0] == ("b", 4.0, 3.0)
    assert compare_latency("e2el", run(a=3.0), run(b=4.0)) is None


def test_decisions_are_compared_step_by_step() -> None:
    def step(id: int, t: float) -> dict[str, Any]:
        return {"t": t, "kind": "decode", "chunks": [[id, 1]], "preempted": [], "swapped_in": [], "rejected": []}

    ours = RunData({}, {}, [step(1, 0.0), step(2, 1.0), step(3, 2.0), step(4, 3.0)])
    theirs = RunData({}, {}, [step(1, 0.5), step(2, 1.5), step(9, 2.5), step(4, 3.5), step(5, 4.5)])
    decisions = compare_decisions(ours, theirs)
    assert (decisions.simulated, decisions.measured, decisions.same, decisions.alike) == (4, 5, 2, 3)
    assert decisions.first["t"] == 2.5
    assert not decisions.identical
    with_itself = compare_decisions(ours, ours)
    assert with_itself.identical


def test_kendalls_tau_has_textbook_values() -> None:
    assert kendall_tau([1, 2, 3, 4], [10, 20, 30, 40]) == 1.0
    assert kendall_tau([1, 2, 3, 4], [4, 3, 2, 1]) == -1.0
    assert kendall_tau([1, 2, 3, 4], [1, 2, 4, 3]) == pytest.approx(4 / 6)
    assert kendall_tau([1, 2, 2, 3], [1, 3, 2, 4]) == pytest.approx(5 / 30**0.5)  # tau-b: one pair tied
    assert kendall_tau([1, 1], [1, 2]) is None


def test_verify_reads_folders_and_checks_the_tolerance(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    near = Profile("near", LinearCost(0.0102, prefill_token=0.001, decode_live=0.001))
    for name, batch in (("one", 2), ("two", 6)):
        live = measured(scenario_from({**TREE, "policy": {"name": "llm-serving", "decode_batch": batch}}))
        simulate_and_compare(live, live.live.requests, near, HostPart())
        live.name = name
        write_replay(live, tmp_path, single=False)
    both = ["verify", str(tmp_path / "sim"), str(tmp_path / "live")]
    assert main([*both, "--tolerance", "0.10", "-o", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "simulated against measured: one" in out
    assert "tolerance 10 %: met" in out
    assert "Kendall's tau" in out
    report = json.loads((tmp_path / "out" / "verify.json").read_text())
    assert [one["name"] for one in report["comparisons"]] == ["one", "two"]
    assert report["kendall_tau"]["makespan"] == 1.0
    assert main([*both, "--tolerance", "0.0001"]) == 3
    assert main([*both]) == 0
    again = read_run(tmp_path / "live" / "one")
    assert again.sent is not None
    assert len(again.sent) == 30
    capsys.readouterr()
    checked = ["--metrics", "p99.9_ttft_ms", "p95_e2el_ms", "--tolerance", "10%"]
    assert main([*both, *checked]) == 2  # not compared without the option
    assert main([*both, *checked, "--metric-percentiles", "95,99.9", "--json"]) == 0
    captured = capsys.readouterr()
    assert "metric 'p99.9_ttft_ms': not compared" in captured.err
    row = json.loads(captured.out)["comparisons"][0]["metrics"]["p99.9_ttft_ms"]
    waits = [r["first_token"] - r["arrival"] for r in again.requests.values() if r["outcome"] == "finished"]
    assert row["measured"] == pytest.approx(1e3 * np.percentile(waits, 99.9), rel=1e-9)
    assert row["simulated"] and row["from_step_times"] is not None


@pytest.mark.usefixtures("device_here")
def test_winners_of_a_sweep_are_replayed_in_rank_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = tmp_path / "sweep.yaml"
    tree = {**TREE, "workload": {**TREE["workload"], "arrivals": {"kind": "poisson", "rate": 60}}}
    sweep.write_text(yaml.safe_dump({"base": tree, "params": {"policy.decode_batch": [1, 2, 8]}}))
    folder = tmp_path / "swept"
    assert main(["sweep", str(sweep), "-o", str(folder), "-j", "1"]) == 0
    assert [name for name, _ in top_scenarios(folder, 1, baseline=True)] == ["rank1", "rank2-baseline"]
    best = top_scenarios(folder, 3)
    assert [(name, scenario.policy["decode_batch"]) for name, scenario in best] == [
        ("rank1", 8), ("rank2-baseline", 4), ("rank3", 2),
    ]  # fmt: skip
    assert top_scenarios(folder / "best.yaml", 1)[0][1].policy["decode_batch"] == 8
    with pytest.raises(BadInput, match=r"no summary\.csv"):
        top_scenarios(tmp_path, 1)
    capsys.readouterr()
    command = ["replay", "--from", str(folder), "--top", "2", "--backend", "fake", "--limit", "8", "--tolerance", "1%"]
    assert main([*command, "-o", str(tmp_path / "out")]) == 0
    assert "rank agreement over 2 settings" in capsys.readouterr().out
    assert (tmp_path / "out" / "live" / "rank2-baseline" / "steps.csv").exists()
