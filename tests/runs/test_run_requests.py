"""Requests of a run are created when the engine reads them, and are rows of numbers when they are done."""

from __future__ import annotations

import csv
import io
import pickle
import tracemalloc
from pathlib import Path
from typing import Any, Optional

import pytest
from servesim.config.scenario import scenario_from
from servesim.core import ClientRequest, Request
from servesim.costs.device_profile import load_profile
from servesim.costs.linear import LinearCost
from servesim.engine.clients import PART
from servesim.engine.inbox import Inbox
from servesim.engine.loop import Loop
from servesim.engine.server import Server
from servesim.engine.simulated import SimulatedClock
from servesim.engine.step import Step
from servesim.policies.vllm_v1 import VLLMV1
from servesim.runs.build import build_simulation, copy_requests
from servesim.runs.fleet import build_fleet
from servesim.runs.replicas import request_table
from servesim.runs.request_rows import COLUMNS, request_rows
from servesim.runs.run_folder import write_run
from servesim.runs.run_requests import RunRequests
from servesim.runs.simulate import Run, load_trace, needs_all, run_loop, simulate
from servesim.traces.trace import Trace

PROFILE = {"prefill": 0.002, "prefill_token": 6e-5, "decode_step": 0.004, "decode_row": 5e-5, "context": 1.2e-7}


def tree(count: int, policy: str = "vllm-v1", rate: float = 30.0, tokens: int = 8, **keys: Any) -> dict[str, Any]:
    lengths = {"kind": "lognormal", "prompt": {"mean": 60, "sd": 40}, "output": {"mean": tokens, "sd": 2}}
    workload = {"requests": count, "arrivals": {"kind": "poisson", "rate": rate}, "lengths": lengths}
    engine = {"num_blocks": 300, "max_model_len": 1024, **keys.pop("engine", {})}
    return {"policy": {"name": policy}, "engine": engine, "profile": PROFILE, "workload": workload, **keys}


def run_with_all(settings: dict[str, Any]) -> Run:
    """Run a scenario whose requests are all created at the start."""
    scenario = scenario_from(settings)
    profile, requests = load_profile(scenario.profile), copy_requests(load_trace(scenario).requests)
    if scenario.cluster is not None:
        fleet, clocks = build_fleet(scenario, scenario.cluster, requests, (), True, profile)
        return run_loop(fleet, clocks, scenario, profile, requests)
    loop, clock = build_simulation(scenario, requests, (), True, profile)
    return run_loop(loop, [clock], scenario, profile, requests)


def cluster(router: str) -> dict[str, Any]:
    return {"cluster": {"replicas": 3, "router": router}}


@pytest.mark.parametrize(
    ("policy", "keys"),
    [
        ("vllm-v1", {}),
        ("sglang", {}),
        ("mindie", {}),
        ("llm-serving", {"engine": {"front_end": {"lag": 3}}}),
        ("vllm", {"engine": {"num_blocks": 40}}),
        ("vllm-v1", {"engine": {"front_end": {"seconds": 0.01, "per_request": 0.003, "per_token": 1e-5}}}),
        ("vllm-v1", {"rate": 400.0, "engine": {"client_timeout": 2.0}}),
        ("vllm-v1", {"rate": 80.0, **cluster("round-robin")}),
        ("llm-serving", {"rate": 80.0, "engine": {"front_end": {"lag": 3}}, **cluster("random")}),
        ("sglang", {"rate": 80.0, **cluster("least-requests")}),
    ],
)
def test_a_run_that_creates_requests_as_they_arrive_has_the_same_results(policy: str, keys: dict[str, Any]) -> None:
    settings = tree(3 * PART, policy, **keys)
    streamed, other = simulate(scenario_from(settings)), run_with_all(settings)
    assert streamed.result() == other.result()
    rows = [list(request_table(run.requests, run.replicas)[1]) for run in (streamed, other)]
    assert rows[0] == rows[1]
    for new, old in zip(streamed.requests, other.requests):
        assert new is not old and new.client_fields() == old.client_fields()
        for name in ("arrival", "scheduled", "first_token", "last_token", "finish", "status", "outcome", "reason"):
            assert getattr(new, name) == getattr(old, name), name


def test_requests_csv_has_the_bytes_of_its_rows(tmp_path: Path) -> None:
    """Also with drafts, requests of several answers, a fleet, and requests that do not finish."""
    drafts = {"method": "ngram", "tokens": 2, "acceptance": 0.6}
    settings = tree(60, rate=400.0, speculative=drafts, engine={"client_timeout": 0.3}, **cluster("round-robin"))
    settings["workload"]["lengths"]["output"] = {"mean": 60, "sd": 30}
    run = simulate(scenario_from(settings))
    assert {"finished", "lost"} <= set(run.measures.outcomes())
    write_run(run, tmp_path)
    assert run.replicas is not None
    rows = [
        (*row, request.drafted, request.accepted, run.replicas.name_of(request.id))
        for row, request in zip(request_rows(run.requests), run.requests)
    ]
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows([[*COLUMNS, "drafted", "accepted", "replica"], *rows])
    assert (tmp_path / "requests.csv").read_bytes() == text.getvalue().encode()


def peak_bytes(settings: dict[str, Any]) -> int:
    scenario = scenario_from(settings)
    trace = load_trace(scenario)
    tracemalloc.start()
    try:
        simulate(scenario, trace)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("router", [None, "round-robin", "least-requests"])
def test_memory_grows_with_the_requests_in_flight(router: Optional[str]) -> None:
    """A request object takes 850 bytes, its row 160; the rest are the gaps between tokens and the replica by id.

    Up to four parts exist as objects, so the smaller run has more.
    """
    keys = {"rate": 30.0, "tokens": 3, **({} if router is None else cluster(router))}
    simulate(scenario_from(tree(10, **keys)))  # imports modules
    few, many = (peak_bytes(tree(count, **keys)) for count in (5 * PART, 9 * PART))
    assert (many - few) / (4 * PART) < (300 if router is None else 450)


def test_a_queue_that_grows_keeps_its_requests() -> None:
    settings = tree(4 * PART, rate=5000.0)
    run = simulate(scenario_from(settings))
    assert run.measures.outcomes() == {"finished": 4 * PART}
    assert run.result() == run_with_all(settings).result()


def test_a_stuck_run_has_a_row_for_every_request() -> None:
    settings = tree(3 * PART, engine={"num_blocks": 6, "reject_oversized": "never"})
    run = simulate(scenario_from(settings))
    assert run.stuck is not None and len(run.requests) == 3 * PART
    assert run.result() == run_with_all(settings).result()
    assert run.requests[-1].status == "waiting" and run.requests[-1].outcome is None


def test_requests_are_read_by_index_slice_and_from_the_end() -> None:
    requests = simulate(scenario_from(tree(40))).requests
    assert requests[-1].id == 39 and [r.id for r in requests[3:7]] == [3, 4, 5, 6]
    assert [r.serial for r in requests[::-20]] == [39, 19]
    assert [r.finish for r in pickle.loads(pickle.dumps(requests))] == [r.finish for r in requests]
    with pytest.raises(IndexError):
        requests[40]


def test_requests_are_created_when_they_are_sent() -> None:
    """A stream of requests is read one by one, at their times."""
    created: list[int] = []
    most = 0

    def numbered() -> Any:
        for number in range(100):
            created.append(number)
            yield Request(number, float(number), 1, 1)

    class Watch:
        def on_step_start(self, server: Server, step: Step, arrived: list[Request]) -> None:
            nonlocal most
            most = max(most, len(created) - len(server.done or ()))

        def on_step_end(self, server: Server, step: Step, now: float, finished: list[Request]) -> None:
            pass

    server = Server(VLLMV1(), 100, 16)
    server.done = []
    Loop(server, Inbox(numbered()), SimulatedClock(LinearCost(base=0.5)), (Watch(),)).run()
    assert len(server.done) == 100 and most <= 3


@pytest.mark.parametrize(
    "keys",
    [
        {"engine": {"front_end": {"end_lag": True}}},
        {"cluster": {"replicas": 2, "faults": [{"at": 1.0, "replica": 0, "kind": "crash"}]}},
    ],
)
def test_some_runs_create_all_requests_at_the_start(keys: dict[str, Any]) -> None:
    scenario = scenario_from(tree(20, **keys))
    assert needs_all(scenario, load_trace(scenario))
    requests = simulate(scenario).requests
    assert isinstance(requests, RunRequests) and requests[3].finish is not None


def test_a_trace_that_is_not_sorted_is_sorted() -> None:
    trace = Trace([ClientRequest(k, float(9 - k), 8, 2) for k in range(9)], "list", "synth")
    run = simulate(scenario_from(tree(1)), trace)
    assert [request.id for request in run.requests] == list(range(9))
    assert run.requests[0].first_token > run.requests[8].first_token
