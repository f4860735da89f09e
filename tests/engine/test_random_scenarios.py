"""Random scenarios of every policy: every metric and every time is the same with and without held plans."""

from __future__ import annotations

import pytest
from servesim.config.scenario import scenario_from
from servesim.core import BadInput
from servesim.policies import POLICIES
from servesim.runs.simulate import Run, simulate

from ..random_scenarios import Case, random_case
from ..run_checks import faults_of


def run_case(case: Case, hold: bool) -> Run | str:
    """Return a run; a text if the server is too small for the policy."""
    try:
        return simulate(scenario_from(case.tree), case.trace, (), hold, case.profile)
    except (BadInput, AssertionError) as error:
        return str(error)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_random_scenarios_are_equal_with_and_without_hold_and_their_states_add_up(name: str) -> None:
    for number in range(1000, 1010):
        case = random_case(number, name)
        run, single = run_case(case, True), run_case(case, False)
        if isinstance(run, str) or isinstance(single, str):
            assert run == single, case
            continue
        assert not faults_of(run, single), case


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


@pytest.mark.parametrize("hold", [True, False])
def test_gaps_between_tokens_add_up_to_the_time_after_the_first_token(hold: bool) -> None:
    run = simulate(scenario_from(SGLANG), hold=hold)
    times = run.measures
    tokens = sum(request.written - 1 for request in run.requests)
    mean = float((times.e2el - times.ttft).sum()) / tokens
    assert times.itl["mean"] == pytest.approx(mean, rel=1e-9)
