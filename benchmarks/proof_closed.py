"""Closed loops of pull requests and guides: gpt-oss-120b on H200, Seed-OSS-36B on Trainium2."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import servesim
from proof_intervals import DRAWS, log_profile, predict_observed
from proof_rows import Row, table_of_document
from servesim.calibrate.logs.fit import fit_logs
from servesim.calibrate.logs.observed_runs import runs_from

GPT_OSS, TRAINIUM = "gpt-oss-120b, H200: more load", "Trainium2: prefill first"
FITTED_ROWS = (1, 4, 16)  # points of the curve over decode rows


def closed_loop(concurrency: int, requests: int, prompt: Any, output: Any) -> dict[str, Any]:
    """Return a closed loop as a workload."""
    return {"concurrency": concurrency, "requests": requests, "lengths": {"prompt": prompt, "output": output}}


def predict_gpt_oss(data: Path) -> list[Row]:
    """Fit concurrencies up to 16; predict the higher ones."""
    rows = table_of_document(data / "measured" / "published" / "vllm-0.22-gptoss-h200.md", "C")
    scenario = {
        "policy": {"name": "vllm-v1", "version": "0.22.0", "max_num_seqs": 256, "max_num_batched_tokens": 8192,
                   "enable_prefix_caching": False},
        "engine": {"num_blocks": 103_690, "max_model_len": 10_240},
    }  # fmt: skip
    cost = {
        "kind": "parts",
        "prefill": {"tokens": [[512, 0.02], [8192, 0.3]], "cross": 1e-9, "square": 5e-10},
        "decode": {"rows": [[n, 0.004 + 5e-5 * active_experts(n)] for n in FITTED_ROWS], "context": 8e-9},
        "mixed": {"one_pass": True, "context": 8e-9},
    }
    free = {"prefill.tokens.8192": 1.0, "prefill.cross": 0.5, "decode.context": 0.3}
    free |= {f"decode.rows.{n}": 1.0 for n in FITTED_ROWS}
    runs = [
        {"name": row["C"], "fit": int(row["C"]) <= 16,
         "scenario": {"workload": closed_loop(int(row["C"]), 10 * int(row["C"]), [6400, 8000], [800, 1000])},
         "reported": {"mean_ttft_ms": float(row["mean TTFT ms"]), "mean_tpot_ms": float(row["mean TPOT ms"])}}
        for row in rows
    ]  # fmt: skip
    spec = runs_from({"scenario": scenario, "cost": cost, "free": free, "runs": runs}, GPT_OSS)
    fit = fit_logs(spec, leave_out=False)
    profile = log_profile(replace(fit, cost=more_rows(fit.cost), draws=[more_rows(draw) for draw in fit.draws]), spec)
    predicted = [(run, predict_observed(run, profile)) for run in spec.runs if not run.fit]
    assumed = "asynchronous scheduling (default); the warm-up requests are part of the simulated loop"
    return [
        Row(GPT_OSS, f"C = {run.name}", figure.removesuffix("_ms").replace("_", " "), measured, ours.figures[figure],
            "C up to 16", assumed=assumed, interval=ours.interval(figure))
        for run, ours in predicted
        for figure, measured in run.reported[0].figures.items()
    ]  # fmt: skip


def active_experts(rows: float) -> float:
    """Return the expected number of experts that the tokens of a decode step use: 4 of 128 each."""
    return 128 * (1 - (1 - 4 / 128) ** rows)


def more_rows(cost: Any) -> Any:
    """Return the cost with its curve of decode rows continued: a fixed time and a time per active expert."""
    points = [(rows, seconds) for rows, seconds, *_ in cost.decodes.rows]
    slope, fixed = np.polyfit([active_experts(rows) for rows, _ in points], [seconds for _, seconds in points], 1)
    further = [(rows, max(points[-1][1], fixed + slope * active_experts(rows))) for rows in (32, 64, 128, 256)]
    return replace(cost, decodes=replace(cost.decodes, rows=[*points, *further]))


def predict_trainium(data: Path) -> list[Row]:
    """Take prefill and step time from BS = 1; predict the other rows of the same server."""
    rows = table_of_document(data / "measured" / "published" / "vllm-neuron-prefill-first.md", "TP")
    first = {row["ratio"]: row for row in rows if row["BS"] == "1"}
    result = []
    for row in rows:
        size, alone = int(row["BS"]), first[row["ratio"]]
        if size == 1:
            continue
        cost = {"kind": "linear", "prefill": float(alone["TTFT"]), "decode_step": float(alone["ITL"]) / 1e3}
        run = servesim.run(
            policy={"name": "vllm", "max_num_seqs": int(row["max-num-seqs"]), "max_num_batched_tokens": 1536},
            engine={"num_blocks": 100_000, "max_model_len": 1536},
            workload=closed_loop(size, 10 * size, 1024, 500),
            profile=cost,
            intervals=DRAWS,
        ).metrics
        limits = run["intervals"]["metrics"]
        figures = {"ITL": ("median_itl_ms", 1.0), "TTFT": ("mean_ttft_ms", 1e3), "E2E": ("mean_e2el_ms", 1e3),
                   "tok/s": ("output_throughput", 1.0)}  # fmt: skip
        result += [
            Row(TRAINIUM, f"BS = {size}", name, float(row[name]), run[key] / unit, "BS = 1",
                assumed="one prompt per prefill; KV memory does not bind; TTFT and E2E are means",
                interval=(limits[key][0] / unit, limits[key][1] / unit))
            for name, (key, unit) in figures.items()
        ]  # fmt: skip
    return result
