"""Closed loops of tables in documents: a few concurrencies are fitted, the others are predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from proof_closed import closed_loop
from proof_intervals import log_profile, with_intervals
from proof_rows import Row, table, table_of_document
from servesim.calibrate.logs.fit import fit_logs
from servesim.calibrate.logs.observed_runs import ObservedRun, runs_from
from servesim.costs.device_profile import Profile
from servesim.runs.simulate import Run, simulate

SEED_OSS, ASCEND = "Seed-OSS-36B, H100: more load", "Qwen3-32B, Ascend A2: other data sets"
QUANTITIES = {"median_tpot_ms": "TPOT median", "mean_tpot_ms": "TPOT mean", "median_ttft_ms": "TTFT median",
              "mean_ttft_ms": "TTFT mean"}  # fmt: skip
FREE = {"base": 1.0, "decode_row": 1.0, "prefill_token": 1.0, "context": 0.2}


class Point(NamedTuple):
    """One row of a table: a closed loop and its figures."""

    name: str
    concurrency: int
    requests: int
    prompt: Any
    output: Any
    figures: Mapping[str, float]  # milliseconds
    throughput: float  # generated tokens per second
    fit: bool = False


def predict_loops(
    name: str, policy: Mapping[str, Any], cost: Mapping[str, float], points: Sequence[Point], texts: Sequence[str]
) -> list[Row]:
    """Fit the points that are marked; predict the others. `texts`: calibrated on, assumed, reason."""
    runs = [
        {"name": point.name, "fit": point.fit, "reported": point.figures,
         "scenario": {"workload": closed_loop(point.concurrency, point.requests, point.prompt, point.output)}}
        for point in points
    ]  # fmt: skip
    scenario = {"policy": {"name": "vllm-v1", **policy}, "engine": {"num_blocks": 100_000}}  # memory does not bind
    spec = runs_from({"scenario": scenario, "cost": {"kind": "linear", **cost}, "free": FREE, "runs": runs}, name)
    profile, rows = log_profile(fit_logs(spec, leave_out=False), spec), []
    calibrated, assumed, reason = texts
    for point, run in zip(points, spec.runs):
        if not point.fit:
            ours = with_intervals(profile, lambda drawn, run=run: figures_of(run, drawn))  # type: ignore[misc]
            measured = {**point.figures, "tok/s": point.throughput}
            rows += [
                Row(name, point.name, QUANTITIES.get(key, key), value, ours.figures[key], calibrated, {}, assumed,
                    reason, ours.interval(key))
                for key, value in measured.items()
            ]  # fmt: skip
    return rows


def figures_of(run: ObservedRun, profile: Profile) -> tuple[Run, dict[str, float]]:
    """Return a simulated run with its figures and its throughput."""
    done = simulate(run.scenario, run.trace, profile=profile)
    figures = {name: pair[1] for name, pair in run.reported[0].compare(done.measures).items()}
    return done, {**figures, "tok/s": done.measures.outputs / done.measures.makespan}


def predict_seed_oss(data: Path) -> list[Row]:
    """Fit one to forty open requests of the server with 40 slots; predict more of them on one with 160 slots."""
    document, points = data / "measured" / "published" / "vllm-neuron-prefill-first.md", []
    for row in table_of_document(document, "config"):
        if not row["TPOT median ms"]:  # median TTFT jumps between two values if all lengths are equal
            continue
        columns = ("BS", "TPOT median ms", "TTFT median ms", "tok/s")
        for cells in zip(*(row[column].split(" / ") for column in columns)):
            size, tpot, ttft, rate = map(float, cells)
            points.append(Point(
                f"{row['max-num-seqs']} slots, {size:g} open requests", int(size), max(16, 10 * int(size)),
                [980, 1020], [490, 510], {"median_tpot_ms": tpot, "median_ttft_ms": ttft}, rate,
                row["max-num-seqs"] == "40",
            ))  # fmt: skip
    policy = {"version": "0.17.0", "scheduler_reserve_full_isl": False, "max_num_seqs": 160,
              "max_num_batched_tokens": 8192, "enable_prefix_caching": False}  # fmt: skip
    # 72 GB of weights and 131,072 bytes of KV per token and GPU at 3.35 TB/s; 36 GFLOP per token and GPU at 500 TFLOP/s
    cost = {"base": 0.014, "decode_row": 5e-5, "context": 5e-8, "prefill_token": 7e-5}
    return predict_loops(SEED_OSS, policy, cost, points, (
        "up to 40 open requests", "token budget 8192 (default on this GPU); lengths uniform within 2 %",
        "the token budget and the start of the load are not published; both decide how many prompts share a step",
    ))  # fmt: skip


def predict_ascend(data: Path) -> list[Row]:
    """Fit two concurrencies of the first data set; predict the other data sets of the same server."""
    rows = table(data / "measured" / "vllm-ascend-docs" / "qwen3-32b_tp4.csv")
    ends = [min(rows[:3], key=concurrency_of), max(rows[:3], key=concurrency_of)]
    points = [
        Point(f"{row['dataset']}, {row['concurrency']} open requests", concurrency_of(row), int(row["requests"]),
              int(row["mean_prompt_tokens"]), int(row["mean_output_tokens"]), {"mean_tpot_ms": float(row["tpot_ms"])},
              float(row["throughput_tok_s"]), row in ends)
        for row in rows
    ]  # fmt: skip
    policy = {"max_num_seqs": 256, "max_num_batched_tokens": 40_960}
    # 65 GB of weights and 65,536 bytes of KV per token and NPU at 1.6 TB/s
    cost = {"base": 0.05, "decode_row": 1e-4, "context": 5e-8, "prefill_token": 5e-5}
    return predict_loops(ASCEND, policy, cost, points, (
        f"{rows[0]['dataset']} with {ends[0]['concurrency']} and {ends[1]['concurrency']} open requests",
        "vLLM 0.32, asynchronous; all requests of a data set have its mean lengths",
        "answers end by themselves: their lengths vary, and the slowest requests run alone",
    ))  # fmt: skip


def concurrency_of(row: Mapping[str, str]) -> int:
    return int(row["concurrency"])
