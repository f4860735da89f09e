"""blis-h100: every request of vLLM 0.15.1 on H100; the run `codegen` of a model predicts the model's other runs."""

from __future__ import annotations

import csv
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from proof_rows import Row, table
from servesim.calibrate.logs.fit import fit_logs
from servesim.calibrate.logs.observed_runs import runs_from
from servesim.config.scenario import scenario_from
from servesim.core import StepCost
from servesim.costs.device_profile import Profile
from servesim.runs.simulate import load_trace, simulate

SET = "blis-h100: other runs of the model"
# Bytes of KV per token and GPU, from the public dimensions of the models.
KV_BYTES = {"Llama-2-7b": 524_288, "Llama-2-70b": 327_680 / 4, "Mixtral": 131_072 / 2, "CodeLlama": 196_608 / 2}
BANDWIDTH = 0.8 * 3.35e12  # of an H100 SXM, bytes per second
QUEUE_RATIO = 5.0  # p99 / median of TTFT in a run with a queue
FITTED_SECONDS = 120.0  # of each request rate of codegen
CALIBRATED = f"codegen of the model, {FITTED_SECONDS:g} s of each rate"
ASSUMED = "asynchronous scheduling and prefix caching on (defaults of 0.15); different prompts share nothing"
SATURATED = (
    "near saturation: up to 128 requests run, the fitted run has 50; steps that are a little too long make a queue"
)
OVERLOAD = ("overload: after 300 s the client gives up and vLLM drops the request; simulated requests run on. "
            "Host offload of KV was on and is not simulated")  # fmt: skip


def predict_blis(data: Path) -> list[Row]:
    """Fit each model's codegen run; predict its other runs."""
    folder = data / "measured" / "blis-h100"
    runs = table(folder / "runs.csv")
    rivals = rivals_by_run(data / "measured" / "blis-validation" / "predictions.csv.gz")
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for codegen in [run for run in runs if run["workload"] == "codegen"]:
            cost, front_end = fit_codegen(codegen, folder, Path(scratch))
            for run in runs:
                if run["model"] == codegen["model"] and run is not codegen:
                    rows += compare(run, read_requests(folder, run), cost, front_end, Path(scratch), rivals)
    return rows


def read_requests(folder: Path, run: dict[str, str]) -> list[dict[str, str]]:
    return table(folder / "requests" / f"{run['run']}.csv.gz")


def first_part(requests: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """Return the first part of each request rate."""
    start: dict[str, float] = {}
    for request in requests:
        start.setdefault(request["stage"], float(request["arrival_s"]))
    return [r for r in requests if float(r["arrival_s"]) < start[r["stage"]] + FITTED_SECONDS]


def fit_codegen(run: dict[str, str], folder: Path, scratch: Path) -> tuple[StepCost, float]:
    """Return step costs and the seconds of the front end, from the run `codegen`.

    The front end is what the mean TTFT has more than the simulated one; a second fit uses it.
    """
    requests, front_end = first_part(read_requests(folder, run)), 0.0
    log = scratch / "log.csv"
    lines = [f"{k},{r['ttft_s']},{r['e2e_s']}" for k, r in enumerate(requests) if r["ok"] == "1"]
    log.write_text("\n".join(["idx,ttft_s,e2e_s", *lines]) + "\n", encoding="utf-8")
    step = float(run["tpot_mean_ms"]) / 1e3
    context = next(size for name, size in KV_BYTES.items() if name in run["model"]) / BANDWIDTH
    cost: dict[str, Any] = {"kind": "linear", "base": 0.8 * step, "prefill_token": 3e-5, "decode_row": 2e-5}
    free = {"base": 1.0, "prefill_token": 1.0, "decode_row": 1.0, "context": 0.2}
    for _ in range(2):
        scenario = scenario_of(run, write_trace(requests, scratch / "codegen.csv"), front_end)
        tree = {"scenario": scenario, "cost": {**cost, "context": context}, "free": free,
                "runs": [{"name": "codegen", "log": str(log)}]}  # fmt: skip
        fitted = fit_logs(runs_from(tree, SET)).cost
        measured = np.mean([float(r["ttft_s"]) for r in requests if r["ok"] == "1"])
        front_end = max(0.0, front_end + float(measured - simulated(scenario, fitted).ttft.mean()))
    return fitted, front_end


def scenario_of(run: dict[str, str], trace: Path, front_end: float) -> dict[str, Any]:
    """Return the server of a run."""
    policy = {"name": "vllm-v1", "max_num_seqs": int(run["max_num_seqs"]), "version": "0.23.0",
              "max_num_batched_tokens": int(run["max_num_batched_tokens"])}  # fmt: skip
    engine = {"num_blocks": int(run["gpu_blocks"]), "max_model_len": int(run["max_model_len"]), "client_timeout": 300,
              "front_end": {"seconds": front_end}}  # fmt: skip
    return {"trace": str(trace), "policy": policy, "engine": engine}


def write_trace(requests: Sequence[dict[str, str]], path: Path) -> Path:
    """Write requests as a trace; equal prompts have equal contents."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("id", "arrival_s", "prompt_tokens", "output_tokens", "content"))
        for r in requests:
            content = f"p{r['prompt_id']}:{r['prompt_tokens']}"
            writer.writerow((r["idx"], r["arrival_s"], r["prompt_tokens"], r["output_tokens"], content))
    return path


def simulated(scenario: dict[str, Any], cost: StepCost) -> Any:
    """Return the metrics of a simulated run."""
    checked = scenario_from(scenario, SET)
    return simulate(checked, load_trace(checked), profile=Profile("fit", cost)).measures


def compare(
    run: dict[str, str], requests: list[dict[str, str]], cost: StepCost, front_end: float, scratch: Path,
    rivals: dict[tuple[str, str], dict[str, float]],
) -> list[Row]:  # fmt: skip
    """Return the rows of a predicted run."""
    done = simulated(scenario_of(run, write_trace(requests, scratch / "run.csv"), front_end), cost)
    failed = int(run["failed"])
    queued = np.percentile(done.ttft, 99) > QUEUE_RATIO * np.median(done.ttft)
    reason = OVERLOAD if failed else SATURATED if queued else ""
    figures = {"E2E mean": ("e2e_mean_ms", done.e2el), "TTFT mean": ("ttft_mean_ms", done.ttft),
               "TPOT mean": ("tpot_mean_ms", done.tpot_of)}  # fmt: skip
    rows = []
    for quantity, (column, seconds) in figures.items():
        rows.append(
            Row(SET, run["run"][16:], quantity, float(run[column]), 1e3 * float(seconds.mean()),
                CALIBRATED, rivals.get((run["validation_id"], column), {}), ASSUMED,
                reason)
        )  # fmt: skip
    if failed:
        rows.append(Row(SET, run["run"][16:], "failed requests", failed, len(requests) - len(done.e2el),
                        CALIBRATED, {}, ASSUMED, OVERLOAD))  # fmt: skip
    return rows


def rivals_by_run(path: Path) -> dict[tuple[str, str], dict[str, float]]:
    """Return the predictions of other simulators, by validation id and column, for whole runs."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in table(path) if path.is_file() else ():
        if row["stage"] == "all" and row["source"] != "first-100":
            key = row["run"].split("-")[0], f"{row['metric']}_ms"
            found.setdefault(key, {})[row["simulator"]] = float(row["predicted_ms"])
    return found
