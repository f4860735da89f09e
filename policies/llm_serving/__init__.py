"""MindSpore llm-serving, contest version of 2024."""

from .policy import LLMServing

__all__ = ["LLMServing"]
