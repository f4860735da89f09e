"""Scheduling policies, one file a family; POLICIES is the table of them all."""

from __future__ import annotations

from ..core import Policy
from .llm_serving import LLMServing
from .vllm import VLLM

POLICIES: dict[str, type[Policy]] = {
    "llm-serving": LLMServing,
    "vllm": VLLM,
}
