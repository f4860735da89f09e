"""The v0 engine of vLLM."""

from __future__ import annotations

from servesim.policies import Validation

from .chunked import VLLMChunked
from .policy import VLLM

__all__ = ["VALIDATION", "VLLM", "VLLMChunked"]
VALIDATION: dict[str, Validation] = {  # recordings per version, and what is not modelled
    "vLLM v0": Validation(
        {
            "vllm": {"0.3.3": 1, "0.4.0": 2, "0.4.2": 5, "0.5.0": 2, "0.6.1": 8, "0.8.5": 1},
            "vllm-chunked": {"0.4.2": 1, "0.5.0": 0, "0.6.1": 1, "0.8.5": 1},
        },
        "prefix cache, speculative decoding, LoRA, multimodal prompts, multi-step scheduling",
        modified=("vidur",),
    ),
}
