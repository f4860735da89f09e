"""Published figures of servers on Ascend NPUs: two settings of MindIE, and six loads of vLLM-Ascend."""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from proof_intervals import log_profile, predict_observed, with_intervals
from proof_rows import Row, table
from servesim.calibrate.logs.fit import LogFit, fit_logs
from servesim.calibrate.logs.observed_runs import ObservedRun, runs_from
from servesim.costs.device_profile import Profile
from servesim.runs.simulate import Run, simulate

Tree = dict[str, Any]
PAIR, LOADS = "MindIE, Qwen3-32B: two settings", "Qwen3-8B, Ascend 910B: other lengths and loads"
SETTINGS: dict[str, Tree] = {
    "prefill first": {},
    "throughput 1000/1": {
        "stage_policy": "throughput", "prefill_time_ms_per_req": 1000, "decode_time_ms_per_req": 1,
    },
}  # fmt: skip
PAIR_ASSUMED = (
    "MindIE 3.0.0 with shipped settings, synchronous; 600 requests, evenly spaced, no limit of 40 open requests; "
    "a decode row takes no time of its own; P99 over requests; 1562 ms is a mean"
)
PAIR_REASON = (
    "the source states neither the statistics nor the arrivals: with Poisson arrivals, P99 of the gaps of prefill "
    "first is 162 ms (costs fitted again); a client that keeps to 40 open requests shortens the waits of 1000/1"
)


def predict_mindie_pair(data: Path) -> list[Row]:
    """Fit the mean TPOT of both settings with two numbers; predict the other figures."""
    published = [row for row in table(data / "ascend-public" / "scheduler_pairs.csv") if row["pair"] == "A"]
    workload = {
        "requests": 600, "arrivals": {"kind": "constant", "rate": 9.4}, "lengths": {"prompt": 128, "output": 100},
    }  # fmt: skip
    runs = [
        {"name": name, "scenario": {"policy": fields}, "reported": {"mean_tpot_ms": float(row["tpot_mean_ms"])}}
        for (name, fields), row in zip(SETTINGS.items(), published)
    ]
    spec = runs_from({
        "scenario": {"policy": {"name": "mindie"}, "workload": workload,
                     "engine": {"num_blocks": 1500, "block_size": 128, "max_model_len": 2560}},
        "cost": {"kind": "linear", "base": 0.03, "prefill_token": 6e-5}, "free": ["base", "prefill_token"],
        "runs": runs,
    }, PAIR)  # fmt: skip
    profile, rows = log_profile(fit_logs(spec, leave_out=False), spec), []
    for run, row in zip(spec.runs, published):
        ours = with_intervals(profile, lambda drawn, run=run: figures_of(run, drawn))  # type: ignore[misc]
        name = "TTFT max" if row["ttft_statistic"] == "max" else "TTFT mean"
        for quantity, measured in ((name, row["ttft_ms"]), ("TPOT P99", row["tpot_p99_ms"])):
            rows.append(Row(PAIR, run.name, quantity, float(measured), ours.figures[quantity],
                            "mean TPOT of both settings: time of a step, time of a prompt token",
                            assumed=PAIR_ASSUMED, reason=PAIR_REASON, interval=ours.interval(quantity)))  # fmt: skip
    return rows


def figures_of(run: ObservedRun, profile: Profile) -> tuple[Run, dict[str, float]]:
    """Return a simulated run with the figures of the source."""
    done = simulate(run.scenario, run.trace, profile=profile)
    ttft, tpot = done.measures.ttft, sorted(done.measures.tpot_of)
    figures = {"TTFT max": ttft.max(), "TTFT mean": ttft.mean(), "TPOT P99": tpot[math.ceil(0.99 * len(tpot)) - 1]}
    return done, {name: 1e3 * float(seconds) for name, seconds in figures.items()}


FITTED = ("random 2K input", "random 32K input", "ShareGPT batch size 4")
LENGTHS = {"random 32K input": (32_000, 100), "random 4K input": (4000, 200), "random 2K input": (2000, 100),
           "random 128 input": (128, 4)}  # fmt: skip
SHAREGPT = {  # means as published; standard deviations and limits of a ShareGPT sample
    "prompt": {"kind": "lognormal", "mean": 217.4, "sd": 260, "min": 4, "max": 1024},
    "output": {"kind": "lognormal", "mean": 201.5, "sd": 190, "min": 4, "max": 1024},
}
SERVER: Tree = {  # vLLM-Ascend 0.9.1 uses its own scheduler for this model, with a budget of max_model_len tokens
    "policy": {"name": "vllm-ascend", "max_num_seqs": 256, "max_num_batched_tokens": 40_960,
               "enable_prefix_caching": False},
    "engine": {"block_size": 128, "max_model_len": 40_960, "front_end": {"seconds": 0.065}},
}  # fmt: skip
BLOCKS = range(1700, 2101, 50)  # the memory of the card is not published: the number that fits best
FIGURES = [f"{statistic}_{figure}_ms" for figure in ("ttft", "tpot") for statistic in ("mean", "median", "p99")]
FIGURES += ["mean_itl_ms", "median_itl_ms"]
QUANTITIES = {"mean_ttft_ms": "TTFT mean", "p99_ttft_ms": "TTFT P99", "mean_tpot_ms": "TPOT mean",
              "median_tpot_ms": "TPOT median", "p99_tpot_ms": "TPOT P99", "median_itl_ms": "ITL median"}  # fmt: skip
LOADS_ASSUMED = (
    "shipped settings; lengths of ShareGPT are drawn; the front end takes 65 ms, from TTFT of the fitted loads"
)
LOADS_REASON = (
    "all requests arrive at once: the API server takes 10 to 12 ms for each of them, and sends no token meanwhile"
)


def predict_gpustack(data: Path) -> list[Row]:
    """Fit three loads of one server; predict the other three."""
    specs = [runs_from(loads_of(data, blocks), LOADS) for blocks in BLOCKS]
    fit, spec = min(((fit_logs(spec, leave_out=False), spec) for spec in specs), key=lambda pair: misfit(pair[0]))
    profile = log_profile(fit, spec)
    return [
        Row(LOADS, run.name, quantity, measured_of(run, figure), ours.figures[figure],
            "random prompts of 2,000 and of 32,000 tokens; ShareGPT, 4 open requests", assumed=LOADS_ASSUMED,
            reason=LOADS_REASON if run.name != "random 4K input" else "", interval=ours.interval(figure))
        for run, ours in ((run, predict_observed(run, profile)) for run in spec.runs if not run.fit)
        for figure, quantity in {"makespan": "duration s", **QUANTITIES}.items()
    ]  # fmt: skip


def measured_of(run: ObservedRun, figure: str) -> float:
    """Return a reported figure, or the makespan."""
    value = run.makespan if figure == "makespan" else run.reported[0].figures[figure]
    assert value is not None
    return value


def misfit(fit: LogFit) -> float:
    """Return the sum of the squared logarithms of predicted / measured, over the fitted figures."""
    pairs = [pair for run in fit.fitted for pair in run.figures.values()]
    return sum(math.log(predicted / measured) ** 2 for measured, predicted in pairs)


def loads_of(data: Path, blocks: int) -> Tree:
    """Return the loads of vLLM-Ascend as the content of a runs.yaml."""
    rows = table(data / "ascend-public" / "gpustack_910b.csv")
    rows = [row for row in rows if row["model"] == "Qwen3-8B" and row["engine"].startswith("vLLM")]
    # 16.4 GB of weights at 1.6 TB/s are 10 ms; the published 47 ms per token are host time
    return {
        "scenario": {**SERVER, "engine": {"num_blocks": blocks, **SERVER["engine"]}},
        "cost": {"kind": "linear", "base": 0.045, "prefill_token": 7e-5, "prefill_square": 5e-9, "decode_row": 1e-4,
                 "context": 2e-8},
        "free": {"base": 1.0, "prefill_token": 1.0, "prefill_square": 1.0, "decode_row": 1.0, "context": 0.5},
        "runs": [load_of(row) for row in rows],
    }  # fmt: skip


def load_of(row: Mapping[str, str]) -> Tree:
    """Return one load: its requests and its published figures."""
    prompt, output = deepcopy(LENGTHS.get(row["case"], (SHAREGPT["prompt"], SHAREGPT["output"])))
    workload: Tree = {"requests": int(row["requests"]), "lengths": {"prompt": prompt, "output": output}}
    workload |= {"concurrency": 4} if row["max_concurrency"] else {"arrivals": {"kind": "burst"}}
    figures = {name: float(row[column_of(name)]) for name in FIGURES}
    return {
        "name": row["case"], "fit": row["case"] in FITTED, "total": float(row["duration_s"]), "reported": figures,
        "scenario": {"workload": workload}, "note": row["source"],
    }  # fmt: skip


def column_of(figure: str) -> str:
    statistic, latency, _ = figure.split("_")
    return f"{latency}_{statistic}_ms"
