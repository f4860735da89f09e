"""Capacity: the highest request rate of one scenario, by bisection."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import servesim
import yaml
from servesim.runs.request_rate import scenario_at_rate

from . import sweeps

pytestmark = pytest.mark.usefixtures("short_runs")
QUICK = ("-j", 1, "-q", "--no-report")


def constant(rate: float, requests: int = 200) -> dict[str, Any]:
    """A D/D/1 queue: one request at a time, 0.1 s each (a prefill of 0.04 s and two decodes of 0.03 s)."""
    lengths = {"kind": "fixed", "prompt": 10, "output": 3}
    workload = {"requests": requests, "arrivals": {"kind": "constant", "rate": rate}, "lengths": lengths}
    costs = {"kind": "linear", "prefill": 0.04, "decode_step": 0.03}
    return {"workload": workload, "policy": {"name": "llm-serving"}, "profile": costs}


@pytest.mark.parametrize("rates", ["auto", [1.0], [80.0], [2.0, 64.0]])
def test_bisection_finds_the_theoretical_capacity(rates: Any) -> None:
    result = servesim.capacity(constant(1.0), subject_to="p99_ttft_ms<=45", rates=rates)
    assert result.rate == pytest.approx(10.0, rel=0.011) and result.rate <= 10.0
    assert result.capacity.missed_at[0] >= 10.0
    assert result.capacity.reason[0].startswith("misses p99_ttft_ms <= 45 (")
    assert list(result.curves.rate) == sorted(result.curves.rate)


def test_a_constraint_that_no_rate_meets_exits_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "scenario.yaml"
    path.write_text(yaml.safe_dump(constant(1.0, 20)))
    words = ("capacity", path, *QUICK, "--rates", "1", "-o")
    assert sweeps.sim(*words, tmp_path / "none", "--subject-to", "p99_ttft_ms<=30") == 1
    text = "No tested rate meets p99_ttft_ms <= 30: at 0.0002441 req/s: misses p99_ttft_ms <= 30 (40.0"
    assert text in capsys.readouterr().out and not (tmp_path / "none/best.yaml").exists()


@pytest.mark.parametrize("rates", ["auto", [1.0], [2.0, 64.0]])
def test_a_lower_bound_is_missed_at_low_rates_too(rates: Any) -> None:
    """The queue serves up to 10 req/s: rates from 8 to 10 meet both constraints."""
    result = servesim.capacity(constant(1.0), subject_to=["request_throughput>=8", "p99_ttft_ms<=45"], rates=rates)
    assert result.rate == pytest.approx(10.0, rel=0.011) and result.rate <= 10.0
    assert result.capacity.missed_below[0] < 8.01 and result.capacity.missed_at[0] >= 10.0
    assert (
        "p99_ttft_ms <= 45 up to 9.9" in result.verdict and "req/s: misses request_throughput >= 8 (" in result.verdict
    )
    assert result.curves.meets.any() and len(result.curves) < 20


def test_a_lower_bound_above_the_throughput_is_missed_at_every_rate() -> None:
    result = servesim.capacity(constant(1.0), subject_to="request_throughput>=20", rates=[1.0, 4.0])
    assert result.rate is None
    assert result.verdict.startswith("No tested rate meets request_throughput >= 20: at 1")
    assert len(result.curves) < 20


def test_attainment_of_an_slo_can_be_a_constraint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "scenario.yaml"
    path.write_text(yaml.safe_dump(constant(1.0)))
    words = ("capacity", path, *QUICK, "--subject-to", "attainment>=0.99")
    assert sweeps.sim(*words, "--goodput", "e2el:150", "-o", tmp_path / "out", "--steady") == 0
    assert "Capacity: meets attainment >= 0.99 up to " in capsys.readouterr().out
    best_scenario = yaml.safe_load((tmp_path / "out/best.yaml").read_text())
    assert best_scenario["workload"]["arrivals"]["rate"] == pytest.approx(10.0, rel=0.02)
    assert sweeps.sim(*words, "-o", tmp_path / "no") == 2
    assert "attainment: expected a `slo`" in capsys.readouterr().err


def test_requests_left_unserved_miss_every_constraint(tmp_path: Path) -> None:
    """Clients give up after a second: the requests that are served meet the bound at every rate."""
    tree = constant(1.0) | {"engine": {"client_timeout": 1.0}}
    result = servesim.capacity(tree, subject_to="p99_ttft_ms<=5000", precision=0.1)
    assert result.rate is not None and 8 < result.rate < 20
    assert "requests unserved" in result.capacity.reason[0]


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
    words = ("--subject-to", "p95_ttft_ms <= 300", "--subject-to", "failed <= 0", "-o", out, "--precision", "5%")
    assert sweeps.sim("capacity", path, *words, *QUICK) == 0
    text = capsys.readouterr().out
    workload = yaml.safe_load((out / "best.yaml").read_text())["workload"]
    rate = workload["contest"]["X"] if kind == "contest" else workload["arrivals"]["rate"]
    assert f"Capacity: meets p95_ttft_ms <= 300, failed <= 0 up to {rate:.10g} req/s; at " in text
    with (out / "rates.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert f"\n{len(rows)} rates, {len(rows)} runs; " in text
    assert max(float(row["rate"]) for row in rows if row["meets"] == "1") == rate
    assert sweeps.sim("run", out / "best.yaml", "--json") == 0
    best = next(row for row in rows if float(row["rate"]) == rate)
    assert json.loads(capsys.readouterr().out)["p95_ttft_ms"] == pytest.approx(float(best["p95_ttft_ms"]), rel=1e-9)


def test_a_resumed_search_for_the_rate_writes_the_same_bytes(tmp_path: Path) -> None:
    path, out = tmp_path / "scenario.yaml", tmp_path / "out"
    path.write_text(yaml.safe_dump(constant(1.0)))
    words = ("capacity", path, "-j", 1, "-q", "--subject-to", "p99_ttft_ms<=45", "-o")
    assert sweeps.sim(*words, tmp_path / "whole") == 0
    assert sweeps.sim(*words, out) == 0
    assert sweeps.sim(*words, out) == 2
    lines = (out / "runs.jsonl").read_bytes().splitlines(keepends=True)
    (out / "runs.jsonl").write_bytes(b"".join(lines[:-2]))
    assert sweeps.sim(*words, out, "--resume") == 0
    assert sweeps.contents(out) == sweeps.contents(tmp_path / "whole")
