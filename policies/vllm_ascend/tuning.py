"""What `sim recommend` tries on vllm-ascend 0.11: its own scheduler, which runs whole prompts, and that of vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from servesim.config.families import Tuning, longest, memory_settings
from servesim.core import ClientRequest
from servesim.policies.vllm_v1.tuning import PARAMS


def defaults(about: Mapping[str, Any], requests: Sequence[ClientRequest]) -> dict[str, Any]:
    """Return limits that the longest request meets: the server does not start with fewer tokens than this length."""
    length = longest(8192, (request.prompt + request.limit for request in requests))
    return {"engine.max_model_len": length, "policy.max_num_batched_tokens": length, **memory_settings(about)}


CHUNKS = {"policy.enable_chunked_prefill": (True,), "policy.max_num_seqs": (256, 1024)}
TOKENS = "policy.max_num_batched_tokens"
TUNINGS = {
    "vllm-ascend": Tuning("vllm-ascend-0.11", [PARAMS, {**CHUNKS, TOKENS: (1024, 2048, 8192)}], defaults),
}
