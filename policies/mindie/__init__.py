"""MindIE-LLM."""

from .policy import MindIE

__all__ = ["MindIE"]
