"""What must hold for every run: two runs of a scenario are equal, and the states of a request add up."""

from __future__ import annotations

import math

from servesim.runs.request_rows import seconds_in_states
from servesim.runs.run_requests import RunRequests
from servesim.runs.simulate import Run
from servesim.testing import TIMES

from .differences import is_same, metrics_of


def different_keys(run: Run, other: Run) -> list[str]:
    """Return what differs between two runs: times exactly, keys of result.json to the last digits of a sum."""
    metrics, others = dict(metrics_of(run.result())), dict(metrics_of(other.result()))
    keys = [key for key in {**metrics, **others} if not is_same(metrics.get(key), others.get(key), key)]
    if [TIMES(request) for request in run.requests] != [TIMES(request) for request in other.requests]:
        keys.append("times of requests")
    return keys if str(run.stuck) == str(other.stuck) else [*keys, "stuck"]


def faults_of(run: Run, other: Run) -> list[str]:
    """Return what differs between two runs of a scenario, or does not add up, without the known faults."""
    scenario = run.scenario
    stages = scenario.policy.get("pipeline_parallel_size", 1)
    keys = different_keys(run, other)
    # with stages, a request counts seconds of steps after its client has gone
    is_cut = stages > 1 and scenario.engine.client_timeout is not None
    return keys if is_cut else [*keys, *wrong_states(run), *wrong_states(other)]


def wrong_states(run: Run) -> list[str]:
    """Return the requests whose seconds in their states do not add up to the time until their end."""
    wrong = []
    states = zip(*(seconds.tolist() for seconds in seconds_in_states(RunRequests.of(run.requests))))
    for request, seconds in zip(run.requests, states):
        if request.client_end is not None and request.finish is not None:
            lifetime = max(request.client_end, request.finish) - request.sent
            if min(seconds) < 0.0 or not math.isclose(sum(seconds), lifetime, rel_tol=1e-9, abs_tol=1e-9):
                wrong.append(f"request {request.id}: {lifetime} s, states {seconds}")
    return wrong
