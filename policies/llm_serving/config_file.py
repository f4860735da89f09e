"""Convert configurations of llm-serving to scenarios and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from servesim.config.families import ConfigFile
from servesim.core import BadInput

# Measured: 7 model calls end before the scheduler sees a new request (the current call and 6 more).
FRONT_END = {"lag": 7, "end_lag": True}
CLIENT_TIMEOUT_S = 600.0  # the server's SSE ping breaks performance_serving's client


def from_llm_serving(tree: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the scenario of a server with this configuration."""
    model, paging = section(tree, "model_config", where), section(tree, "pa_config", where)
    lengths = as_list(model.get("seq_length") or [4096])
    batches = as_list(model.get("decode_batch_size") or [1])
    if len(batches) > 1:
        raise BadInput(
            f"{where}: model_config.decode_batch_size: several sizes {batches} crash the real server; give one"
        )
    paged = bool(model.get("page_attention", False))
    policy: dict[str, Any] = {"name": "llm-serving", "decode_batch": batches[0]}
    strategy = model.get("batching_strategy", "continuous")
    if paged and strategy == "static":
        policy["strategy"] = "static-paged"
    elif not paged:
        policy["strategy"] = strategy
        policy["prefill_batch"] = as_list(model.get("prefill_batch_size") or [1])[0]
    engine: dict[str, Any] = {
        "num_blocks": paging.get("num_blocks", 1024),
        "block_size": paging.get("block_size", 16),
        "max_model_len": max(lengths),
        "prefill_buckets": [] if model.get("seq_type") == "dyn" else lengths,
        "front_end": dict(FRONT_END),
        "client_timeout": CLIENT_TIMEOUT_S,
    }
    if model.get("max_generate_length"):
        engine["max_generate_length"] = model["max_generate_length"]
    return {"policy": policy, "engine": engine}


def to_llm_serving(policy: Mapping[str, Any], engine: Mapping[str, Any]) -> dict[str, Any]:
    """Return the llm-serving configuration of a scenario with the policy llm-serving."""
    strategy = policy.get("strategy", "paged")
    max_length = engine.get("max_model_len") or 4096
    return {
        "model_config": {
            "model_name": "llama_7b",
            "max_generate_length": engine.get("max_generate_length") or max_length,
            "seq_length": list(engine.get("prefill_buckets") or [max_length]),
            "seq_type": "static" if engine.get("prefill_buckets") else "dyn",
            "prefill_batch_size": [policy.get("prefill_batch", 1)],
            "decode_batch_size": [policy.get("decode_batch", 1)],
            "batching_strategy": "static" if strategy.startswith("static") else "continuous",
            "page_attention": strategy.endswith("paged"),
            "backend": "kbk",
        },
        "pa_config": {
            "num_blocks": engine.get("num_blocks", 1024),
            "block_size": engine.get("block_size", 16),
            "decode_seq_length": max_length,
        },
    }


def section(tree: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    """Return a section of the configuration; a missing one is empty."""
    keys = tree.get(name) or {}
    if not isinstance(keys, Mapping):
        raise BadInput(f"{where}: {name}: expected a mapping, got {keys!r}")
    return keys


def as_list(value: Any) -> list[Any]:
    """Return a value as a list; the configuration may hold one size or a list of sizes."""
    return list(value) if isinstance(value, list) else [value]


CONFIG_FILE = ConfigFile("the YAML configuration of llm-serving", from_llm_serving)
