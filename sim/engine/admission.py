"""What a server can serve at all: the longest sequence, where an answer is cut off, what can never fit."""

from __future__ import annotations

from typing import Optional

from servesim.core import FOREVER, BlockPool, Request


class Limits:
    """The bounds of one server."""

    __slots__ = ("longest", "max_generate_length", "max_model_len", "pool")

    def __init__(self, pool: BlockPool, max_model_len: Optional[int], max_generate_length: Optional[int]) -> None:
        self.pool = pool
        self.max_model_len = max_model_len  # longest prompt + answer
        self.max_generate_length = max_generate_length  # llm-serving stops there without telling the client
        given = [length for length in (max_model_len, max_generate_length) if length is not None]
        self.longest = min(given, default=FOREVER)

    def last_token(self, request: Request) -> int:
        """Return how many tokens a request will have written when it is over."""
        end = request.output if request.output < request.limit else request.limit
        room = self.longest - request.prompt
        if end > room:
            end = room
        return end if end > 1 else 1

    def cut_off(self, request: Request) -> bool:
        """Whether a request ended at max_generate_length rather than of itself."""
        return self.max_generate_length is not None and request.written < min(request.output, request.limit)

    def misfit(self, request: Request) -> Optional[str]:
        """Say why a request can never run, or None."""
        if self.max_model_len is not None and request.prompt > self.max_model_len:
            return f"prompt of {request.prompt} tokens, max_model_len is {self.max_model_len}"
        limit = request.limit if self.max_model_len is None else min(request.limit, self._room(request))
        need = self.pool.blocks(request.prompt + max(1, limit) - 1)
        if need > self.pool.total:
            return f"needs {need} blocks for {request.prompt}+{limit} tokens, the pool has {self.pool.total}"
        return None

    def _room(self, request: Request) -> int:
        return max(1, (self.max_model_len or 0) - request.prompt)
