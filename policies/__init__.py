"""Scheduling policies, one folder per engine family. POLICIES lists them all.

They need Python 3.9 and the standard library. Policies import `core` only; `config` imports POLICIES.
"""

from __future__ import annotations

from servesim.core import Policy

from .llm_serving import LLMServing
from .mindie import MindIE
from .mlfq import MLFQ, SRPT
from .nano_vllm import NanoVLLM
from .papers import LightLLM, Orca, Sarathi, SarathiAlternating, SplitFuse, Static
from .sglang import SGLang
from .vllm_ascend import (
    AscendBalance,
    AscendBatchJobs,
    AscendDynamicBatch,
    AscendProfilingChunk,
    AscendRecompute,
    AscendShortFirst,
    VLLMAscend,
    VLLMMindSpore,
)
from .vllm_v0 import VLLM, VLLMChunked
from .vllm_v1 import VLLMV1

POLICIES: dict[str, type[Policy]] = {
    "llm-serving": LLMServing,
    "vllm": VLLM,
    "vllm-chunked": VLLMChunked,
    "vllm-v1": VLLMV1,
    "vllm-ascend": VLLMAscend,
    "vllm-ascend-dynamic-batch": AscendDynamicBatch,
    "vllm-ascend-short-first": AscendShortFirst,
    "vllm-ascend-batch-jobs": AscendBatchJobs,
    "vllm-ascend-profiling-chunk": AscendProfilingChunk,
    "vllm-ascend-recompute": AscendRecompute,
    "vllm-ascend-balance": AscendBalance,
    "vllm-mindspore": VLLMMindSpore,
    "nano-vllm": NanoVLLM,
    "static": Static,
    "orca": Orca,
    "sarathi": Sarathi,
    "sarathi-alternating": SarathiAlternating,
    "splitfuse": SplitFuse,
    "lightllm": LightLLM,
    "sglang": SGLang,
    "mindie": MindIE,
    "mlfq": MLFQ,
    "srpt": SRPT,
}
