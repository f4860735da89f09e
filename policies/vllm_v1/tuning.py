"""What `sim recommend` tries on vLLM, and the defaults that vLLM chooses by the memory of its device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from servesim.config.families import Tuning, memory_settings
from servesim.core import ClientRequest
from servesim.costs.kv_memory import device_memory

GIB = 2**30
PARAMS = {
    "policy.max_num_seqs": (64, 128, 256, 512, 1024),
    "policy.max_num_batched_tokens": (1024, 2048, 8192, 16384),
}


def defaults(about: Mapping[str, Any], requests: Sequence[ClientRequest]) -> dict[str, Any]:
    """Return the defaults of vLLM 0.32 for a server; an A100 has those of small devices."""
    memory = device_memory(about) or 0
    is_large = memory >= 70 * GIB and "A100" not in str(about.get("device"))
    sequences, tokens = (1024, 16384 if memory >= 160 * GIB else 8192) if is_large else (256, 2048)
    used = memory_settings(about, gpu_memory_utilization=0.92)
    return {"policy.max_num_seqs": sequences, "policy.max_num_batched_tokens": tokens, **used}


TUNINGS = {"vllm": Tuning("vllm-v1-0.32", [PARAMS], defaults)}
