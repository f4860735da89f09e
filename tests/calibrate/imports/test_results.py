"""Result files of load generators: as a trace, as a measured run, and as the measured side of `sim verify`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from servesim.calibrate.replay.measured_run import benchmark_run
from servesim.cli import main
from servesim.config.scenario import scenario_from
from servesim.core import BadInput
from servesim.runs.run_folder import read_run, write_run
from servesim.runs.simulate import Run, simulate
from servesim.traces.read.formats import load

SCENARIO = {
    "workload": {
        "requests": 30,
        "arrivals": {"kind": "poisson", "rate": 5},
        "lengths": {"prompt": 40, "output": [2, 30]},
    },
    "policy": {"name": "vllm-v1"},
    "profile": {"kind": "linear", "base": 0.01, "prefill_token": 1e-4, "decode_row": 1e-3},
}


@pytest.fixture(scope="module")
def run() -> Run:
    return simulate(scenario_from(SCENARIO))


def gaps(request: Any) -> list[float]:
    """Return equal gaps from the first to the last token."""
    count = request.written - 1
    return [(request.client_end - request.first_token) / count] * count


def vllm_file(run: Run) -> str:
    return json.dumps({
        "duration": run.measures.makespan, "request_rate": 5.0, "max_concurrency": None,
        "input_lens": [r.prompt for r in run.requests],
        "output_lens": [r.written for r in run.requests],
        "ttfts": [r.first_token - r.sent for r in run.requests],
        "itls": [gaps(r) for r in run.requests],
        "start_times": [1000.0 + r.sent for r in run.requests],
        "generated_texts": ["" for _ in run.requests],
        "errors": ["" for _ in run.requests],
    })  # fmt: skip


def guidellm_file(run: Run) -> str:
    rows = [
        {"request_id": f"r{k}", "request_start_time": 1.7e9 + r.sent, "request_end_time": 1.7e9 + r.client_end,
         "request_latency": r.client_end - r.sent, "time_to_first_token_ms": 1e3 * (r.first_token - r.sent),
         "prompt_tokens": r.prompt, "output_tokens": r.written}
        for k, r in enumerate(run.requests)
    ]  # fmt: skip
    return json.dumps({"benchmarks": [{"requests": {"successful": rows, "errored": [], "incomplete": []}}]})


def aiperf_file(run: Run) -> str:
    lines = []
    for k, r in enumerate(run.requests):
        metrics = {
            "input_sequence_length": r.prompt, "output_sequence_length": r.written,
            "time_to_first_token": 1e3 * (r.first_token - r.sent), "request_latency": 1e3 * (r.client_end - r.sent),
            "inter_chunk_latency": [1e3 * gap for gap in gaps(r)],
        }  # fmt: skip
        about = {
            "session_num": k,
            "request_start_ns": 1759813207532900363 + round(1e9 * r.sent),
            "was_cancelled": False,
        }
        values = {key: {"value": value, "unit": ""} for key, value in metrics.items()}
        lines.append(json.dumps({"metadata": about, "metrics": values, "error": None}))
    return "\n".join(lines)


WRITERS = {"vllm-bench": vllm_file, "guidellm-results": guidellm_file, "aiperf-results": aiperf_file}


@pytest.mark.parametrize("format", WRITERS)
def test_a_result_file_is_a_trace_and_a_measured_run(format: str, run: Run, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(WRITERS[format](run), encoding="utf-8")
    trace = load(path)
    assert trace.format == format
    start = run.requests[0].sent
    assert trace.arrivals == pytest.approx([r.sent - start for r in run.requests], abs=1e-5)
    assert (trace.prompts == [r.prompt for r in run.requests]).all()
    assert (trace.outputs == [r.written for r in run.requests]).all()
    expected, measured = run.result(), benchmark_run(path).result()
    for name in ("mean_ttft_ms", "p90_ttft_ms", "mean_tpot_ms", "mean_e2el_ms", "p99_e2el_ms", "duration"):
        assert measured[name] == pytest.approx(expected[name], rel=1e-4), name
    assert measured["completed"] == 30


@pytest.mark.parametrize("format", WRITERS)
def test_verify_takes_the_file_or_the_imported_folder(
    format: str, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"
    path.write_text(WRITERS[format](run), encoding="utf-8")
    again = simulate(scenario_from({**SCENARIO, "workload": None, "trace": {"path": str(path)}}))
    write_run(again, tmp_path / "sim")
    assert main(["calibrate", "import", "results", str(path), "-o", str(tmp_path / "measured")]) == 0
    assert "30 finished, 0 failed requests" in capsys.readouterr().out
    for measured in (path, tmp_path / "measured"):
        # Chunks of text hide single gaps between tokens, so ITL is not compared.
        assert main(["verify", str(tmp_path / "sim"), str(measured), "--tolerance", "0.01", "--json"]) == 0
        report = json.loads(capsys.readouterr().out)["comparisons"][0]
        assert report["metrics"]["mean_e2el_ms"]["error"] == pytest.approx(0.0, abs=1e-3)
        for unknown in ("preemptions", "model_calls"):  # a client does not see them: no value, not 0
            assert report["metrics"][unknown]["measured"] is None
            assert report["metrics"][unknown]["simulated"] is not None
    assert len(read_run(tmp_path / "measured").requests) == 30
    assert len(load(tmp_path / "measured" / "requests.csv")) == 30


def test_the_starts_of_a_closed_loop_follow_from_the_latencies(tmp_path: Path) -> None:
    """Two open requests: the third starts at the end of the second (1 s), the fourth at that of the first (3 s)."""
    itls = [[2.0], [0.5], [4.0], [1.0]]
    lists = {"input_lens": [5] * 4, "output_lens": [2] * 4, "ttfts": [1, 0.5, 2, 1], "itls": itls, "errors": [""] * 4}
    result = {**lists, "request_rate": "inf", "max_concurrency": 2}
    path = tmp_path / "result.json"
    path.write_text(json.dumps(result), encoding="utf-8")
    assert [request.arrival for request in load(path).requests] == [0.0, 0.0, 1.0, 3.0]


def test_turns_that_share_an_id_get_new_ones(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "result.jsonl"
    path.write_text(aiperf_file(run).replace('"session_num": 1,', '"session_num": 0,'), encoding="utf-8")
    assert [request.id for request in load(path).requests] == [str(k) for k in range(30)]


def test_failed_requests_are_not_part_of_the_trace(tmp_path: Path) -> None:
    result = {"input_lens": [5, 6], "output_lens": [0, 2], "ttfts": [0.0, 0.5], "itls": [[], [0.5]],
              "errors": ["timeout", ""], "start_times": [0.0, 0.1]}  # fmt: skip
    path = tmp_path / "result.json"
    path.write_text(json.dumps(result), encoding="utf-8")
    assert [request.prompt for request in load(path).requests] == [6]
    assert benchmark_run(path).result()["outcomes"] == {"failed": 1, "finished": 1}


def test_one_of_several_benchmarks_of_guidellm_is_chosen(run: Run, tmp_path: Path) -> None:
    report = json.loads(guidellm_file(run))
    report["benchmarks"].append({"requests": {"successful": report["benchmarks"][0]["requests"]["successful"][:4]}})
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report), encoding="utf-8")
    assert len(benchmark_run(path, 1).requests) == 4
    with pytest.raises(BadInput, match="expected one benchmark, got 2"):
        load(path)
    with pytest.raises(BadInput, match="--benchmark: expected 0 to 1, got 2"):
        benchmark_run(path, 2)
