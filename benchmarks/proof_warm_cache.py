"""Llama-3.1-70B FP8 on one H200, vLLM 0.14: a prefix cache that stays warm while the request rate rises."""

from __future__ import annotations

import random
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from proof_intervals import log_profile, predict_observed
from proof_rows import Row, table_of_document
from servesim.calibrate.logs.fit import fit_logs
from servesim.calibrate.logs.observed_runs import ObservedRun, Reported, runs_from

SET = "Llama-70B FP8, H200: more load"
BASELINE, HIGHEST_FITTED = "baseline-rerun", 2.5
TOKENS = {"baseline-rerun": 348_304, "mem095": 394_100, "batch16k": 347_500}  # of KV, by setting
BUDGETS = {"batch16k": 16_384}  # else 8192
STARTERS, CONVERSATIONS, TURNS = 10, 60, 5
# The published totals: 300 prompts of 5,806 tokens and answers of 518 tokens in the mean. A question then has 340.
STARTER_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 3750, 340, 518
OUTPUT = (40, 1000)  # uniform: mean 520; E2E / TPOT of the slowest requests is 990
PAUSE = 90.0  # seconds from the last arrival of a rate to the next rate
FIGURES = {"mean_ttft_ms": "TTFT mean", "mean_tpot_ms": "TPOT mean", "median_e2el_ms": "E2E p50"}
ASSUMED = ("lengths of single requests, their order and the turns of a conversation are drawn: only their means are "
           "published; all rates in one run, so the cache carries over")  # fmt: skip
REASON = (
    "measured step times jump by 40 % between 0.75 and 1 req/s (ITL p50 25.5 to 35.1 ms); a sum of terms has no jump"
)


def predict_llama_70b(data: Path) -> list[Row]:
    """Fit the rates up to 2.5 of the baseline; predict its higher rates and the other settings."""
    rows = table_of_document(data / "measured" / "published" / "vllm-0.14-llama70b-h200.md", "setting")
    by_setting = {name: [row for row in rows if row["setting"] == name] for name in TOKENS}
    with tempfile.TemporaryDirectory() as folder:
        low = [row for row in by_setting[BASELINE] if float(row["rate"]) <= HIGHEST_FITTED]
        cost = {"kind": "linear", "base": 0.02, "decode_row": 1e-4, "context": 4e-8, "prefill_token": 1e-4}
        free = {"base": 1.0, "decode_row": 1.0, "context": 0.2, "prefill_token": 1.0}
        spec = runs_from({"cost": cost, "free": free, "runs": [entry(BASELINE, low, Path(folder))]}, SET)
        spec = replace(spec, runs=[with_rates(spec.runs[0], low)])
        profile, result = log_profile(fit_logs(spec, leave_out=False), spec), []
        for name, of_setting in by_setting.items():
            tree = {"cost": cost, "free": free, "runs": [entry(name, of_setting, Path(folder))]}
            run = with_rates(runs_from(tree, SET).runs[0], of_setting)
            ours = predict_observed(run, profile)
            for rate, figure, measured in (
                (part.name, figure, measured) for part in run.reported for figure, measured in part.figures.items()
            ):
                if name != BASELINE or float(rate) > HIGHEST_FITTED:
                    key = f"{rate} {figure}"
                    result.append(Row(SET, f"{name}, {rate} req/s", FIGURES[figure], measured, ours.figures[key],
                                      "baseline at 0.5 to 2.5 req/s", {}, ASSUMED, REASON,
                                      ours.interval(key)))  # fmt: skip
    return result


def starts(rows: list[dict[str, str]]) -> list[float]:
    """Return when each rate starts."""
    times, now = [], PAUSE
    for row in rows:
        times.append(now)
        now += 300 / float(row["rate"]) + PAUSE
    return times


def entry(setting: str, rows: list[dict[str, str]], folder: Path) -> dict[str, Any]:
    """Return one server with all of its rates as a run."""
    lines = prompts()
    requests = [(10.0 * k, *line) for k, line in enumerate(lines[:10])]  # warm-up
    for start, row in zip(starts(rows), rows):
        draw, now = random.Random(0), start
        for line in lines:
            requests.append((now, *line))
            now += draw.expovariate(float(row["rate"]))
    path = folder / f"{setting}-{len(rows)}.csv"
    text = "\n".join(f"{time},{prompt},{output},{content}" for time, prompt, output, content in sorted(requests))
    path.write_text(f"arrival_s,prompt_tokens,output_tokens,content\n{text}\n", encoding="utf-8")
    policy = {"name": "vllm-v1", "max_num_seqs": 1024, "max_num_batched_tokens": BUDGETS.get(setting, 8192),
              "version": "0.14.1", "scheduler_reserve_full_isl": False}  # fmt: skip
    scenario = {"trace": str(path), "policy": policy, "engine": {"num_blocks": TOKENS[setting] // 16}}
    return {"name": setting, "scenario": scenario, "reported": {"mean_ttft_ms": 1.0}}


def prompts() -> list[tuple[int, int, str]]:
    """Return prompt tokens, output tokens and content of the 300 prompts."""
    draw, lines = random.Random(0), []
    for conversation in range(CONVERSATIONS):
        pieces = [f"start{conversation % STARTERS}:{STARTER_TOKENS}"]
        for turn in range(TURNS):
            pieces.append(f"q{conversation}-{turn}:{QUESTION_TOKENS}")
            tokens = STARTER_TOKENS + (turn + 1) * QUESTION_TOKENS + turn * ANSWER_TOKENS
            lines.append((tokens, draw.randint(*OUTPUT), " ".join(pieces)))
            pieces.append(f"a{conversation}-{turn}:{ANSWER_TOKENS}")
    draw.shuffle(lines)
    return lines


def with_rates(run: ObservedRun, rows: list[dict[str, str]]) -> ObservedRun:
    """Return the run with the figures of each rate. Times count from the first request."""
    reported = [
        Reported(
            {figure: float(row[column]) for figure, column in FIGURES.items()}, (start, start + length), row["rate"]
        )
        for row, start, length in zip(rows, starts(rows), (300 / float(row["rate"]) + PAUSE for row in rows))
    ]
    return replace(run, reported=reported)
