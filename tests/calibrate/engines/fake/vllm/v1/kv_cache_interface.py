"""KV cache of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class FullAttentionSpec:
    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: Any


@dataclass
class SlidingWindowSpec(FullAttentionSpec):
    sliding_window: int = 0
