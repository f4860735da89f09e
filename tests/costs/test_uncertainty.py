"""Cost models from the uncertainty of a profile, and the spread between sessions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from servesim.calibrate.probe.fitted_profile import profile_from
from servesim.core import Shape, StepCost
from servesim.costs.derived import ScaledCost
from servesim.costs.device_profile import bundled_profiles, load_profile, write_profile
from servesim.costs.linear import LinearCost
from servesim.costs.parts import DecodePart, MixedPart, PartsCost, PrefillPart
from servesim.costs.uncertainty import SESSION_SPREAD, parameters, with_parameters

from ..calibrate.probe.step_samples import DECODES, LENGTHS, decodes, measured, prompts

TRUE = LinearCost(base=3e-3, prefill_token=3e-5, decode_step=6e-3, decode_row=1e-4, context=1e-7)
PARTS = PartsCost(
    PrefillPart(((16.0, 0.01), (256.0, 0.02))),
    DecodePart(((1.0, 0.01, 1e-7), (8.0, 0.01, 1e-7))),
    MixedPart(overlap=0.9),
)


RAGGED = PartsCost(PARTS.prefill, DecodePart(((1.0, 0.01), (8.0, 0.02, 1e-4))))  # the second point has a context term


@pytest.mark.parametrize("cost", [TRUE, PARTS], ids=["linear", "parts"])
def test_parameters_can_be_set_again(cost: StepCost) -> None:
    assert with_parameters(cost, parameters(cost)) == cost
    for shape in (Shape(1, 100, 100, 10_000), decodes(4, 100)):
        before = cost.seconds(shape)
        doubled = with_parameters(cost, [2 * value for value in parameters(cost)])
        assert doubled.seconds(shape) == pytest.approx(2 * before)  # not from a cache of the original


def test_stored_draws_are_valid_cost_models() -> None:
    """Terms are at least 0 and curves rise, also if the samples do not separate the terms."""
    samples = measured([prompts(n) for n in LENGTHS] + DECODES, TRUE.seconds, 0.1)
    profile = profile_from(samples, {}, "here")
    for drawn in profile.representatives(20):
        assert isinstance(drawn.cost, ScaledCost)
        assert min(parameters(drawn.cost.cost)) >= 0
        assert drawn.cost.cost != profile.cost


def test_points_with_different_numbers_of_values_are_not_parameters(tmp_path: Path) -> None:
    assert with_parameters(RAGGED, parameters(RAGGED)) == RAGGED
    write_profile(tmp_path, {"name": "x"}, RAGGED)
    assert load_profile(tmp_path).cost.decode(8, 4, 9) == RAGGED.decode(8, 4, 9)


@pytest.mark.parametrize("name", bundled_profiles())
def test_every_profile_has_representatives(name: str) -> None:
    """Without stored components, all times vary together, as between two sessions."""
    profile, shape = load_profile(name), decodes(4, 100)
    ratios = [drawn.cost.seconds(shape) / profile.cost.seconds(shape) for drawn in profile.representatives(200)]
    assert np.mean(ratios) == pytest.approx(1.0, abs=0.01)
    assert 0.8 * SESSION_SPREAD < np.std(ratios) < 0.05


def test_the_interval_of_a_fit_holds_and_is_not_wide(tmp_path: Path) -> None:
    """Over independent sets of samples, about 95 % of the intervals contain the true time."""
    inside, widths = [], []
    for seed in range(6):
        samples = measured([prompts(n) for n in LENGTHS] + DECODES, TRUE.seconds, 0.1, repeats=3, seed=seed)
        profile = profile_from(samples, {}, "here")
        write_profile(
            tmp_path, {**profile.about, "uncertainty": {**profile.about["uncertainty"], "session": 0.0}}, profile.cost
        )
        stored = load_profile(tmp_path)
        draws = [drawn.cost for drawn in stored.representatives(40)]
        for shape in (prompts(300), prompts(1500), decodes(3, 60), decodes(30, 900)):
            error = 1.96 * float(np.std([cost.seconds(shape) for cost in draws]))
            inside.append(abs(stored.cost.seconds(shape) - TRUE.seconds(shape)) <= error)
            widths.append(error / TRUE.seconds(shape))
    assert np.mean(inside) > 0.8
    assert np.median(widths) < 0.1


def test_a_scaled_cost_is_linear_in_the_same_way() -> None:
    scaled = ScaledCost(TRUE, 1.02)
    line = scaled.linear_in_context(4, 4)
    assert scaled.decode(4, 4, 777) == line[0] + line[1] * 777
    assert scaled.seconds(prompts(50)) == 1.02 * TRUE.seconds(prompts(50))
    assert scaled.decode(4, 4, 777) == pytest.approx(1.02 * TRUE.decode(4, 4, 777))
