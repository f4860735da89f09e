"""MindSpore llm-serving, contest version of 2024."""

from __future__ import annotations

from servesim.core import Policy

from .policy import LLMServing

__all__ = ["POLICIES", "LLMServing"]
POLICIES: dict[str, type[Policy]] = {"llm-serving": LLMServing}
