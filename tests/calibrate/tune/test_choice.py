"""The choice of the next measurement: expected gains over draws, twins, device seconds, and a stable order."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from servesim.calibrate.tune.choice import (
    Candidate,
    Scatter,
    adjusted,
    choose,
    drawn_costs,
    find_twins,
    measured_ratios,
    rate,
    same_order,
    scatter_of,
    scattered,
)
from servesim.calibrate.tune.correction import Factors
from servesim.calibrate.tune.journal import Measurement
from servesim.calibrate.tune.step_times import StepFactors, scaled_parts
from servesim.core import Shape
from servesim.costs.device_profile import Profile, load_profile
from servesim.costs.parts import DecodePart, MixedPart, PartsCost, PrefillPart
from servesim.study.sweep import Records

PARTS = PartsCost(
    PrefillPart(((1.0, 0.01), (100.0, 0.05)), row=0.001), DecodePart(((1.0, 0.004), (8.0, 0.006)), context=1e-6),
    MixedPart(one_pass=False, overlap=0.5),
)  # fmt: skip
PREFILL, DECODE = Shape(1, 50, 50, 2500), Shape(decode_rows=4, decode_live=4, context=400)


def alone(*configs: int) -> dict[int, frozenset[int]]:
    """Return configurations without twins."""
    return {config: frozenset({config}) for config in configs}


def test_the_gain_is_the_mean_improvement_over_the_leader_and_the_leader_can_lose() -> None:
    ratings = {c.config: c for c in rate({3: [10.0, 10.0], 5: [12.0, 9.0], 0: [20.0, 20.0]}, 3, alone(3, 5, 0))}
    assert ratings[5].gain == pytest.approx(0.05)  # 1 of 10 in one of two draws
    assert ratings[3].gain == pytest.approx(0.05)
    assert ratings[0].gain == 0
    assert (ratings[3].wins, ratings[5].wins, ratings[0].wins) == (1, 1, 0)


def test_a_configuration_that_fails_in_a_draw_gains_nothing_there() -> None:
    ratings = {c.config: c for c in rate({1: [10.0, 10.0], 2: [math.inf, 8.0]}, 1, alone(1, 2))}
    assert ratings[2].gain == pytest.approx(0.1)


def test_required_ones_come_first_then_the_largest_gain_per_second() -> None:
    slow, fast, useless = Candidate(4, 1, 0.02, frozenset({4}), 100.0), Candidate(5, 1, 0.01, frozenset({5}), 10.0), \
        Candidate(6, 0, 0.0, frozenset({6}), 1.0)  # fmt: skip
    leader, baseline = Candidate(1, 5, 0.01, frozenset({1}), 10.0), Candidate(0, 0, 0.0, frozenset({0}), 10.0)
    candidates = [slow, fast, useless, leader, baseline]
    assert choose(candidates, required=[1, 0], known=[], top=3) == [1, 0, 5, 4]
    assert choose(candidates, required=[1, 0], known=[], top=2) == [1, 0, 5]
    assert choose(candidates, required=[1], known=[1, 0], top=2) == [5, 4]
    assert choose(candidates, required=[1], known=[0, 1, 4, 5], top=2) == []


def test_twins_are_measured_once() -> None:
    values = {1: [10.0, 10.0], 2: [9.0, 11.0], 3: [9.0, 11.0]}
    twins = {1: frozenset({1}), 2: frozenset({2, 3}), 3: frozenset({2, 3})}
    candidates = [replace(c, seconds=1.0) for c in rate(values, 1, twins)]
    assert choose(candidates, required=[1], known=[], top=5) == [1, 2]
    assert choose(candidates, required=[1], known=[1, 3], top=5) == []


def test_twins_share_the_measured_value() -> None:
    """16 and 64 slots behave in the same way if there are 10 requests; 2 slots do not."""
    predicted = {0: 1000.0, 1: 1100.0, 2: 1100.0, 3: 1200.0}
    records: Records = {
        (config, replication): {"metrics": {"mean_e2el_ms": value + replication, "preemptions": 0}}
        for config, value in predicted.items()
        for replication in range(2)
    }
    assert find_twins(records) == {
        0: frozenset({0}), 1: frozenset({1, 2}), 2: frozenset({1, 2}), 3: frozenset({3}),
    }  # fmt: skip
    runs = [measured(0, {"mean_e2el_ms": 1000.0}), measured(1, {"mean_e2el_ms": 1355.0})]
    result = adjusted(records, measured_ratios(records, runs))
    values = [result[config, 0]["metrics"]["mean_e2el_ms"] for config in range(4)]
    assert values[:3] == pytest.approx([1000.0, 1355.0, 1355.0])
    assert values[3] == pytest.approx(1200.0 * math.sqrt(1355.0 / 1100.0))  # no twin: the mean of the ratios


def test_runs_with_random_cost_models_and_failed_runs_have_no_twins() -> None:
    records: Records = {
        (0, 0): {"error": "no"}, (1, 0): {"error": "no"}, (0, 0, 1): {"metrics": {"makespan": 1.0}},
        (1, 0, 1): {"metrics": {"makespan": 1.0}},
    }  # fmt: skip
    assert find_twins(records) == alone(0, 1)
    assert measured_ratios(records, [measured(0, {"makespan": 5.0})]) == {0: {}, 1: {}}


def test_the_order_is_stable_if_no_pair_of_leaders_is_swapped_by_more_than_a_tie() -> None:
    assert same_order([4, 2, 7], {4: 10.0, 2: 11.0, 7: 12.0, 9: 15.0}, top=3)
    assert same_order([4, 2, 7], {4: 10.01, 2: 10.0, 7: 12.0}, top=3)  # a tie
    assert not same_order([4, 2, 7], {4: 11.0, 2: 10.0, 7: 12.0}, top=3)
    assert not same_order([4, 2, 7], {4: 10.0, 2: 11.0, 7: 12.0, 9: 10.5}, top=3)  # a new leader
    assert not same_order([4, 2], {2: 10.0, 3: 11.0}, top=2)  # a leader cannot win any more


def test_factors_scale_prompts_and_decodes_and_nothing_else() -> None:
    scaled = scaled_parts(PARTS, 2.0, 3.0)
    assert scaled.seconds(PREFILL) == pytest.approx(2 * PARTS.seconds(PREFILL))
    assert scaled.seconds(DECODE) == pytest.approx(3 * PARTS.seconds(DECODE))
    assert scaled.mixed.overlap == PARTS.mixed.overlap
    factors = StepFactors(PARTS, factor=2.0, decode_ratio=1.5)
    assert factors.seconds(PREFILL) == scaled.seconds(PREFILL)
    assert factors.decode(4, 4, 400) == scaled.decode(4, 4, 400)
    assert factors.linear_in_context(4, 4) == scaled.linear_in_context(4, 4)


def test_draws_are_repeatable_and_vary_by_the_given_spread() -> None:
    profile = Profile("p", PARTS, {"uncertainty": {"session": 0.0}})
    costs = drawn_costs(profile, PARTS, Factors(0.0, 0.1), 400)
    assert costs == drawn_costs(profile, PARTS, Factors(0.0, 0.1), 400)
    assert all(cost.seconds(PREFILL) == pytest.approx(PARTS.seconds(PREFILL)) for cost in costs)
    logs = [math.log(cost.seconds(DECODE) / PARTS.seconds(DECODE)) for cost in costs]
    assert math.sqrt(sum(value**2 for value in logs) / len(logs)) == pytest.approx(0.1, rel=0.15)


def test_the_stored_draws_of_a_profile_are_used() -> None:
    profile = load_profile("h200-llama2-7b")
    assert isinstance(profile.cost, PartsCost)
    costs = drawn_costs(profile, profile.cost, Factors(0.0, 0.0), 4)
    assert len({cost.decodes.rows for cost in costs}) == 4


def measured(config: int, figures: dict[str, float]) -> Measurement:
    name = f"config{config}"
    return Measurement(round=1, config=config, name=name, seconds=1.0, metrics=figures, predicted={})


def test_measured_ones_get_their_value_and_the_others_the_mean_ratio() -> None:
    records: Records = {
        (config, replication): {"metrics": {"makespan": 10.0 + config + replication, "preemptions": 0}}
        for config in range(3)
        for replication in range(2)
    }
    runs = [measured(0, {"makespan": 20.0, "preemptions": 3}), measured(1, {"makespan": 88.0})]
    result = adjusted(records, measured_ratios(records, runs))
    assert [result[config, 0]["metrics"]["makespan"] for config in range(3)] == pytest.approx([20.0, 88.0, 48.0])
    assert result[0, 1]["metrics"]["makespan"] == pytest.approx(22.0)  # the ratio of the measured run
    assert result[0, 0]["metrics"]["preemptions"] == 0


def test_failed_runs_and_stopped_measurements_change_nothing() -> None:
    records: Records = {(0, 0): {"error": "no"}, (1, 0): {"metrics": {"makespan": 10.0}}}
    assert adjusted(records, measured_ratios(records, [measured(0, {"makespan": 5.0}), measured(1, {})])) == records


def test_the_scatter_is_that_of_measured_over_predicted_between_configurations() -> None:
    records: Records = {(config, 0): {"metrics": {"makespan": 10.0}} for config in range(3)}
    runs = [measured(0, {"makespan": 10.0}), measured(1, {"makespan": 10.0 * math.exp(0.4)})]
    scatter = scatter_of("makespan", records, runs)  # 0 and 0.4, around their mean
    assert scatter == pytest.approx((math.sqrt(2 * 0.2**2), math.sqrt(2 * 0.2**2)))
    assert scatter_of("makespan", records, []) == (0.0, 0.0)


def test_one_measurement_scatters_by_its_error_and_repeated_ones_show_their_noise() -> None:
    records: Records = {(0, 0): {"metrics": {"makespan": 13.6}}}
    first = measured(0, {"makespan": 13.6}).model_copy(update={"predicted": {"makespan": 10.0}})
    assert scatter_of("makespan", records, [first]).predicted == pytest.approx(math.log(1.36))
    later = [first.model_copy(update={"round": 2, "metrics": {"makespan": 10.0 * math.exp(e)}}) for e in (0.1, -0.1)]
    scatter = scatter_of("makespan", records, later)
    assert scatter.predicted == pytest.approx(0.1)  # as predicted with the corrected profile
    assert scatter.noise == pytest.approx(math.sqrt(2 * 0.1**2))


def test_a_measured_configuration_scatters_by_its_noise_only_and_twins_alike() -> None:
    values = {config: [10.0] * 400 for config in range(4)}
    twins = {0: frozenset({0}), 1: frozenset({1}), 2: frozenset({2, 3}), 3: frozenset({2, 3})}
    result = scattered(values, Scatter(0.3, 0.1), {1: 4, 3: 1}, twins)
    widths = {c: math.sqrt(sum(math.log(v / 10.0) ** 2 for v in own) / len(own)) for c, own in result.items()}
    assert widths == pytest.approx({0: 0.3, 1: 0.05, 2: 0.1, 3: 0.1}, rel=0.15)
    assert result[2] == result[3] and result[0] != result[1]
    assert scattered(values, Scatter(), {}, twins) == values
