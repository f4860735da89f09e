"""Recordings per version of SGLang, and what is not modelled."""

from servesim.config.families import Validation

VALIDATION = {
    "SGLang": Validation(
        {"sglang": {"0.4.6": 34, "0.5.18": 22}},
        "speculative decoding, LoRA, priorities, hierarchical cache, data parallelism",
    ),
}
