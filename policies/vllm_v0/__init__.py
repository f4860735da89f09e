"""The v0 engine of vLLM."""

from __future__ import annotations

from servesim.core import Policy

from .chunked import VLLMChunked
from .policy import VLLM

__all__ = ["POLICIES", "VLLM", "VLLMChunked"]
POLICIES: dict[str, type[Policy]] = {
    "vllm": VLLM,
    "vllm-chunked": VLLMChunked,
}
