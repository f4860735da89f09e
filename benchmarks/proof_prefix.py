"""Prefix caching: the counters of vLLM 0.13 in LLMServingSim's pulse run."""

from __future__ import annotations

from pathlib import Path

import servesim
from proof_rows import Row, table

PULSE = "ispass26: prefix cache"
# vLLM 0.13: synchronous, and the free list of versions before 0.24. Its null block holds no tokens.
SCHEDULER = {"name": "vllm-v1", "max_num_seqs": 128, "max_num_batched_tokens": 2048, "version": "0.13.0",
             "scheduler_reserve_full_isl": False,
             "async_scheduling": False}  # fmt: skip
BLOCKS, MAX_MODEL_LEN = 13_844 - 1, 2048


def predict_pulse(data: Path) -> list[Row]:
    """Predict the prefix queries and hits of six pulses of 50 requests; no time is fitted, because none matters."""
    folder = data / "measured" / "llmservingsim-ispass26"
    result = servesim.run(
        trace=folder / "workloads" / "pulse.csv.gz",
        policy=SCHEDULER,
        engine={"num_blocks": BLOCKS, "max_model_len": MAX_MODEL_LEN},
        profile={"kind": "linear", "base": 0.02, "prefill_token": 1e-4, "decode_row": 2e-4},
    )
    last = table(folder / "pulse" / "SD+PC_counters.csv")[-1]
    queries, hits = float(last["prefix_cache_queries"]), float(last["prefix_cache_hits"])
    rival = next(r for r in table(folder / "rivals.csv") if r["metric"] == "final prefix hit percent")
    rows = [
        ("prefix queries (tokens)", queries, result.metrics["prefix_cache_queries"], {}),
        ("prefix hits (tokens)", hits, result.metrics["prefix_cache_hits"], {}),
        ("prefix hit rate (%)", 100 * hits / queries, 100 * result.metrics["prefix_hit_rate"],
         {rival["simulator"]: float(rival["predicted"])}),
    ]  # fmt: skip
    return [
        Row(PULSE, "A6000, Llama-3.1-8B, six pulses", name, measured, float(ours), "nothing", rivals)
        for name, measured, ours, rivals in rows
    ]
