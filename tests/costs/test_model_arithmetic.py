"""FLOPs and bytes of models: hand-computed figures, and torch's own count."""

from __future__ import annotations

import pytest
from servesim.calibrate.probe.parts_fit import model_ratios
from servesim.costs.device_profile import load_profile
from servesim.costs.model_arithmetic import (
    MODELS,
    SIZES,
    Model,
    bytes_per_value,
    known_peak,
    model_of,
    peak_of,
    stored_model,
)

from ..calibrate.device.paged_runs import torch_reference

LLAMA = MODELS["llama2-7b"]


def test_llama_2_7b_has_its_known_sizes() -> None:
    assert LLAMA.layer_weights == 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008) == 6_476_005_376
    assert LLAMA.weights == 6_476_005_376 + 32000 * 4096  # 6.74 billion parameters with the embedding, not read
    assert 2 * LLAMA.kv_values == 524_288  # bytes per token: 0.5 MiB


def test_a_prefill_of_three_tokens_and_a_decode() -> None:
    # 3 tokens attend to 1 + 2 + 3 = 6 tokens; one row computes logits
    assert LLAMA.flops(3, 1, 6) == 2 * 6_476_005_376 * 3 + 2 * 32000 * 4096 + 4 * 32 * 4096 * 6
    # a decode with 10 cached tokens reads the weights and 10 tokens, and writes one
    assert LLAMA.values_moved(1, 1, 10) == 6_607_077_376 + 262_144 * 11


def test_key_and_value_heads_shared_by_groups_have_fewer_weights_and_values() -> None:
    grouped = Model("grouped", 2, 256, 8, 2, 512, 1000, 2048)
    assert grouped.layer_weights == 2 * (256 * (256 + 64 + 64) + 256 * 256 + 3 * 256 * 512)
    assert grouped.kv_values == 2 * 2 * 64


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_flops_equal_those_that_torch_counts(kv_heads: int) -> None:
    torch = pytest.importorskip("torch")
    from servesim.calibrate.device.torch.model import random_weights
    from torch.utils.flop_counter import FlopCounterMode

    model = Model("small", 2, 64, 4, kv_heads, 176, 256, 512)
    weights = random_weights(model, torch.device("cpu"), torch.float32, 0)
    with FlopCounterMode(display=False) as counter:
        torch_reference(weights, model, list(range(24)))
    # The reference computes the logits of all tokens, and torch counts masked pairs too.
    assert counter.get_total_flops() == model.flops(tokens=24, rows=24, pairs=24 * 24)


def test_a_model_is_found_by_name_or_by_its_sizes() -> None:
    sizes = {"name": "own", "layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "intermediate": 176, "vocab": 256}
    assert model_of({"model": "llama2-7b"}) is LLAMA
    found = model_of({"model": sizes})
    assert found is not None and (found.name, found.kv_heads) == ("own", 2)
    assert model_of({"model": "unknown"}) is None and model_of({"model": {"layers": 0}}) is None
    assert [bytes_per_value(about, LLAMA) for about in ({}, {"dtype": "float32"}, {"dtype": "int3"})] == [2, 4, None]


def test_the_assumptions_of_a_fit_use_the_same_arithmetic() -> None:
    ratios = model_ratios({"model": "llama2-7b"})
    assert ratios.square_per_token == 2 * 32 * 4096 / (2 * LLAMA.weights)
    assert ratios.context_per_step == 2 * 32 * 4096 / LLAMA.weights
    assert model_ratios({}).source == "Llama-2-7B" and model_ratios({"model": "tiny"}).source == "tiny"


@pytest.mark.parametrize(
    ("name", "flops", "bandwidth"), [("h200-llama2-7b", 989e12, 4.8e12), ("ascend910b4-llama2-7b", 280e12, 0.8e12)]
)
def test_bundled_profiles_state_the_peak_that_a_fit_would_write(name: str, flops: float, bandwidth: float) -> None:
    about = load_profile(name).about
    peak = peak_of(about)
    assert peak is not None and (peak.flops, peak.bandwidth) == (flops, bandwidth) and peak.source
    assert peak == known_peak(about)


def test_a_peak_is_known_only_for_its_data_type_and_device() -> None:
    assert known_peak({"device": "NVIDIA H200", "dtype": "float32"}) is None
    assert known_peak({"device": "cpu x86_64", "dtype": "bfloat16"}) is None
    assert peak_of({}) is None


def test_a_profile_keeps_the_sizes_of_a_model_that_only_has_a_known_name() -> None:
    tiny = {"name": "tiny", **{key: getattr(MODELS["tiny"], key) for key in SIZES}}
    assert stored_model(tiny) == "tiny" == stored_model("tiny")
    other = {**tiny, "vocab": 32000}
    assert stored_model({**other, "context": 4096}) == other
    assert stored_model({"name": "mine", "layers": 32}) == "mine"  # profile.yaml needs all sizes or none
    assert stored_model(None) is None
