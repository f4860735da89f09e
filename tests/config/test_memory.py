"""KV blocks from the memory of the device: vLLM's arithmetic, keys that exclude each other, one-line errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from servesim.config.layers import merge
from servesim.config.memory import ModelSizes, memory_budget
from servesim.config.scenario import Scenario, scenario_from
from servesim.core import BadInput
from servesim.costs.kv_memory import MemoryBudget, memory_of_name
from servesim.files.checked import format_bytes, to_bytes

from ..commands.running import run_sim

GIB = 2**30
LLAMA3_8B = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "intermediate": 14336, "vocab": 128256}
WORKLOAD = {"requests": 3, "arrivals": {"kind": "burst"}, "lengths": {"prompt": 8, "output": 2}}


def scenario(**engine: Any) -> Scenario:
    return scenario_from({"workload": WORKLOAD, "policy": "vllm-v1", "profile": "h200-llama2-7b", "engine": engine})


def test_llama2_7b_has_half_a_megabyte_of_cache_per_token_and_13_5_gigabytes_of_weights() -> None:
    memory = memory_of_name("llama2-7b")
    assert memory is not None
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
        (79.15, memory_of_name("llama2-7b"), 7351 * 16 * 0.5 / 1024),  # vLLM, pull request 2031: 7351 blocks
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


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"device_memory": "141GB", "num_blocks": 400}, "engine.num_blocks: expected one of num_blocks and device_"),
        ({"device_memory": "10GB"}, "engine.device_memory: no KV block fits: 0 KV blocks of 8.39 MB: 0.9 * 10.0 GB -"),
        ({"device_memory": "900TB", "model": "micro"}, "engine.device_memory: expected at most 2147483647 KV blocks"),
        ({"device_memory": "much"}, "engine.device_memory: expected a size above 0, such as 141GB"),
        ({"device_memory": True}, "engine.device_memory: expected a size above 0"),
        ({"device_memory": "1e30GB"}, "engine.device_memory: expected a size above 0"),
        ({"device_memory": "141GB", "model": "llama9"}, "engine.model: expected one of llama2-7b, tiny, micro, or its"),
        ({"device_memory": "141GB", "model": {"layers": 3}}, "engine.model.hidden: expected"),
        ({"device_memory": "141GB", "model": {"layer": 3}}, "layer: unknown key; known: "),
        ({"reserve": "2GB"}, "engine: reserve has no effect without device_memory"),
        ({"gpu_memory_utilization": 0.8}, "engine: gpu_memory_utilization has no effect without device_memory"),
        ({"device_memory": "141GB", "gpu_memory_utilization": 90}, "engine.gpu_memory_utilization: expected"),
    ],
)
def test_wrong_keys_are_one_line(engine: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput) as error:
        scenario(**engine)
    assert message in str(error.value)


def test_a_cost_mapping_names_no_model() -> None:
    tree = {"workload": WORKLOAD, "profile": {"base": 0.001}, "engine": {"device_memory": "80GB"}}
    with pytest.raises(BadInput, match=r"engine.model: expected a model .* the profile names none"):
        scenario_from(tree)


def test_a_file_over_a_preset_replaces_the_blocks() -> None:
    base = {"engine": {"num_blocks": 1024, "block_size": 16}}
    assert merge(base, {"engine": {"device_memory": "80GB"}}) == {"engine": {"block_size": 16, "device_memory": "80GB"}}
    base = {"engine": {"device_memory": "80GB"}}
    assert merge(base, {"engine": {"num_blocks": 7}}) == {"engine": {"num_blocks": 7}}


def test_run_prints_the_blocks_and_its_manifest_repeats_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tree = {"workload": WORKLOAD, "policy": "vllm", "engine": {"device_memory": "32GiB"}}
    Path("memory.yaml").write_text(yaml.safe_dump(tree))
    said = run_sim(capsys, "run", "memory.yaml", "-o", "out")
    assert said.code == 0
    assert said.error == (
        "sim: profile: ascend910b4-llama2-7b, the default; --profile selects another one\n"
        "sim: engine.num_blocks: 1,887 KV blocks of 8.39 MB: 0.9 * 34.4 GB - 13.5 GB weights of llama2-7b - "
        "1.61 GB reserve\n"
    )
    again = json.loads(Path("out/manifest.json").read_text())["scenario"]
    assert again["engine"]["num_blocks"] == 1887
    Path("again.yaml").write_text(yaml.safe_dump(again))
    assert run_sim(capsys, "run", "again.yaml").code == 0


@pytest.mark.parametrize(
    ("text", "size"), [("141GB", 141 * 10**9), ("1.5 GiB", 3 * 2**29), (4096, 4096), ("2e3 mb", 2 * 10**9), ("7", 7)]
)
def test_sizes_are_read(text: object, size: int) -> None:
    assert to_bytes(text) == size


@pytest.mark.parametrize(
    ("size", "text"), [(13_476_000_000, "13.5 GB"), (141e9, "141 GB"), (8388608, "8.39 MB"), (5, "5.00 bytes")]
)
def test_sizes_are_printed(size: float, text: str) -> None:
    assert format_bytes(size) == text
