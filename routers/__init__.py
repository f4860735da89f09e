"""Routers of fleets, by name. A module for each project they come from."""

from __future__ import annotations

from .aibrix import AibrixPrefixCache
from .ascend_proxy import AscendDecode, AscendPrefill
from .conductor import Conductor
from .dynamo import DynamoKv
from .llm_d import LlmD, LlmDPrecise
from .production_stack import LowestRate, StackKvAware, StackPrefixAware, StackRoundRobin, StackSession
from .router import Asked, Fleet, Memory, Replica, Router
from .sglang import (
    SglangCacheAware,
    SglangConsistentHashing,
    SglangManual,
    SglangPowerOfTwo,
    SglangPrefixHash,
    SglangRoundRobin,
)
from .simple import LeastRequests, PowerOfTwo, RandomReplica, RoundRobin, Sticky
from .vllm_dp import VllmDataParallel

ROUTERS: dict[str, type[Router]] = {
    "round-robin": RoundRobin,
    "random": RandomReplica,
    "least-requests": LeastRequests,
    "power-of-two": PowerOfTwo,
    "sticky": Sticky,
    "vllm-dp": VllmDataParallel,
    "sglang-cache-aware": SglangCacheAware,
    "sglang-round-robin": SglangRoundRobin,
    "sglang-manual": SglangManual,
    "sglang-consistent-hashing": SglangConsistentHashing,
    "sglang-power-of-two": SglangPowerOfTwo,
    "sglang-prefix-hash": SglangPrefixHash,
    "production-stack": StackPrefixAware,
    "production-stack-kvaware": StackKvAware,
    "production-stack-round-robin": StackRoundRobin,
    "production-stack-session": StackSession,
    "production-stack-rate": LowestRate,
    "llm-d": LlmD,
    "llm-d-precise": LlmDPrecise,
    "dynamo-kv": DynamoKv,
    "aibrix": AibrixPrefixCache,
    "conductor": Conductor,
    "ascend-prefill": AscendPrefill,
    "ascend-decode": AscendDecode,
}

__all__ = ["ROUTERS", "Asked", "Fleet", "Memory", "Replica", "Router"]
