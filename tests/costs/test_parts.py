"""The cost model in parts: its terms, mixed steps, padding, host time, its mapping and old profiles."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from servesim.calibrate.probe.sample_set import predict
from servesim.config.scenario import scenario_from
from servesim.core import Shape
from servesim.costs.derived import CostWithHost, SampledCost, SamplingTerm, ScaledCost
from servesim.costs.device_profile import Profile
from servesim.costs.mapping import cost_from, cost_mapping
from servesim.costs.parts import DecodePart, HostPart, MixedPart, PartsCost, PrefillPart, SwapPart
from servesim.runs.simulate import simulate

PREFILL = PrefillPart(((16.0, 0.01), (256.0, 0.02), (512.0, 0.04)), 1e-4, 1e-9, 2e-9, 1e-6, 3e-9, buckets=(32, 64, 256))
DECODE = DecodePart(((1.0, 0.01), (8.0, 0.012), (32.0, 0.02)), 1e-5, 1e-7)
COST = PartsCost(
    PREFILL, DECODE, MixedPart(True, 1e-3, 1e-5, 2e-7), SwapPart(1e-3, 1e-4), HostPart(1e-4, 1e-5, 2e-5, 1e-7)
)
VARIANTS = [
    COST,
    replace(COST, mixed=MixedPart(one_pass=False, overlap=0.6)),
    replace(COST, mixed=MixedPart(floor=False)),
    replace(COST, decodes=replace(DECODE, buckets=(1, 8, 32), context_root=1e-5)),
    replace(COST, decodes=DecodePart(((1.0, 0.01, 1e-7), (8.0, 0.012, 2e-7)))),
]


def random_shape(rng: random.Random) -> Shape:
    rows, live = rng.randint(0, 3), rng.randint(0, 40)
    tokens = rng.randint(rows, 900) if rows else 0
    squares, cross = tokens * tokens // max(rows, 1), rng.choice([0, tokens * 100])
    return Shape(rows, tokens, tokens, squares, cross, live, live, live * rng.randint(0, 900), rng.choice([0, 0, 5]))


def test_the_parts_of_a_step_are_added() -> None:
    host = 1e-4 + 1e-5 * 2 + 2e-5 * 2 + 1e-7 * 200
    prefill = Shape(2, 200, 200, 20_000, 40_000)
    attention = 1e-9 * 20_000 + 2e-9 * 40_000 + 1e-6 * 200 + 3e-9 * 20_000
    assert COST.seconds(prefill) == pytest.approx(0.02 + 2e-4 + attention + host)
    assert COST.seconds(Shape(decode_rows=8, decode_live=6, context=1000)) == pytest.approx(
        0.012 + 6e-5 + 1e-4 + 1e-4 + 6e-5
    )
    assert COST.seconds(Shape(swapped=5)) == pytest.approx(1e-3 + 5e-4 + 1e-4)


def test_decodes_join_the_prompt_tokens_in_one_pass() -> None:
    mixed = Shape(1, 60, 60, 3600, 0, 8, 8, 1000)
    one_pass = 0.02 + 1e-4 + 3600e-9 + 1e-3 + 8e-5 + 2e-4  # 68 tokens are padded to 256
    host = 1e-4 + 9e-5 + 2e-5 + 60e-7
    assert COST.seconds(mixed) == pytest.approx(one_pass + host)


def test_the_shorter_part_of_a_mixed_step_is_hidden_by_the_overlap() -> None:
    cost = replace(VARIANTS[1], host=HostPart())
    mixed = Shape(1, 60, 60, 3600, 0, 8, 8, 1000)
    prefill, decode = cost.seconds(mixed._replace(decode_rows=0)), cost.decode(8, 8, 1000)
    assert cost.seconds(mixed) == pytest.approx(prefill + decode - 0.6 * min(prefill, decode))


def test_a_mixed_step_takes_at_least_as_long_as_its_decodes() -> None:
    mixed = Shape(1, 1, 1, 1, 0, 32, 32, 10_000_000)
    assert COST.seconds(mixed) > COST.decode(32, 32, 10_000_000)
    assert VARIANTS[2].seconds(mixed) < VARIANTS[2].decode(32, 32, 10_000_000)


@pytest.mark.parametrize("cost", VARIANTS, ids=range(len(VARIANTS)))
def test_more_work_never_takes_less_time(cost: PartsCost) -> None:
    rng = random.Random(0)
    for _ in range(500):
        shape = random_shape(rng)
        if not (shape.prefill_rows or shape.decode_rows):
            continue
        seconds = cost.seconds(shape)
        assert seconds > 0
        growing = ["context", "swapped"] if shape.decode_rows else ["swapped"]
        growing += ["prefill_tokens", "squares", "cross"] if shape.prefill_rows else []
        for name in growing:
            more = shape._replace(**{name: getattr(shape, name) * rng.choice([2, 100]) + 1})
            assert cost.seconds(more) >= seconds, name
        if shape.decode_rows:
            assert cost.seconds(shape._replace(decode_rows=shape.decode_rows + 1)) >= seconds


@pytest.mark.parametrize("cost", VARIANTS, ids=range(len(VARIANTS)))
def test_many_predictions_at_once_are_the_same(cost: PartsCost) -> None:
    rng = random.Random(1)
    shapes = [shape for shape in (random_shape(rng) for _ in range(300)) if any(shape)]
    predicted = predict(cost, np.array(shapes, dtype=float))
    assert predicted == pytest.approx([cost.seconds(shape) for shape in shapes], rel=1e-12)


@pytest.mark.parametrize("cost", VARIANTS, ids=range(len(VARIANTS)))
def test_it_can_be_written_and_read_back(cost: PartsCost) -> None:
    assert cost_from(cost_mapping(cost), "cost") == cost


@pytest.mark.parametrize("cost", VARIANTS, ids=range(len(VARIANTS)))
def test_hold_gives_identical_times(cost: PartsCost) -> None:
    workload = {"requests": 30, "arrivals": {"kind": "poisson", "rate": 20},
                "lengths": {"kind": "fixed", "prompt": 40, "output": 50}}  # fmt: skip
    scenario = scenario_from({"workload": workload, "policy": {"name": "vllm-v1"}, "engine": {"num_blocks": 2000}})
    spans = [simulate(scenario, hold=hold, profile=Profile("parts", cost)).measures.makespan for hold in (True, False)]
    assert spans[0] == spans[1]


def test_decodes_that_are_linear_in_the_context_say_so() -> None:
    assert COST.linear_in_context(8, 8) == pytest.approx((0.012 + 8e-5 + 1e-4 + 8e-5, 1e-7))
    assert VARIANTS[3].linear_in_context(8, 8) is None


def test_the_measured_host_time_of_a_replay_replaces_that_of_the_profile() -> None:
    replayed = CostWithHost(COST, HostPart(step=5e-3))
    assert replayed.decode(8, 8, 100) == pytest.approx(replace(COST, host=HostPart()).decode(8, 8, 100) + 5e-3)


@pytest.mark.parametrize(("host", "step"), [(0.0, 0.0128), (0.004, 0.0128), (0.0129, 0.0129), (0.5, 0.5)])
def test_with_steps_in_flight_host_time_counts_only_where_it_exceeds_the_device(host: float, step: float) -> None:
    """8 decodes of 900 tokens take 0.012 + 8 * 1e-5 + 7200 * 1e-7 s on the device."""
    cost = replace(COST, host=HostPart(step=host))
    profile = Profile("parts", cost).overlapped()
    assert profile.cost.decode(8, 8, 7200) == pytest.approx(step)
    scaled = Profile("parts", ScaledCost(cost, 2.0)).overlapped()
    assert scaled.cost.decode(8, 8, 7200) == pytest.approx(2 * step)
    prompts = Shape(1, 256, 256, 256**2)
    device = replace(COST, host=HostPart()).seconds(prompts)
    assert profile.cost.seconds(prompts) == pytest.approx(max(device, host))


def test_steps_in_flight_are_shorter_by_what_the_profile_says_and_more_so_without_a_graph() -> None:
    cost = replace(COST, host=HostPart())
    about = {"in_flight": {"step": 1e-4, "launch": 1e-3}, "token_buckets": [64, 256], "row_buckets": [8, 16]}
    profile = Profile("parts", cost, about).overlapped(HostPart(step=9.0))  # not that of a warm-up
    prompts, saved = Shape(1, 256, 256, 256**2), {256: 1e-4, 257: 1.1e-3}
    mixed = {8: prompts._replace(decode_rows=8, decode_live=8), 0: prompts}
    assert profile.cost.seconds(mixed[0]) == pytest.approx(cost.seconds(mixed[0]) - saved[256])
    assert profile.cost.seconds(mixed[8]) == pytest.approx(cost.seconds(mixed[8]) - saved[257])
    assert profile.cost.decode(16, 16, 900) == pytest.approx(cost.decode(16, 16, 900) - 1e-4)
    assert profile.cost.decode(17, 17, 900) == pytest.approx(cost.decode(17, 17, 900) - 1.1e-3)


def test_the_host_time_of_a_replay_counts_prompt_tokens_without_padding() -> None:
    """It is fitted to live steps, whose tokens are not padded. The host time of a profile counts the same tokens."""
    host = HostPart(token=1e-5)
    padded = Shape(1, 512, 100, 100**2)
    assert CostWithHost(COST, host).seconds(padded) == pytest.approx(replace(COST, host=host).seconds(padded))


def test_the_host_time_of_a_profile_is_replaced_inside_other_cost_models() -> None:
    host, other = HostPart(step=5e-3), SamplingTerm(1e-3, 0.0)
    expected = replace(COST, host=host).decode(8, 8, 100)
    assert CostWithHost(ScaledCost(COST, 1.0), host).decode(8, 8, 100) == pytest.approx(expected)
    assert CostWithHost(SampledCost(COST, other), host).decode(8, 8, 100) == pytest.approx(expected + 1e-3)


GOOD: dict[str, Any] = {"kind": "parts", "prefill": {"tokens": [[1, 0.1]]}, "decode": {"rows": [[1, 0.1]]}}


WRONG_COST_PARTS: Any = [
    *(
        {"prefill": {"tokens": points}}
        for points in (
            [[1, -0.01], [2, 0.1]],
            [[-1, 0.01], [2, 0.1]],
            [[1, 10**400]],
            [[2, 0.1], [1, 0.1]],
            3,
            [[1, "x"]],
        )
    ),
    {"prefill": {"tokens": [[1, 0.1]], "buckets": 5}},
    {"decode": {"rows": [[1, 0.1, -1e-3]]}},
    {"decode": {"rows": [[1, 0.1]], "buckets": 3}},
    {"prefill": {"tokens": [[1, 0.2], [2, 0.1]]}},
    {"decode": {"rows": [[1, 0.2], [2, 0.1]]}},
    {"decode": {"rows": []}},
    {"decode": {"context": -1e-9}},
    {"mixed": {"overlap": 1.5}},
    {"mixed": {"one_pass": 1}},
    {"mixed": {"speed": 1}},
    {"swap": 5},
    {"prefil": {}},
    {"prefill": {"buckets": [0]}},
    {"host": {"step": float("inf")}},
]


def test_errors_name_the_key(expected_errors: Callable[..., None]) -> None:
    expected_errors("cost_parts", lambda change: cost_from({**GOOD, **change}, "cost"), WRONG_COST_PARTS)


def test_few_tokens_after_many_cached_ones_take_as_long_as_those_that_fill_the_device() -> None:
    part = PrefillPart(((1.0, 0.01), (4096.0, 0.05)), cross=1e-9, width=512)
    few, full, many = (part.seconds(Shape(1, n, n, n * n, n * 10_000)) for n in (64, 512, 2048))
    alone = {n: part.seconds(Shape(1, n, n, n * n)) for n in (64, 512, 2048)}
    assert few - alone[64] == pytest.approx(512 * 10_000 * 1e-9) == pytest.approx(full - alone[512])
    assert many - alone[2048] == pytest.approx(2048 * 10_000 * 1e-9)


def test_rows_above_the_largest_bucket_are_not_padded() -> None:
    part = DecodePart(((1.0, 0.01), (8.0, 0.02), (512.0, 0.2), (518.0, 0.3), (1024.0, 0.4)), buckets=(1, 8, 512))
    assert [part.terms(rows)[0] for rows in (2, 8, 9, 512)] == [0.02, 0.02, 0.2, 0.2]
    assert part.terms(771)[0] == pytest.approx(0.35)  # in the middle of 518 and 1024
