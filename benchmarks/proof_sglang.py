"""SGLang 0.5.18 on an RTX 4090: retractions by load, batch limit, pool size and radix cache."""

from __future__ import annotations

import re
import runpy
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from proof_intervals import with_intervals
from proof_rows import Row, table_of_document
from scipy.optimize import least_squares
from servesim.calibrate.logs.observed_runs import ObservedRun, relative_spread, runs_from
from servesim.calibrate.logs.residuals import predict
from servesim.config.layers import merge
from servesim.core import StepCost
from servesim.costs.device_profile import Profile
from servesim.costs.mapping import cost_from
from servesim.runs.simulate import Run, simulate

SET = "SGLang 0.5.18, RTX 4090: other loads and settings"
TOKENS, MAX_MODEL_LEN = 87_552, 40_960  # of the KV pool; of Qwen3-4B
SCENARIO: dict[str, Any] = {
    "policy": {"name": "sglang", "version": "0.5.18", "chunked_prefill_size": 2048, "max_prefill_tokens": 16_384,
               "max_running_requests": 2048, "ignore_eos": True},
    "engine": {"block_size": 1, "num_blocks": TOKENS, "max_model_len": MAX_MODEL_LEN},
}  # fmt: skip
SETTINGS: dict[str, Any] = {  # rows of the second table, by the first words of their names
    "chunked prefill off": {"policy": {"chunked_prefill_size": None}},
    "max-total-tokens 65536": {"engine": {"num_blocks": 65_536}},
    "max-running-requests 24": {"policy": {"max_running_requests": 24}},
    "max-running-requests 40": {"policy": {"max_running_requests": 40}},
    "disable-radix-cache": {"policy": {"disable_radix_cache": True}},
}
SETTINGS_RATE, FITTED_LOADS = "2", 2  # requests/s of the second table; the lowest loads of the first one
SHARED_TOKENS = 36  # with which all prompts begin
GRAPH_ROWS = 24  # larger batches run without CUDA graphs
# Seconds of a step, of the launches without CUDA graphs, of a row, of a cached token (147,456 bytes at 90 % of 1 TB/s)
# and of a prompt token (7.3 GFLOP at 150 TFLOP/s): start values, and the widths of their logarithms.
START, WIDTHS = np.array([0.0095, 5e-4, 3e-5, 1.6e-7, 5e-5]), np.array([1.0, 1.0, 1.0, 0.3, 1.0])
POINT_SPREAD, WALL_SPREAD = 0.03, 0.005  # of the step times: a prefill of 28 ms may be among the 40 steps of a point
CALIBRATED = "ten step times of the server log; the loads 0.35 and 0.5 req/s"
ASSUMED = "wall time counts from the first request; the three prompts of the warm-up are not cached"
FIRST_SECONDS = (
    "all 120 requests arrive within 14 s; with each decode step between their prefills, admissions reserve less. "
    "The count depends on the time of a prefill, which the fitted rows show in TTFT only"
)


def predict_sglang(data: Path) -> list[Row]:
    """Fit four costs to the step times and the two lowest loads; predict the other loads and the settings."""
    folder = data / "measured" / "published"
    document = folder / "sglang-0.5.18-rtx4090.md"
    loads, settings = (table_of_document(document, name) for name in ("QPS", "setting"))
    with tempfile.TemporaryDirectory() as scratch:
        traces = {row["QPS"]: write_trace(folder, row["QPS"], Path(scratch)) for row in loads}
        by_load = [(row, observed(row, {"trace": str(traces[row["QPS"]])})) for row in loads]
        cost = fit(step_points(document), [run for _, run in by_load[:FITTED_LOADS]])
        rows = [line for row, run in by_load[FITTED_LOADS:] for line in compare(f"{row['QPS']} req/s", row, run, cost)]
        for name, change in SETTINGS.items():
            row = next(row for row in settings if row["setting"].startswith(name))
            run = observed(row, merge({"trace": str(traces[SETTINGS_RATE])}, change))
            rows += compare(f"{SETTINGS_RATE} req/s, {name}", row, run, cost)
    return rows


def write_trace(folder: Path, rate: str, scratch: Path) -> Path:
    """Write the exact requests of a load, which the data's own generator gives."""
    requests = runpy.run_path(str(folder / "sglang_trace.py"))["requests"](float(rate))
    lines = [
        f"{arrival},{prompt},{output},shared:{SHARED_TOKENS} own{k}:{prompt - SHARED_TOKENS}"
        for k, (arrival, prompt, output) in enumerate(requests)
    ]
    path = scratch / f"{rate}.csv"
    path.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens,content", *lines]) + "\n", encoding="utf-8")
    return path


def number(cell: str) -> float:
    """Return a figure; the median, if a cell has one for each run."""
    return statistics.median(map(float, cell.split(",")))


def observed(row: dict[str, str], scenario: dict[str, Any]) -> ObservedRun:
    """Return a row of the tables as a run."""
    reported = {
        "median_ttft_ms": 1e3 * number(row["TTFT p50 s"]),
        "p99_ttft_ms": 1e3 * number(row["TTFT p99 s"]),
        "median_tpot_ms": number(row["TPOT p50 ms"]),
        "p99_tpot_ms": number(row["TPOT p99 ms"]),
    }
    run = {"name": "run", "scenario": scenario, "total": number(row["wall s"]), "reported": reported}
    tree = {"scenario": SCENARIO, "cost": {"kind": "linear"}, "free": ["base"], "runs": [run]}
    return runs_from(tree, SET).runs[0]


def step_points(document: Path) -> list[tuple[int, int, float]]:
    """Return running requests, tokens in the pool and seconds of the steps that the server log shows."""
    line = next(line for line in document.read_text(encoding="utf-8").splitlines() if line.startswith("Step-time"))
    cells = re.findall(r"(\d+) / ([\d,]+) / (\d+)", line)
    return [(int(rows), int(tokens.replace(",", "")), int(rows) / int(rate)) for rows, tokens, rate in cells]


def cost_of(factors: Any) -> StepCost:
    """Return the costs for logarithms of factors of the start values."""
    base, launches, row, context, token = (START * np.exp(factors)).tolist()
    rows = [[n, base + n * row + (launches if n > GRAPH_ROWS else 0.0)] for n in (1, GRAPH_ROWS, GRAPH_ROWS + 1, 100)]
    prefill = {"tokens": [[1, base], [1001, base + 1000 * token]]}
    return cost_from({"kind": "parts", "prefill": prefill, "decode": {"rows": rows, "context": context}}, SET)


def fit(points: list[tuple[int, int, float]], runs: list[ObservedRun]) -> StepCost:
    """Return the costs that give the step times and the figures of the runs."""

    def residuals(values: Any) -> list[float]:
        cost = cost_of(values - 1)
        errors = [np.log(cost.decode(rows, rows, tokens) / seconds) / POINT_SPREAD for rows, tokens, seconds in points]
        for run in runs:
            done = predict(run, cost)
            assert run.makespan is not None
            errors.append(np.log(done.makespan / run.makespan) / WALL_SPREAD)
            pairs = run.reported[0].compare(done.metrics).items()
            errors += [np.log(ours / measured) / relative_spread(name) for name, (measured, ours) in pairs]
        return [*errors, *(values - 1) / WIDTHS]

    # The differences for derivatives are relative, so the start is 1, not 0.
    return cost_of(least_squares(residuals, np.ones(len(START)), diff_step=0.03).x - 1)


def compare(name: str, row: dict[str, str], run: ObservedRun, cost: StepCost) -> list[Row]:
    """Return the rows of a predicted run."""
    ours = with_intervals(Profile("fit", cost), lambda profile: figures_of(run, profile))
    retractions, rows = number(row["retractions"]), []
    missed = abs(ours.figures["preemptions"] - retractions) > max(3, 0.15 * retractions)
    for key, value in ours.figures.items():
        figure = "retractions" if key == "preemptions" else key
        if figure in row:
            rows.append(Row(SET, name, figure, number(row[figure]), value, CALIBRATED, assumed=ASSUMED,
                            reason=FIRST_SECONDS if missed and key == "preemptions" else "",
                            interval=ours.interval(key)))  # fmt: skip
    return rows


def figures_of(run: ObservedRun, profile: Profile) -> tuple[Run, dict[str, float]]:
    """Return a simulated run with the figures of the tables."""
    done = simulate(run.scenario, run.trace, profile=profile)
    measures = done.measures
    return done, {
        "preemptions": sum(request.preemptions for request in done.requests),
        "wall s": measures.makespan,
        "TTFT p99 s": float(np.percentile(measures.ttft, 99)),
        "TPOT p50 ms": 1e3 * float(np.percentile(measures.tpot, 50)),
        "TTFT mean s": float(measures.ttft.mean()),
        "E2E p50 s": float(np.percentile(measures.e2el, 50)),
    }
