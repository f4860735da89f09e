"""What h200_replay.py replays: policy settings, engines and seeded workloads, as data. Numpy only.

Arrivals are drawn for a mean of one a second and stretched on the device, so that the stock setting is overloaded by
LOAD whatever the device's speed; the stretched ones are what is recorded and simulated.
"""

from __future__ import annotations

from typing import Any

import numpy as np

BLOCK = 16
BLOCKS = 6000  # 48 GB of a 7B's keys and values

STOCK: dict[str, Any] = {"name": "llm-serving", "decode_batch": 128, "prefill_batch": 1}
SETTINGS: dict[str, dict[str, Any]] = {
    "stock": {"policy": STOCK},
    "delay-0.5": {"policy": {**STOCK, "delay_factor": 0.5, "delay_variant": "queue"}},
    "delay-2": {"policy": {**STOCK, "delay_factor": 2.0, "delay_variant": "queue"}},
    "sorted": {"policy": {**STOCK, "order": "longest-output"}},
    "prefill-8": {"policy": {**STOCK, "prefill_batch": 8}},
    "decode-32": {"policy": {**STOCK, "decode_batch": 32}},
    "pressure": {"policy": STOCK, "few_blocks": True},
    "swapped-queue": {"policy": {**STOCK, "evicted": "swapped"}, "few_blocks": True},
    "chunked": {"policy": {"name": "sarathi", "chunk_size": 256, "max_num_seqs": 128}},
    "vllm-chunked": {"policy": {"name": "vllm-chunked", "max_num_batched_tokens": 512, "max_num_seqs": 128}},
}
WORKLOADS: dict[str, dict[str, Any]] = {
    "alpaca": {"requests": 900, "seed": 1, "few_blocks": 420, "load": 3.0},
    "long": {"requests": 450, "seed": 2, "few_blocks": 1500, "load": 2.5},
}
# Steps as a server makes them, of a workload that is not judged: samples for the fit beside the probe's designed ones.
CALIBRATION = {"requests": 200, "seed": 9, "few_blocks": 600, "load": 3.0}
CALIBRATED = ("stock", "prefill-8", "decode-32", "chunked", "vllm-chunked")


def drawn(workload: str) -> list[tuple[float, int, int]]:
    """Return (arrival, prompt, output) of every request; arrivals one a second in the mean, in bursts."""
    about = WORKLOADS.get(workload, CALIBRATION)
    draw, count = np.random.default_rng(about["seed"]), about["requests"]
    if workload == "alpaca":  # quantiles of the contest's first 1500 records: p50 17 in, 46 out, p99 79 and 294
        prompts = np.clip(draw.lognormal(np.log(17), 0.62, count), 5, 190)
        outputs = np.clip(draw.lognormal(np.log(42), 0.95, count), 1, 500)
        gaps = draw.gamma(0.25, 4.0, count)  # bursts: a coefficient of variation of 2
    elif workload == "calibration":
        prompts = np.clip(draw.lognormal(np.log(100), 1.1, count), 5, 1500)
        outputs = np.clip(draw.lognormal(np.log(60), 0.8, count), 2, 400)
        gaps = draw.exponential(1.0, count)
    else:
        prompts = np.clip(draw.lognormal(np.log(300), 0.7, count), 32, 1500)
        outputs = np.clip(draw.lognormal(np.log(90), 0.6, count), 8, 400)
        gaps = draw.exponential(1.0, count)
    arrivals = np.cumsum(gaps) - gaps[0]
    arrivals *= (count - 1) / arrivals[-1]
    return [(float(a), int(p), int(o)) for a, p, o in zip(arrivals, prompts, outputs)]


def engine(setting: str, workload: str) -> dict[str, Any]:
    """Return a setting's engine."""
    few = SETTINGS[setting].get("few_blocks", False)
    blocks = WORKLOADS.get(workload, CALIBRATION)["few_blocks"] if few else BLOCKS
    return {"num_blocks": blocks, "block_size": BLOCK, "host_blocks": 0, "max_model_len": 4096}
