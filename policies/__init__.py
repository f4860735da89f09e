"""Scheduling policies, one module per engine family. POLICIES lists them all.

They need Python 3.9 and the standard library. Policies import `core` only; `config` imports POLICIES.
"""

from __future__ import annotations

from servesim.core import Policy

from .lightllm import LightLLM
from .llm_serving import LLMServing
from .mindie import MindIE
from .orca import Orca, Static
from .sarathi import Sarathi, SarathiAlternating
from .sglang import SGLang
from .splitfuse import SplitFuse
from .vllm_ascend import VLLMAscend, VLLMMindSpore
from .vllm_ascend_queues import AscendBatchJobs, AscendShortFirst
from .vllm_ascend_v1 import AscendBalance, AscendDynamicBatch, AscendProfilingChunk, AscendRecompute
from .vllm_v0 import VLLM
from .vllm_v0_chunked import VLLMChunked
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
    "static": Static,
    "orca": Orca,
    "sarathi": Sarathi,
    "sarathi-alternating": SarathiAlternating,
    "splitfuse": SplitFuse,
    "lightllm": LightLLM,
    "sglang": SGLang,
    "mindie": MindIE,
}
