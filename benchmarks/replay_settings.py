"""What h200_replay.py replays: policy settings, engines and seeded workloads, as data. Numpy only.

Arrivals are drawn for a mean of one a second and stretched on the device, so that the stock setting is offered its
`load` (1: as much as it can serve) whatever the device's speed; the stretched ones are what is recorded and simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

BLOCK = 16
BLOCKS = 6000  # 48 GB of a 7B's keys and values

STOCK: dict[str, Any] = {"name": "llm-serving", "decode_batch": 128, "prefill_batch": 1}
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
    "swapped-queue": {"policy": {**STOCK, "evicted": "swapped"}, "few_blocks": True},
    "chunked": {"policy": {"name": "sarathi", "chunk_size": 256, "max_num_seqs": 128}},
    "vllm-chunked": {"policy": {"name": "vllm-chunked", "max_num_batched_tokens": 512, "max_num_seqs": 128}},
}
# Delays tell settings apart where the server has time to spare, few seats and little memory where it has none.
CROWDED = [name for name in SETTINGS if name != "delay-8"]
CALM = ["stock", "delay-0.5", "delay-2", "delay-8", "prefill-2", "prefill-8", "chunked", "vllm-chunked"]
WORKLOADS: dict[str, dict[str, Any]] = {
    "alpaca": {"requests": 700, "seed": 1, "few_blocks": 420, "load": 10.0, "settings": CROWDED},
    "long": {"requests": 360, "seed": 2, "few_blocks": 1500, "load": 10.0, "settings": CROWDED},
    "calm": {"requests": 300, "seed": 3, "few_blocks": 420, "load": 0.4, "settings": CALM},
}
# Steps as a server makes them, of workloads that are not judged: samples for the fit beside the probe's designed ones.
# Each of these is drawn anew for every slice of the sitting: median prompt and output, and load.
CALIBRATION = {"requests": 120, "seed": 9, "few_blocks": 600}
CALIBRATED = ("stock", "chunked", "prefill-8", "vllm-chunked", "decode-32")
MEDIANS = ((24, 50), (90, 60), (320, 90))
LOADS = (4.0, 0.6)


def drawn(workload: str, part: int = 0) -> list[tuple[float, int, int]]:
    """Return (arrival, prompt, output) of every request; arrivals one a second in the mean, in bursts."""
    about = WORKLOADS.get(workload, CALIBRATION)
    draw, count = np.random.default_rng(about["seed"] + part), about["requests"]
    if workload in ("alpaca", "calm"):  # as the contest's first 1500 records: p50 17 in, 46 out, p99 79 and 294
        prompts = np.clip(draw.lognormal(np.log(17), 0.62, count), 5, 190)
        outputs = np.clip(draw.lognormal(np.log(42), 0.95, count), 1, 500)
        # a backlog comes in bursts (a coefficient of variation of 2); one by one where nobody should have to queue
        gaps = draw.gamma(0.25, 4.0, count) if workload == "alpaca" else draw.exponential(1.0, count)
    elif workload == "long":
        prompts = np.clip(draw.lognormal(np.log(300), 0.7, count), 32, 1500)
        outputs = np.clip(draw.lognormal(np.log(90), 0.6, count), 8, 400)
        gaps = draw.exponential(1.0, count)
    else:
        prompt, output = MEDIANS[part % len(MEDIANS)]
        prompts = np.clip(draw.lognormal(np.log(prompt), 1.0, count), 4, 1500)
        outputs = np.clip(draw.lognormal(np.log(output), 0.8, count), 2, 400)
        gaps = draw.exponential(1.0, count)
    arrivals = np.cumsum(gaps) - gaps[0]
    arrivals *= (count - 1) / arrivals[-1]
    return [(float(a), int(p), int(o)) for a, p, o in zip(arrivals, prompts, outputs)]


def load_of(workload: str, part: int = 0) -> float:
    """Return how much of what the stock setting can serve is asked of it."""
    return float(WORKLOADS[workload]["load"]) if workload in WORKLOADS else LOADS[part % len(LOADS)]


def engine(setting: str, workload: str) -> dict[str, Any]:
    """Return a setting's engine."""
    few = SETTINGS[setting].get("few_blocks", False)
    blocks = WORKLOADS.get(workload, CALIBRATION)["few_blocks"] if few else BLOCKS
    return {"num_blocks": blocks, "block_size": BLOCK, "host_blocks": 0, "max_model_len": 4096}


def runs(workloads: Sequence[str], settings: Sequence[str]) -> list[tuple[str, str, bool]]:
    """Return what is replayed, in order: workload, setting, and whether it is only to see the device repeat itself."""
    asked = [(w, s, False) for w in workloads for s in WORKLOADS[w]["settings"] if s in settings]
    return asked + [(w, "stock", True) for w in workloads if "stock" in settings]
