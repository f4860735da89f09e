"""blis-h100: every request of vLLM 0.15.1 on H100; the run `codegen` of a model predicts the model's other runs."""

from __future__ import annotations

import csv
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from proof_intervals import log_profile, with_intervals
from proof_rows import Row, table
from servesim.calibrate.logs.fit import fit_logs
from servesim.calibrate.logs.observed_runs import runs_from
from servesim.config.scenario import scenario_from
from servesim.costs.device_profile import Profile
from servesim.runs.simulate import Run, load_trace, simulate

SET = "blis-h100: other runs of the model"
# Bytes of KV per token and GPU, from the public dimensions of the models.
KV_BYTES = {"Llama-2-7b": 524_288, "Llama-2-70b": 327_680 / 4, "Mixtral": 131_072 / 2, "CodeLlama": 196_608 / 2}
BANDWIDTH = 0.8 * 3.35e12  # of an H100 SXM, bytes per second
COLUMNS = {"E2E mean": "e2e_mean_ms", "TTFT mean": "ttft_mean_ms", "TPOT mean": "tpot_mean_ms",
           "failed requests": "failed"}  # fmt: skip
QUEUE_RATIO = 5.0  # p99 / median of TTFT in a run with a queue
FITTED_SECONDS = 120.0  # of each request rate of codegen
START_UP = 10.0  # first seconds of a run, which are not fitted: first calls of a new server are slow
CALIBRATED = f"codegen of the model, {FITTED_SECONDS:g} s of each rate, without the first {START_UP:g} s"
ASSUMED = ("asynchronous scheduling and prefix caching on (defaults of 0.15); different prompts share nothing; every "
           "run has a new server, with the slow first calls of codegen")  # fmt: skip
SATURATED = (
    "near saturation: up to 128 requests run, the fitted run has 50; steps that are a little too long make a queue"
)
OVERLOAD = ("overload: nearly all requests wait until their clients give up (300 s). "
            "Host offload of KV was on and is not simulated")  # fmt: skip


class Fitted(NamedTuple):
    """What the run `codegen` shows of a server."""

    profile: Profile
    front_end: tuple[float, float]  # seconds at rate 0, and per request per second: it also serves the running streams
    start_up: float  # seconds that the first call takes longer

    def engine(self, rate: float) -> dict[str, Any]:
        """Return the front end at a request rate, and the slow first call."""
        constant, slope = self.front_end
        return {
            "front_end": {"seconds": max(0.0, constant + slope * rate)},
            "cold_start": {"prefill": self.start_up},
        }


def stages_of(requests: Sequence[dict[str, str]]) -> list[str]:
    return list(dict.fromkeys(r["stage"] for r in requests))


def rate_of(times: Sequence[float]) -> float:
    """Return the mean rate of arrivals."""
    return (len(times) - 1) / (max(times) - min(times))


def mean_rate(requests: Sequence[dict[str, str]]) -> float:
    """Return the request rate of a run, as its requests see it on average."""
    rates = [[float(r["arrival_s"]) for r in requests if r["stage"] == stage] for stage in stages_of(requests)]
    return float(np.average([rate_of(times) for times in rates], weights=[len(times) for times in rates]))


def predict_blis(data: Path) -> list[Row]:
    """Fit each model's codegen run; predict its other runs."""
    folder = data / "measured" / "blis-h100"
    runs = table(folder / "runs.csv")
    rivals = rivals_by_run(data / "measured" / "blis-validation" / "predictions.csv.gz")
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for codegen in [run for run in runs if run["workload"] == "codegen"]:
            fitted = fit_codegen(codegen, folder, Path(scratch))
            for run in runs:
                if run["model"] == codegen["model"] and run is not codegen:
                    rows += compare(run, read_requests(folder, run), fitted, Path(scratch), rivals)
    return rows


def read_requests(folder: Path, run: dict[str, str]) -> list[dict[str, str]]:
    return table(folder / "requests" / f"{run['run']}.csv.gz")


def first_part(requests: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """Return the first part of each request rate."""
    start: dict[str, float] = {}
    for request in requests:
        start.setdefault(request["stage"], float(request["arrival_s"]))
    return [r for r in requests if float(r["arrival_s"]) < start[r["stage"]] + FITTED_SECONDS]


def fit_codegen(run: dict[str, str], folder: Path, scratch: Path) -> Fitted:
    """Return step costs, front end and start-up of a server, from the run `codegen`.

    The front end is what the mean TTFT has more than the simulated one; a second fit uses it.
    """
    requests, front_end = first_part(read_requests(folder, run)), 0.0
    arrival, ttft = (np.array([float(r[key]) for r in requests]) for key in ("arrival_s", "ttft_s"))
    warm = arrival >= arrival[0] + START_UP
    log = scratch / "log.csv"
    lines = [f"{k},{r['ttft_s']},{r['e2e_s']}" for k, r in enumerate(requests) if warm[k]]
    log.write_text("\n".join(["idx,ttft_s,e2e_s", *lines]) + "\n", encoding="utf-8")
    step = float(run["tpot_mean_ms"]) / 1e3
    context = next(size for name, size in KV_BYTES.items() if name in run["model"]) / BANDWIDTH
    cost: dict[str, Any] = {"kind": "linear", "base": 0.8 * step, "prefill_token": 3e-5, "decode_row": 2e-5}
    free = {"base": 1.0, "prefill_token": 1.0, "decode_row": 1.0, "context": 0.2}
    for _ in range(2):
        engine = {"front_end": {"seconds": front_end}}
        scenario = scenario_of(run, write_trace(requests, scratch / "codegen.csv"), engine)
        tree = {"scenario": scenario, "cost": {**cost, "context": context}, "free": free,
                "runs": [{"name": "codegen", "log": str(log)}]}  # fmt: skip
        spec = runs_from(tree, SET)
        fitted = log_profile(fit_logs(spec, leave_out=False), spec)
        more = front_end + ttft - simulated(scenario, fitted).measures.ttft
        front_end = max(0.0, float(more[warm].mean()))
    stage = np.array([r["stage"] for r in requests])
    stages = [warm & (stage == name) for name in stages_of(requests)]
    slope, constant = np.polyfit([rate_of(arrival[k]) for k in stages], [more[k].mean() for k in stages], 1)
    # A first call that takes s seconds longer delays the requests of these s seconds by s / 2 on average.
    waited = max(0.0, float((more[~warm] - front_end).sum()))
    return Fitted(fitted, (float(constant), float(slope)), math.sqrt(2 * waited * START_UP / np.count_nonzero(~warm)))


def scenario_of(run: dict[str, str], trace: Path, engine: dict[str, Any]) -> dict[str, Any]:
    """Return the server of a run; `engine` has further keys."""
    policy = {"name": "vllm-v1", "max_num_seqs": int(run["max_num_seqs"]), "version": "0.15.1",
              "max_num_batched_tokens": int(run["max_num_batched_tokens"]),
              "scheduler_reserve_full_isl": False}  # fmt: skip
    sizes = {"num_blocks": int(run["gpu_blocks"]), "max_model_len": int(run["max_model_len"]), "client_timeout": 300}
    return {"trace": str(trace), "policy": policy, "engine": {**sizes, **engine}}


def write_trace(requests: Sequence[dict[str, str]], path: Path) -> Path:
    """Write requests as a trace; equal prompts have equal contents."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("id", "arrival_s", "prompt_tokens", "output_tokens", "content"))
        for r in requests:
            content = f"p{r['prompt_id']}:{r['prompt_tokens']}"
            writer.writerow((r["idx"], r["arrival_s"], r["prompt_tokens"], r["output_tokens"], content))
    return path


def simulated(scenario: dict[str, Any], profile: Profile) -> Run:
    """Return a simulated run."""
    checked = scenario_from(scenario, SET)
    return simulate(checked, load_trace(checked), profile=profile)


def compare(
    run: dict[str, str], requests: list[dict[str, str]], fitted: Fitted, scratch: Path,
    rivals: dict[tuple[str, str], dict[str, float]],
) -> list[Row]:  # fmt: skip
    """Return the rows of a predicted run."""
    scenario = scenario_of(run, write_trace(requests, scratch / "run.csv"), fitted.engine(mean_rate(requests)))
    predicted = with_intervals(fitted.profile, lambda profile: figures_of(simulated(scenario, profile)))
    ttft = predicted.run.measures.ttft
    queued = np.percentile(ttft, 99) > QUEUE_RATIO * np.median(ttft)
    reason = OVERLOAD if int(run["failed"]) else SATURATED if queued else ""
    return [
        Row(SET, run["run"][16:], quantity, float(run[column]), predicted.figures[quantity], CALIBRATED,
            rivals.get((run["validation_id"], column), {}), ASSUMED, reason, predicted.interval(quantity))
        for quantity, column in COLUMNS.items()
        if column != "failed" or int(run["failed"])
    ]  # fmt: skip


def figures_of(done: Run) -> tuple[Run, dict[str, float]]:
    """Return a run and its figures."""
    measures = done.measures
    times = 1e3 * np.array([measures.e2el.mean(), measures.ttft.mean(), measures.tpot_of.mean()])
    return done, dict(zip(COLUMNS, (*times.tolist(), len(done.requests) - len(measures.e2el))))


def rivals_by_run(path: Path) -> dict[tuple[str, str], dict[str, float]]:
    """Return the predictions of other simulators, by validation id and column, for whole runs."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in table(path) if path.is_file() else ():
        if row["stage"] == "all" and row["source"] != "first-100":
            key = row["run"].split("-")[0], f"{row['metric']}_ms"
            found.setdefault(key, {})[row["simulator"]] = float(row["predicted_ms"])
    return found
