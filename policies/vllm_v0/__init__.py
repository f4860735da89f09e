"""The v0 engine of vLLM."""

from .chunked import VLLMChunked
from .policy import VLLM

__all__ = ["VLLM", "VLLMChunked"]
