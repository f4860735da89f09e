"""Step times are finite and at least 0: terms, curves outside their points, tables, profiles and user cost models."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, Optional

import numpy as np
import pytest
from servesim.config.scenario import scenario_from
from servesim.core import BadInput, Shape, StepCost
from servesim.costs.device_profile import Profile, bundled_profiles, load_profile
from servesim.costs.imported_tables import VIDUR_TABLES, load_vidur
from servesim.costs.linear import LinearCost
from servesim.costs.mapping import cost_from
from servesim.costs.parts import DecodePart, HostPart, MixedPart, PartsCost, PrefillPart, SwapPart, interpolate
from servesim.engine.clocks import VirtualClock
from servesim.runs.simulate import simulate

PARTS = {"prefill": PrefillPart, "decode": DecodePart, "mixed": MixedPart, "swap": SwapPart, "host": HostPart}
PREFILL, DECODE = {"tokens": [[1, 0.01]]}, {"rows": [[1, 0.01]]}


def number_terms(kind: type[Any]) -> list[str]:
    return [field.name for field in fields(kind) if isinstance(field.default, float)]


@pytest.mark.parametrize("value", [-0.1, -1e-300, float("nan"), float("inf"), 1e308, 10**400, True, "1"], ids=str)
def test_no_term_of_a_cost_model_is_negative_or_absurd(value: Any) -> None:
    for name in number_terms(LinearCost):
        with pytest.raises(BadInput, match=rf"profile\.{name}: expected a number .*from .* got "):
            cost_from({"kind": "linear", name: value}, "profile")
    for part, kind in PARTS.items():
        for name in number_terms(kind):
            parts: dict[str, Any] = {"prefill": PREFILL, "decode": DECODE}
            parts[part] = {**parts.get(part, {}), name: value}
            with pytest.raises(BadInput, match=rf"profile\.{part}\.{name}: expected a number .*from .* got "):
                cost_from({"kind": "parts", **parts}, "profile")


def test_curves_are_never_negative_outside_their_points() -> None:
    rng = random.Random(1)
    for _ in range(500):
        xs = sorted(rng.sample(range(1, 1000), rng.randint(1, 5)))
        points = [(float(x), rng.choice([0.0, rng.random()])) for x in xs]
        assert all(interpolate(points, rng.uniform(0, 3000)) >= 0 for _ in range(20))
        assert all(interpolate(points, x) == pytest.approx(y, abs=1e-15) for x, y in points)


def test_a_steep_curve_is_proportional_below_and_a_falling_one_constant_above() -> None:
    steep, falling = [(100.0, 0.01), (200.0, 0.1)], [(100.0, 0.1), (200.0, 0.02)]
    assert interpolate(steep, 10) == pytest.approx(0.001)
    assert interpolate(steep, 300) == pytest.approx(0.19)
    assert interpolate(falling, 50) == pytest.approx(0.14)
    assert interpolate(falling, 5000) == 0.02


@pytest.mark.parametrize("name", bundled_profiles())
def test_the_rule_changes_no_curve_of_a_bundled_profile(name: str) -> None:
    cost = load_profile(name).cost
    assert isinstance(cost, PartsCost)
    for points in (cost.prefill.tokens, [(point[0], point[1]) for point in cost.decodes.rows]):
        knots = [x for x, _ in points]
        for x in [0.5 * knots[0], *knots, *(1.01 * x for x in knots), 2 * knots[-1]]:
            index = next((k for k in range(1, len(points)) if points[k][0] > x), len(points) - 1)
            (x0, y0), (x1, y1) = points[index - 1], points[index]
            assert interpolate(points, x) == y0 + (y1 - y0) * (x - x0) / (x1 - x0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"comp_ms_per_layer": np.full(9, -1.0)}, "comp_ms_per_layer: expected finite numbers of at least 0"),
        ({"kvsave_ms_per_layer": np.full(9, np.nan)}, "kvsave_ms_per_layer: expected finite numbers"),
        ({"attn_decode_ms_per_layer": np.zeros((0, 3))}, "attn_decode_ms_per_layer: expected a table of numbers"),
        ({"attn_prefill_ms_per_layer": np.array([["a"]])}, "attn_prefill_ms_per_layer: expected a table of numbers"),
        ({"layers": np.array(-1)}, "layers: expected a number from 1 to 10000, got -1"),
        ({"layers": np.array([1, 2])}, "layers: expected a number from 1 to 10000"),
    ],
)
def test_tables_of_vidur_are_validated(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    tables: dict[str, Any] = {
        name: np.ones(9) if index < 2 else np.ones((3, 3)) for index, name in enumerate(VIDUR_TABLES)
    }
    np.savez(tmp_path / "good.npz", layers=32, **tables)
    load_vidur(tmp_path / "good.npz")
    np.savez(tmp_path / "bad.npz", **{"layers": 32, **tables, **change})
    with pytest.raises(BadInput, match=message):
        load_vidur(tmp_path / "bad.npz")


def written(folder: Path, section: str) -> Path:
    (folder / "profile.yaml").write_text(f"{section}\ncost: {{base: 0.1}}\n")
    return folder


WRONG_PROFILE: Any = [
    "cold_start: {prefill: -1}",
    "cold_start: {decode: 1.0e+308}",
    "front_end: {seconds: -1}",
    "noise: {decode: [1, -1]}",
    "noise: {decode: 5}",
    "grid: {decode_rows: [1]}",
    "cold_start: 5",
]


def test_numbers_of_a_profile_are_validated(tmp_path: Path, expected_errors: Callable[..., None]) -> None:
    expected_errors("profile", lambda section: load_profile(written(tmp_path, section)), WRONG_PROFILE)


class UserCost(StepCost):
    """Returns `bad` seconds for one kind of step, or for one context of it, and 1 s for the others."""

    def __init__(self, kind: str, bad: float, context: Optional[int] = None) -> None:
        self.kind, self.bad, self.context = kind, bad, context

    def seconds(self, shape: Shape) -> float:
        return self.bad if shape.kind == self.kind and self.context in (None, shape.context) else 1.0


class LinearUserCost(UserCost):
    """A linear cost of decodes, given by its two terms."""

    def linear_in_context(self, rows: int, live: int) -> Optional[tuple[float, float]]:
        return 1.0, self.bad


SCENARIO = {
    "workload": {"requests": 1, "arrivals": {"kind": "constant", "rate": 0.2}, "lengths": {"prompt": 20, "output": 60}},
    "policy": {"name": "vllm"},
}


@pytest.mark.parametrize("bad", [-0.1, float("nan")])
@pytest.mark.parametrize("hold", [True, False])
@pytest.mark.parametrize(
    "make",
    [
        lambda bad: UserCost("prefill", bad),
        lambda bad: UserCost("decode", bad),
        lambda bad: UserCost("decode", bad, context=25),
        lambda bad: UserCost("decode", bad, context=60),
    ],
)
def test_a_user_cost_model_with_an_invalid_time_is_named(make: Any, hold: bool, bad: float) -> None:
    with pytest.raises(BadInput, match="cost model UserCost: expected a step time of at least 0 s and finite, got "):
        simulate(scenario_from(SCENARIO), hold=hold, profile=Profile("mine", make(bad)))


@pytest.mark.parametrize("bad", [-0.1, float("nan")])
def test_a_user_cost_model_with_an_invalid_line_is_named(bad: float) -> None:
    with pytest.raises(BadInput, match="cost model LinearUserCost: expected a step time"):
        simulate(scenario_from(SCENARIO), profile=Profile("mine", LinearUserCost("none", bad)))


def test_the_clock_of_live_tests_names_the_cost_model_too() -> None:
    from servesim.config.registry import make_policy
    from servesim.core import Request
    from servesim.engine.inbox import Inbox
    from servesim.engine.loop import Loop
    from servesim.engine.server import Server

    clock = VirtualClock(UserCost("prefill", float("nan")))
    with pytest.raises(BadInput, match="cost model UserCost"):
        Loop(Server(make_policy({"name": "vllm"}), 100, 16), Inbox([Request(0, 0.0, 5, 2)]), clock).run()
