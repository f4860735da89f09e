"""Token budget of vLLM 0.22: six values of max_num_batched_tokens over bursts of long prompts."""

from __future__ import annotations

import random
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from proof_rows import Row, table
from scipy.optimize import least_squares
from servesim.calibrate.logs.observed_runs import ObservedRun, runs_from
from servesim.calibrate.logs.residuals import predict
from servesim.core import StepCost
from servesim.costs.mapping import cost_from

SET = "vLLM 0.22: token budget"
# Blocks: the source estimates 550,000 tokens on the RTX 5090 and 1.8 million on the A100.
BLOCKS = {"RTX5090": 34_375, "A100": 112_500}
FIGURES = {"mean_e2el_ms": "avg_lat", "mean_ttft_ms": "avg_ttft", "mean_tpot_ms": "avg_tpot"}
# Seconds of a step, a prompt token, a pair of tokens and the root of the pairs: Qwen2.5-3B at 150 TFLOP/s has 6.2 GFLOP
# per token, and 36 layers x 16 heads x 128 x 4 FLOP per pair. Attention is as efficient as the rest within 30 %.
START, WIDTHS = np.array([0.006, 4.1e-5, 2e-9, 1e-6]), np.array([1.0, 1.0, 0.3, 1.0])
CONTEXT = 36_864 / 1.5e12  # bytes of KV per token, and bandwidth
SPREAD = 0.05  # of a mean over five seeds
ASSUMED = "KV memory as the source estimates it; asynchronous scheduling (default)"
A100 = "the five seeds of budget 16384 differ by 46 % in TTFT; no step costs give their TTFT and TPOT together"
Cells = dict[tuple[str, float, int], list[ObservedRun]]  # by prompt length, burst rate, budget: one run per seed


def arrivals(phases: str, seed: int) -> list[float]:
    """Return the send times: Poisson arrivals that start again at each phase, from one generator."""
    draw, start, times = random.Random(seed), 0.0, []
    for phase in phases.split(","):
        seconds, rate = map(float, phase.split(":"))
        now = draw.expovariate(rate)
        while now < seconds:
            times.append(start + now)
            now += draw.expovariate(rate)
        start += seconds
    return times


def predict_budget(data: Path) -> list[Row]:
    """For each GPU, fit the smallest and the largest budget at the lowest load, and predict every other cell."""
    rows = []
    runs = [row for row in table(data / "measured" / "published" / "vllm-0.22-budget.csv") if row["mbt"]]
    for gpu in dict.fromkeys(row["gpu"] for row in runs):
        with tempfile.TemporaryDirectory() as folder:
            of_gpu = [row for row in runs if row["gpu"] == gpu and row["config"].startswith("mbt_")]
            cells = read_cells(gpu, of_gpu, Path(folder))
            rows += predict_gpu(gpu, cells)
    return rows


def read_cells(gpu: str, rows: Sequence[dict[str, str]], folder: Path) -> Cells:
    """Return the runs of a GPU; their traces are written to the folder."""
    scenario = {
        "policy": {"name": "vllm-v1", "max_num_seqs": 256, "enable_prefix_caching": False},
        "engine": {"num_blocks": BLOCKS[gpu], "max_model_len": 32_768},
    }
    tree = {
        "scenario": scenario,
        "cost": {"kind": "linear"},
        "free": ["base"],
        "runs": [entry(r, folder) for r in rows],
    }
    cells: Cells = defaultdict(list)
    for row, run in zip(rows, runs_from(tree, SET).runs):
        burst = float(row["phases"].split(",")[1].split(":")[1])
        cells[row["prompt"], burst, int(row["mbt"])].append(run)
    return cells


def entry(row: dict[str, str], folder: Path) -> dict[str, Any]:
    """Return one run of the table."""
    times = arrivals(row["phases"], int(row["seed"]))
    if len(times) != int(row["n"]):
        raise ValueError(f"{row}: expected {row['n']} requests, got {len(times)}")
    path = folder / f"{len(list(folder.iterdir()))}.csv"
    lines = [f"{time},{row['prompt']},{row['out']}" for time in times]
    path.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *lines]) + "\n", encoding="utf-8")
    reported = {figure: 1e3 * float(row[column]) for figure, column in FIGURES.items()}
    scenario = {"trace": str(path), "policy": {"max_num_batched_tokens": int(row["mbt"])}}
    return {"name": path.stem, "scenario": scenario, "reported": reported}


def cost_of(factors: Any) -> StepCost:
    """Return the costs for logarithms of factors of the start values."""
    base, token, pair, root = (START * np.exp(factors)).tolist()
    prefill = {"tokens": [[n, base + n * token] for n in (512, 16_384)], "cross": pair, "square": pair / 2}
    return cost_from({
        "kind": "parts",
        "prefill": {**prefill, "cross_root": root},
        "decode": {"rows": [[1, base], [32, base + 32e-5]], "context": CONTEXT},
        "mixed": {"one_pass": True, "row": 1e-5, "context": CONTEXT},
    }, SET)  # fmt: skip


def figures(runs: Sequence[ObservedRun], cost: StepCost) -> Any:
    """Return the measured and the predicted figures, as means over seeds."""
    pairs = [list(run.reported[0].compare(predict(run, cost).metrics).values()) for run in runs]
    return np.mean(pairs, axis=0).T


def predict_gpu(gpu: str, cells: Cells) -> list[Row]:
    """Fit two cells, and return the rows of the others and the loss by the chosen budget of every load."""
    common = max({key[0] for key in cells}, key=lambda prompt: sum(key[0] == prompt for key in cells))
    lowest = min(key[1] for key in cells if key[0] == common)
    budgets = sorted(key[2] for key in cells if key[:2] == (common, lowest))
    fitted = [(common, lowest, budget) for budget in (budgets[0], budgets[-1])]

    def residuals(factors: Any) -> Any:
        cost = cost_of(factors)
        errors = [np.log(np.divide(*figures(cells[key], cost))) / SPREAD for key in fitted]
        return np.concatenate([*errors, factors / WIDTHS])

    cost = cost_of(least_squares(residuals, np.zeros(len(START)), diff_step=0.05).x)
    calibrated = f"budgets {budgets[0]} and {budgets[-1]} at {lowest:g} req/s"
    rows, by_load = [], defaultdict(dict)
    for key, runs in cells.items():
        prompt, burst, budget = key
        measured, ours = figures(runs, cost)
        by_load[prompt, burst][budget] = measured[0], ours[0]
        for figure, *pair in zip(FIGURES, measured, ours) if key not in fitted else ():
            name = f"{gpu}, {prompt} tokens, {burst:g} req/s, budget {budget}"
            rows.append(Row(SET, name, figure.removesuffix("_ms").replace("_", " "), *pair, calibrated, {}, ASSUMED,
                            A100 if gpu == "A100" else ""))  # fmt: skip
    for (prompt, burst), by_budget in by_load.items():
        best, chosen = (min(by_budget, key=lambda budget, k=k: by_budget[budget][k]) for k in (0, 1))
        pair = by_budget[best][0], by_budget[chosen][0]
        rows.append(Row(SET, f"{gpu}, {prompt} tokens, {burst:g} req/s: budget {best} is best, we choose {chosen}",
                        "measured latency of the chosen budget", *pair, calibrated, {}, ASSUMED))  # fmt: skip
    return rows
