"""The schedulers of vllm-ascend and vllm-mindspore, plug-ins of vLLM V1."""

from __future__ import annotations

from servesim.core import Policy

from .queues import AscendBatchJobs, AscendShortFirst
from .v1 import AscendBalance, AscendDynamicBatch, AscendProfilingChunk, AscendRecompute
from .whole_prompts import VLLMAscend, VLLMMindSpore

__all__ = [
    "POLICIES", "AscendBalance", "AscendBatchJobs", "AscendDynamicBatch", "AscendProfilingChunk", "AscendRecompute",
    "AscendShortFirst", "VLLMAscend", "VLLMMindSpore",
]  # fmt: skip
POLICIES: dict[str, type[Policy]] = {
    "vllm-ascend": VLLMAscend,
    "vllm-ascend-dynamic-batch": AscendDynamicBatch,
    "vllm-ascend-short-first": AscendShortFirst,
    "vllm-ascend-batch-jobs": AscendBatchJobs,
    "vllm-ascend-profiling-chunk": AscendProfilingChunk,
    "vllm-ascend-recompute": AscendRecompute,
    "vllm-ascend-balance": AscendBalance,
    "vllm-mindspore": VLLMMindSpore,
}
