"""The same policy object simulated and live: both runs make the same decisions at the same times."""

from __future__ import annotations

import gc
import io
import json
import math
import re
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from servesim.calibrate.device.backend import MODELS
from servesim.calibrate.device.fake import FakeBackend
from servesim.calibrate.live.block_tables import BlockTables
from servesim.calibrate.live.driver import block_tables
from servesim.calibrate.live.replay_job import replay
from servesim.config.scenario import Scenario, scenario_from
from servesim.core import BadInput, Request, Stuck
from servesim.core.request import CLIENT_FIELDS
from servesim.costs.linear import LinearCost
from servesim.engine.build import build_loop, build_server
from servesim.engine.clocks import VirtualClock
from servesim.engine.loop import Loop
from servesim.engine.rules import rules_of
from servesim.engine.simulated import SimulatedClock
from servesim.policies import POLICIES
from servesim.runs.build import build_scenario_loop
from servesim.runs.decision_log import DecisionLog

from ..policy_values import policy_fields
from ..scenarios import run_steps

COST = LinearCost(base=0.5, prefill_token=0.125, decode_live=0.25, swap_block=0.25)  # steps may end at arrival times
LIVE: dict[str, dict[str, Any]] = {  # what live runs need
    "sglang": {"disable_radix_cache": True},
    "vllm-mindspore": {"policy": "fcfs"},
}


@pytest.fixture(autouse=True)
def no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A live run starts with a garbage collection; with the objects of pytest it would take 90 % of the time here."""
    monkeypatch.setattr(gc, "collect", lambda: 0)


@st.composite
def scenarios(draw: Any, name: str) -> tuple[Scenario, list[list[Any]]]:
    """Draw settings of a policy, a small engine and requests, often with simultaneous arrivals."""
    policy = draw(policy_fields(POLICIES[name]))
    block_size = 1 if name == "lightllm" else 4
    num_blocks = draw(st.integers(8, 24)) * (4 if block_size == 1 else 1)
    engine = {"num_blocks": num_blocks, "block_size": block_size, "host_blocks": 12}
    if draw(st.booleans()):
        engine["max_model_len"] = 40
    lag, seconds = draw(st.sampled_from([1, 1, 3])), draw(st.sampled_from([None, None, 0.25]))
    engine["front_end"] = {"lag": lag, "end_lag": draw(st.booleans()), "seconds": seconds}
    try:
        scenario = scenario_from({"policy": {"name": name, **policy, **LIVE.get(name, {})}, "engine": engine})
    except BadInput:
        assume(False)
    requests: list[list[Any]] = []
    for id in range(draw(st.integers(1, 9))):
        prompt, output = draw(st.integers(1, 18)), draw(st.integers(1, 12))
        after = draw(st.integers(0, id - 1)) if id and draw(st.integers(0, 5)) == 0 else None
        arrival = draw(st.integers(0, 40)) / 4
        job = f"{id}#job_name[{draw(st.sampled_from('abc'))}]#" if name == "vllm-ascend-batch-jobs" else id
        after = after if after is None else requests[after][0]
        requests.append(
            [job, arrival, prompt, output, output + draw(st.integers(0, 2)), 0, None, None, after, 0.25, None]
        )
    return scenario, requests


def run_simulated(scenario: Scenario, rows: list[list[Any]]) -> tuple[list[Any], list[Request], Any]:
    requests = [Request(**dict(zip(CLIENT_FIELDS, row))) for row in rows]
    file = io.StringIO()
    loop = build_scenario_loop(scenario, requests, SimulatedClock(COST), (DecisionLog(file),))
    stuck = None
    try:
        loop.run()
    except Stuck as error:
        stuck = str(error)
    return [json.loads(line) for line in file.getvalue().splitlines()], requests, stuck


def run_live(scenario: Scenario, rows: list[list[Any]]) -> dict[str, Any]:
    backend = FakeBackend({})
    model, engine = MODELS["micro"], scenario.engine
    backend.load(model, 512, engine.block_size, engine.host_blocks)
    args = {"policy": scenario.policy, "engine": engine.model_dump(), "requests": rows, "vocab": model.vocab}
    live: dict[str, Any] = json.loads(json.dumps(replay(backend, {**args, "context": 512}, clock=VirtualClock(COST))))
    return live


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_both_clocks_give_the_same_decisions_at_the_same_times(name: str) -> None:
    @settings(max_examples=10)
    @given(scenarios(name))
    def check(drawn: tuple[Scenario, list[list[Any]]]) -> None:
        scenario, rows = drawn
        try:
            live = run_live(scenario, rows)
        except BadInput as error:  # a policy without a block pool, on a device that is too small
            if "does not count blocks" not in str(error) and "a live run has one stage" not in str(error):
                with pytest.raises(BadInput, match=re.escape(str(error))):
                    run_simulated(scenario, rows)
            return
        decisions, requests, stuck = run_simulated(scenario, rows)
        assert live["decisions"] == decisions
        assert live["stuck"] == stuck
        times = [[r.written, r.first_token, r.client_end, r.preemptions, r.outcome] for r in requests]
        assert [[row[0], row[4], row[7], row[12], row[13]] for row in live["requests"]] == times

    check()


def test_a_live_run_refuses_to_compute_a_request_without_its_blocks() -> None:
    policy = {"name": "vllm-mindspore", "policy": "priority", "enable_prefix_caching": False}
    scenario = scenario_from({"policy": {**policy, "enable_chunked_prefill": False}, "engine": {"num_blocks": 8}})
    with pytest.raises(BadInput, match=r"policy: a live run cannot compute .* expected policy\.policy: fcfs"):
        run_live(scenario, [[0, 0.0, 9, 8, 8, 0, None, None, None, 0.0, None]])


def test_a_live_run_of_a_model_with_windows_stores_all_layers_in_full() -> None:
    request: list[Any] = [0, 0.0, 9, 8, 8, 0, None, None, None, 0.0, None]
    tree = {"policy": {"name": "vllm-v1"}, "engine": {"num_blocks": 80, "kv_cache_groups": [128, None]}}
    message = r"engine\.kv_cache_groups: expected \[null\]: a live run stores all layers in full, got \[128, null\]"
    with pytest.raises(BadInput, match=message):
        run_live(scenario_from(tree), [request])
    tree["engine"]["kv_cache_groups"] = [None]
    assert run_live(scenario_from(tree), [request])["requests"][0][13] == "finished"


@pytest.mark.parametrize("output", [3, 4, 5])
def test_the_block_of_a_token_after_the_end_is_free_when_its_step_returns(output: int) -> None:
    """SGLang 0.4.6 computes a token after the last one; with an output of 4, it starts a block."""
    policy = {"name": "sglang", "version": "0.4.6", "disable_radix_cache": True}
    scenario = scenario_from({"policy": policy, "engine": {"num_blocks": 8, "block_size": 4}})
    live = run_live(scenario, [[0, 0.0, 1, output, output, 0, None, None, None, 0.0, None]])
    assert live["blocks_left"] == live["blocks"] == 8


def test_a_finished_run_frees_all_its_blocks() -> None:
    rows = [[id, id / 4, 9, 8, 8, 0, None, None, None, 0.0, None] for id in range(12)]
    for name in sorted(POLICIES):
        policy = {"name": name, **LIVE.get(name, {})}
        scenario = scenario_from({"policy": policy, "engine": {"num_blocks": 100, "block_size": 4}})
        live = run_live(scenario, rows)
        if not rules_of(POLICIES[name]()).frees_late:  # these keep the last blocks until the next plan
            assert live["blocks_left"] == live["blocks"], name


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_aborted_requests_free_all_their_blocks(name: str) -> None:
    @settings(max_examples=15)
    @given(scenarios(name), st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=6))
    def check(drawn: tuple[Scenario, list[list[Any]]], aborts: list[tuple[int, int]]) -> None:
        scenario, rows = drawn
        requests = [Request(**dict(zip(CLIENT_FIELDS, row))) for row in rows]
        try:
            remaining, loop, tables = serve_with_aborts(scenario, requests, aborts)
        except (BadInput, Stuck):
            return
        assert remaining == []
        late_blocks = sum(len(tables.tables.get(request, ())) for request in loop.server.finished)
        assert tables.free_count + late_blocks == tables.total

    check()


SPLIT_FUSE, THREE_LANES = ("mindie", {"split_fuse": True}), ("vllm-ascend-short-first", {"threshold": 4})
GO_ON = sorted(set(POLICIES) - {"vllm-ascend-batch-jobs"})  # the real engine ends: see test_ascend_rules.py


@pytest.mark.parametrize(("name", "fields"), [*((name, {}) for name in GO_ON), SPLIT_FUSE, THREE_LANES])
def test_a_short_request_runs_after_the_head_of_the_queue_is_aborted(name: str, fields: dict[str, Any]) -> None:
    """The first request leaves no blocks for the second, which is aborted when the third arrives."""
    block_size = 1 if name == "lightllm" else 4
    policy = {"name": name, **fields, **LIVE.get(name, {})}
    scenario = scenario_from({"policy": policy, "engine": {"num_blocks": 32 // block_size, "block_size": block_size}})
    requests = [Request(0, 0.0, 16, 10, 10), Request(1, 0.5, 17, 4, 4), Request(2, 3.5, 3, 2, 2)]
    remaining, _, _ = serve_with_aborts(scenario, requests, [(4, 1)])
    assert remaining == []
    assert [request.outcome for request in requests] == ["finished", "aborted", "finished"]


def serve_with_aborts(
    scenario: Scenario, requests: list[Request], aborts: list[tuple[int, int]]
) -> tuple[list[Request], Loop, BlockTables]:
    """Run to the end and abort requests before the given model calls; return the requests that remain."""
    engine = {**scenario.engine.model_dump(), "reject_oversized": "always"}
    server = build_server(scenario.make_policy(), engine)
    tables = block_tables(server, engine["num_blocks"])
    loop = build_loop(server, engine, requests, VirtualClock(LinearCost(base=1.0)), (tables,))
    for _ in range(3000):
        for call, id in aborts:
            if call == loop.calls and id < len(requests) and requests[id].status in ("waiting", "running", "swapped"):
                loop.abort(requests[id], loop.now, "gone")
                server.check()
        run_steps(loop, 1)
        server.check()
        if loop.next_time == math.inf:
            loop.require_done()
            break
    return server.all_requests(), loop, tables
