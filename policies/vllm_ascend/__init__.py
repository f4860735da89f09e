"""The schedulers of vllm-ascend and vllm-mindspore, plug-ins of vLLM V1."""

from __future__ import annotations

from servesim.policies import Validation

from .queues import AscendBatchJobs, AscendShortFirst
from .v1 import AscendBalance, AscendDynamicBatch, AscendProfilingChunk, AscendRecompute
from .whole_prompts import VLLMAscend, VLLMMindSpore

__all__ = [
    "VALIDATION", "AscendBalance", "AscendBatchJobs", "AscendDynamicBatch", "AscendProfilingChunk",
    "AscendRecompute", "AscendShortFirst", "VLLMAscend", "VLLMMindSpore",
]  # fmt: skip
VALIDATION: dict[str, Validation] = {  # recordings per version, and what is not modelled
    "vLLM on Ascend": Validation(
        {
            "vllm-ascend": {"0.9.1": 2, "0.11.0": 10},
            "vllm-ascend-dynamic-batch": {"0.13.0": 5},
            "vllm-ascend-short-first": {"0.25.1rc1": 6},
            "vllm-ascend-batch-jobs": {"0.25.1rc1": 4},
            "vllm-ascend-profiling-chunk": {"0.25.1rc1": 3},
            "vllm-ascend-recompute": {"0.25.1rc1": 2},
            "vllm-ascend-balance": {"0.25.1rc1": 2},
            "vllm-mindspore": {"0.5.1": 7},
        },
        "asynchronous scheduling except with short requests first and batch jobs, need_timing of profiling chunks, "
        "KV transfer, priorities with the prefix cache in vllm-mindspore, speculative decoding, LoRA, "
        "multimodal prompts",
    ),
}
