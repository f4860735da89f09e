"""Fast-forward changes no figure: every key of result.json and every column of requests.csv, for random scenarios.

Times are equal bit by bit (test_random_scenarios.py). Sums of seconds are added in another order, so they may differ in
their last digits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
from servesim.config.scenario import scenario_from
from servesim.core import BadInput
from servesim.policies import POLICIES
from servesim.runs.request_rows import COLUMNS, request_row
from servesim.runs.simulate import Run, simulate

from ..compiled.random_scenarios import Case, random_case

PER_POLICY = 12
ROUNDING = 1e-9


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of every leaf of a result."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from leaves(inner, f"{path}[{index}]")
    else:
        yield path, value


def figures(run: Run) -> dict[str, Any]:
    """Return all figures of a run that users see."""
    rows = {str(request.id): dict(zip(COLUMNS, request_row(request))) for request in run.requests}
    return dict(leaves({"result": run.result(), "requests": rows}))


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Return the figures that differ by more than rounding."""
    found = [f"{path} is missing" for path in one.keys() ^ other.keys()]
    for path in one.keys() & other.keys():
        a, b = one[path], other[path]
        numbers = isinstance(a, float) and isinstance(b, (int, float))
        if a != b and not (numbers and math.isclose(a, b, rel_tol=ROUNDING, abs_tol=ROUNDING)):
            found.append(f"{path}: {a} with fast-forward, {b} without")
    return sorted(found)


def run_of(case: Case, fast_forward: bool) -> Run:
    return simulate(scenario_from(case.tree), case.trace, (), fast_forward, case.profile)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_figure_is_equal_with_and_without_fast_forward(name: str) -> None:
    compared = 0
    for number in range(PER_POLICY):
        case = random_case(5000 + number, name)
        try:
            with_it, without = run_of(case, True), run_of(case, False)
        except (BadInput, AssertionError):  # an engine that is too small for the policy
            continue
        assert not differences(figures(with_it), figures(without)), case.name
        compared += 1
    assert compared > PER_POLICY // 2


SGLANG = {
    "policy": {"name": "sglang"},
    "engine": {"num_blocks": 3000},
    "profile": "h200-llama2-7b",
    "workload": {
        "requests": 300,
        "arrivals": {"kind": "poisson", "rate": 80},
        "lengths": {"kind": "uniform", "prompt": [1, 100], "output": [5, 80]},
    },
}


@pytest.mark.parametrize("fast_forward", [True, False])
def test_gaps_between_tokens_add_up_to_the_time_after_the_first_token(fast_forward: bool) -> None:
    run = simulate(scenario_from(SGLANG), fast_forward=fast_forward)
    times = run.measures
    tokens = sum(request.written - 1 for request in run.requests)
    mean = float((times.e2el - times.ttft).sum()) / tokens
    assert times.itl["mean"] == pytest.approx(mean, rel=1e-9)
