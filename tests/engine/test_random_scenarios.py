"""Random scenarios of every policy: every metric and every time is the same with and without fast-forward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from servesim.config.scenario import scenario_from
from servesim.core import BadInput
from servesim.policies import POLICIES
from servesim.runs.simulate import simulate
from servesim.testing import TIMES

from ..random_scenarios import Case, random_case


def numbers(tree: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every metric of a result."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from numbers(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def outcome(case: Case, fast_forward: bool) -> Any:
    """Return the times of the requests and the metrics of a run; a text if the server is too small for the policy."""
    try:
        run = simulate(scenario_from(case.tree), case.trace, (), fast_forward, case.profile)
    except (BadInput, AssertionError) as error:
        return str(error), {}
    metrics = dict(numbers(run.result()))
    exact = {key: value for key, value in metrics.items() if not isinstance(value, float)}
    times = [TIMES(request) for request in run.requests]
    return (times, str(run.stuck), exact), {key: value for key, value in metrics.items() if key not in exact}


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_random_scenarios_are_equal_with_and_without_fast_forward(name: str) -> None:
    for number in range(1000, 1010):
        case = random_case(number, name)
        (exact, metrics), (single_exact, single_metrics) = outcome(case, True), outcome(case, False)
        assert exact == single_exact, case
        assert metrics == pytest.approx(single_metrics, rel=1e-9, nan_ok=True), case


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
