"""Runs of BLIS's validation set, predicted with profiles that `sim calibrate derive` computes: python proof_derive.py

All step times come from the bundled profile of Llama-2-7B on an H200, which we measured. One training run of the set
(Llama-2-7B, H100) gives the seconds of the front end; no other figure of the set is used.
"""

from __future__ import annotations

import csv
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Optional

import servesim
from servesim.config.memory import MemoryBudget
from servesim.costs.derivation import Setting, derive_profile, setting_of
from servesim.costs.device_profile import load_profile, write_profile
from servesim.costs.kv_memory import RESERVE, UTILISATION, device_memory, memory_of_profile
from servesim.costs.public_models import find_device, find_model

DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "measured" / "blis-validation"
SOURCE = "h200-llama2-7b"
FRONT_END_RUN = "20260217-155451-llama-2-7b-tp1-codegen"  # of the training part
METRICS = {"e2e_mean_ms": "mean_e2el_ms", "ttft_mean_ms": "mean_ttft_ms", "tpot_mean_ms": "mean_tpot_ms"}
PROMPTS, GROUPS, PAUSE, SPREAD = 100, 10, 5.0, 0.05  # prompts come round; seconds between stages; of prompt lengths
# vLLM samples as generation_config.json of the model says: these models ask for top-p.
TOP_P = ("Llama-2", "Llama-3", "Llama-4", "Qwen")


def predict_blis_validation(data: Path = DATA, only: Optional[str] = None) -> list[dict[str, Any]]:
    """Return rows with run, part, metric, measured and predicted (milliseconds) of all runs."""
    with (data / "runs.csv").open(newline="") as runs, (data / "measured.csv").open(newline="") as figures:
        settings = {run["run"]: run for run in csv.DictReader(runs)}
        measured = {row["run"]: row for row in csv.DictReader(figures) if row["stage"] == "all"}
    first = simulate(settings[FRONT_END_RUN], 0.0)
    front_end = (float(measured[FRONT_END_RUN]["ttft_mean_ms"]) - first["mean_ttft_ms"]) / 1e3
    chosen = [run for run in settings.values() if only is None or only in run["run"]]
    with ProcessPoolExecutor() as pool:
        results = list(pool.map(simulate, chosen, [max(0.0, front_end)] * len(chosen)))
    return [
        {"run": run["run"], "part": run["part"], "metric": metric, "predicted": result[own],
         "measured": float(measured[run["run"]][metric])}
        for run, result in zip(chosen, results) for metric, own in METRICS.items()
    ]  # fmt: skip


def simulate(run: Mapping[str, str], front_end: float) -> dict[str, float]:
    """Derive the profile of a run, simulate it, and return its metrics."""
    source = load_profile(SOURCE)
    old = setting_of(source)
    dtype = "float8" if run["precision"] == "FP8" else old.dtype
    new = Setting(find_model(run["model"]), find_device(run["hardware"]), dtype, int(run["tp"]))
    with tempfile.TemporaryDirectory() as folder:
        profile = derive_profile(source, new, "derived")
        write_profile(Path(folder), {**profile.about, "front_end": {"seconds": front_end}}, profile.cost)
        trace = Path(folder) / "trace.csv"
        write_trace(run, trace)
        blocks = int(run["gpu_blocks"] or 0) or memory_blocks(profile.about, run)
        sampling = "top_p" if run["model"].split("/")[-1].startswith(TOP_P) else "device"
        result = servesim.run(
            trace=trace,
            policy={
                "name": "vllm-v1",
                "max_num_seqs": int(run["max_num_seqs"]),
                "max_num_batched_tokens": int(run["max_num_batched_tokens"]),
                "version": "0.23.0",
            },
            engine={"num_blocks": blocks, "max_model_len": 4096, "client_timeout": 300, "sampling": sampling},
            profile=folder,
        )
    return {own: float(result.metrics[own]) for own in METRICS.values()}


def memory_blocks(about: Mapping[str, Any], run: Mapping[str, str]) -> int:
    """Return the KV blocks of a run whose number is not published, from the memory of its device."""
    memory, model = device_memory(about), memory_of_profile(about)
    assert memory is not None and model is not None
    return MemoryBudget(memory, float(run["gpu_memory_utilization"] or UTILISATION), model, RESERVE, 16).blocks


def write_trace(run: Mapping[str, str], path: Path) -> None:
    """Write the requests of a run: Poisson arrivals in each stage, and prompts that come round.

    A replica of a data-parallel run gets its share of the requests.
    """
    rng = random.Random(run["run"])
    system, question = int(run["system_prompt_tokens"]), int(run["question_tokens"])
    lengths = [max(1, round(rng.gauss(question, SPREAD * question))) for _ in range(PROMPTS)]
    arrivals: list[float] = []
    start = 0.0
    for rate, seconds in zip(run["rates"].split("+"), run["durations"].split("+")):
        count = round(float(rate) * float(seconds))
        arrivals += sorted(start + rng.uniform(0.0, float(seconds)) for _ in range(count))
        start += float(seconds) + PAUSE
    with path.open("w", encoding="utf-8") as file:
        file.write("arrival_s,prompt_tokens,output_tokens,content\n")
        for number, arrival in list(enumerate(arrivals))[:: int(run["dp"])]:
            prompt = number % PROMPTS
            content = f"system{prompt % GROUPS}:{system} question{prompt}:{lengths[prompt]}"
            file.write(f"{arrival:.6f},{system + lengths[prompt]},{run['output_tokens']},{content}\n")


def main() -> None:
    rows = predict_blis_validation(only=sys.argv[1] if len(sys.argv) > 1 else None)
    for row in rows:
        error = row["predicted"] / row["measured"] - 1
        print(f"{row['run']:<48}{row['metric']:<14}{row['measured']:>10.1f}{row['predicted']:>10.1f}{error:>+9.1%}")
    for part in ("validation", "training"):
        for metric in METRICS:
            errors = [
                abs(r["predicted"] / r["measured"] - 1) for r in rows if (r["part"], r["metric"]) == (part, metric)
            ]
            if errors:
                print(f"{part}: {metric}: median error {statistics.median(errors):.1%} of {len(errors)} runs")


if __name__ == "__main__":
    main()
