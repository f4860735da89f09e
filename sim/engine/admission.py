"""The limits of a server: the longest sequence, where an output is cut off, and which requests can never run."""

from __future__ import annotations

from typing import Optional

from servesim.core import FOREVER, BlockPool, Request


class Limits:
    """The length and memory limits of one server."""

    __slots__ = ("max_generate_length", "max_length", "max_model_len", "pool")

    def __init__(self, pool: BlockPool, max_model_len: Optional[int], max_generate_length: Optional[int]) -> None:
        self.pool = pool
        self.max_model_len = max_model_len  # most tokens of prompt + output
        self.max_generate_length = max_generate_length  # llm-serving stops at this number of prompt + output tokens
        lengths = [length for length in (max_model_len, max_generate_length) if length is not None]
        self.max_length = min(lengths, default=FOREVER)  # the smaller of both

    def output_tokens(self, request: Request) -> int:
        """Return the number of tokens that a request will generate on this server."""
        tokens = request.output if request.output < request.limit else request.limit
        if tokens > self.max_length - request.prompt:
            tokens = self.max_length - request.prompt
        return tokens if tokens > 1 else 1

    def cut_off(self, request: Request) -> bool:
        """Whether a length limit ended a request early, on a server with max_generate_length."""
        return self.max_generate_length is not None and request.written < min(request.output, request.limit)

    def rejection_reason(self, request: Request) -> Optional[str]:
        """Return why a request can never run, or None if it can."""
        if self.max_model_len is not None and request.prompt > self.max_model_len:
            return f"prompt of {request.prompt} tokens, max_model_len is {self.max_model_len}"
        limit = request.limit if self.max_model_len is None else min(request.limit, self._max_output(request))
        need = self.pool.blocks_for(request.prompt + max(1, limit) - 1)
        if need > self.pool.total:
            return f"needs {need} blocks for {request.prompt}+{limit} tokens, the pool has {self.pool.total}"
        return None

    def _max_output(self, request: Request) -> int:
        return max(1, (self.max_model_len or 0) - request.prompt)
