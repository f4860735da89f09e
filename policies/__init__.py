"""Scheduling policies, one module per engine family. POLICIES lists them all.

They need Python 3.9 and the standard library. Policies import `core` only; `config` imports POLICIES.
"""

from __future__ import annotations

from servesim.core import Policy

from .lightllm import LightLLM
from .llm_serving import LLMServing
from .mlfq import MLFQ, SRPT
from .nano_vllm import NanoVLLM
from .orca import Orca, Static
from .sarathi import Sarathi, SarathiAlternating
from .sglang import SGLang
from .splitfuse import SplitFuse
from .vllm_v0 import VLLM
from .vllm_v0_chunked import VLLMChunked
from .vllm_v1 import VLLMV1

POLICIES: dict[str, type[Policy]] = {
    "llm-serving": LLMServing,
    "vllm": VLLM,
    "vllm-chunked": VLLMChunked,
    "vllm-v1": VLLMV1,
    "nano-vllm": NanoVLLM,
    "static": Static,
    "orca": Orca,
    "sarathi": Sarathi,
    "sarathi-alternating": SarathiAlternating,
    "splitfuse": SplitFuse,
    "lightllm": LightLLM,
    "sglang": SGLang,
    "mlfq": MLFQ,
    "srpt": SRPT,
}
