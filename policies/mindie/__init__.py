"""MindIE-LLM."""

from __future__ import annotations

from servesim.policies import Validation

from .policy import MindIE

__all__ = ["VALIDATION", "MindIE"]
VALIDATION: dict[str, Validation] = {  # recordings per version, and what is not modelled
    "MindIE-LLM": Validation(
        {"mindie": {"3.0.0": 35}},
        "prefix cache, several answers (n > 1) and beam search, speculative decoding, P/D disaggregation, data "
        "parallelism, sequence and context parallelism",
    ),
}
