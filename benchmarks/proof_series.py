"""Other runs of LLMServingSim's authors, from layer profiles: tokens of each second, replicas, several GPUs, experts.

The profiles do not have the time to exchange results between GPUs; it is computed from the link. The attention table of
the older profiles ends at 21 cached tokens per request if 128 run, so the attention is that of a derived profile.
"""

from __future__ import annotations

import csv
import gzip
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import servesim
from proof_intervals import DRAWS, NO_LIMITS
from proof_rows import Row, table
from servesim.calibrate.imports.cost_tables import import_layers
from servesim.core import Shape
from servesim.costs.derivation import Setting, derive_profile, setting_of
from servesim.costs.device_profile import load_profile, write_profile
from servesim.costs.parts import MixedPart, PartsCost
from servesim.costs.public_models import find_device, find_model
from servesim.costs.uncertainty import MODEL_SPREAD, TTFT_SPREAD

SET, EXPERTS = "ispass26: layer times", "layer profile: experts on two GPUs"
ONCE = ("embedding", "final_layernorm")  # of a step; the other layers are in each transformer layer
POINTS = [2**k for k in range(12)]  # tokens, or rows
SOURCE = "h200-llama2-7b"
BLOCKS = 13_844 - 1  # of the A6000; they bind in no run
SCHEDULER = {"name": "vllm-v1", "max_num_seqs": 128, "max_num_batched_tokens": 2048}
OLD = {"version": "0.13.0", "scheduler_reserve_full_isl": False, "async_scheduling": False}
SYNCHRONOUS = "engine arguments as in the pulse run (vLLM 0.13, synchronous, 128 requests, 2048 tokens); no host time"
CALIBRATED = "layer times; attention derived from Llama-2-7B on an H200"
ALTERNATE = "; requests go to the replicas in turn"
EAGER = (
    "probably run without CUDA graphs, so the host adds time to short steps; and the start of the series is not exact"
)
QWEN, QWEN_LAYERS, QWEN_HIDDEN, LOCAL_EXPERTS, PER_TOKEN = "Qwen3-30B-A3B-Instruct-2507", 48, 2048, 64, 8
LINK_SECONDS, LINK_BANDWIDTH = 20e-6, 16e9  # as the authors' cluster file states
LINK = "exchanges take 20 us and 16 GB/s (the authors' cluster file); requests go to the GPUs in turn; no host time"
LOCKSTEP = "the GPUs wait for each other in every layer, which two independent servers do not"


LAST_CONTEXT = 1000  # tokens of a long request; 1,000 more are 0.5 % of a step


class Series(NamedTuple):
    """A run of the set."""

    run: str
    model: str
    device: str
    degree: int = 1  # of tensor parallelism
    caching: bool = True
    replicas: int = 1
    apart: bool = False  # prefill and decode on different replicas


RUNS = (
    Series("A6000/SD+PC", "Llama-3.1-8B", "A6000"),
    Series("A6000/MD", "Llama-3.1-8B", "A6000", caching=False, replicas=2),
    Series("H100/SD+PC", "Llama-3.1-70B", "H100", degree=4),
    Series("H100/SD", "Llama-3.1-70B", "H100", degree=4, caching=False),
    Series("H100/PDD", "Llama-3.1-70B", "H100", degree=4, caching=False, apart=True),
)
TRANSFER = "; copies take 0.38 ms and 146 GB/s, as measured elsewhere; no time of the proxy"
CONNECTOR = "; the connector takes as long in each decode step as in the last full second of the run, with one request"
PROXY = (
    "the proxy and the client add time before the first token; and the connector may take longer in a step with more "
    "requests than in the steps with one, from which its time is"
)
Figure = tuple[str, float, float, dict[str, float], tuple[Any, Any]]  # quantity, measured, ours, of others, interval
ABOUT = {"name": "layers", "uncertainty": {"session": MODEL_SPREAD, "ttft": TTFT_SPREAD}}  # as imports have


def predict_series(data: Path) -> list[Row]:
    """Predict the runs of models and devices that are in the public tables; nothing is fitted."""
    folder, rows = data / "measured" / "llmservingsim-ispass26", []
    means = {run["run"]: run for run in table(folder / "runs.csv")}
    rivals: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for rival in table(folder / "rivals.csv"):
        if rival["predicted"]:
            rivals[rival["run"], rival["metric"]][rival["simulator"]] = float(rival["predicted"])
    for series in RUNS:
        tables = folder / "profile" / f"{series.device}-{series.model}-tp{series.degree}" / "layers.csv.gz"
        policy = {**SCHEDULER, **OLD, "enable_prefix_caching": series.caching}
        with tempfile.TemporaryDirectory() as scratch:
            cost = cost_of(series, table(tables))
            write_profile(Path(scratch) / "profile", ABOUT, cost)
            cluster: Mapping[str, Any] = {"replicas": series.replicas}
            if series.apart:
                decode = with_connector(cost, table(folder / "series" / "H100_PDD.csv"))
                write_profile(Path(scratch) / "decode", ABOUT, decode)
                cluster = apart(Path(scratch) / "decode", kv_bytes(series))
            run = simulate(table(folder / "workloads" / "dense.csv.gz"), Path(scratch), policy, cluster)
        assumed = SYNCHRONOUS + (ALTERNATE if series.replicas > 1 else TRANSFER if series.apart else "")
        for quantity, measured, predicted, others, interval in (
            *series_figures(folder, series, run),
            *mean_figures(means[series.run], run, rivals),
        ):
            known = CALIBRATED + (CONNECTOR if series.apart else "")
            why = PROXY if series.apart else EAGER
            rows.append(Row(SET, series.run, quantity, measured, predicted, known, others, assumed, why, interval))
    return rows


def apart(decode_profile: Path, token_bytes: int) -> dict[str, Any]:
    """Return a prefill replica and a decode replica with a profile of its own."""
    pools = [
        {"name": "prefill", "role": "prefill"},
        {"name": "decode", "role": "decode", "profile": str(decode_profile)},
    ]
    return {"pools": pools, "transfer": {"token_bytes": token_bytes}}


def with_connector(cost: PartsCost, seconds: Sequence[Mapping[str, str]]) -> PartsCost:
    """Return the costs of a decode replica: the connector makes each step longer by the same time.

    In the last full second of the run, one request is left, and each of its tokens is a step.
    """
    tokens = [float(line["measured_tok_s"]) for line in seconds if float(line["measured_tok_s"])]
    step = 1 / tokens[-2]
    alone = cost.duration(Shape(decode_rows=1, decode_live=1, context=LAST_CONTEXT))
    rows = tuple((rows, time + max(0.0, step - alone)) for rows, time in cost.decodes.rows)
    return replace(cost, decodes=replace(cost.decodes, rows=rows))


def kv_bytes(series: Series) -> int:
    """Return the bytes of the KV of a token in 16 bits."""
    return 2 * find_model(series.model).kv_values


def cost_of(series: Series, times: Sequence[Mapping[str, str]]) -> PartsCost:
    """Return the costs: times of the layers, exchanges between the GPUs, and the attention of a derived profile."""
    source, model = load_profile(SOURCE), find_model(series.model)
    new = Setting(model, find_device(series.device), setting_of(source).dtype, series.degree)
    derived = derive_profile(source, new, "derived").cost
    assert isinstance(derived, PartsCost)
    seconds: dict[int, float] = defaultdict(float)
    head: dict[int, float] = {}
    for line in times:
        name, tokens, time = line["layer_name"], int(line["input"]), 1e-9 * float(line["latency(ns)"])
        if name == "lm_head":
            head[tokens] = time
        elif name != "attn":
            seconds[tokens] += time if name in ONCE else model.layers * time
    prefill = [seconds[n] + head[1] + new.exchange(n) for n in POINTS]
    decode = [seconds[n] + head[n] + new.exchange(n) for n in POINTS]
    return PartsCost(
        prefill=replace(derived.prefill, tokens=rising(prefill), row=0.0, buckets=()),
        decodes=replace(derived.decodes, rows=rising(decode), live=0.0, buckets=()),
        mixed=MixedPart(context=derived.decodes.context),
    )


def rising(values: Sequence[float]) -> list[tuple[float, float]]:
    """Return a curve over POINTS that does not fall: single measurements scatter."""
    return list(zip(POINTS, np.maximum.accumulate(values).tolist()))


def simulate(
    requests: Sequence[Mapping[str, str]], scratch: Path, policy: Mapping[str, Any], cluster: Mapping[str, Any]
) -> Any:
    """Run the requests on replicas with the profile of the folder; they get the requests in turn."""
    trace = scratch / "trace.csv"
    with trace.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        names = ("arrival_s", "prompt_tokens", "output_tokens", "hash_ids")
        writer.writerow(names)
        writer.writerows([request[name] for name in names] for request in requests)
    return servesim.run(
        {"cluster": cluster},
        trace=trace,
        policy=policy,
        engine={"num_blocks": BLOCKS},
        profile=scratch / "profile",
        decisions=True,
        intervals=DRAWS,
    )


def series_figures(folder: Path, series: Series, run: Any) -> list[Figure]:
    """Return the mean difference of tokens in each second, and the last second with tokens."""
    path = folder / "series" / f"{series.run.replace('/', '_')}.csv"
    if series.apart or not path.is_file():
        return []
    lines = table(path)
    measured, theirs = (np.array([float(line[column]) for line in lines]) for column in list(lines[0])[1:])
    longest = max(len(measured), int(np.ceil(run.decisions.t_end.max())) + 1)
    measured, theirs = (np.pad(values, (0, longest - len(values))) for values in (measured, theirs))
    ours = tokens_by_second(run, longest)
    mean, names = float(measured[: len(lines)].mean()), ("measured", "LLMServingSim 2.0", "ours")
    ends = {name: float(np.flatnonzero(values)[-1]) for name, values in zip(names, (measured, theirs, ours))}
    differences = [mean + float(np.abs(values - measured).sum()) / len(lines) for values in (theirs, ours)]
    return [
        ("tok/s, plus the mean difference of a second", mean, differences[1], {names[1]: differences[0]}, NO_LIMITS),
        ("last second with tokens", ends["measured"], ends["ours"], {names[1]: ends[names[1]]}, NO_LIMITS),
    ]


def tokens_by_second(run: Any, seconds: int) -> Any:
    """Return the tokens that the steps of a run generate in each second, and 0 up to a number of seconds."""
    steps = run.decisions
    return np.bincount(np.ceil(steps.t_end).astype(int), weights=steps.batch, minlength=seconds)


def mean_figures(
    means: Mapping[str, str], run: Any, rivals: Mapping[tuple[str, str], dict[str, float]]
) -> list[Figure]:
    """Return the means that are published for a run with one server."""
    columns = {"tok/s": ("throughput_tok_s", "throughput_tok_s", "output_throughput"),
               "TTFT mean": ("ttft_mean_ms", "mean_ttft_ms", "mean_ttft_ms"),
               "TPOT mean": ("tpot_mean_ms", "mean_tpot_ms", "mean_tpot_ms")}  # fmt: skip
    return [
        (quantity, float(means[column]), float(run.metrics[own]), rivals[means["run"], metric], mean_limits(run, own))
        for quantity, (column, metric, own) in columns.items()
        if means[column]
    ]  # fmt: skip


def mean_limits(run: Any, metric: str) -> tuple[Any, Any]:
    """Return the interval of a mean."""
    limits: tuple[Any, Any] = run.metrics["intervals"]["metrics"].get(metric, NO_LIMITS)
    return limits


def predict_qwen(data: Path) -> list[Row]:
    """Predict Qwen3-30B-A3B on two GPUs: each computes its own requests, and half of the experts for both."""
    folder = data / "measured" / "llmservingsim-rtxpro6000"
    requests = sorted(table(folder / QWEN / "requests.csv.gz"), key=lambda row: float(row["arrival_s"]))
    measured = next(run for run in table(folder / "runs.csv") if run["run"].endswith(QWEN))
    rival = next(run for run in table(folder / "rivals.csv") if run["run"].endswith(QWEN))
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        add_exchange(folder / "profile" / QWEN / "tp1", scratch / "tables")
        import_layers(scratch / "tables", scratch / "profile", QWEN_LAYERS, experts=(LOCAL_EXPERTS, PER_TOKEN))
        run = simulate(requests, scratch, {**SCHEDULER, "version": "0.19.0"}, {"replicas": 2})
    done = run.requests
    figures = {"E2E mean": ("e2e_mean_ms", "mean_e2el_ms", done.e2el),
               "TTFT mean": ("ttft_mean_ms", "mean_ttft_ms", done.ttft),
               "TPOT mean": ("tpot_mean_ms", "mean_tpot_ms", done.tpot)}  # fmt: skip
    return [
        Row(EXPERTS, f"2 x RTX PRO 6000, {QWEN}", quantity, float(measured[column]), 1e3 * float(seconds.mean()),
            "layer profile", {"LLMServingSim": float(rival[column])}, LINK, LOCKSTEP, mean_limits(run, own))
        for quantity, (column, own, seconds) in figures.items()
    ]  # fmt: skip


def add_exchange(source: Path, target: Path) -> None:
    """Copy a layer profile and add the time of the exchanges before and after the experts, as a layer."""
    shutil.copytree(source, target)
    with gzip.open(target / "dense.csv.gz", "at", encoding="utf-8") as file:
        for tokens in (1, 2048):
            seconds = 2 * (LINK_SECONDS + tokens * 2 * QWEN_HIDDEN / LINK_BANDWIDTH)
            file.write(f"exchange,{tokens},{1e6 * seconds}\n")
