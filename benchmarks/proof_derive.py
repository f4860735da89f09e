"""Runs of BLIS's validation set, predicted with profiles that `sim calibrate derive` computes.

All step times come from the bundled profiles of Llama-2-7B and, for models with grouped heads, of Llama-3.1-8B on an
H200, which we measured. One training run of the set (Llama-2-7B, H100) gives the seconds of the front end. Constants of
the rules, such as what a step of a server takes longer than its kernels, were chosen with the open runs in view.
"""

from __future__ import annotations

import random
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import servesim
from proof_intervals import DRAWS, NO_LIMITS
from proof_rows import Row, table
from servesim.config.memory import MemoryBudget
from servesim.costs.derivation import Setting, derive_profile, setting_of
from servesim.costs.device_profile import load_profile, write_profile
from servesim.costs.kv_memory import RESERVE, UTILISATION, device_memory, memory_of_profile
from servesim.costs.named_profile import measured_for
from servesim.costs.public_models import find_device, find_model

SETS = {"validation": "derived profiles: blis-validation", "training": "derived profiles: training runs of BLIS"}
FRONT_END_RUN = "20260217-155451-llama-2-7b-tp1-codegen"  # of the training part
FIGURES = {"e2e_mean_ms": ("E2E mean", "mean_e2el_ms"), "ttft_mean_ms": ("TTFT mean", "mean_ttft_ms"),
           "tpot_mean_ms": ("TPOT mean", "mean_tpot_ms")}  # fmt: skip
PROMPTS, GROUPS, PAUSE, SPREAD = 100, 10, 5.0, 0.05  # prompts come round; seconds between stages; of prompt lengths
# vLLM samples as generation_config.json of the model says: these models ask for top-p.
TOP_P = ("Llama-2", "Llama-3", "Llama-4", "Qwen")
CALIBRATED = "Llama-2-7B and Llama-3.1-8B on an H200; front end of one run of Llama-2-7B on an H100"
ASSUMED = (
    "Poisson arrivals; 100 prompts that come round; asynchronous scheduling and prefix caching on; KV blocks from the "
    "memory of the device where they are not published; top-p sampling where the model asks for it; a new server, "
    "which compiles the kernels of experts"
)
QUEUE_RATIO = 4.5  # TTFT / TPOT: about 3 where no request waits
QUEUED = "requests wait in this run: a small error of the step time is a large error of the queueing time"
OTHER_DEVICE = "the efficiencies were measured on an H200; those of this GPU differ"


def predict_blis_validation(data: Path, only: str = "") -> list[Row]:
    """Predict every run but the one that gives the front end; `only`: runs whose names contain this text."""
    folder = data / "measured" / "blis-validation"
    settings = {run["run"]: run for run in table(folder / "runs.csv")}
    measured = {row["run"]: row for row in table(folder / "measured.csv") if row["stage"] == "all"}
    others = factors_of_others(folder / "predictions.csv.gz")
    first = simulate(settings.pop(FRONT_END_RUN), 0.0, draws=0)
    front_end = (float(measured[FRONT_END_RUN]["ttft_mean_ms"]) - first["mean_ttft_ms"]) / 1e3
    chosen = [run for run in settings.values() if only in run["run"]]
    with ProcessPoolExecutor() as pool:
        results = list(pool.map(simulate, chosen, [max(0.0, front_end)] * len(chosen)))
    rows = []
    for run, result in zip(chosen, results):
        figures = measured[run["run"]]
        for column, (quantity, own) in FIGURES.items():
            value = float(figures[column])
            rivals = {name: value * factors[column] for name, factors in others[run["run"]].items()}
            rows.append(Row(SETS[run["part"]], run["run"], quantity, value, float(result[own]), CALIBRATED, rivals,
                            ASSUMED, reason_of(run, figures),
                            result["intervals"]["metrics"].get(own, NO_LIMITS)))  # fmt: skip
    return rows


def reason_of(run: Mapping[str, str], figures: Mapping[str, str]) -> str:
    """Return why the prediction of a run may be bad."""
    if float(figures["ttft_mean_ms"]) > QUEUE_RATIO * float(figures["tpot_mean_ms"]):
        return QUEUED
    return "" if run["hardware"] == "H100" else OTHER_DEVICE


def factors_of_others(path: Path) -> dict[str, dict[str, dict[str, float]]]:
    """Return predicted / measured of other simulators by run, simulator and column.

    LLMServingSim predicts the first 100 requests of a run, and is compared with these.
    """
    pairs: dict[tuple[str, str], dict[str, tuple[float, float]]] = defaultdict(dict)
    for row in table(path):
        if row["stage"] == "all":
            pair = float(row["predicted_ms"]), float(row["measured_ms"])
            pairs[row["run"], row["simulator"]][row["metric"]] = pair
    factors: dict[str, dict[str, dict[str, float]]] = defaultdict(dict)
    for (run, simulator), of_run in pairs.items():
        (e2e, e2e_measured), (ttft, ttft_measured) = of_run["e2e_mean"], of_run["ttft_mean"]
        factors[run][simulator] = {
            "e2e_mean_ms": e2e / e2e_measured,
            "ttft_mean_ms": ttft / ttft_measured,
            "tpot_mean_ms": (e2e - ttft) / (e2e_measured - ttft_measured),
        }
    return factors


def simulate(run: Mapping[str, str], front_end: float, draws: int = DRAWS) -> Mapping[str, Any]:
    """Derive the profile of a run, simulate it, and return its metrics."""
    source = load_profile(measured_for(run))
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
                "version": "0.15.1",
                "scheduler_reserve_full_isl": False,
            },
            engine={
                "num_blocks": blocks,
                "max_model_len": 4096,
                "client_timeout": 300,
                "sampling": sampling,
                "start": "cold" if new.model.experts else None,
            },
            profile=folder,
            intervals=draws,
        )
    metrics: Mapping[str, Any] = result.metrics
    return metrics


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
