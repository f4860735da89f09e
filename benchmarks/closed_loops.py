"""Closed loops: fit the two ends of a public curve of TTFT and TPOT over concurrency, predict the points between.

    python benchmarks/closed_loops.py POINTS.csv [MODEL ...]      default: the dense models

POINTS.csv is aiconfigurator-silicon/points.csv.gz of the shared data: one row per measured point, `curve` names its
setting. The data do not state token budget and KV blocks; SETTINGS are those of the benchmark's own scripts.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from servesim.calibrate.logs.fit import RunError, fit_logs
from servesim.calibrate.logs.observed_runs import Runs, runs_from
from servesim.files.csv_rows import read_csv

DENSE = ("meta-llama/Llama-3.1-70B", "Qwen/Qwen3-32B", "nvidia/Llama-3.1-8B-Instruct-FP8")
SETTINGS = {"policy": {"name": "vllm-v1", "max_num_batched_tokens": 8192}, "engine": {"num_blocks": 200_000}}
ROUNDS = 10  # requests per open request
SHORTEST = 0.8  # of the stated length: lengths are uniform from this fraction
# Experts of a layer, experts per token, and weights of all experts (layers x experts x 3 matrices), by config.json.
EXPERTS = {
    "MiniMaxAI/MiniMax-M2.5": (256, 8, 62 * 256 * 3 * 3072 * 1536),
    "moonshotai/Kimi-K2.5": (384, 8, 60 * 384 * 3 * 7168 * 2048),
    "openai/gpt-oss-120b": (128, 4, 36 * 128 * 3 * 2880 * 2880),
}
BYTES = {"fp8": 1.0, "fp4": 9 / 16, "int4": 9 / 16}  # of a weight; 4 bits and a scale for 16 weights
BANDWIDTH = {"h100_sxm": 3.35e12, "h200_sxm": 4.8e12, "b200_sxm": 8e12, "b300_sxm": 8e12}  # bytes per second
BANDWIDTH_SHARE = 0.7  # that reads of experts reach, before the fit


def read_curves(path: Path, models: tuple[str, ...] = DENSE) -> dict[str, list[dict[str, str]]]:
    """Return the points of every curve with a point between its ends, by concurrency."""
    curves: dict[str, list[dict[str, str]]] = defaultdict(list)
    for row in read_csv(path, ("curve", "model", "concurrency", "isl", "osl", "ttft_mean_ms", "tpot_mean_ms")):
        if row["model"] in models:
            curves[row["curve"]].append(row.cells)
    for points in curves.values():
        points.sort(key=lambda row: int(row["concurrency"]))
    return {name: points for name, points in curves.items() if len(points) > 2}


def runs_of(points: list[dict[str, str]]) -> Runs:
    """Return the runs of a curve; only the first and the last one are fitted."""
    step, experts = float(points[0]["tpot_mean_ms"]) / 1e3, expert_terms(points[0])
    base = 0.8 * step
    if experts:
        unused = (1 - experts["expert_share"]) ** int(points[0]["concurrency"])
        base = max(0.2 * step, 0.9 * step - experts["experts"] * (1 - unused))
    return runs_from(
        {
            "scenario": SETTINGS,
            "cost": {"kind": "linear", "base": base, "prefill_token": 5e-5, "decode_row": 0.02 * step, "context": 1e-8,
                     **experts},
            "free": {"base": 1.0, "prefill_token": 1.0, "decode_row": 1.0, "context": 0.3,
                     **({"experts": 0.5} if experts else {})},
            "runs": [entry(row, row in (points[0], points[-1])) for row in points],
        },
        "curve",
    )  # fmt: skip


def expert_terms(row: dict[str, str]) -> dict[str, float]:
    """Return the share of the experts that a token uses, and the seconds to read all of them from memory."""
    if row["model"] not in EXPERTS:
        return {}
    experts, per_token, weights = EXPERTS[row["model"]]
    bandwidth = int(row["moe_tp"]) * int(row["moe_ep"]) * BANDWIDTH[row["system"]] * BANDWIDTH_SHARE
    return {"experts": weights * BYTES[row["precision"]] / bandwidth, "expert_share": per_token / experts}


def entry(row: dict[str, str], fit: bool) -> dict[str, Any]:
    """Return a point of a curve as a run."""
    count, prompt, output = int(row["concurrency"]), int(row["isl"]), int(row["osl"])
    lengths = {"prompt": [int(SHORTEST * prompt), prompt], "output": [int(SHORTEST * output), output]}
    workload = {"concurrency": count, "requests": ROUNDS * count, "lengths": lengths}
    reported = {"mean_ttft_ms": float(row["ttft_mean_ms"]), "mean_tpot_ms": float(row["tpot_mean_ms"])}
    scenario = {"policy": {"max_num_seqs": count}, "workload": workload}
    return {"name": f"c{count}", "scenario": scenario, "reported": reported, "fit": fit}


def errors_of(runs: list[RunError], figure: str) -> list[float]:
    """Return the signed errors of a figure."""
    return [run.figures[figure][1] / run.figures[figure][0] - 1 for run in runs]


def main() -> int:
    """Print the errors of every curve and their median; return 3 if the median TPOT error is above 5 %."""
    path, models = Path(sys.argv[1]), tuple(sys.argv[2:]) or DENSE
    tpot, ttft, start = [], [], time.perf_counter()
    for name, points in read_curves(path, models).items():
        fit = fit_logs(runs_of(points), leave_out=False)
        errors = errors_of(fit.predicted, "mean_tpot_ms")
        tpot += errors
        ttft += errors_of(fit.predicted, "mean_ttft_ms")
        row = points[0]
        shown = ", ".join(f"{error:+.1%}" for error in errors)
        print(f"{name} {row['model']} {row['isl']}/{row['osl']}: TPOT {shown}", flush=True)
    medians = [float(np.median(np.abs(errors))) for errors in (tpot, ttft)]
    seconds = time.perf_counter() - start
    print(f"{len(tpot)} points: median error of TPOT {medians[0]:.2%}, of TTFT {medians[1]:.2%}; {seconds:.0f} s")
    return 3 if medians[0] > 0.05 else 0


if __name__ == "__main__":
    sys.exit(main())
