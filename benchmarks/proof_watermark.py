"""Watermark of vLLM V1: preemptions and throughput by the share of blocks that an admission leaves free."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from proof_intervals import NO_LIMITS, Predicted, log_profile, with_intervals
from proof_rows import Row, table_of_document
from servesim.calibrate.logs.fit import fit_logs
from servesim.calibrate.logs.observed_runs import runs_from
from servesim.config.layers import merge
from servesim.config.scenario import scenario_from
from servesim.costs.device_profile import Profile
from servesim.runs.simulate import Run, load_trace, simulate

SET = "vLLM 44594: watermark"
PROMPTS, SEEDS = 450, range(5)  # the order of the lengths is not known: the mean over seeds
SCENARIO: dict[str, Any] = {
    "policy": {"name": "vllm-v1", "max_num_seqs": 256, "max_num_batched_tokens": 8192, "enable_prefix_caching": False},
    "engine": {"num_blocks": 299_584 // 16 - 1, "max_model_len": 8192},
    "workload": {"concurrency": 128, "requests": PROMPTS, "lengths": {"prompt": [800, 1200], "output": [4000, 6000]}},
}
# Start values: 15.2 GB of weights and 57,344 bytes of KV per token at 8 TB/s; 15.2 GFLOP per prompt token, 1.2 PFLOP/s.
COST = {"kind": "linear", "base": 0.0035, "decode_row": 2e-5, "context": 1e-8, "prefill_token": 1.3e-5}
ASSUMED = "token budget 8192; lengths uniform within 20 %; asynchronous scheduling; order of lengths: mean of 5 seeds"
MEDIAN_TTFT = "half of the requests wait: the median depends on the order of lengths (4.6 to 10.0 s over three seeds)"


def predict_watermark(data: Path) -> list[Row]:
    """Fit the costs to the row "off" only; predict the other rows, and the best of them."""
    rows = table_of_document(data / "measured" / "published" / "vllm-44594-watermark.md", "watermark")
    profile, others = fit_off(rows[0]), rows[1:]
    ours = {row["watermark"]: predict_row(profile, float(row["watermark"])) for row in others}
    cells = [
        (f"watermark {row['watermark']}", quantity, float(row[quantity]), predicted,
         ours[row["watermark"]].interval(quantity))
        for row in others
        for quantity, predicted in ours[row["watermark"]].figures.items()
        if row[quantity][0].isdigit()
    ]  # fmt: skip
    best, chosen = (max(figures, key=lambda name: figures[name]) for figures in (
        {row["watermark"]: float(row["out tok/s"]) for row in others},
        {name: predicted.figures["out tok/s"] for name, predicted in ours.items()},
    ))  # fmt: skip
    cells.append(("all rows", "watermark with the best throughput", float(best), float(chosen), NO_LIMITS))
    return [
        Row(SET, run, quantity, measured, predicted, 'row "off"', assumed=ASSUMED,
            reason=MEDIAN_TTFT if quantity == "TTFT p50 s" else "", interval=interval)
        for run, quantity, measured, predicted, interval in cells
    ]  # fmt: skip


def fit_off(row: dict[str, str]) -> Profile:
    """Return the profile that gives the times of the row without a watermark."""
    reported = {
        "median_ttft_ms": 1e3 * float(row["TTFT p50 s"]),
        "p99_ttft_ms": 1e3 * float(row["TTFT p99 s"]),
        "median_e2el_ms": 1e3 * float(row["E2EL p50 s"]),
        "p99_itl_ms": float(row["ITL p99 ms"]),
    }
    run = {"name": "off", "total": PROMPTS / float(row["req/s"]), "reported": reported}
    free = {"base": 1.0, "decode_row": 1.0, "context": 0.3, "prefill_token": 0.5}
    spec = runs_from({"scenario": SCENARIO, "cost": COST, "free": free, "runs": [run]}, SET)
    return log_profile(fit_logs(spec), spec)


def predict_row(profile: Profile, watermark: float) -> Predicted:
    """Return the figures of a row of the table."""
    return with_intervals(
        profile,
        lambda drawn: simulate_watermark(drawn, watermark, SEEDS),
        lambda k, drawn: simulate_watermark(drawn, watermark, [k % len(SEEDS)]),
    )


def simulate_watermark(profile: Profile, watermark: float, seeds: Sequence[int]) -> tuple[Run, dict[str, float]]:
    """Return the figures of the table, as means over seeds."""
    results = []
    for seed in seeds:
        scenario = scenario_from(merge(SCENARIO, {"policy": {"watermark": watermark}, "seed": seed}), SET)
        done = simulate(scenario, load_trace(scenario), profile=profile)
        results.append({
            "preemptions": sum(request.preemptions for request in done.requests),
            "out tok/s": sum(request.written for request in done.requests) / done.measures.makespan,
            "TTFT p50 s": float(np.percentile(done.measures.ttft, 50)),
            "TTFT p99 s": float(np.percentile(done.measures.ttft, 99)),
            "E2EL p50 s": float(np.percentile(done.measures.e2el, 50)),
        })  # fmt: skip
    return done, {name: statistics.mean(result[name] for result in results) for name in results[0]}
