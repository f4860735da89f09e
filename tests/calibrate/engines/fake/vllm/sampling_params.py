"""Sampling parameters."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class SamplingParams:
    max_tokens: int
    ignore_eos: bool
    temperature: float
    stop_token_ids: list[int]
