"""Files of sglang.bench_serving, with single requests and without: as a trace, a measured run and a log to fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from servesim.calibrate.logs.observed_runs import runs_from
from servesim.calibrate.replay.measured_run import benchmark_run
from servesim.cli import main
from servesim.core import BadInput
from servesim.runs.run_folder import read_run
from servesim.traces.read.formats import load

# One line of the file, as SGLang 0.5 writes it; Python's json writes an infinite rate as Infinity.
SUMMARY: dict[str, Any] = {
    "tag": None, "backend": "sglang", "dataset_name": "random", "request_rate": float("inf"), "max_concurrency": None,
    "sharegpt_output_len": None, "random_input_len": 400, "random_output_len": 40, "random_range_ratio": 0.5,
    "server_info": {"chunked_prefill_size": 8192}, "duration": 8.0, "completed": 4, "total_input_tokens": 1200,
    "total_output_tokens": 12, "total_output_tokens_retokenized": 12, "request_throughput": 0.5,
    "input_throughput": 150.0, "output_throughput": 1.5, "total_throughput": 151.5, "mean_e2e_latency_ms": 2000.0,
    "median_e2e_latency_ms": 1900.0, "std_e2e_latency_ms": 100.0, "p99_e2e_latency_ms": 2900.0, "mean_ttft_ms": 1000.0,
    "median_ttft_ms": 900.0, "std_ttft_ms": 50.0, "p99_ttft_ms": 1400.0, "mean_tpot_ms": 500.0,
    "median_tpot_ms": 500.0, "std_tpot_ms": 10.0, "p99_tpot_ms": 510.0, "mean_itl_ms": 500.0, "median_itl_ms": 500.0,
    "std_itl_ms": 10.0, "p95_itl_ms": 505.0, "p99_itl_ms": 510.0, "concurrency": 1.0, "accept_length": None,
}  # fmt: skip
DETAILS: dict[str, Any] = {
    "input_lens": [200, 300, 400, 300], "output_lens": [3, 3, 3, 3], "ttfts": [1.0, 0.5, 2.0, 1.0],
    "itls": [[1.0, 1.0], [0.25, 0.25], [2.0, 2.0], [0.5, 0.5]], "generated_texts": ["a", "b", "c", "d"],
    "errors": ["", "", "", ""],
}  # fmt: skip
TRACEBACK = "Traceback (most recent call last):\n  File 'x.py', line 1\naiohttp.ClientOSError: reset by peer\n"


def write(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "sglang.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def arrivals(path: Path) -> list[float]:
    return [request.arrival for request in load(path).requests]


def test_without_a_rate_requests_are_sent_at_once_or_as_others_end(tmp_path: Path) -> None:
    """Two open requests: the third starts at the end of the second (1 s), the fourth at that of the first (3 s)."""
    path = write(tmp_path, {**SUMMARY, **DETAILS})
    trace = load(path)
    assert (trace.format, trace.remarks()) == ("sglang-bench", [])
    assert arrivals(path) == [0.0] * 4
    assert arrivals(write(tmp_path, {**SUMMARY, **DETAILS, "max_concurrency": 2})) == [0.0, 0.0, 1.0, 3.0]


def test_at_a_rate_arrivals_are_drawn_and_the_last_request_ends_with_the_benchmark(tmp_path: Path) -> None:
    path = write(tmp_path, {**SUMMARY, **DETAILS, "request_rate": 0.75, "duration": 9.5})
    trace = load(path)
    assert trace.requests[0].arrival == 0.0 and len(set(arrivals(path))) == 4
    assert [request.prompt for request in trace.requests] == [200, 300, 400, 300]  # in the order of the file
    [remark] = trace.remarks()
    assert "no send times: Poisson arrivals at 0.75 requests/s are drawn" in remark
    result = benchmark_run(path).result()
    assert result["duration"] == pytest.approx(9.5)
    assert (result["mean_ttft_ms"], result["mean_e2el_ms"]) == (1125.0, 3000.0)
    assert result["backend"]["notes"] == [remark.split(": ", 1)[1]]


def test_the_mean_gap_of_drawn_arrivals_is_that_of_the_rate(tmp_path: Path) -> None:
    """1,000 gaps of 0.1 s: their sum has a standard deviation of 3.2 s. Without a duration it is not scaled."""
    columns = {key: values[:1] * 1001 for key, values in DETAILS.items()}
    path = write(tmp_path, {**SUMMARY, **columns, "request_rate": 10, "duration": None})
    assert load(path).span == pytest.approx(100.0, abs=10.0)
    assert load(path, seed=1).span != load(path).span


def test_a_rate_and_a_concurrency_limit_the_send_times_together(tmp_path: Path) -> None:
    """One open request, and a rate that does not matter: each request is sent when the one before it ends."""
    row = {**SUMMARY, **DETAILS, "request_rate": 1e6, "max_concurrency": 1}
    assert arrivals(write(tmp_path, row)) == [0.0, 3.0, 4.0, 10.0]


def test_failed_requests_are_not_part_of_the_trace(tmp_path: Path) -> None:
    row = {**SUMMARY, **DETAILS, "output_lens": [3, 0, 3, 3], "errors": ["", TRACEBACK, "", ""]}
    path = write(tmp_path, row)
    assert load(path).dropped == {"failed: aiohttp.ClientOSError: reset by peer": 1}
    assert benchmark_run(path).result()["outcomes"] == {"failed": 1, "finished": 3}


def test_a_summary_is_a_trace_with_drawn_lengths(tmp_path: Path) -> None:
    row = {**SUMMARY, "completed": 500, "total_input_tokens": 150_000, "total_output_tokens": 15_000}
    trace = load(write(tmp_path, row))
    assert len(trace) == 500 and set(trace.prompts) <= {*range(195, 411)}  # 200 to 400, scaled to the total
    assert set(trace.outputs) <= {*range(19, 42)} and len(set(trace.outputs)) > 15
    assert (trace.prompts.sum(), trace.outputs.sum()) == (pytest.approx(150_000, 1e-3), pytest.approx(15_000, 5e-3))
    [remark] = trace.remarks()
    assert remark.endswith("lengths are drawn from the range of the data set")
    trace = load(write(tmp_path, {**row, "dataset_name": "sharegpt", "max_concurrency": 100}))
    assert set(trace.prompts) == {300} and set(trace.outputs) == {30}
    assert trace.remarks()[0].endswith("each has the mean lengths")
    assert set(trace.arrivals) == {0.0, 2.0, 4.0, 6.0, 8.0}  # 100 at a time, of 2 s each


def test_a_summary_is_a_measured_run_with_the_metrics_that_it_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, SUMMARY)
    assert main(["calibrate", "import", "results", str(path), "-o", str(tmp_path / "measured")]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("4 finished requests in 8.00 s\n") and said.err.count("\n") == 1
    result = read_run(tmp_path / "measured").result
    expected = {"p99_e2el_ms": 2900.0, "mean_ttft_ms": 1000.0, "p95_itl_ms": 505.0, "makespan": 8.0, "completed": 4,
                "request_throughput": 0.5, "total_token_throughput": 151.5, "total_output_tokens": 12}  # fmt: skip
    assert {name: result[name] for name in expected} == expected
    assert {result.get(name) for name in ("p90_ttft_ms", "p90_e2el_ms", "failed")} == {None}  # not in the file
    settings = ["--policy", "sglang", "--set", "profile={kind: linear, base: 0.1}", "-o", str(tmp_path / "sim")]
    assert main(["run", "--trace", str(path), *settings]) == 0
    capsys.readouterr()
    for measured in (path, tmp_path / "measured"):
        assert main(["verify", str(tmp_path / "sim"), str(measured), "--json"]) == 0
        report = json.loads(capsys.readouterr().out)["comparisons"][0]["metrics"]
        assert report["mean_ttft_ms"]["measured"] == 1000.0 and report["p90_ttft_ms"]["measured"] is None


@pytest.mark.parametrize("details", [{}, {**DETAILS, "request_rate": 1.0}], ids=["summary", "rate"])
def test_a_fit_compares_means_and_quantiles_if_requests_are_drawn(details: dict[str, Any], tmp_path: Path) -> None:
    tree = {
        "scenario": {"policy": {"name": "sglang"}}, "cost": {"kind": "linear", "base": 0.1}, "free": ["base"],
        "runs": [{"name": "a", "log": write(tmp_path, {**SUMMARY, **details}).name}],
    }  # fmt: skip
    [run] = runs_from(tree, "runs.yaml", tmp_path).runs
    assert not run.has_request_times and run.makespan is None
    [part] = run.reported
    assert part.figures["mean_e2el_ms"] == 2000.0 and "std_ttft_ms" not in part.figures
    assert set(part.figures) == {
        *(f"{kind}_{name}_ms" for kind in ("mean", "median", "p99") for name in ("ttft", "tpot", "itl", "e2el")),
        "p95_itl_ms",
    }


def test_a_fit_compares_single_requests_if_their_send_times_are_known(tmp_path: Path) -> None:
    tree = {
        "scenario": {"policy": {"name": "sglang"}}, "cost": {"kind": "linear", "base": 0.1}, "free": ["base"],
        "runs": [{"name": "a", "log": write(tmp_path, {**SUMMARY, **DETAILS, "max_concurrency": 2}).name}],
    }  # fmt: skip
    [run] = runs_from(tree, "runs.yaml", tmp_path).runs
    assert run.end.tolist() == [3.0, 1.0, 7.0, 5.0] and not run.reported


def test_a_file_with_several_benchmarks_needs_a_choice(tmp_path: Path) -> None:
    path = write(tmp_path, SUMMARY, {**SUMMARY, **DETAILS})
    assert benchmark_run(path, 1).result()["mean_ttft_ms"] == 1125.0
    with pytest.raises(BadInput, match="expected one benchmark, got 2; choose one with --benchmark"):
        load(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"request_rate": "trace"},
            "row 1: request_rate: expected a rate or Infinity: the send times are in the trace",
        ),
        ({"request_rate": -1}, "row 1: request_rate: expected 1e-09 to 1e.09 requests per second or Infinity, got -1"),
        ({"request_rate": float("nan")}, "row 1: request_rate: expected 1e-09 to 1e.09 .* got 'NaN'"),
        ({"completed": 0}, "row 1: completed: expected at least 1 request, got 0"),
        ({"input_lens": [1]}, "row 1: output_lens: expected a list, as with --output-details, got nothing"),
    ],
)
def test_a_wrong_value_is_one_line(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=message):
        load(write(tmp_path, {**SUMMARY, **changes}))
