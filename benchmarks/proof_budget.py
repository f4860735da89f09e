"""Token budget of vLLM 0.22: six values of max_num_batched_tokens over bursts of long prompts."""

from __future__ import annotations

import random
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from proof_intervals import Predicted, log_profile, with_intervals
from proof_rows import Row, table
from servesim.calibrate.logs.fit import fit_logs
from servesim.calibrate.logs.observed_runs import ObservedRun, runs_from
from servesim.costs.device_profile import Profile
from servesim.runs.simulate import Run, simulate

SET = "vLLM 0.22: token budget"
FIGURES = {"mean_e2el_ms": "avg_lat", "mean_ttft_ms": "avg_ttft", "mean_tpot_ms": "avg_tpot"}
# Data sheets: FLOP/s and bytes/s; bytes for weights and KV, from the source's estimates of KV memory.
GPUS = {
    "RTX5090": (209.5e12, 1.79e12, 26.4e9),
    "A100": (312e12, 2.04e12, 72.5e9),
    "H100": (989e12, 3.35e12, 72.5e9),
}
# Parameters, layers, heads, KV heads, head size, from the models' config.json.
MODELS = {
    "Qwen2.5-3B": (3.09e9, 36, 16, 2, 128),
    "Qwen2.5-0.5B": (0.49e9, 24, 14, 2, 64),
    "SmolLM3-3B": (3.08e9, 36, 16, 4, 128),
    "Llama-3.2-3B": (3.21e9, 28, 24, 8, 128),
}
COMPUTE, MEMORY, STEP = 0.6, 0.8, 0.0015  # start values: shares of the data sheet, seconds of a step besides reading
# Parameters with the widths of their priors. Every step reads the weights once, which takes what the data sheet says
# within 30 %. Attention is as efficient as the rest within 30 %, before and within a chunk.
FREE = {
    "decode.rows.1 + prefill.tokens.1": 0.3, "prefill.tokens.16384": 1.0, "prefill.cross + prefill.square": 0.3,
    "prefill.cross_root": 1.0, "front_end.seconds": 1.0, "front_end.per_token": 1.0,
}  # fmt: skip
SPREAD = 0.05  # of the figures: a run has few requests, and the model is not exact
ASSUMED = "KV memory as the source estimates it; asynchronous scheduling (default)"
Cell = tuple[str, float, int]  # prompt and output length, burst rate, budget: one run per seed


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
    """For each GPU and model, fit the smallest and the largest budget at the lowest load; predict every other cell."""
    rows = []
    runs = [row for row in table(data / "measured" / "published" / "vllm-0.22-budget.csv") if row["mbt"]]
    runs = [row for row in runs if row["config"].startswith("mbt_")]
    for gpu, model in dict.fromkeys((row["gpu"], row["model"]) for row in runs):
        with tempfile.TemporaryDirectory() as folder:
            of_server = [row for row in runs if (row["gpu"], row["model"]) == (gpu, model)]
            fitted = fitted_cells([cell_of(row) for row in of_server])
            tree = runs_tree(gpu, model, of_server, fitted, Path(folder))
            spec = runs_from(tree, SET)
            profile = log_profile(fit_logs(spec, leave_out=False), spec)
            rows += rows_of(f"{gpu}, {model.split('/')[-1]}", of_server, fitted, spec.runs, profile)
    return rows


def cell_of(row: dict[str, str]) -> Cell:
    """Return the setting of a run without its seed."""
    burst = float(row["phases"].split(",")[1].split(":")[1])
    return f"{row['prompt']} + {row['out']} tokens", burst, int(row["mbt"])


def fitted_cells(cells: Sequence[Cell]) -> list[Cell]:
    """Return the smallest and the largest budget at the lowest load of the most frequent lengths."""
    common = statistics.mode(cell[0] for cell in cells)
    lowest = min(cell[1] for cell in cells if cell[0] == common)
    budgets = [cell[2] for cell in cells if cell[:2] == (common, lowest)]
    return [(common, lowest, budget) for budget in (min(budgets), max(budgets))]


def runs_tree(
    gpu: str, model: str, rows: Sequence[dict[str, str]], fitted: Sequence[Cell], folder: Path
) -> dict[str, Any]:
    """Return the file of runs of a GPU and a model; its traces are written to the folder."""
    flops, bandwidth, memory = GPUS[gpu]
    parameters, layers, heads, kv_heads, head = next(sizes for name, sizes in MODELS.items() if name in model)
    cached = 4 * layers * kv_heads * head  # bytes per token: 16-bit keys and values
    token, pair = 2 * parameters / (COMPUTE * flops), 4 * layers * heads * head / (COMPUTE * flops)
    step, read = STEP + 2 * parameters / (MEMORY * bandwidth), cached / (MEMORY * bandwidth)
    return {
        "scenario": {
            "policy": {"name": "vllm-v1", "max_num_seqs": 256, "enable_prefix_caching": False},
            "engine": {"num_blocks": int((memory - 2 * parameters) / (16 * cached)), "max_model_len": 32_768},
        },
        "cost": {
            "kind": "parts",
            "prefill": {"tokens": [[1, step], [16_384, step + 16_384 * token]], "cross": pair, "square": pair / 2,
                        "cross_root": 1e-6},
            "decode": {"rows": [[1, step]], "live": 1e-5, "context": read},
            "mixed": {"one_pass": True, "row": 1e-5, "context": read},
        },
        "free": FREE,
        "spread": SPREAD,
        "runs": [entry(row, cell_of(row) in fitted, folder / f"{k}.csv") for k, row in enumerate(rows)],
    }  # fmt: skip


def entry(row: dict[str, str], fit: bool, path: Path) -> dict[str, Any]:
    """Return one run of the table, and write its trace."""
    times = arrivals(row["phases"], int(row["seed"]))
    if len(times) != int(row["n"]):
        raise ValueError(f"{row}: expected {row['n']} requests, got {len(times)}")
    lines = [f"{time},{row['prompt']},{row['out']}" for time in times]
    path.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *lines]) + "\n", encoding="utf-8")
    reported = {figure: 1e3 * float(row[column]) for figure, column in FIGURES.items()}
    scenario = {"trace": str(path), "policy": {"max_num_batched_tokens": int(row["mbt"])}}
    return {"name": path.stem, "scenario": scenario, "reported": reported, "fit": fit}


def predict_cell(runs: Sequence[ObservedRun], profile: Profile) -> Predicted:
    """Return the figures of a cell as means over seeds."""

    def predict(drawn: Profile) -> tuple[Run, dict[str, float]]:
        done = [simulate(run.scenario, run.trace, profile=drawn) for run in runs]
        pairs = [run.reported[0].compare(one.measures) for run, one in zip(runs, done)]
        return done[0], {figure: float(np.mean([pair[figure][1] for pair in pairs])) for figure in FIGURES}

    return with_intervals(profile, predict)


def rows_of(
    server: str, rows: Sequence[dict[str, str]], fitted: Sequence[Cell], runs: Sequence[ObservedRun], profile: Profile
) -> list[Row]:
    """Return the figures of predicted cells, and the loss by the chosen budget of every load."""
    cells: dict[Cell, list[ObservedRun]] = defaultdict(list)
    for row, run in zip(rows, runs):
        cells[cell_of(row)].append(run)
    ours = {cell: predict_cell(of_cell, profile) for cell, of_cell in cells.items()}
    means = {
        cell: {figure: (float(np.mean([run.reported[0].figures[figure] for run in of_cell])), predicted)
               for figure, predicted in ours[cell].figures.items()}
        for cell, of_cell in cells.items()
    }  # fmt: skip
    calibrated = f"budgets {fitted[0][2]} and {fitted[1][2]} at {fitted[0][1]:g} req/s"
    found = [
        Row(SET, f"{server}, {lengths}, {burst:g} req/s, budget {budget}",
            figure.removesuffix("_ms").replace("_", " "), *pair, calibrated, {}, ASSUMED,
            interval=ours[lengths, burst, budget].interval(figure))
        for (lengths, burst, budget), pairs in means.items() if (lengths, burst, budget) not in fitted
        for figure, pair in pairs.items()
    ]  # fmt: skip
    for load in dict.fromkeys(cell[:2] for cell in means):
        by_budget = {cell[2]: pairs["mean_e2el_ms"] for cell, pairs in means.items() if cell[:2] == load}
        best = min(by_budget, key=lambda budget: by_budget[budget][0])
        chosen = min(by_budget, key=lambda budget: by_budget[budget][1])
        pair = by_budget[best][0], by_budget[chosen][0]
        found.append(Row(SET, f"{server}, {load[0]}, {load[1]:g} req/s: budget {best} is best, we choose {chosen}",
                        "measured latency of the chosen budget", *pair, calibrated, {}, ASSUMED))  # fmt: skip
    return found
