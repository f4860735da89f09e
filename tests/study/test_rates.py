"""Rates: every configuration at several request rates; curves, capacities, resume."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from servesim.study.executor import Serial
from servesim.study.pilot_runs import choose_terms
from servesim.study.rate_summary import RateSummary, summarise
from servesim.study.result import load_result
from servesim.study.sweep import sweep
from servesim.study.sweep_file import read_experiment
from servesim.study.sweep_text import format_result
from servesim.study.verdict import join_rates, verdict_of

from . import sweeps

pytestmark = pytest.mark.usefixtures("short_runs")
QUIET = ("-j", 1, "-q", "--no-report")


def queue(requests: int = 200) -> dict[str, Any]:
    """A D/D/1 queue: one request at a time, 0.1 s each with decode_batch 1, so it can serve 10 requests per second."""
    workload = {
        "requests": requests,
        "arrivals": {"kind": "constant", "rate": 1.0},
        "lengths": {"kind": "fixed", "prompt": 10, "output": 3},
    }
    costs = {"kind": "linear", "prefill": 0.04, "decode_step": 0.03}
    return {"workload": workload, "policy": {"name": "llm-serving", "decode_batch": 1}, "profile": costs}


def file_of(folder: Path, **keys: Any) -> Path:
    folder.mkdir(exist_ok=True)
    tree = {"base": queue(), "params": {"policy.decode_batch": [1, 4]}, "rates": [2, 8, 16], **keys}
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump({"objectives": ["mean_e2el_ms"], **tree}, sort_keys=False))
    return path


def run(folder: Path, **keys: Any) -> RateSummary:
    experiment = choose_terms(read_experiment(file_of(folder, **keys)), folder / "out", Serial())
    result = summarise(experiment, sweep(experiment, folder / "out", Serial()))
    assert isinstance(result, RateSummary)
    return result


def test_every_configuration_serves_the_same_requests_at_every_rate(tmp_path: Path) -> None:
    result = run(tmp_path, base=sweeps.base(), params={"policy.decode_batch": [2, 8]}, replications=2)
    assert list(result.by_rate) == [2.0, 8.0, 16.0]
    records = [json.loads(line) for line in (tmp_path / "out/runs.jsonl").read_text().splitlines()]
    keys = {(run["rate"], run["config"], run["replication"]) for run in records}
    assert len(keys) == len(records) == 3 * 3 * 2
    for summary in result.by_rate.values():
        assert {run["seed"] for row in summary.rows for run in row.runs if run["replication"] == 1} != {0}
        assert {run["metrics"]["completed"] for row in summary.rows for run in row.runs} == {40}
    spans = [result.by_rate[rate].baseline.mean("makespan") for rate in result.rates]
    assert spans == sorted(spans, reverse=True)  # the same requests arrive faster


def test_the_highest_capacity_wins_and_best_yaml_has_its_rate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = file_of(tmp_path, params={"policy.decode_batch": [1, 4], "policy.prefill_batch": [1]}), tmp_path / "out"
    words = ("--subject-to", "p99_e2el_ms <= 400", "--precision", "2%")
    assert sweeps.sim("sweep", file, "-o", out, *QUIET, *words) == 0
    text = capsys.readouterr().out
    result = load_result(out)
    assert isinstance(result, RateSummary) and result.winner is not None and result.winner.capacity is not None
    assert result.winner.assignment["policy.decode_batch"] == 4
    rate = result.winner.capacity.rate
    assert rate > (result.baseline.capacity or result.winner.capacity).rate
    assert f"meets p99_e2el_ms <= 400 up to {rate:.10g} req/s; the baseline up to " in text
    assert yaml.safe_load((out / "best.yaml").read_text())["workload"]["arrivals"]["rate"] == rate
    with (out / "capacity.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    assert float(rows[0]["capacity"]) == rate and rows[0]["relation"] == "best"
    with (out / "summary.csv").open() as lines:
        rates = [float(row["rate"]) for row in csv.DictReader(lines)]
    assert sorted(set(rates)) == [2.0, 8.0, 16.0]
    assert sweeps.sim("run", out / "best.yaml", "--json") == 0
    again = json.loads(capsys.readouterr().out)["p99_e2el_ms"]
    expected = next(point for point in result.winner.points if point.rate == rate).row.mean("p99_e2el_ms")
    assert again == pytest.approx(expected, rel=1e-9) and again <= 400


def test_neighbouring_rates_with_the_same_text_share_a_line() -> None:
    texts = [(0.5, "a"), (1.25, "a"), (2.0, "b"), (4.0, "a")]
    assert join_rates(texts) == [("0.5 to 1.25 req/s", "a"), ("2 req/s", "b"), ("4 req/s", "a")]


def test_without_constraints_every_rate_has_its_own_winner(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = file_of(tmp_path), tmp_path / "out"
    assert sweeps.sim("sweep", file, "-o", out, *QUIET) == 0
    text = capsys.readouterr().out
    assert "Winner per rate: 2 to 8 req/s: nothing beats the baseline; 16 req/s: decode_batch=4." in text
    assert not (out / "best.yaml").exists()
    best = yaml.safe_load((out / "best-at-16.yaml").read_text())
    assert best["workload"]["arrivals"]["rate"] == 16.0
    assert sweeps.sim("table", out, "--rate", 16) == 2  # one parameter only
    assert sweeps.sim("compare", f"{out}:0@16", f"{out}@16", "-j", 1, "--metric", "mean_e2el_ms") == 0
    assert "B is " in capsys.readouterr().out
    assert sweeps.sim("compare", f"{out}:0", out, "-j", 1) == 2
    assert "expected one of its rates (2, 8, 16), got no rate" in capsys.readouterr().err


def test_auto_rates_go_from_light_load_to_above_the_capacity_of_the_baseline(tmp_path: Path) -> None:
    result = run(tmp_path, rates="auto", subject_to=["p99_ttft_ms <= 45"])
    assert result.rates[0] <= 2 and result.rates[-1] > 10
    capacity = result.baseline.capacity
    assert capacity is not None and capacity.rate <= 10.0 < (capacity.missed_at or 0)
    again = choose_terms(read_experiment(tmp_path / "sweep.yaml"), tmp_path / "out", Serial())
    assert list(again.rates) == result.rates


def test_nothing_meets_the_constraints_at_any_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--subject-to", "p99_ttft_ms <= 30")
    assert sweeps.sim("sweep", file_of(tmp_path), "-o", tmp_path / "out", *QUIET, *words) == 1
    text = capsys.readouterr().out
    assert (
        "No winner: no configuration meets p99_ttft_ms <= 30 at a tested rate. Nearest at 2 req/s: the baseline" in text
    )
    assert "  below 2  " in text and not (tmp_path / "out/best.yaml").exists()


@pytest.mark.parametrize("lines", [0, 7, 12])
def test_a_resumed_sweep_over_rates_writes_the_same_bytes(tmp_path: Path, lines: int) -> None:
    keys = {"subject_to": ["p99_e2el_ms <= 400"], "precision": 0.05}
    file = file_of(tmp_path, **keys)
    assert sweeps.sim("sweep", file, "-o", tmp_path / "whole", *QUIET) == 0
    assert sweeps.sim("sweep", file, "-o", tmp_path / "part", *QUIET) == 0
    journal = tmp_path / "part/runs.jsonl"
    text = journal.read_bytes().splitlines(keepends=True)
    assert len(text) > 12
    journal.write_bytes(b"".join(text[:lines]) + b'{"config": 1, "rep')
    assert sweeps.sim("sweep", file, "-o", tmp_path / "part", *QUIET, "--resume") == 0
    for name in (
        "experiment.json",
        "runs.jsonl",
        "summary.csv",
        "pareto.csv",
        "rates.csv",
        "capacity.csv",
        "best.yaml",
    ):
        assert (tmp_path / "part" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def test_requests_without_a_rate_have_no_rates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    burst = {"requests": 5, "arrivals": {"kind": "burst"}, "lengths": {"kind": "fixed", "prompt": 1, "output": 1}}
    file = file_of(tmp_path, base={**queue(), "workload": burst})
    assert sweeps.sim("sweep", file, "-o", tmp_path / "out", *QUIET) == 2
    error = capsys.readouterr().err
    assert "expected requests with a rate" in error and error.count("\n") == 1


def test_an_unfinished_sweep_over_rates_has_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Configuration 2 has no run yet."""
    out = tmp_path / "out"
    params = {"policy.decode_batch": [2, 4]}
    run(tmp_path, subject_to=["p99_e2el_ms <= 400"], params=params)
    journal = out / "runs.jsonl"
    lines = [line for line in journal.read_text().splitlines(keepends=True) if json.loads(line)["config"] != 2]
    journal.write_text("".join(lines))
    assert sweeps.sim("report", out) == 0
    assert "decode_batch=4" in (out / "report.html").read_text()


def test_a_value_that_misses_another_constraint_names_it(tmp_path: Path) -> None:
    """At 16 requests per second, the TTFT limit is met only because it is wide; the E2E limit is missed."""
    keys = {"subject_to": ["p99_ttft_ms <= 60000", "p99_e2el_ms <= 400"], "rates": [2, 16]}
    lines = format_result(run(tmp_path, **keys)).splitlines()
    (row,) = [line for line in lines if line.endswith("baseline")]
    assert " ! p99_e2el_ms, saturated" in row and row.startswith("2     2 (misses at 16)")
    assert any(line.startswith("saturated: 1 of 4 tested rates (the backlog grows") for line in lines)
    assert "the capacities are not tested against the error of the cost model: leave a margin" in lines
    assert "the winner is not tested against the error of the cost model; --intervals does it" in format_result(
        run(tmp_path / "other")
    )


def test_a_winner_with_a_smaller_capacity_has_the_reason(tmp_path: Path) -> None:
    """Equal capacities within the precision: the latency decides, and the sentence says so."""
    result = run(tmp_path, subject_to=["p99_e2el_ms <= 400"], precision=0.05)
    result.winner, other = result.baseline, next(curve for curve in result.curves if not curve.is_baseline)
    assert result.winner.capacity is not None
    other.capacity, other.outcome = result.winner.capacity._replace(rate=1.01 * result.winner.capacity.rate), "equal"
    result.decided_at = 2.0
    other_rate = f"{1.01 * result.winner.capacity.rate:.10g}"
    assert verdict_of(result).text.endswith(
        f"; 1 other equal within 5 % (up to {other_rate} req/s), chosen by the fewest changes at 2 req/s."
    )
