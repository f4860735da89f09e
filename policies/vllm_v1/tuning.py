"""What `sim recommend` tries on vLLM, and the defaults that vLLM chooses by the memory of its device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from servesim.config.families import Tuning
from servesim.costs.kv_memory import device_memory

LARGE = 70 * 2**30  # bytes: devices from this size on get larger defaults
PARAMS = {
    "policy.max_num_seqs": (64, 128, 256, 512, 1024),
    "policy.max_num_batched_tokens": (1024, 2048, 4096, 8192, 16384),
}


def defaults(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return vLLM's defaults for a server; an A100 has those of small devices."""
    is_large = (device_memory(about) or 0) >= LARGE and "A100" not in str(about.get("device"))
    sequences, tokens = (1024, 8192) if is_large else (256, 2048)
    return {"policy.max_num_seqs": sequences, "policy.max_num_batched_tokens": tokens}


TUNINGS = {"vllm": Tuning("vllm-v1-0.32", PARAMS, defaults)}
