"""Flags and configuration."""

from __future__ import annotations

import os
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any


@dataclass
class EngineArgs:
    model: str
    skip_tokenizer_init: bool = False
    max_model_len: int = 2048
    enforce_eager: bool = False
    block_size: int = 16
    num_gpu_blocks_override: int = 100
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    async_scheduling: bool = True
    enable_prefix_caching: bool = False
    scheduler_cls: Any = None

    def create_engine_config(self) -> Any:
        assert os.path.exists(os.path.join(self.model, "config.json"))
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ValueError("max_num_batched_tokens must be at least max_num_seqs.\nSecond line.")
        names = ("max_num_seqs", "max_num_batched_tokens", "async_scheduling", "scheduler_cls", "max_model_len")
        scheduler = SimpleNamespace(**{name: getattr(self, name) for name in names})
        cache = SimpleNamespace(
            block_size=self.block_size, blocks=self.num_gpu_blocks_override,
            enable_prefix_caching=self.enable_prefix_caching,
        )  # fmt: skip
        return SimpleNamespace(scheduler_config=scheduler, cache_config=cache, model_config=SimpleNamespace(dtype=None))
