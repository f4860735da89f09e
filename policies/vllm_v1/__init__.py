"""The V1 engine of vLLM."""

from __future__ import annotations

from servesim.core import Policy

from .policy import VLLMV1

__all__ = ["POLICIES", "VLLMV1"]
POLICIES: dict[str, type[Policy]] = {"vllm-v1": VLLMV1}
