"""A profile by the names of a model and a device: in scenarios, in layers over other profiles, and in the API."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import servesim
from servesim.config.layers import Layer, assemble, file_layer, setting_layers
from servesim.config.scenario import Scenario, scenario_from
from servesim.core import BadInput
from servesim.costs.derivation import Setting, derive_profile
from servesim.costs.device_profile import load_profile
from servesim.costs.public_devices import DEVICES
from servesim.costs.public_models import PUBLIC_MODELS, alias_note, find_device
from servesim.study.experiment_file import input_digests

NAMES = {"model": "llama-3.1-8b", "device": "H100"}
WORKLOAD = {"requests": 20, "arrivals": {"kind": "poisson", "rate": 4}, "lengths": {"prompt": 100, "output": 20}}


def scenario(*layers: dict[str, Any], settings: tuple[str, ...] = ()) -> Scenario:
    return scenario_from(assemble([*map(Layer, layers), *setting_layers(settings)]))


def kv_blocks(memory: float, weights: float, token: int, utilisation: float = 0.9) -> int:
    """Blocks of 16 tokens in the memory of a device, in bytes."""
    return int(int(memory * utilisation) - weights - 1.5 * 2**30) // (16 * token)


def test_the_profile_is_that_of_calibrate_derive() -> None:
    named = load_profile({**NAMES, "tensor_parallel": 2, "precision": "fp8"})
    setting = Setting(PUBLIC_MODELS["llama-3.1-8b"], DEVICES["H100"], "float8", 2)
    derived = derive_profile(load_profile("h200-llama3.1-8b"), setting, "any")
    assert named.cost == derived.cost and named.name == "h100-tp2-llama-3.1-8b-float8"
    assert named.about["derived"] == derived.about["derived"]


@pytest.mark.parametrize(
    ("names", "measured"),
    [({"model": "llama-2-13b"}, "h200-llama2-7b"), ({"model": "qwen2.5-7b"}, "h200-llama3.1-8b"),
     ({"device": "L4"}, "h200-llama2-7b"), ({**NAMES, "measured": "h200-llama2-7b"}, "h200-llama2-7b")],
)  # fmt: skip
def test_a_model_is_derived_from_one_with_the_same_kind_of_heads(names: dict[str, Any], measured: str) -> None:
    assert load_profile(names).about["derived"]["profile"] == measured
    over = assemble([Layer({"profile": "h200-llama2-7b"}), Layer({"profile": names})])  # the profile of many presets
    assert load_profile(over["profile"]).about["derived"]["profile"] == measured


def test_without_cuda_graphs_a_step_takes_at_least_the_launch_of_its_kernels() -> None:
    """Measured on an H200: 10.3 to 12.5 ms for all decodes of Llama-3.1-8B that take less with graphs."""
    names = {"model": "llama-3.1-8b", "device": "H200"}
    graphs, eager = load_profile(names), load_profile({**names, "eager": True})
    assert eager.name.endswith("-eager") and eager.cost == graphs.cost
    launch = 32 * 9 * 36e-6
    assert 10.3e-3 < launch < 12.5e-3
    for rows, context in ((1, 16), (64, 32_768), (512, 512 * 512)):
        with_graphs = graphs.cost_of_run().decode(rows, rows, context)
        assert eager.cost_of_run().decode(rows, rows, context) == max(with_graphs, launch)
    slow, fast = (servesim.run(preset="vllm-v1-0.32", profile=p, workload=WORKLOAD).metrics for p in
                  ({**names, "eager": True}, names))  # fmt: skip
    assert slow["mean_tpot_ms"] == pytest.approx(1e3 * launch, rel=0.02) and fast["mean_tpot_ms"] < 7


def test_the_memory_of_the_device_gives_the_blocks() -> None:
    weights = 32 * (2 * 4096 * 128 * (32 + 8) + 3 * 4096 * 14336) + 2 * 128256 * 4096
    per_token = 2 * 2 * 32 * 8 * 128
    expected = kv_blocks(81_559 * 2**20, 2 * weights, per_token)
    assert scenario({"profile": NAMES}).engine.num_blocks == expected
    # A preset or a file below has the memory of another device. A layer above is what the user wants.
    assert scenario({"engine": {"num_blocks": 1024}}, {"profile": NAMES}).engine.num_blocks == expected
    assert scenario({"engine": {"device_memory": "L4"}}, {"profile": NAMES}).engine.num_blocks == expected
    assert scenario({"engine": {"num_blocks": 7}, "profile": NAMES}).engine.num_blocks == 7
    assert scenario({"profile": NAMES}, settings=("engine.num_blocks=7",)).engine.num_blocks == 7
    half = kv_blocks(81_559 * 2**20, weights, per_token // 2)
    assert scenario({"profile": {**NAMES, "tensor_parallel": 2}}).engine.num_blocks == half


def test_only_a_model_keeps_the_device_of_the_scenario() -> None:
    tree = assemble([Layer({"profile": "ascend910b4-llama2-7b"}), Layer({"profile": {"model": "qwen2.5-7b"}})])
    assert tree["profile"] == {"measured": "ascend910b4-llama2-7b", "model": "qwen2.5-7b"}
    assert "910B4" in load_profile(tree["profile"]).about["device"]
    kept = scenario({"engine": {"device_memory": "L4"}}, {"profile": {"model": "qwen2.5-7b"}})
    assert kept.engine.device_memory == DEVICES["L4"].memory


def test_a_setting_is_merged_as_a_layer_is() -> None:
    base = {"profile": NAMES, "engine": {"device_memory": "H100"}}
    changed = scenario(base, settings=("profile={device: L40S}", "profile.precision=fp8"))
    assert changed.profile == {"model": "llama-3.1-8b", "device": "L40S", "precision": "fp8"}
    assert changed.engine.device_memory == DEVICES["L40S"].memory


def test_the_folder_of_a_model_is_beside_the_scenario(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 2048}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps({**sizes, "vocab_size": 32000}), encoding="utf-8")
    (tmp_path / "s.yaml").write_text("profile: {model: mine, device: L4}\n", encoding="utf-8")
    tree = assemble([file_layer(tmp_path / "s.yaml")])
    assert tree["profile"]["model"] == str(tmp_path / "mine")
    assert load_profile(tree["profile"]).about["model"]["layers"] == 4


def test_the_weights_have_the_precision_in_which_the_model_is_published() -> None:
    for name in ("gpt-oss-120b", "openai/gpt-oss-20b"):
        names = {"model": name, "device": "H200"}
        plain, given = load_profile(names), load_profile({**names, "precision": "mxfp4"})
        assert (plain.name, plain.digest, plain.about) == (given.name, given.digest, given.about)
        assert (plain.about["dtype"], plain.about["kv_dtype"]) == ("mxfp4", "bfloat16")
        assert load_profile({**names, "precision": "bf16"}).about["dtype"] == "bfloat16"
    assert load_profile(NAMES).about["dtype"] == load_profile({"device": "H100"}).about["dtype"] == "bfloat16"


def config_of(folder: Path, **keys: Any) -> str:
    """Write the config.json of a small model; return its folder."""
    sizes = {"num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 2048}
    (folder / "config.json").write_text(json.dumps({**sizes, "vocab_size": 32000, **keys}), encoding="utf-8")
    return str(folder)


@pytest.mark.parametrize(
    ("quantised", "precision"),
    [
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, "mxfp4"),  # gpt-oss
        ({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}, "float8"),  # Qwen3-8B-FP8
        (None, "bfloat16"),
    ],
)
def test_a_config_json_says_the_precision_of_its_weights(quantised: Any, precision: str, tmp_path: Path) -> None:
    names = {"model": config_of(tmp_path, quantization_config=quantised), "device": "H100"}
    assert load_profile(names).about["dtype"] == precision
    assert load_profile({**names, "precision": "int8"}).about["dtype"] == "int8"


@pytest.mark.parametrize("quantised", [{"quant_method": "awq"}, {"bits": 4}, {"quant_method": ["fp8"]}, [8]])
def test_weights_of_an_unknown_method_need_a_precision(quantised: Any, tmp_path: Path) -> None:
    names = {"model": config_of(tmp_path, quantization_config=quantised), "device": "H100"}
    with pytest.raises(BadInput) as bad:
        scenario({"profile": names})
    assert "config.json: quantization_config: expected quant_method mxfp4 or fp8, or a precision" in str(bad.value)
    assert "\n" not in str(bad.value)
    assert scenario({"profile": {**names, "precision": "int8"}}).engine.num_blocks > 1


@pytest.mark.parametrize("name", ["H100", "h100", "H100-SXM", "NVIDIA H100 80GB HBM3"])
def test_a_device_has_several_names(name: str) -> None:
    assert find_device(name) == DEVICES["H100"]


def test_an_alias_has_a_note() -> None:
    assert find_device("a100") == DEVICES["A100-80GB"]
    assert "A100-80GB" in alias_note("a100") and not alias_note("H100")


@pytest.mark.parametrize(
    ("keys", "part"),
    [
        ({"device": "H10"}, "profile.device: expected a known device, got 'H10'; nearest: H100, "),
        ({"model": "llama-3.1-9b"}, "nearest: llama-3.1-8b, "),
        ({"model": "llama-3.1-9b"}, "`sim models` lists all"),
        ({"device": "H100", "precision": "fp9"}, "precision: expected 'bfloat16'"),
        ({"device": "H100", "tensor_parallel": 0}, "tensor_parallel: expected"),
        ({"device": "H100", "modle": "x"}, "modle"),
    ],
)
def test_a_wrong_name_is_one_line(keys: dict[str, Any], part: str) -> None:
    with pytest.raises(BadInput) as bad:
        scenario({"profile": keys})
    assert part in str(bad.value) and "\n" not in str(bad.value)


def test_a_sweep_notices_that_the_measured_profile_changed() -> None:
    assert list(input_digests([{"profile": NAMES}])) == ["profile h200-llama3.1-8b"]


def test_python_accepts_names() -> None:
    result = servesim.run(preset="vllm-v1-0.32", profile=NAMES, workload=WORKLOAD)
    assert result.scenario["profile"] == NAMES
    assert any("profile h100-llama-3.1-8b was derived" in text for text in result.metrics["warnings"])
