"""SGLang."""

from __future__ import annotations

from servesim.policies import Validation

from .policy import SGLang

__all__ = ["VALIDATION", "SGLang"]
VALIDATION: dict[str, Validation] = {  # recordings per version, and what is not modelled
    "SGLang": Validation(
        {"sglang": {"0.4.6": 34, "0.5.18": 22}},
        "speculative decoding, LoRA, priorities, hierarchical cache, data parallelism",
    ),
}
