"""The V1 engine of vLLM."""

from __future__ import annotations

from servesim.policies import Validation

from .policy import VLLMV1

__all__ = ["VALIDATION", "VLLMV1"]
VALIDATION: dict[str, Validation] = {  # recordings per version, and what is not modelled
    "vLLM V1": Validation(
        {"vllm-v1": {
            "0.11.0": 6, "0.14.0": 7, "0.19.0": 7, "0.23.0": 1, "0.24.0": 1, "0.27.0": 7, "0.32.0": 88,
        }},
        "drafters that guess all tokens at once, LoRA, multimodal prompts, KV connectors",
    ),
}  # fmt: skip
