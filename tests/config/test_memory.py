"""KV blocks from the memory of the device: vLLM's arithmetic, keys that exclude each other, one-line errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from servesim.config.layers import merge
from servesim.config.memory import ModelSizes, memory_budget
from servesim.config.scenario import Scenario, scenario_from
from servesim.core import BadInput
from servesim.costs.kv_memory import MemoryBudget, memory_of_profile
from servesim.files.checked import to_bytes

GIB = 2**30
LLAMA3_8B = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "intermediate": 14336, "vocab": 128256}
WORKLOAD = {"requests": 3, "arrivals": {"kind": "burst"}, "lengths": {"prompt": 8, "output": 2}}


def scenario(**engine: Any) -> Scenario:
    return scenario_from({"workload": WORKLOAD, "policy": "vllm-v1", "profile": "h200-llama2-7b", "engine": engine})


def test_llama2_7b_has_half_a_megabyte_of_cache_per_token_and_13_5_gigabytes_of_weights() -> None:
    memory = memory_of_profile({"model": "llama2-7b"})
    assert memory.per_token == 2 * 32 * 4096 * 2
    assert memory.weights == pytest.approx(2 * 6.738e9, rel=1e-3)


def test_sizes_of_a_model_with_fewer_kv_heads() -> None:
    memory = ModelSizes(**LLAMA3_8B).memory()
    assert memory.per_token == 2 * 32 * 8 * 128 * 2
    assert memory.weights == pytest.approx(2 * 8.03e9, rel=1e-3)
    wide = ModelSizes(**LLAMA3_8B, head_size=256, kv_dtype="float8").memory()
    assert wide.per_token == 2 * 32 * 8 * 256


@pytest.mark.parametrize(
    ("device", "model", "printed_gib"),
    [
        (79.15, memory_of_profile({"model": "llama2-7b"}), 7351 * 16 * 0.5 / 1024),  # 7351 blocks, pull request 2031
        (79.22, ModelSizes(**LLAMA3_8B).memory(), 53.29),  # vLLM, pull request 10511
    ],
)
def test_the_cache_is_near_the_one_that_vllm_printed(device: float, model: Any, printed_gib: float) -> None:
    budget = MemoryBudget(int(device * GIB), 0.9, model, 3 * 2**29, 16)
    assert budget.cache / GIB == pytest.approx(printed_gib, rel=0.05)


def test_device_memory_computes_the_blocks_and_the_model_is_the_profiles() -> None:
    engine = scenario(device_memory="141GB").engine
    expected = (int(141e9 * 0.9) - 2 * (6_607_077_376 + 32000 * 4096) - 3 * 2**29) // (16 * 524288)
    assert engine.num_blocks == expected == scenario(device_memory="141GB", model="llama2-7b").engine.num_blocks
    assert scenario(device_memory="141GB", block_size=32).engine.num_blocks == expected // 2
    less = scenario(device_memory="141GB", gpu_memory_utilization=0.5, reserve="10GB", model=LLAMA3_8B)
    budget = memory_budget(less.engine, less.profile)
    assert budget.cache == int(70.5e9) - ModelSizes(**LLAMA3_8B).memory().weights - 10**10
    assert less.engine.num_blocks == budget.cache // (16 * 131072)


WRONG_ENGINE_MEMORY: Any = [
    {"device_memory": "141GB", "num_blocks": 400},
    {"device_memory": "10GB"},
    {"device_memory": "900TB", "model": "micro"},
    {"device_memory": "much"},
    {"device_memory": True},
    {"device_memory": "1e30GB"},
    {"device_memory": "141GB", "model": "llama9"},
    {"device_memory": "141GB", "model": {"layers": 3}},
    {"device_memory": "141GB", "model": {"layer": 3}},
    {"reserve": "2GB"},
    {"gpu_memory_utilization": 0.8},
    {"device_memory": "141GB", "gpu_memory_utilization": 90},
]


def test_wrong_keys_are_one_line(expected_errors: Callable[..., None]) -> None:
    expected_errors("engine_memory", lambda engine: scenario(**engine), WRONG_ENGINE_MEMORY)


def test_a_cost_mapping_names_no_model() -> None:
    tree = {"workload": WORKLOAD, "profile": {"base": 0.001}, "engine": {"device_memory": "80GB"}}
    with pytest.raises(BadInput, match=r"engine.model: expected a model .* the profile names none"):
        scenario_from(tree)


def test_a_file_over_a_preset_replaces_the_blocks() -> None:
    base = {"engine": {"num_blocks": 1024, "block_size": 16}}
    assert merge(base, {"engine": {"device_memory": "80GB"}}) == {"engine": {"block_size": 16, "device_memory": "80GB"}}
    base = {"engine": {"device_memory": "80GB"}}
    assert merge(base, {"engine": {"num_blocks": 7}}) == {"engine": {"num_blocks": 7}}


@pytest.mark.parametrize(
    ("text", "size"), [("141GB", 141 * 10**9), ("1.5 GiB", 3 * 2**29), (4096, 4096), ("2e3 mb", 2 * 10**9), ("7", 7)]
)
def test_sizes_are_read(text: object, size: int) -> None:
    assert to_bytes(text) == size


def test_a_policy_has_the_block_size_of_its_engine() -> None:
    """SGLang has pages of one token. The default number of tokens stays the same, and a given size counts."""

    def engine(policy: str, **keys: int) -> tuple[int, int]:
        found = scenario_from({"workload": WORKLOAD, "policy": {"name": policy}, "engine": keys}).engine
        return found.block_size, found.num_blocks

    assert engine("sglang") == (1, 16 * 1024)
    assert engine("sglang", num_blocks=900) == (1, 900)
    assert engine("sglang", block_size=16) == engine("vllm-v1") == (16, 1024)
