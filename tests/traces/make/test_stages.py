"""Load tests in stages, and closed loops with a number of open requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from servesim.config.scenario import CLIENT_DELAY_S, scenario_from
from servesim.runs.simulate import simulate
from servesim.traces.make.synth import synthesise
from servesim.traces.make.workload import longer_workload

LENGTHS = {"prompt": 10, "output": 5}
STAGES = [{"rate": 8, "seconds": 600}, {"rate": 0, "seconds": 50}, {"rate": 20, "seconds": 300}]


def staged(**keys: Any) -> Any:
    return synthesise({"stages": STAGES, "lengths": LENGTHS, **keys}, seed=3).arrivals


def test_every_stage_has_its_own_rate() -> None:
    counts, _ = np.histogram(staged(), [0, 600, 650, 950])
    assert counts[0] == pytest.approx(4800, rel=0.05)
    assert counts[1] == 0
    assert counts[2] == pytest.approx(6000, rel=0.05)
    assert counts.sum() == len(staged())


def test_poisson_gaps_inside_a_stage_are_exponential_and_constant_ones_are_equal() -> None:
    first = staged()[staged() < 600]
    assert np.diff(first).std() / np.diff(first).mean() == pytest.approx(1.0, abs=0.1)
    constant = staged(gaps="constant")
    np.testing.assert_allclose(np.diff(constant[constant < 599]), 1 / 8)
    np.testing.assert_allclose(np.diff(constant[constant > 651]), 1 / 20)


def test_the_short_form_equals_arrivals_of_the_kind_stages() -> None:
    arrivals = {"kind": "stages", "stages": STAGES}
    long = synthesise({"duration": 950, "arrivals": arrivals, "lengths": LENGTHS}, seed=3)
    assert (long.arrivals == staged()).all()
    assert (synthesise({"requests": 100, "arrivals": arrivals, "lengths": LENGTHS}, 3).arrivals == staged()[:100]).all()


def test_concurrency_is_the_number_of_open_requests() -> None:
    tree = {
        "workload": {"concurrency": 6, "requests": 60, "lengths": {"prompt": 20, "output": [4, 40]}},
        "policy": {"name": "vllm-v1"},
        "profile": {"kind": "linear", "base": 0.01, "decode_row": 0.001},
    }
    requests = simulate(scenario_from(tree)).requests
    events = sorted([(r.sent, 1) for r in requests] + [(r.client_end, -1) for r in requests])
    open_now = np.cumsum([change for _, change in events])
    assert open_now.max() == 6
    next_sent = {r.client_end + CLIENT_DELAY_S for r in requests if r.client_end is not None}
    assert all(r.sent in next_sent for r in requests[6:])  # a request starts when another one has ended
    last_start = max(r.sent for r in requests)
    assert sum(r.client_end > last_start for r in requests) >= 5  # the server stays full until the last one is sent


WRONG_STAGES: Any = [
    {"stages": []},
    {"stages": [{"rate": 0, "seconds": 9}]},
    {"stages": [{"rate": 1}]},
    {"stages": STAGES, "concurrency": 4},
    {"stages": STAGES, "gaps": "even"},
    {"concurrency": 4},
    {"concurrency": 0, "requests": 4},
    {"requests": 999, "arrivals": {"kind": "stages", "stages": [{"rate": 1, "seconds": 9}]}},
    {"stages": [{"rate": 1e6, "seconds": 1e6}]},
]


def test_a_faulty_workload_is_one_line(expected_errors: Callable[..., None]) -> None:
    expected_errors("stages", lambda keys: synthesise({"lengths": LENGTHS, **keys}), WRONG_STAGES)


def poisson(requests: int) -> dict[str, Any]:
    return {"requests": requests, "arrivals": {"kind": "poisson", "rate": 3.0}, "lengths": LENGTHS}


@pytest.mark.parametrize(
    "workload",
    [
        {"contest": {"X": 0.3, "T": 400}},
        {"duration": 50.0, "arrivals": {"kind": "poisson", "rate": 2.0}, "lengths": LENGTHS},
        {"stages": [{"rate": 1, "seconds": 20}, {"rate": 3, "seconds": 30}], "lengths": LENGTHS},
        {"requests": 60, "arrivals": {"kind": "stages", "stages": [{"rate": 2, "seconds": 50}]}, "lengths": LENGTHS},
        {"mix": [poisson(30), poisson(70)]},
    ],
)
def test_every_kind_of_workload_can_be_longer(workload: dict[str, Any]) -> None:
    one, five = synthesise(workload), synthesise(longer_workload(workload, 5))
    assert len(five) == pytest.approx(5 * len(one), rel=0.3) and five.span == pytest.approx(5 * one.span, rel=0.3)
