"""Policy settings, engines and seeded workloads of h200_replay.py, as data. Numpy only.

Arrivals are drawn at one request per second and then scaled on the device. The scaled rate is `load` times the capacity
of the stock setting, at any device speed. The scaled arrivals are recorded and simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

BLOCK = 16  # tokens
BLOCKS = 6000  # 48 GB of KV cache for a 7B model
MANY_ROWS = (320, 384, 512)  # further padding buckets of a session with --rows 512

STOCK: dict[str, Any] = {"name": "llm-serving", "decode_batch": 128, "prefill_batch": 1}
V1: dict[str, Any] = {"name": "vllm-v1", "max_num_seqs": 128, "async_scheduling": False}
SETTINGS: dict[str, dict[str, Any]] = {
    "stock": {"policy": STOCK},
    "delay-0.5": {"policy": {**STOCK, "delay_factor": 0.5, "delay_variant": "queue"}},
    "delay-2": {"policy": {**STOCK, "delay_factor": 2.0, "delay_variant": "queue"}},
    "delay-8": {"policy": {**STOCK, "delay_factor": 8.0, "delay_variant": "queue"}},
    "sorted": {"policy": {**STOCK, "order": "longest-output"}},
    "prefill-2": {"policy": {**STOCK, "prefill_batch": 2}},
    "prefill-8": {"policy": {**STOCK, "prefill_batch": 8}},
    "decode-16": {"policy": {**STOCK, "decode_batch": 16}},
    "decode-32": {"policy": {**STOCK, "decode_batch": 32}},
    "decode-64": {"policy": {**STOCK, "decode_batch": 64}},
    "pressure": {"policy": STOCK, "few_blocks": True},
    "swapped-queue": {"policy": {**STOCK, "preempted_to": "swapped"}, "few_blocks": True},
    "chunked": {"policy": {"name": "sarathi", "chunk_size": 256, "max_num_seqs": 128}},
    "vllm-chunked": {"policy": {"name": "vllm-chunked", "max_num_batched_tokens": 512, "max_num_seqs": 128}},
    "vllm": {"policy": {"name": "vllm", "max_num_seqs": 128}},
    "vllm-v1": {"policy": V1},
    "no-cache": {"policy": {**V1, "enable_prefix_caching": False}},
    "small-cache": {"policy": V1, "few_blocks": True},
    "sync": {"policy": V1},
    "async": {"policy": {**V1, "async_scheduling": True}},
    "rows-512": {"policy": {**V1, "max_num_seqs": 512}},
    "async-512": {"policy": {**V1, "max_num_seqs": 512, "async_scheduling": True}},
}
# Capacity of five policies for the workloads load-50, load-80 and load-95, relative to the estimate of the session.
# Simulated with the bundled profile: all requests at once, throughput of the requests 200 to 1,200 of 1,500.
CAPACITY = {"stock": 0.94, "vllm": 0.99, "vllm-chunked": 1.05, "vllm-v1": 1.03, "chunked": 0.93}
# Delay factors make a difference at light load; batch sizes and few KV blocks make one under a backlog.
OTHER_SETTINGS = ("delay-8", "vllm", "vllm-v1", "no-cache", "small-cache", "sync", "async", "rows-512", "async-512")
BACKLOG_SETTINGS = [name for name in SETTINGS if name not in OTHER_SETTINGS]
LIGHT_LOAD_SETTINGS = ["stock", "delay-0.5", "delay-2", "delay-8", "prefill-2", "prefill-8", "chunked", "vllm-chunked"]
CACHE_SETTINGS = ["vllm-v1", "no-cache", "small-cache"]
ASYNC_SETTINGS = ["sync", "async"]
MANY_SETTINGS = ["rows-512", "async-512"]
WORKLOADS: dict[str, dict[str, Any]] = {
    "alpaca": {"requests": 700, "seed": 1, "few_blocks": 420, "load": 10.0, "settings": BACKLOG_SETTINGS},
    "long": {"requests": 360, "seed": 2, "few_blocks": 1500, "load": 10.0, "settings": BACKLOG_SETTINGS},
    "calm": {"requests": 300, "seed": 3, "few_blocks": 420, "load": 0.4, "settings": LIGHT_LOAD_SETTINGS},
    "load-50": {"requests": 700, "seed": 4, "few_blocks": 1500, "load": 0.5, "settings": list(CAPACITY)},
    "load-80": {"requests": 700, "seed": 5, "few_blocks": 1500, "load": 0.8, "settings": list(CAPACITY)},
    "load-95": {"requests": 700, "seed": 6, "few_blocks": 1500, "load": 0.95, "settings": list(CAPACITY)},
    "prefixes": {"requests": 400, "seed": 7, "few_blocks": 900, "load": 0.6, "settings": CACHE_SETTINGS},
    "prefix-burst": {"requests": 400, "seed": 8, "few_blocks": 900, "load": 10.0, "settings": CACHE_SETTINGS},
    "turns": {"requests": 400, "seed": 10, "few_blocks": 900, "load": 0.6, "settings": CACHE_SETTINGS},
    # one workload at two loads: nothing waits, and nearly all the capacity is used
    "steps-light": {"requests": 400, "seed": 11, "few_blocks": 1500, "load": 0.25, "settings": ASYNC_SETTINGS},
    "steps-busy": {"requests": 400, "seed": 11, "few_blocks": 1500, "load": 0.9, "settings": ASYNC_SETTINGS},
    # 512 running requests: all at once, and at 0.7 and 0.5 of the capacity
    "many": {"requests": 2000, "seed": 12, "few_blocks": 1500, "load": 10.0, "settings": MANY_SETTINGS},
    "many-busy": {"requests": 2000, "seed": 13, "few_blocks": 1500, "load": 0.7, "settings": MANY_SETTINGS},
    "many-calm": {"requests": 1200, "seed": 14, "few_blocks": 1500, "load": 0.5, "settings": MANY_SETTINGS},
}
DEFAULT_WORKLOADS = ("alpaca", "long", "calm")
# Workloads that only provide served steps for the fit, in addition to the probe samples; their errors are not reported.
# Every calibration slice of the session draws new requests with the next medians (prompt, output) and the next load.
CALIBRATION = {"requests": 120, "seed": 9, "few_blocks": 600}
MANY_CALIBRATION = {"requests": 900, "seed": 9, "few_blocks": 600}  # of a session with --rows 512
CALIBRATION_SETTINGS = ("stock", "chunked", "prefill-8", "vllm-chunked", "decode-32", "vllm-v1")
PREFIXES, PREFIX_TOKENS = 24, (300, 900)  # shared beginnings of prompts, used as often as 1/k
TURNS, THINK_TIME_S = 4, 0.5  # of a conversation: a prompt contains the turns before and their answers
MEDIANS = ((24, 50), (90, 60), (320, 90))
LOADS = (4.0, 0.6)


def spec_of(workload: str) -> dict[str, Any]:
    """Return the definition of a workload."""
    return WORKLOADS.get(workload) or (MANY_CALIBRATION if workload == "many-calibration" else CALIBRATION)


def draw_requests(workload: str, slice_index: int = 0) -> list[tuple[float, int, int]]:
    """Return (arrival, prompt, output) of every request, at a mean rate of one request per second."""
    spec = spec_of(workload)
    draw, count = np.random.default_rng(spec["seed"] + slice_index), spec["requests"]
    if workload in ("alpaca", "calm"):  # like the 1,500 contest requests: p50 17 in, 46 out; p99 79, 294
        prompts = np.clip(draw.lognormal(np.log(17), 0.62, count), 5, 190)
        outputs = np.clip(draw.lognormal(np.log(42), 0.95, count), 1, 500)
        # bursts for the backlog (coefficient of variation 2), Poisson arrivals for the light load
        gaps = draw.gamma(0.25, 4.0, count) if workload == "alpaca" else draw.exponential(1.0, count)
    elif workload in ("prefixes", "prefix-burst", "turns"):  # without what a prompt shares; see draw_contents
        prompts = np.clip(draw.lognormal(np.log(80), 0.7, count), 8, 400)
        outputs = np.clip(draw.lognormal(np.log(60), 0.6, count), 8, 200)
        gaps = draw.exponential(1.0, count)
    elif workload == "long" or (workload.startswith(("load-", "steps-", "many")) and workload in WORKLOADS):
        prompts = np.clip(draw.lognormal(np.log(300), 0.7, count), 32, 1500)
        outputs = np.clip(draw.lognormal(np.log(90), 0.6, count), 8, 400)
        gaps = draw.exponential(1.0, count)
    else:
        prompt, output = MEDIANS[slice_index % len(MEDIANS)]
        prompts = np.clip(draw.lognormal(np.log(prompt), 1.0, count), 4, 1500)
        outputs = np.clip(draw.lognormal(np.log(output), 0.8, count), 2, 400)
        gaps = draw.exponential(1.0, count)
    arrivals = np.cumsum(gaps) - gaps[0]
    arrivals *= (count - 1) / arrivals[-1]
    return [(float(a), int(p), int(o)) for a, p, o in zip(arrivals, prompts, outputs)]


def draw_contents(workload: str, rows: Sequence[tuple[float, int, int]]) -> list[list[Any]]:
    """Return the requests of a workload: client fields in order, with contents if prompts share text.

    Rows are (arrival, prompt, output). A shared prefix, and the turns before, are added to the prompt.
    """
    draw = np.random.default_rng(spec_of(workload)["seed"])
    lengths = draw.integers(*PREFIX_TOKENS, PREFIXES).tolist()
    use = 1 / np.arange(1, PREFIXES + 1)
    requests: list[list[Any]] = []
    pieces: list[list[Any]] = []
    for id, (arrival, prompt, output) in enumerate(rows):
        turn = id % TURNS if workload == "turns" else 0
        content = None
        if workload in ("prefixes", "prefix-burst", "turns"):
            if turn == 0:
                prefix = int(draw.choice(PREFIXES, p=use / use.sum()))
                pieces = [[f"prefix:{prefix}", lengths[prefix]]]
            pieces = [*pieces, [f"prompt:{id}", prompt]]
            content = {"pieces": pieces, "answer": f"output:{id}"}
            prompt = sum(tokens for _, tokens in pieces)
            pieces = [*pieces, [f"output:{id}", output]]
        follows, think_time = (id - 1, THINK_TIME_S) if turn else (None, 0.0)
        requests.append([id, arrival, prompt, output, output, 0, None, content, follows, think_time, None])
    return requests


def offered_load(workload: str, slice_index: int = 0, setting: str = "stock") -> float:
    """Return the offered load as a multiple of the estimated capacity of the device."""
    if workload not in WORKLOADS:
        return LOADS[slice_index % len(LOADS)]
    own = CAPACITY[setting] if workload.startswith("load-") else 1.0
    return float(WORKLOADS[workload]["load"]) * own


def engine(setting: str, workload: str, blocks: int = BLOCKS) -> dict[str, Any]:
    """Return the engine section of a setting; `blocks`: those of the device."""
    few = SETTINGS[setting].get("few_blocks", False)
    blocks = min(blocks, spec_of(workload)["few_blocks"]) if few else blocks
    return {"num_blocks": blocks, "block_size": BLOCK, "host_blocks": 0, "max_model_len": 4096}


def runs(workloads: Sequence[str], settings: Sequence[str]) -> list[tuple[str, str, bool]]:
    """Return the runs in order: workload, setting, and whether the run only measures run-to-run variation."""
    first = [(w, s, False) for w in workloads for s in WORKLOADS[w]["settings"] if s in settings]
    return first + [(w, "stock", True) for w, s, _ in first if s == "stock"]
