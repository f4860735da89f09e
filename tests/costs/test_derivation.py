"""Profiles derived by arithmetic: hand-computed bytes, identity, order of models and devices, and real runs."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from servesim.core import Shape, StepCost
from servesim.costs.derivation import Setting, all_reduce, derive_cost, derive_profile, products, setting_of
from servesim.costs.device_profile import load_profile, write_profile
from servesim.costs.kv_memory import memory_of_profile
from servesim.costs.linear import LinearCost
from servesim.costs.model_arithmetic import MODELS, known_peak
from servesim.costs.profile_verdict import RANKING, verdict_on
from servesim.costs.public_devices import DEVICES, device_of
from servesim.costs.public_models import PUBLIC_MODELS, find_device, find_model
from servesim.report.trust import profile_facts
from servesim.runs.run_warnings import source_notes

H200 = load_profile("h200-llama2-7b")
MEASURED = setting_of(H200)
SHAPES = (
    Shape(decode_rows=1, decode_live=1, context=500),
    Shape(decode_rows=64, decode_live=64, context=40_000),
    Shape(1, 17, 17, 17 * 17, 17 * 500, 20, 20, 12_000),
    Shape(1, 2048, 2048, 2048**2),
)


def derived(**changes: object) -> StepCost:
    return derive_cost(H200.cost, MEASURED, replace(MEASURED, **changes))  # type: ignore[arg-type]


def test_mixtral_reads_the_bytes_that_we_computed_by_hand() -> None:
    model = PUBLIC_MODELS["mixtral-8x7b"]
    # attention: q and o 4096 x 4096, k and v 4096 x 1024; router 4096 x 8; an expert: 3 matrices of 4096 x 14336
    attention, router, expert = 2 * 4096 * 4096 + 2 * 4096 * 1024, 4096 * 8, 3 * 4096 * 14336
    assert model.layer_weights == 32 * (attention + router + 8 * expert) == 46_440_382_464
    assert model.active_weights == 32 * (attention + router + 2 * expert)
    assert model.weights_read(1) == pytest.approx(model.active_weights + 32000 * 4096)  # one token: 2 of 8 experts
    assert model.weights_read(2) == pytest.approx(32 * (attention + router + 3.5 * expert) + 32000 * 4096)
    assert model.weights_read(1000) == pytest.approx(model.weights)
    setting = Setting(model, DEVICES["H100"], "float16", 2)
    assert setting.read(1000) == pytest.approx(2 * (46_440_382_464 + 131_072_000) / (2 * 3.35e12))
    assert setting.kv_bytes == 2 * 2 * 32 * 8 * 128 / 2  # bytes, keys and values, layers, heads, size; two devices


def test_a_decode_step_on_four_devices_is_the_sum_that_we_computed_by_hand() -> None:
    cost = derived(model=PUBLIC_MODELS["llama-3.1-70b"], device=DEVICES["H100"], degree=4)
    fixed = 32 * 9 * 5e9 / 989e12  # small kernels
    hidden = 24 * 4096 * 32 / 4.8e12  # norms and residuals: 12 values of 2 bytes
    share = 2 * 6_607_077_376 / 4.8e12 / (0.00467982 - fixed - hidden)  # of the bandwidth of the H200, by the rest
    assert share * 4.8 / 3.35 > 0.95  # the kernels of the H200 read as much as the memory of an H100 has
    weights = 80 * (2 * 8192 * 128 * (64 + 8) + 3 * 8192 * 28672) + 128256 * 8192
    read = 2 * weights / (4 * 3.35e12) / 0.95 + 24 * 8192 * 80 / 3.35e12  # all devices compute the norms
    all_reduce = 7.5e-6 + 3 * 2 * 8192 / (0.7 * 450e9)  # the hidden state of a token, from three others at once
    programs = 80 * 2 / (32 * 32)  # layers and KV heads of a device
    row = 6.35661e-06 * programs
    kernels = 80 * (9 - 2) / (32 * 9)  # an all-reduce computes the norm after it
    assert cost.decode(1, 1, 0) == pytest.approx(fixed * kernels + read + 160 * all_reduce + row, rel=1e-4)
    kv_share = 524_288 / 4.8e12 / 1.16048e-07
    cache = (2 * 2 * 80 * 8 * 128 / 4 / 3.35e12) / (524_288 / 4.8e12) * kv_share / 0.95
    more = (cache * 1.16048e-07 + 80 / 32 * 2.89873e-08) * 10_000  # the second term: per token of the longest row
    assert cost.decode(1, 1, 10_000) - cost.decode(1, 1, 0) == pytest.approx(more, rel=1e-4)


def test_a_server_has_longer_steps_and_other_paddings_than_a_probe() -> None:
    probe, server = derived(device=DEVICES["H100"]), derived(device=DEVICES["H100"], server=True)
    for rows in (1, 8, 128):  # sizes that both have
        assert server.decode(rows, rows, 0) - probe.decode(rows, rows, 0) == pytest.approx(0.3e-3)
    assert probe.decode(97, 97, 0) == probe.decode(128, 97, 0)  # sizes of the probe: 96, 128
    assert server.decode(97, 97, 0) == server.decode(104, 97, 0) < server.decode(105, 97, 0)
    prompt = Shape(1, 513, 513, 513**2)  # larger than all graphs: not padded
    assert server.seconds(prompt) - probe.seconds(prompt) == pytest.approx(0.3e-3)


def test_what_a_server_adds_is_added_once() -> None:
    setting = replace(MEASURED, device=DEVICES["H100"], server=True)
    once = derive_profile(H200, setting, "once")
    assert not MEASURED.server and setting_of(once).server
    twice = derive_profile(once, replace(setting, device=DEVICES["A100-80GB"]), "twice")
    at_once = derive_profile(H200, replace(setting, device=DEVICES["A100-80GB"]), "at once")
    assert twice.cost.decode(64, 64, 0) == pytest.approx(at_once.cost.decode(64, 64, 0), rel=0.02)
    same = derive_profile(H200, replace(MEASURED, server=True), "same")
    assert same.cost == derive_cost(H200.cost, MEASURED, MEASURED) and not setting_of(same).server


def test_a_new_server_compiles_the_kernels_of_experts() -> None:
    mixtral, dense = (
        derive_profile(H200, Setting(PUBLIC_MODELS[name], DEVICES["H100"], "bfloat16", 2), name)
        for name in ("mixtral-8x7b", "llama-3.1-8b")
    )
    assert mixtral.measured_cold_start() == (3.1, 0.0) and mixtral.cold_start == (0.0, 0.0)
    assert "cold" not in dense.about


def test_an_all_reduce_of_much_data_is_done_in_two_exchanges() -> None:
    link = 900e9
    bandwidth = 0.7 * 450e9
    assert all_reduce(1e4, 2, link) == pytest.approx(5e-6 + 1e4 / bandwidth)
    assert all_reduce(1e4, 8, link) == pytest.approx(10e-6 + 7 * 1e4 / bandwidth)
    assert all_reduce(1e8, 8, link) == pytest.approx(20e-6 + 2 * 7 / 8 * 1e8 / bandwidth)


def test_experts_do_not_hide_what_they_compute_but_dense_models_do() -> None:
    mixtral, dense = (
        Setting(PUBLIC_MODELS[name], DEVICES["H100"], "bfloat16") for name in ("mixtral-8x7b", "llama2-7b")
    )
    assert products(dense, 4.0, 1.0) == 4.0
    assert products(mixtral, 4.0, 1.0) == products(mixtral, 1.0, 4.0) == 4.8


def test_a_row_of_a_shard_has_the_programs_of_its_heads() -> None:
    """Measured on an H200: a decode of 512 rows of a shard of Llama-3.1-8B takes 3.27 ms (context 16)."""
    eight = load_profile("h200-llama3.1-8b")
    whole = setting_of(eight)
    model = whole.model
    shard = replace(model, heads=4, kv_heads=1, intermediate=14336 // 8, vocab=128256 // 8, head=128)
    cost = derive_cost(eight.cost, whole, replace(whole, model=shard))
    assert cost.decode(512, 512, 512 * 16) == pytest.approx(3.27e-3, rel=0.08)
    assert cost.decode(1, 1, 16) == pytest.approx(1.90e-3, rel=0.08)


def test_the_head_size_of_a_model_is_not_always_hidden_over_heads() -> None:
    model = PUBLIC_MODELS["qwen3-32b"]  # 64 heads of 128, hidden 5120
    assert model.kv_values == 2 * 64 * 8 * 128
    assert model.layer_weights == 64 * (2 * 5120 * 128 * (64 + 8) + 3 * 5120 * 25600)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama-3.1-8b", 8.03), ("llama-3.1-70b", 70.6), ("qwen2.5-32b", 32.8), ("qwen3-30b-a3b", 30.5),
     ("mixtral-8x22b", 140.6), ("mistral-nemo", 12.2), ("gpt-oss-120b", 116.8), ("llama-4-scout", 107.8)],
)  # fmt: skip
def test_public_models_have_their_published_number_of_parameters(name: str, billions: float) -> None:
    model = PUBLIC_MODELS[name]
    assert (model.weights + model.vocab * model.hidden) / 1e9 == pytest.approx(billions, rel=0.01)


def test_without_a_change_the_derived_costs_are_the_measured_ones() -> None:
    linear = LinearCost(base=2e-3, prefill=1e-3, prefill_token=2e-5, decode_step=3e-3, decode_row=1e-5, context=1e-7)
    for cost in (H200.cost, linear):
        same = derive_cost(cost, MEASURED, MEASURED)
        assert [same.seconds(s) for s in SHAPES] == pytest.approx([cost.seconds(s) for s in SHAPES], rel=1e-9)
    profile = derive_profile(H200, MEASURED, "same")
    assert profile.about["derived"]["changed"] == [] and profile.uncertainty.session == H200.uncertainty.session
    assert profile.uncertainty.ttft == 0.0


@pytest.mark.parametrize("kind", ["parts", "linear"])
def test_a_larger_model_is_slower_and_a_faster_device_is_faster(kind: str) -> None:
    linear = LinearCost(base=5e-3, prefill_token=2e-5, decode_row=1e-5, context=1.2e-7)
    cost = H200.cost if kind == "parts" else linear
    for shape in SHAPES:
        models = ["qwen2.5-3b", "llama2-7b", "llama-2-13b", "codellama-34b", "llama-2-70b"]
        new = [replace(MEASURED, model=PUBLIC_MODELS[name]) for name in models]
        times = [derive_cost(cost, MEASURED, setting).seconds(shape) for setting in new]
        if shape.context < 40_000:  # grouped heads of a larger model read fewer bytes of a long context
            assert times == sorted(times) and times[0] < times[-1]
        devices = [replace(MEASURED, device=DEVICES[name]) for name in ("H200", "H100", "A100-80GB", "A10", "L4")]
        times = [derive_cost(cost, MEASURED, setting).seconds(shape) for setting in devices]
        assert times == sorted(times) and times[0] < times[-1]


def test_eight_bits_and_more_devices_make_a_large_model_faster() -> None:
    model = PUBLIC_MODELS["llama-3.1-70b"]
    times = [
        derived(model=model, dtype=dtype, degree=degree).seconds(SHAPES[0])
        for dtype, degree in (("bfloat16", 1), ("float8", 1), ("float8", 2), ("float8", 4))
    ]
    assert times == sorted(times, reverse=True)
    assert times[1] > times[0] / 2  # the fixed time stays, and all-reduces are added
    assert times[2] > times[1] / 2


def test_a_mixture_of_experts_reads_more_experts_with_more_rows() -> None:
    cost = derived(model=PUBLIC_MODELS["mixtral-8x7b"])
    one, sixteen = (cost.decode(rows, rows, 0) for rows in (1, 16))
    dense = H200.cost.decode(16, 16, 0) - H200.cost.decode(1, 1, 0)
    assert sixteen > 2 * one and dense < 0.1 * one


def test_a_derived_profile_is_marked_and_its_intervals_are_wide(tmp_path: Path) -> None:
    new = Setting(find_model("mistralai/Mixtral-8x7B-v0.1"), find_device("h100"), "bfloat16", 2)
    profile = derive_profile(H200, new, "derived")
    write_profile(tmp_path, profile.about, profile.cost)
    read = load_profile(tmp_path)
    assert "other model, other device, other tensor parallelism" in source_notes([read])[0].text
    verdict = verdict_on(read)
    assert verdict.grade == RANKING and "no step was measured" in verdict.text
    assert any(fact.name == "Derived" and fact.tone == "check" for fact in profile_facts(read))
    draws = [drawn.cost.seconds(SHAPES[1]) for drawn in read.representatives(200)]
    low, high = sorted(draws)[10], sorted(draws)[-10]
    assert high / low > 1.25
    assert read.uncertainty.draws and not read.mean_errors
    memory = memory_of_profile(read.about)
    assert memory is not None and memory.per_token == 2 * 32 * 8 * 128 * 2 // 2
    assert 0.95 < setting_of(read).read(64) / new.read(64) < 1.05  # a derived profile can be derived from


def test_the_time_of_top_p_grows_with_the_vocabulary() -> None:
    profile = derive_profile(H200, replace(MEASURED, model=PUBLIC_MODELS["llama-3.1-8b"]), "large")
    assert profile.sampling["top_p"].row == pytest.approx(H200.sampling["top_p"].row * 128256 / 32000)
    assert H200.for_run("top_p").cost.seconds(SHAPES[1]) > H200.cost.seconds(SHAPES[1])


@pytest.mark.parametrize(
    ("name", "expected"),
    [("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"), ("Llama-2-7b-hf", "llama2-7b"),
     ("Qwen/Qwen2.5-32B-Instruct", "qwen2.5-32b"), ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
     ("mistralai/Mistral-Nemo-Instruct-2407", "mistral-nemo"), ("openai/gpt-oss-20b", "gpt-oss-20b")],
)  # fmt: skip
def test_models_are_found_by_the_names_of_hugging_face(name: str, expected: str) -> None:
    assert find_model(name).name == expected


def test_devices_are_found_by_the_names_that_drivers_show() -> None:
    assert device_of({"device": "NVIDIA H100 80GB HBM3"}) == DEVICES["H100"]
    assert device_of({"device": "NVIDIA A100-SXM4-80GB"}) == DEVICES["A100-80GB"]
    assert device_of({"device": "NVIDIA L40"}) is None  # neither an L4 nor an L40S
    assert find_device("rtx 4090") == DEVICES["RTX-4090"]
    assert known_peak({"device": "NVIDIA H200", "dtype": "bfloat16"}) is not None
    assert all(device.source for device in DEVICES.values())


def test_a_model_that_only_has_the_name_of_a_known_one_keeps_its_sizes() -> None:
    own = replace(MODELS["llama2-7b"], layers=16)
    assert derive_profile(H200, replace(MEASURED, model=own), "own").about["model"]["layers"] == 16


@pytest.mark.slow
def test_runs_of_other_models_and_devices_are_predicted(shared: Path) -> None:
    """Two of the runs that `benchmarks/proof_derive.py` predicts; nothing but the front end is fitted."""
    root = Path(__file__).resolve().parents[2]
    sys.path.insert(0, str(root / "benchmarks"))
    import proof_derive

    data = shared / "data"
    if not (data / "measured" / "blis-validation").is_dir():
        pytest.skip("needs the runs in ../shared/data/measured/blis-validation, which are absent")
    for name in ("59-qwen3", "27-mixtral-8x7b-tp2-general-lite"):
        rows = {row.quantity: row for row in proof_derive.predict_blis_validation(data, name)}
        assert abs(rows["E2E mean"].error) < 0.08
        assert abs(rows["TTFT mean"].error) < 0.178
