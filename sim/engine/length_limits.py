"""The length and memory limits of a server: what it rejects on arrival, and where it ends an output."""

from __future__ import annotations

from typing import Optional

from servesim.core import BlockPool, Policy, Request


class Limits:
    """The length and memory limits of one server."""

    __slots__ = (
        "_policy", "max_generate_length", "max_model_len", "max_prompt", "most_blocks", "pool", "rejects_full_prompts",
        "rejects_oversized",
    )  # fmt: skip

    def __init__(self, pool: BlockPool, policy: Policy, max_model_len: Optional[int]) -> None:
        self.pool = pool
        self.max_model_len = max_model_len  # most tokens of prompt + output
        self.max_generate_length: Optional[int] = None  # an output ends at this number of prompt + output tokens
        self.max_prompt: Optional[int] = None  # most tokens of a prompt
        self.most_blocks: list[int] = []  # of a request, by KV cache group; empty: there is one group, without a limit
        self.rejects_oversized = True  # a request that can never fit
        self.rejects_full_prompts = False  # a prompt that leaves no output token
        self._policy = policy

    def change(self, max_generate_length: Optional[int], rejects_oversized: Optional[bool]) -> None:
        """Use the limits of a scenario; None: those of the engine. Only one that counts blocks ends outputs early."""
        if self._policy.uses_block_pool:
            self.max_generate_length = max_generate_length
        if rejects_oversized is not None:
            self.rejects_oversized = rejects_oversized

    def blocks_for(self, tokens: int) -> int:
        """Return the KV blocks of a request with this number of tokens, in all groups."""
        blocks = self.pool.blocks_for(tokens)
        return sum([min(blocks, most) for most in self.most_blocks]) if self.most_blocks else blocks

    def most_tokens(self, request: Request) -> int:
        """Return the number of tokens at which a limit, not a stop token, ends a request."""
        most = self._policy.max_output(request.prompt, self.pool, self.max_model_len)
        if self.max_generate_length is not None:
            most = min(most, self.max_generate_length - request.prompt)
        if most > request.limit:
            most = request.limit
        return most if most > 1 else 1

    def cut_off(self, request: Request) -> bool:
        """Whether a length limit ended a request early, on a server with max_generate_length."""
        return self.max_generate_length is not None and request.written < min(request.output, request.limit)

    def rejection_reason(self, request: Request) -> Optional[str]:
        """Return why the server rejects a request on arrival, or None if it does not."""
        prompt, max_model_len = request.prompt, self.max_model_len
        if max_model_len is not None and prompt >= max_model_len and self.rejects_full_prompts:
            return f"prompt of {prompt} tokens leaves no output token, max_model_len is {max_model_len}"
        if self.max_prompt is not None and prompt > self.max_prompt:
            return f"prompt of {prompt} tokens, the engine accepts at most {self.max_prompt}"
        if not self.rejects_oversized:
            return None
        if max_model_len is not None and prompt > max_model_len:
            return f"prompt of {prompt} tokens, max_model_len is {max_model_len}"
        most = self._policy.max_output(prompt, self.pool, max_model_len)
        if most < 0:
            return f"prompt of {prompt} tokens, which the engine does not accept"
        limit = max(1, min(request.limit, most))
        need = self.blocks_for(prompt + limit - 1)
        if need > self.pool.total:
            return f"needs {need} blocks for {prompt}+{limit} tokens, the pool has {self.pool.total}"
        return None
