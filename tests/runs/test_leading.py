"""Which metric leads: latency or goodput of requests that arrive at a rate, makespan of a fixed amount of work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import servesim
from servesim.runs.leading import leading_metrics

POISSON = {"kind": "poisson", "rate": 4.0}
LENGTHS = {"prompt": [5, 40], "output": [2, 20]}
REQUESTS: dict[str, Any] = {"requests": 20, "lengths": LENGTHS}
RATE, WORK = ("mean_e2el_ms", "p99_ttft_ms"), ("makespan", "mean_ttft_ms")
CASES: list[tuple[dict[str, Any], tuple[str, str]]] = [
    ({**REQUESTS, "arrivals": POISSON}, RATE),
    ({"stages": [{"rate": 2, "seconds": 10}], "lengths": LENGTHS}, RATE),
    ({**REQUESTS, "arrivals": {"kind": "burst"}}, WORK),
    ({**REQUESTS, "arrivals": {"kind": "closed", "users": 4}}, WORK),
    ({**REQUESTS, "concurrency": 4}, WORK),
    ({"contest": {"X": 5, "T": 300}}, WORK),
    ({"mix": [{**REQUESTS, "concurrency": 4}, {**REQUESTS, "arrivals": POISSON}]}, RATE),
]


@pytest.mark.parametrize(("workload", "expected"), CASES)
def test_the_load_decides(workload: dict[str, Any], expected: tuple[str, str]) -> None:
    assert leading_metrics({"workload": workload}) == expected


def test_goodput_leads_with_an_slo_and_a_rate_only() -> None:
    slo = {"ttft": 500.0, "tpot": None}
    assert leading_metrics({"workload": CASES[0][0], "slo": slo}) == ("request_goodput", "p99_ttft_ms")
    assert leading_metrics({"workload": CASES[0][0], "slo": {"ttft": None}}) == RATE
    assert leading_metrics({"workload": CASES[4][0], "slo": slo}) == WORK


def test_a_steady_state_has_no_makespan() -> None:
    assert leading_metrics({"workload": CASES[0][0]}, steady=True) == RATE
    assert leading_metrics({"workload": CASES[4][0]}, steady=True) == ("mean_e2el_ms", "output_throughput")


@pytest.mark.parametrize(
    ("rows", "expected"),
    [("0,8,2,\n0.5,8,2,\n", RATE), ("0,8,2,\n0,8,2,\n", WORK)],
    ids=["send times", "all at once"],
)
def test_the_send_times_of_a_trace_decide(tmp_path: Path, rows: str, expected: tuple[str, str]) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival,prompt,output,session\n" + rows)
    assert leading_metrics({"trace": str(path)}) == expected
    assert leading_metrics({"trace": {"path": str(path), "rate": 2.0}}) == RATE


def test_runs_without_a_scenario_have_their_arrivals() -> None:
    assert leading_metrics({}, arrivals=[0.0, 1.0]) == RATE
    assert leading_metrics({}, arrivals=[0.0, 0.0]) == WORK


def test_the_sentence_of_a_run_has_the_leading_metrics() -> None:
    tree = {"workload": CASES[0][0], "profile": {"base": 0.02}}
    run = servesim.run(tree)
    assert "; p99_ttft_ms " in run.verdict and ": mean_e2el_ms " in run.verdict
    work = servesim.run({**tree, "workload": CASES[4][0]})
    assert "mean_ttft_ms" in work.verdict and "e2el" not in work.verdict
