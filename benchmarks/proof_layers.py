"""From a layer profile to a run: LLMServingSim's profiles and vLLM 0.19 on RTX 4090 and RTX PRO 6000."""

from __future__ import annotations

import csv
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import servesim
from proof_intervals import DRAWS, NO_LIMITS
from proof_rows import Row, table
from servesim.calibrate.imports.cost_tables import import_layers

SET = "layer profile alone"
LAYERS = 32  # of Llama-3.1-8B
UNEQUAL = (
    "steps of the run take longer than the sum of their layers: steps with a full token budget 5 %, and 3 ms more "
    "while one context of a small batch is long; the profile's table of unequal contexts explains the second, but adds "
    "5 % to the RTX 4090 run, which is right without it"
)
PRO_BLOCKS = 33_000  # estimated by the data's README; they do not bind


class Measured(NamedTuple):
    """One measured request; times in seconds."""

    arrival: float
    first: float
    last: float
    prompt: int
    output: int
    hash_ids: str


def predict_layers(data: Path) -> list[Row]:
    """Predict both runs from their layer profiles; nothing is fitted."""
    pro = data / "measured" / "llmservingsim-rtxpro6000"
    prompts = table(pro / "Llama-3.1-8B" / "requests.csv.gz")
    rival = next(row for row in table(pro / "rivals.csv") if row["run"].endswith("Llama-3.1-8B"))
    rivals = {name: {"LLMServingSim": float(rival[column])} for name, column in (
        ("TTFT mean", "ttft_mean_ms"), ("TPOT mean", "tpot_mean_ms"), ("E2E mean", "e2e_mean_ms"),
    )}  # fmt: skip
    rows = []
    bench = data / "bench" / "vllm-rtx4090"
    if bench.is_dir():  # the same 300 requests as on the RTX PRO 6000: prompts share the same blocks
        summary = (bench / "llmservingsim_summary.txt").read_text(encoding="utf-8")
        rows += compare("RTX 4090, Llama-3.1-8B", bench / "profile", read_4090(bench, prompts), 2588 - 1, 256,
                        rivals_4090(summary))  # fmt: skip
    measured = [
        Measured(float(row["arrival_s"]), float(row["first_token_s"]), float(row["last_token_s"]),
                 int(row["prompt_tokens"]), int(row["output_tokens"]), row["hash_ids"])
        for row in prompts
    ]  # fmt: skip
    rows += compare("RTX PRO 6000, Llama-3.1-8B", pro / "profile" / "Llama-3.1-8B", measured, PRO_BLOCKS, 128, rivals,
                    UNEQUAL)  # fmt: skip
    return rows


def read_4090(bench: Path, prompts: Sequence[dict[str, str]]) -> list[Measured]:
    """Return the requests of the RTX 4090; its two clocks are joined by the shortest way from arrival to queue."""
    lines = (bench / "vllm" / "requests.jsonl").read_text(encoding="utf-8").splitlines()
    found = sorted(map(json.loads, lines), key=lambda row: int(row["request_id"].split("-")[1]))
    clock = max(row["arrival_time"] - row["queued_ts"] for row in found)
    return [
        Measured(row["arrival_time"], row["first_token_ts"] + clock, row["last_token_ts"] + clock, row["input_toks"],
                 row["output_toks"], prompt["hash_ids"])
        for row, prompt in zip(found, prompts)
    ]  # fmt: skip


def rivals_4090(summary: str) -> dict[str, dict[str, float]]:
    """Return LLMServingSim's means from its printed table."""
    means = {line.split()[0]: float(line.split()[3]) for line in summary.splitlines() if " Mean " in line}
    names = {"TTFT mean": "TTFT", "TPOT mean": "TPOT", "E2E mean": "Latency"}
    return {name: {"LLMServingSim": means[key]} for name, key in names.items()}


def compare(
    name: str, profile: Path, measured: list[Measured], blocks: int, max_num_seqs: int,
    rivals: dict[str, dict[str, float]], reason: str = "",
) -> list[Row]:  # fmt: skip
    """Simulate a run from its layer profile."""
    with tempfile.TemporaryDirectory() as folder:
        import_layers(profile, Path(folder) / "profile", LAYERS)
        trace = Path(folder) / "trace.csv"
        write_trace(measured, trace)
        policy = {
            "name": "vllm-v1",
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": 2048,
            "version": "0.19.0",
        }
        run = servesim.run(
            trace=trace,
            policy=policy,
            engine={"num_blocks": blocks},
            profile=Path(folder) / "profile",
            intervals=DRAWS,
        )
    times = np.array([(r.arrival, r.first, r.last, r.output) for r in measured])
    ttft, decode, e2e = times[:, 1] - times[:, 0], times[:, 2] - times[:, 1], times[:, 2] - times[:, 0]
    figures = {"E2E mean": (e2e, "mean_e2el_ms"), "TTFT mean": (ttft, "mean_ttft_ms"),
               "TPOT mean": (decode / (times[:, 3] - 1), "mean_tpot_ms")}  # fmt: skip
    assumed = "asynchronous scheduling and prefix caching on (defaults of 0.19); no host time"
    return [
        Row(SET, name, quantity, 1e3 * float(seconds.mean()), run.metrics[key], "layer profile", rivals[quantity],
            assumed, reason, run.metrics["intervals"]["metrics"].get(key, NO_LIMITS))
        for quantity, (seconds, key) in figures.items()
    ]  # fmt: skip


def write_trace(measured: Sequence[Measured], path: Path) -> None:
    """Write the requests in order of arrival."""
    start = min(request.arrival for request in measured)
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("arrival_s", "prompt_tokens", "output_tokens", "hash_ids"))
        for r in sorted(measured, key=lambda request: request.arrival):
            writer.writerow((r.arrival - start, r.prompt, r.output, r.hash_ids))
