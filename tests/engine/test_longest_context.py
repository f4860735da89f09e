"""The longest context of a step: kept by the server if a cost model has a term for it, and only then."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from servesim.config.scenario import scenario_from
from servesim.core import BadInput, Request, Shape
from servesim.costs.device_profile import Profile
from servesim.costs.parts import DecodePart, MixedPart, PartsCost, PrefillPart
from servesim.engine.server import Server
from servesim.engine.step import Step
from servesim.policies import POLICIES
from servesim.runs.simulate import simulate

from ..random_scenarios import server_case
from ..run_checks import different_keys

LONGEST = 1e-4
DECODES = DecodePart(((1.0, 0.006), (32.0, 0.01)), context=1e-5, longest=LONGEST)
COST = PartsCost(PrefillPart(((1.0, 0.004), (128.0, 0.05))), DECODES, MixedPart(row=1e-4))


class LongestChecker:
    """Compares the longest context of every step with its rows."""

    every_step = True

    def __init__(self, kept: bool) -> None:
        self.kept, self.steps = kept, 0

    def on_step_start(self, server: Server, step: Step, arrived: Sequence[Request]) -> None:
        if step.decode_rows:
            rows = [request.cached for request in server.running if request.decodes]
            assert step.longest == (max(rows) if self.kept else 0)
            self.steps += 1

    def on_step_end(self, server: Server, step: Step, now: float, finished: Sequence[Request]) -> None:
        pass


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_gives_the_same_times_with_and_without_hold(name: str) -> None:
    compared = 0
    for number in range(2000, 2006):
        case = server_case(number, name)
        profile, checker = Profile("test", COST), LongestChecker(True)
        tree = {key: value for key, value in case.tree.items() if key != "profile"}
        try:
            run, single = (simulate(scenario_from(tree), case.trace, (), fast, profile) for fast in (True, False))
        except (BadInput, AssertionError):  # the server is too small for the policy
            continue
        assert not different_keys(run, single), case
        simulate(scenario_from(tree), case.trace, (checker,), False, profile)
        compared += checker.steps
    assert compared > 20


def test_a_cost_model_without_the_term_keeps_no_longest_context() -> None:
    checker, plain = LongestChecker(False), Profile("plain", replace(COST, decodes=replace(DECODES, longest=None)))
    for number in range(2000, 2006):
        case = server_case(number, "vllm-v1")
        tree = {key: value for key, value in case.tree.items() if key != "profile"}
        with suppress(BadInput):  # such as drafts with failing requests
            simulate(scenario_from(tree), case.trace, (checker,), False, plain)
    assert checker.steps


SIZES: dict[str, Any] = {"decode_rows": 4, "decode_live": 4, "context": 8000}


def test_one_long_context_takes_longer_than_equal_ones() -> None:
    equal, one_long = Shape(**SIZES), Shape(**SIZES, longest=7000)
    more = LONGEST * (7000 - 2000)
    assert COST.duration(one_long) - COST.duration(equal) == pytest.approx(more)
    assert COST.duration(equal) == COST.duration(Shape(**SIZES, longest=2000)) == COST.decode(4, 4, 8000)
    mixed = [shape._replace(prefill_rows=1, prefill_tokens=9, prefill_live=9) for shape in (one_long, equal)]
    assert COST.seconds(mixed[0]) - COST.seconds(mixed[1]) == pytest.approx(more)
