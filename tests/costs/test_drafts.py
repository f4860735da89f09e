"""Steps that verify drafts, in every cost model, and the time of the drafter."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from servesim.calibrate.probe.sample_set import Samples
from servesim.config.scenario import scenario_from
from servesim.core import Shape, StepCost
from servesim.core.errors import BadInput
from servesim.costs.derivation import Setting, derive_profile, setting_of
from servesim.costs.derived import FirstUseCost, Launches, OverlappedCost, SampledCost, SamplingTerm, ScaledCost
from servesim.costs.device_profile import Profile, load_profile, write_profile
from servesim.costs.drafting import DraftedCost, derived_drafter, with_drafter
from servesim.costs.imported_tables import LayerCost, VidurCost
from servesim.costs.linear import LinearCost
from servesim.costs.mapping import cost_from, cost_mapping
from servesim.costs.parts import NO_HOST, DecodePart, HostPart, MixedPart, PartsCost, PrefillPart
from servesim.costs.public_models import find_device, find_model
from servesim.files.step_table import ModelCall, read_calls, read_steps, write_calls
from servesim.runs.run_warnings import run_warnings
from servesim.runs.simulate import simulate

PREFILL = PrefillPart(((16.0, 0.01), (256.0, 0.02), (512.0, 0.04)), cross=1e-9)
DECODE = DecodePart(((1.0, 0.01), (8.0, 0.012), (64.0, 0.016)), live=1e-5, context=1e-7)
PARTS = PartsCost(PREFILL, DECODE, MixedPart(True, 1e-3, 1e-5, 2e-7), host=HostPart(1e-4, 1e-5))
LINEAR = LinearCost(base=0.01, prefill_token=1e-4, decode_row=1e-3, context=1e-6)
LAYERS = LayerCost(
    [(1, 0.001), (100, 0.002), (200, 0.004)], [(1, 0.001), (101, 0.002)],
    [(0, 0, 1, 100, 1e-4), (0, 0, 1, 1000, 2e-4), (0, 0, 64, 100, 1e-3), (0, 0, 64, 1000, 5e-3), (8, 0, 0, 0, 1e-4),
     (512, 0, 0, 0, 2e-3), (8, 1000, 0, 0, 2e-4), (512, 1000, 0, 0, 3e-3)], layers=10,
)  # fmt: skip
VIDUR = VidurCost([0.1 * k for k in range(65)], [0.0] * 65, [[1.0] * 20] * 65, [[1.0] * 65] * 20, layers=2)
MODELS: list[StepCost] = [
    PARTS, replace(PARTS, mixed=MixedPart(one_pass=False, overlap=0.5)), LINEAR, LAYERS, VIDUR, ScaledCost(PARTS, 1.1),
    replace(PARTS, prefill=replace(PREFILL, width=512, cross_root=1e-6, buckets=(32, 256))),
    replace(PARTS, decodes=replace(DECODE, draft=1e-4)),
    SampledCost(PARTS, SamplingTerm(1e-4, 1e-6)), LinearCost(decode_row=1e-4, experts=0.01, expert_share=0.1),
    OverlappedCost(PARTS, NO_HOST), load_profile("h200-llama3.1-8b").cost, load_profile("ascend910b4-llama2-7b").cost,
    DraftedCost(PARTS, LinearCost(base=0.001, decode_row=1e-4), 3),
]  # fmt: skip


def decodes(rows: int, context: int, drafts: int = 0) -> Shape:
    return Shape(decode_rows=rows, decode_live=rows, context=rows * context, drafts=drafts)


def test_drafts_are_tokens_of_the_layers_and_the_cache_is_read_once() -> None:
    host = 1e-4 + 8e-5
    assert PARTS.duration(decodes(8, 1000)) == pytest.approx(0.012 + 8e-5 + 8000e-7 + host)
    read = 1.4 * 8000e-7  # in the kernel of chunks
    assert PARTS.duration(decodes(8, 1000, 8)) == pytest.approx(0.012 + 8e-5 + read + host)  # 16 tokens: 10 ms
    assert PARTS.duration(decodes(8, 1000, 248)) == pytest.approx(0.02 + 8e-5 + read + host)
    slow = replace(PARTS, prefill=replace(PREFILL, cross=2e-8))  # 32 tokens per row: 6.4e-7 per cached token
    assert slow.duration(decodes(8, 1000, 248)) == pytest.approx(0.02 + 8e-5 + 8000 * 6.4e-7 + host)


def test_few_rows_with_drafts_take_as_long_as_a_chunk_unless_their_contexts_are_split() -> None:
    chunks = replace(PARTS, prefill=replace(PREFILL, width=512))
    host, read = 1e-4 + 1e-5, 1000e-7
    assert chunks.duration(decodes(1, 1000, 3)) == pytest.approx(0.01 + 1e-5 + 512_000e-9 + host)
    unequal = decodes(2, 550, 6)._replace(longest=1000)
    assert chunks.duration(unequal) == pytest.approx(0.01 + 0.002 / 7 + 2e-5 + 512_000e-9 + host + 1e-5)
    split = replace(chunks, decodes=replace(DECODE, split=True))
    assert split.duration(decodes(1, 1000, 3)) == pytest.approx(0.01 + 1e-5 + read + host)
    assert cost_from(cost_mapping(split), "cost") == split


def test_drafts_join_the_prompts_of_a_mixed_step() -> None:
    mixed = Shape(1, 200, 200, 0, 0, 8, 8, 8000, drafts=48)  # 256 tokens
    rest = 8e-5 + 1e-4 + 9e-5
    assert PARTS.duration(mixed) == pytest.approx(0.02 + 1.4 * 1600e-6 + rest)
    assert PARTS.duration(mixed._replace(drafts=7, prefill_tokens=241)) == pytest.approx(
        0.02 + 1e-3 + 1.4 * 1600e-6 + rest  # one row has no drafts: the kernel of decodes runs too
    )


def test_a_fitted_draft_takes_its_time_in_decode_steps_and_that_of_a_token_in_mixed_ones() -> None:
    cost = replace(PARTS, decodes=replace(DECODE, draft=3e-4))
    assert cost.duration(decodes(8, 100, 5)) == pytest.approx(PARTS.duration(decodes(8, 100)) + 5 * 3e-4)
    mixed = Shape(1, 200, 200, 0, 0, 8, 8, 800, drafts=7)
    joined = mixed._replace(drafts=0, prefill_tokens=207)
    assert cost.duration(mixed) == pytest.approx(PARTS.duration(joined))
    assert cost_from(cost_mapping(cost), "here") == cost


def test_the_draft_token_of_a_sum_of_terms_is_a_prompt_token_unless_it_is_given() -> None:
    shape = decodes(4, 100, 12)
    assert LINEAR.duration(shape) == pytest.approx(0.01 + 4e-3 + 4e-4 + 12e-4)
    assert replace(LINEAR, draft_token=0.0).duration(shape) == pytest.approx(0.01 + 4e-3 + 4e-4)
    experts = LinearCost(experts=1.0, expert_share=0.5)
    assert experts.duration(decodes(1, 0, 1)) == pytest.approx(0.75)


def test_tables_count_drafts_as_tokens_and_as_sequences() -> None:
    attention = 1e-3 + 0.004 * (900 / 900)
    assert LAYERS.duration(decodes(64, 1000, 36)) == pytest.approx(0.002 + 0.00199 + 10 * attention)
    assert VIDUR.duration(decodes(8, 100, 8)) == pytest.approx(2e-3 * (1.6 + 1.0))


def test_selection_launches_and_new_shapes_count_drafts() -> None:
    assert SampledCost(LINEAR, SamplingTerm(0.1, 0.01)).seconds(decodes(2, 0, 6)) == pytest.approx(
        LINEAR.seconds(decodes(2, 0, 6)) + 0.18
    )
    assert [Launches(1.0, 64, 32).of_step(decodes(16, 0, drafts)) for drafts in (0, 48, 49)] == [0.0, 0.0, 1.0]
    first = FirstUseCost(LINEAR, 16, 1.0)
    assert [first.seconds(decodes(8, 0, n)) > 1 for n in (8, 8, 9)] == [True, False, True]


@pytest.mark.parametrize("cost", MODELS, ids=lambda cost: type(cost).__name__)
def test_more_drafts_never_take_less_time(cost: StepCost) -> None:
    rng = random.Random(1)
    for _ in range(60):
        rows, context = rng.randint(1, 60), rng.randint(1, 1500)
        shape = decodes(rows, context)
        if rng.random() < 0.5:
            shape = shape._replace(prefill_rows=1, prefill_tokens=40, prefill_live=40, squares=1600)
        first = 1 if shape.prefill_rows else 0  # if all rows have drafts, a mixed step needs no kernel of decodes
        seconds = [cost.duration(shape._replace(drafts=k * rows)) for k in range(first, 8)]
        assert all(low <= high * (1 + 1e-12) for low, high in zip(seconds, seconds[1:])), shape


@pytest.mark.parametrize("name", ["h200-llama2-7b", "h200-llama3.1-8b"])
def test_a_step_with_drafts_costs_about_as_chunks_of_as_many_tokens(name: str) -> None:
    """Where the samples have such chunks: few rows. The chunks of many rows would read their KV cache too fast."""
    cost = load_profile(name).cost
    for rows in (1, 4, 8):
        chunks = Shape(rows, 4 * rows, 4 * rows, 16 * rows, 4 * rows * 500)
        assert cost.duration(decodes(rows, 500, 3 * rows)) == pytest.approx(cost.duration(chunks), rel=0.05)


@pytest.mark.parametrize("cost", MODELS, ids=lambda cost: type(cost).__name__)
def test_hold_and_single_steps_have_the_same_times(cost: StepCost) -> None:
    """The first takes them from `verify`, the second from the shape; also when the numbers of a step are known."""
    draw = random.Random(7)
    for _ in range(200):
        rows, drafts = draw.randint(1, 300), draw.randint(1, 5)
        context = draw.randint(0, 2000) * rows
        longest = draw.choice([0, min(context, context // rows * 2)])
        shape = Shape(decode_rows=rows, decode_live=rows, context=context, longest=longest, drafts=rows * drafts)
        first = cost.duration(shape)
        assert cost.verify(rows, rows, context, rows * drafts, longest) == first == cost.duration(shape)


def test_the_passes_of_a_drafter() -> None:
    drafter = LinearCost(base=0.001, prefill_row=1e-4, prefill_token=1e-5, decode_row=1e-4)
    cost = DraftedCost(LINEAR, drafter, 3)
    shape = decodes(8, 100, 24)
    first, later = 0.001 + 8e-4 + 24e-5, 0.001 + 8e-4
    assert cost.duration(shape) == pytest.approx(LINEAR.duration(shape) + first + 2 * later)
    prompt = Shape(1, 100, 100, 10_000)
    assert cost.duration(prompt) == pytest.approx(LINEAR.duration(prompt) + 0.001 + 1e-4 + 1e-3 + 2 * (0.001 + 1e-4))
    assert cost.duration(decodes(8, 100)) == pytest.approx(LINEAR.duration(decodes(8, 100)) + 3 * later)
    assert cost.seconds(Shape(swapped=3)) == LINEAR.seconds(Shape(swapped=3))


def test_the_drafting_time_is_given_or_of_the_profile(tmp_path: Path) -> None:
    measured: dict[str, Any] = {"method": "eagle", "step": 0.002, "row": 1e-4, "token": 1e-5}
    write_profile(tmp_path, {"name": "p", "drafting": measured}, LINEAR)
    profile, shape = load_profile(tmp_path), decodes(1, 0, 2)
    assert profile.section("drafting") == measured
    plain = LINEAR.duration(shape)

    def added(method: str, tokens: int, seconds: Any = None) -> float:
        return with_drafter(LINEAR, profile, method, tokens, seconds).duration(shape) - plain

    assert added("eagle", 2) == pytest.approx(2 * 0.0021 + 2e-5)
    assert added("eagle", 2, 0.005) == pytest.approx(0.005)
    assert [added("eagle", 2, 0.0), added("ngram", 2), added("eagle", 0)] == [0.0, 0.0, 0.0]
    any_method = replace(profile, about={"drafting": {"step": 0.002}})
    assert with_drafter(LINEAR, any_method, "ngram", 5).duration(shape) == pytest.approx(plain + 0.002)
    with pytest.raises(BadInput, match=r"drafting\.step"):
        write_profile(tmp_path, {"drafting": {"step": -1}}, LINEAR)


def test_the_pass_of_eagle_is_one_layer_and_the_head() -> None:
    profile = load_profile("h200-llama2-7b")
    drafter = derived_drafter(profile, "eagle")
    assert drafter is not None
    weights = (4 * 4096**2 + 3 * 4096 * 11008 + 32000 * 4096) * 2  # bytes
    seconds, step = drafter.decode(1, 1, 0), profile.cost.decode(1, 1, 0)
    assert 1.0 < seconds / (weights / 4.8e12) < 1.8
    assert 1 / 32 < seconds / step < 3 / 32
    assert derived_drafter(profile, "ngram") is None
    assert derived_drafter(profile, "draft_model") is None  # its name is not given
    assert derived_drafter(Profile("costs", LINEAR), "eagle") is None
    scaled = derived_drafter(replace(profile, cost=ScaledCost(profile.cost, 2.0)), "mtp")
    assert scaled is not None
    assert scaled.decode(1, 1, 0) == pytest.approx(2 * seconds)


def test_a_draft_model_is_a_model_of_its_own() -> None:
    profile = load_profile("h200-llama2-7b")
    old = setting_of(profile)
    named = derived_drafter(profile, "draft_model", "Qwen/Qwen2.5-3B")
    whole = derive_profile(profile, Setting(find_model("qwen2.5-3b"), old.device, "bfloat16", server=False), "own").cost
    assert named is not None
    assert named.decode(4, 4, 400) == pytest.approx(whole.decode(4, 4, 400))
    with pytest.raises(BadInput, match=r"speculative\.model: expected a known model"):
        derived_drafter(profile, "draft_model", "unknown")


def test_a_run_with_drafts_warns_only_if_the_drafting_time_is_not_known() -> None:
    def warnings(profile: Any, **section: Any) -> list[str]:
        tree = {"policy": {"name": "vllm-v1"}, "profile": profile, "engine": {"num_blocks": 1000}}
        scenario = scenario_from({**tree, "speculative": {"tokens": 2, "acceptance": 0.5, **section}})
        found = run_warnings(scenario, load_profile(profile), None)
        return [str(warning) for warning in found if "drafting" in str(warning)]

    costs = {"kind": "linear", "base": 0.01}
    assert len(warnings(costs)) == 1
    assert warnings(costs, method="ngram") == warnings(costs, drafting=0.0) == warnings("h200-llama2-7b") == []
    assert len(warnings("h200-llama2-7b", method="draft_model")) == 1
    assert warnings("h200-llama2-7b", method="draft_model", model="qwen3-4b") == []


def test_drafts_count_in_the_range_of_the_profile() -> None:
    """40 rows with 15 drafts each have 640 tokens; the prompts of the profile have up to 100."""
    cost = {"kind": "parts", "prefill": {"tokens": [[1, 0.01], [16, 0.011]]}, "decode": {"rows": [[1, 0.01]]}}
    profile = Profile("p", cost_from(cost, "cost"), {"grid": {"prefill_tokens": [1, 100], "decode_rows": [1, 64]}})
    workload = {"requests": 40, "arrivals": {"kind": "burst"}, "lengths": {"prompt": 2, "output": 40}}
    tree = {"policy": {"name": "vllm-v1"}, "engine": {"num_blocks": 9000}, "workload": workload}
    drafts = {"tokens": 15, "acceptance": 0.0}
    plain, drafted = (
        simulate(scenario_from({**tree, **more}), profile=profile) for more in ({}, {"speculative": drafts})
    )
    assert plain.outside_profile == []
    assert drafted.outside_profile == ["prefill_tokens 640 (measured 1 to 100)"]


def test_a_derived_server_splits_the_contexts_of_rows_with_drafts() -> None:
    profile = load_profile("h200-llama3.1-8b")
    server = derive_profile(profile, Setting(find_model("llama-3.1-8b"), find_device("H100"), "bfloat16"), "server")
    extra = [
        cost.duration(decodes(1, 4000, 3)) - cost.duration(decodes(1, 4000)) for cost in (profile.cost, server.cost)
    ]
    assert extra[0] > 3e-3  # the chunk kernel of the measured backend
    assert extra[1] < 2e-4


def test_tables_of_steps_have_drafts_and_older_ones_do_not(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    calls = [ModelCall(0.0, 0.1, 0.2, decodes(2, 10, 6)), ModelCall(0.3, 0.4, 0.5, Shape(1, 5, 5, 25))]
    write_calls(calls, path)
    assert read_calls(path) == calls
    samples = Samples.from_rows([step._replace(seconds=0.1, point=0) for step in read_steps(path)])
    assert samples.column("drafts").tolist() == [6, 0]
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(line.rpartition(",")[0] for line in lines), encoding="utf-8")
    assert [call.shape.drafts for call in read_calls(path)] == [0, 0]
