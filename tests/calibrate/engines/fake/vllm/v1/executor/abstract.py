"""The executor."""

from __future__ import annotations

from typing import Any


class Executor:
    def __init__(self, vllm_config: Any) -> None:
        self.scheduler_config = vllm_config.scheduler_config
        self.cache_config = vllm_config.cache_config
        self.model_config = vllm_config.model_config
        self._init_executor()

    def _init_executor(self) -> None:
        raise NotImplementedError

    def collective_rpc(self, method: str) -> list[Any]:
        raise NotImplementedError
