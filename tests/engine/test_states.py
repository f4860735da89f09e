"""Seconds of a request in its states, also with two steps in flight. test_random_scenarios.py checks their sum."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from servesim.config.scenario import scenario_from
from servesim.core import BadInput, Chunk, Request
from servesim.engine.server import Server
from servesim.engine.step import Step
from servesim.policies import POLICIES
from servesim.runs.simulate import simulate

from ..random_scenarios import server_case
from ..run_checks import wrong_states


class ModelSeconds:
    """Adds up the seconds of the model calls that computed the prompt of a request, and of those that decoded it."""

    def __init__(self) -> None:
        self.prefill: Counter[Any] = Counter()
        self.decoding: Counter[Any] = Counter()
        self._prompts: dict[Step, list[Request]] = {}
        self._rows: dict[Step, list[Request]] = {}

    def on_step_start(self, server: Server, step: Step, arrived: list[Request]) -> None:
        alone = [chunk.request for chunk in step.chunks if server.draft_cohort is not None and is_decode(chunk)]
        self._prompts[step] = [chunk.request for chunk in step.chunks if chunk.request not in alone]
        prompts = {chunk.request for chunk in step.chunks}
        chosen = {chunk.request for chunk in step.plan.chunks}
        self._rows[step] = [
            request
            for request in server.running
            if request.decodes and request not in prompts and (step.plan.decode or request in chosen)
        ] + alone

    def on_step_end(self, server: Server, step: Step, now: float, finished: list[Request]) -> None:
        # one that has ended before: a token that is thrown away
        for request in self._prompts.pop(step):
            if request.status != "done" or request in finished:
                self.prefill[request.id] += now - step.start
        for request in self._rows.pop(step):
            if request.status != "done" or request in finished:
                self.decoding[request.id] += now - step.start


def is_decode(chunk: Chunk) -> bool:
    """Whether a chunk is the last token of a request whose prompt is computed, and its drafts."""
    return chunk.tokens - chunk.drafts == 1 and chunk.request.cached >= chunk.request.prompt


DROPS = {"sglang"}  # a preempted request loses its token in flight, and the time of the step is not decoding time


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_prefill_and_decoding_are_the_seconds_of_the_model_calls(name: str) -> None:
    for number in range(1100, 1105):
        case = server_case(number, name)
        if case.tree["engine"].get("data_parallel_size", 1) > 1:
            continue
        sums = ModelSeconds()
        try:
            run = simulate(scenario_from(case.tree), case.trace, (sums,), profile=case.profile)
        except (BadInput, AssertionError):
            continue
        assert not wrong_states(run)
        for request in run.requests:
            if request.finish is not None and not (request.preemptions and name in DROPS):
                assert request.prefilling == pytest.approx(sums.prefill[request.id], abs=1e-9), (request, case)
                assert request.decoding == pytest.approx(sums.decoding[request.id], abs=1e-9), (request, case)


def two_tokens(**engine: Any) -> dict[str, Any]:
    """Return a scenario of short answers with asynchronous scheduling."""
    return {
        "policy": {"name": "vllm-v1"},
        "engine": {"num_blocks": 1000, **engine},
        "profile": {"base": 0.01},
        "workload": {
            "requests": 100,
            "arrivals": {"kind": "poisson", "rate": 20},
            "lengths": {"kind": "fixed", "prompt": 20, "output": 2},
        },
    }


@pytest.mark.parametrize("hold", [True, False])
def test_a_request_with_two_tokens_decodes_for_one_step(hold: bool) -> None:
    run = simulate(scenario_from(two_tokens()), hold=hold)
    assert {round(request.decoding, 9) for request in run.requests} == {0.01}
    assert not wrong_states(run)


@pytest.mark.parametrize("hold", [True, False])
def test_a_preempted_request_waits_after_its_step_in_flight(hold: bool) -> None:
    tree = two_tokens(num_blocks=40)
    tree["workload"]["lengths"] = {"kind": "uniform", "prompt": [10, 60], "output": [40, 80]}
    run = simulate(scenario_from(tree), hold=hold)
    assert sum(request.preemptions for request in run.requests) > 20
    assert not wrong_states(run)


def test_a_client_that_gives_up_has_no_negative_time_in_the_front_end() -> None:
    run = simulate(scenario_from(two_tokens(client_timeout=0.015)))
    assert run.measures.outcomes()["lost"]
    assert not wrong_states(run)
