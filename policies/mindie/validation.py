"""Recordings per version of MindIE-LLM, and what is not modelled."""

from servesim.config.families import Validation

VALIDATION = {
    "MindIE-LLM": Validation(
        {"mindie": {"3.0.0": 35}},
        "prefix cache, several answers (n > 1) and beam search, speculative decoding, P/D disaggregation, data "
        "parallelism, sequence and context parallelism",
    ),
}
