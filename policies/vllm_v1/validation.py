"""Recordings per version of vLLM V1, and what is not modelled."""

from servesim.config.families import Validation

VALIDATION = {
    "vLLM V1": Validation(
        {"vllm-v1": {
            "0.11.0": 6, "0.14.0": 7, "0.19.0": 7, "0.23.0": 1, "0.24.0": 1, "0.27.0": 7, "0.32.0": 88,
        }},
        "drafters that guess all tokens at once, LoRA, multimodal prompts, KV connectors",
    ),
}  # fmt: skip
