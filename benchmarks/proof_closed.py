"""Closed loops of pull requests and guides: gpt-oss-120b on H200, Seed-OSS-36B on Trainium2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import servesim
from proof_intervals import DRAWS, NO_LIMITS, log_profile, predict_observed
from proof_rows import Row, table_of_document
from servesim.calibrate.logs.fit import fit_logs
from servesim.calibrate.logs.observed_runs import ObservedRun, runs_from
from servesim.costs.device_profile import Profile
from servesim.runs.simulate import simulate

GPT_OSS, TRAINIUM = "gpt-oss-120b, H200: more load", "Trainium2: prefill first"
FITTED_ROWS = (1, 4, 16)  # points of the curve over decode rows
GPT_OSS_ASSUMED = (
    "asynchronous scheduling (default); the server is warm; KV cache groups of the model: windows of 128 tokens, and "
    "full attention"
)
GPT_OSS_REASON = (
    "the source reads the KV usage from time to time, so it misses the short peaks of prompts; a derived profile has "
    "TTFT +7 to +8 % and TPOT +8 to +9 %"
)


def closed_loop(concurrency: int, requests: int, prompt: Any, output: Any) -> dict[str, Any]:
    """Return a closed loop as a workload."""
    return {"concurrency": concurrency, "requests": requests, "lengths": {"prompt": prompt, "output": output}}


def predict_gpt_oss(data: Path) -> list[Row]:
    """Fit concurrencies up to 16; predict the higher ones, and the use of the KV cache, of which nothing is fitted."""
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
    result = []
    for run, row in zip(spec.runs, rows):
        if run.fit:
            continue
        ours = predict_observed(run, profile)  # without groups: memory does not bind, and the times are the same
        figures = {
            figure.removesuffix("_ms").replace("_", " "): (measured, ours.figures[figure], ours.interval(figure))
            for figure, measured in run.reported[0].figures.items()
        }
        done = ours.run.measures
        figures["tok/s"] = (float(row["out tok/s"]), done.outputs / done.makespan, NO_LIMITS)
        figures |= kv_figures(row, run, profile)
        result += [
            Row(GPT_OSS, f"C = {run.name}", quantity, measured, predicted, "C up to 16", assumed=GPT_OSS_ASSUMED,
                reason=GPT_OSS_REASON, interval=interval)
            for quantity, (measured, predicted, interval) in figures.items()
        ]  # fmt: skip
    return result


def kv_figures(row: Mapping[str, str], run: ObservedRun, profile: Profile) -> dict[str, tuple[float, float, Any]]:
    """Return the published and the simulated use of the KV cache, with its two groups.

    The published means include time without requests, so the mean is that of a running request.
    """
    engine = run.scenario.engine.model_copy(update={"kv_cache_groups": [128, None]})
    done = simulate(run.scenario.model_copy(update={"engine": engine}), run.trace, profile=profile)
    result = done.result()
    times = [done.measures.requests.column(name)[done.measures.done] for name in ("finish", "scheduled")]
    running = float((times[0] - times[1]).sum()) / done.end
    mean = float(row["KV mean %"]) / float(row["running mean/max"].split("/")[0])
    return {
        "KV max %": (float(row["KV max %"]), 100 * result["peak_kv_usage"], NO_LIMITS),
        "KV mean %, per running request": (mean, 100 * result["mean_kv_usage"] / running, NO_LIMITS),
    }


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
