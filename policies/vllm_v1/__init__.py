"""The V1 engine of vLLM."""

from .policy import VLLMV1

__all__ = ["VLLMV1"]
