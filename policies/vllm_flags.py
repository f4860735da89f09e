"""Flags of `vllm serve` that all versions of vLLM share, and notes about them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from servesim.config.exported import note_on_blocks
from servesim.config.memory import model_memory
from servesim.config.scenario import Scenario
from servesim.files.checked import format_bytes

BLOCK_SIZES = (1, 8, 16, 32, 64, 128)  # of older versions; 0.11.1 and later also accept 256
ENGINE_KEYS = {"block_size", "max_model_len", "host_blocks", "host_cache", "data_parallel_size", "kv_cache_groups"}


def token_flags(policy: Any) -> dict[str, Any]:
    return {"--max-num-seqs": policy.max_num_seqs, "--max-num-batched-tokens": policy.max_num_batched_tokens}


def memory_flags(scenario: Scenario, blocks: int) -> dict[str, Any]:
    """Return the flags of the KV cache: the fraction of the memory if the scenario has one, else the blocks."""
    engine = scenario.engine
    flags: dict[str, Any] = {"--max-model-len": engine.max_model_len, "--block-size": engine.block_size}
    if engine.device_memory is None:
        return {**flags, "--num-gpu-blocks-override": blocks}
    fraction = engine.gpu_memory_utilization
    return {**flags, "--gpu-memory-utilization": 0.9 if fraction is None else f"{fraction:g}"}


def switch(name: str, on: bool) -> dict[str, bool]:
    """Return --NAME or --no-NAME."""
    return {f"--{name}" if on else f"--no-{name}": True}


def blocks_gib(scenario: Scenario, blocks: int) -> float:
    """Return the host memory of KV blocks in GiB; raise BadInput if the model is not known."""
    engine = scenario.engine
    size = blocks * engine.block_size * model_memory(engine.model, scenario.profile).in_block(engine.kv_cache_groups)
    return float(f"{size / 2**30:.6g}")


def vllm_notes(scenario: Scenario, whole_prompts: bool) -> list[str]:
    """Return what to know about the number of KV blocks and, without chunked prefill, about the token budget."""
    engine, notes = scenario.engine, []
    if whole_prompts and engine.max_model_len is None:  # vLLM compares the maximum length of the model, not known here
        notes.append(
            "without chunked prefill, vLLM starts only if --max-num-batched-tokens is at least the maximum length of "
            "the model; set engine.max_model_len"
        )
    if engine.device_memory is None:
        return note_on_blocks(scenario, "--num-gpu-blocks-override") + notes
    size = format_bytes(engine.device_memory)
    blocks = f"simulated with {engine.num_blocks:,} KV blocks on {size}; compare it with the number that vLLM prints"
    return [blocks, *notes]


def refuse_block_size(flags: dict[str, Any], size: int, sizes: Sequence[int], version: str) -> list[str]:
    """Remove a block size that the version does not accept from the flags, and return why."""
    if size in sizes:
        return []
    del flags["--block-size"]
    return [f"engine.block_size={size}: vLLM {version} accepts {', '.join(map(str, sizes))}"]
