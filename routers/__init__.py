"""Routers of fleets, by name. A module for each project they come from."""

from __future__ import annotations

from servesim.core.class_table import ClassTable

from .router import Asked, Fleet, Memory, Replica, Router

PLACES = {  # name -> module and class
    "round-robin": "simple.RoundRobin",
    "random": "simple.RandomReplica",
    "least-requests": "simple.LeastRequests",
    "power-of-two": "simple.PowerOfTwo",
    "sticky": "simple.Sticky",
    "vllm-dp": "vllm_dp.VllmDataParallel",
    "sglang-cache-aware": "sglang.SglangCacheAware",
    "sglang-round-robin": "sglang.SglangRoundRobin",
    "sglang-manual": "sglang.SglangManual",
    "sglang-consistent-hashing": "sglang.SglangConsistentHashing",
    "sglang-power-of-two": "sglang.SglangPowerOfTwo",
    "sglang-prefix-hash": "sglang.SglangPrefixHash",
    "production-stack": "production_stack.StackPrefixAware",
    "production-stack-kvaware": "production_stack.StackKvAware",
    "production-stack-round-robin": "production_stack.StackRoundRobin",
    "production-stack-session": "production_stack.StackSession",
    "production-stack-rate": "production_stack.LowestRate",
    "llm-d": "llm_d.LlmD",
    "llm-d-precise": "llm_d.LlmDPrecise",
    "dynamo-kv": "dynamo.DynamoKv",
    "aibrix": "aibrix.AibrixPrefixCache",
    "conductor": "conductor.Conductor",
    "ascend-prefill": "ascend_proxy.AscendPrefill",
    "ascend-decode": "ascend_proxy.AscendDecode",
}
ROUTERS: ClassTable[Router] = ClassTable(__name__, PLACES)

__all__ = ["ROUTERS", "Asked", "Fleet", "Memory", "Replica", "Router"]
