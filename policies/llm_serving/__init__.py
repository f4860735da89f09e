"""MindSpore llm-serving, contest version of 2024."""

from __future__ import annotations

from servesim.policies import Validation

from .policy import LLMServing

__all__ = ["VALIDATION", "LLMServing"]
VALIDATION: dict[str, Validation] = {  # recordings per version, and what is not modelled
    "llm-serving": Validation({"llm-serving": {"7342f33": 74}}, "versions after May 2024", modified=("moon", "yyds")),
}
