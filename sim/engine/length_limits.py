"""The length and memory limits of a server: what it rejects on arrival, and where it ends an output."""

from __future__ import annotations

from typing import Optional

from servesim.core import FOREVER, BlockPool, Request, Traits


class Limits:
    """The length and memory limits of one server."""

    __slots__ = ("_traits", "max_generate_length", "max_length", "max_model_len", "pool", "rejects_oversized")

    def __init__(
        self,
        pool: BlockPool,
        traits: Traits,
        max_model_len: Optional[int],
        max_generate_length: Optional[int],
        rejects_oversized: Optional[bool] = None,
    ) -> None:
        self.pool = pool
        self.max_model_len = max_model_len  # most tokens of prompt + output
        self.max_generate_length = max_generate_length  # llm-serving stops at this number of prompt + output tokens
        self.rejects_oversized = traits.rejects_oversized if rejects_oversized is None else rejects_oversized
        self._traits = traits
        lengths = [] if max_generate_length is None else [max_generate_length]
        if max_model_len is not None:
            lengths.append(max_model_len + traits.tokens_past_max_model_len)
        self.max_length = min(lengths, default=FOREVER)  # prompt + output tokens at which an output is cut

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
        """Return why the server rejects a request on arrival, or None if it does not."""
        prompt, max_model_len = request.prompt, self.max_model_len
        if max_model_len is not None and prompt >= max_model_len and self._traits.rejects_full_prompts:
            return f"prompt of {prompt} tokens leaves no output token, max_model_len is {max_model_len}"
        if not self.rejects_oversized:
            return None
        if max_model_len is not None and prompt > max_model_len:
            return f"prompt of {prompt} tokens, max_model_len is {max_model_len}"
        limit = request.limit
        if max_model_len is not None:
            limit = min(limit, max_model_len + self._traits.tokens_past_max_model_len - prompt)
        limit = max(1, limit)
        need = self.pool.blocks_for(prompt + limit - 1)
        if need > self.pool.total:
            return f"needs {need} blocks for {prompt}+{limit} tokens, the pool has {self.pool.total}"
        return None
