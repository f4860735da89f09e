"""A request."""

from __future__ import annotations

from typing import Any


class Request:
    def __init__(
        self, request_id: str, prompt_token_ids: list[int], sampling_params: Any, pooling_params: Any,
        arrival_time: float, priority: int = 0, block_hasher: Any = None,
    ) -> None:  # fmt: skip
        self.request_id = request_id
        self.arrival_time = arrival_time
        self.params = sampling_params
        self.num_prompt_tokens = len(prompt_token_ids)
        self.outputs: list[int] = []
        self.placeholders = 0  # tokens in flight
        self.num_computed_tokens = 0
        self.blocks = 0

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + len(self.outputs) + self.placeholders
