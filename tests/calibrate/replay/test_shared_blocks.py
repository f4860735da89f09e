"""Live runs with a prefix cache: requests share real blocks, and generate the same tokens as alone."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Optional

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from servesim.calibrate.client.prompts import Prompts
from servesim.calibrate.device.backend import MODELS
from servesim.calibrate.device.fake import FakeBackend
from servesim.calibrate.live import driver
from servesim.calibrate.live.replay_job import replay
from servesim.calibrate.live.request_json import request_to_json
from servesim.calibrate.live.setup import DeviceSession
from servesim.calibrate.live.shared_blocks import SharedBlockTables
from servesim.calibrate.replay.measured_run import run_from_result
from servesim.calibrate.replay.replay import replay_on_backend, with_known_answers
from servesim.config.scenario import Scenario, scenario_from
from servesim.core import Request, Stuck
from servesim.core.content import Content, content_of_pieces
from servesim.costs.device_profile import Profile
from servesim.costs.linear import LinearCost
from servesim.engine.clocks import VirtualClock
from servesim.engine.simulated import SimulatedClock
from servesim.runs.build import build_scenario_loop, copy_requests
from servesim.runs.decision_log import InMemoryLog

from ...commands.running import run_sim
from ..device.kbk_host import kbk_python

pytestmark = pytest.mark.timeout(1800)
COST = LinearCost(base=0.5, prefill_token=0.125, decode_live=0.25)  # steps may end at arrival times
BLOCK = 4


@pytest.fixture(autouse=True)
def no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A live run starts with a garbage collection; with the objects of pytest it would take 90 % of the time here."""
    monkeypatch.setattr(gc, "collect", lambda: 0)


def policy_of(**changes: Any) -> dict[str, Any]:
    return {"name": "vllm-v1", "max_num_seqs": 6, "max_num_batched_tokens": 24, **changes}


def conversation(session: str, turns: Sequence[tuple[int, int]], system: int) -> list[Request]:
    """Return the turns of a session, each (new tokens, output); all sessions start with one system prompt."""
    pieces: list[tuple[Any, int]] = [("system", system)]
    requests: list[Request] = []
    for turn, (new, output) in enumerate(turns):
        id, before = f"{session}{turn}", requests[-1].id if requests else None
        pieces.append((f"prompt:{id}", new))
        content = content_of_pieces(pieces, f"output:{id}")
        requests.append(
            Request(id, 0.0, content.ends[-1], output, session=session, content=content, follows=before, think_time=0.5)
        )
        pieces.append((f"output:{id}", output))
    return requests


class LiveResult:
    """A live run on a fake backend, whose tokens depend on every cached token, and its simulation."""

    def __init__(self, scenario: Scenario, requests: Sequence[Request]) -> None:
        rows = json.loads(json.dumps([request_to_json(request) for request in requests]))
        tables: list[SharedBlockTables] = []

        class Tables(SharedBlockTables):
            def __init__(self, *args: Any) -> None:
                super().__init__(*args)
                tables.append(self)

        model, engine = MODELS["micro"], scenario.engine
        backend = FakeBackend({})
        backend.load(model, 512, engine.block_size)
        args = {"policy": scenario.policy, "engine": engine.model_dump(), "requests": rows, "vocab": model.vocab}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(driver, "SharedBlockTables", Tables)
            self.live = replay(backend, {**args, "context": 512, "check_tokens": len(rows)}, clock=VirtualClock(COST))
        (self.tables,) = tables
        self.simulated = copy_requests(requests)
        log = InMemoryLog()
        self.loop = build_scenario_loop(scenario, self.simulated, SimulatedClock(COST), (log,))
        self.stuck: Optional[str] = None
        try:
            self.loop.run()
        except Stuck as error:
            self.stuck = str(error)
        self.loop.server.check()
        self.decisions = log.rows

    def check(self) -> None:
        live, cache = self.live, self.loop.server.prefix_cache
        assert live["stuck"] == self.stuck
        assert json.loads(json.dumps(live["decisions"])) == json.loads(json.dumps(self.decisions))
        assert live["prefix_cache"]["hits"] == cache.stats.hits
        assert self.tables.evicted == cache.stats.evicted_blocks
        assert [row[-1] for row in live["requests"]] == [request.cached_tokens for request in self.simulated]
        different = [answer for answer in live["token_check"]["answers"] if answer["different"]]
        assert different == []


@st.composite
def workloads(draw: Any) -> tuple[Scenario, list[Request]]:
    """Draw sessions with one system prompt, requests with shared beginnings, equal requests, and few blocks."""
    requests = []
    for session in range(draw(st.integers(0, 3))):
        lengths = st.tuples(st.integers(1, 9), st.integers(1, 7))
        requests += conversation(f"s{session}-", draw(st.lists(lengths, min_size=1, max_size=3)), 6)
    for id in range(draw(st.integers(1, 7))):
        pieces = draw(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 9)), max_size=3))
        content = content_of_pieces(pieces) if pieces else None
        prompt = content.ends[-1] if content is not None else draw(st.integers(1, 18))
        output = draw(st.integers(1, 12))
        request = Request(id, 0.0, prompt, output, output + draw(st.sampled_from([0, 0, 1, 5])), content=content)
        requests.append(request)
    for request in requests:
        request.sent = request.arrival = draw(st.integers(0, 40)) / 4
        request.priority = draw(st.integers(0, 2))
    policy = policy_of(
        max_num_seqs=draw(st.integers(1, 6)), max_num_batched_tokens=draw(st.sampled_from([6, 16, 24])),
        policy=draw(st.sampled_from(["fcfs", "fcfs", "priority"])), scheduler_reserve_full_isl=draw(st.booleans()),
        version=draw(st.sampled_from(["0.32.0", "0.23.0"])), async_scheduling=draw(st.booleans()),
    )  # fmt: skip
    engine = {"num_blocks": draw(st.integers(9, 24)), "block_size": BLOCK, "reject_oversized": "always"}
    return scenario_from({"policy": policy, "engine": engine}), requests


@settings(max_examples=100)
@given(workloads())
def test_live_runs_find_and_evict_the_blocks_of_the_simulation(drawn: tuple[Scenario, list[Request]]) -> None:
    LiveResult(*drawn).check()


def sharing_burst() -> list[Request]:
    """Sessions, equal prompts, and requests without content, in so few blocks that some are preempted."""
    requests = [
        *conversation("a", [(5, 9), (3, 6), (4, 5)], 17),
        *conversation("b", [(9, 7), (2, 8)], 17),
        *(Request(f"same{id}", 0.0, 24, 6, content=Content(["document"], [24])) for id in range(3)),
        *(Request(f"long{id}", 0.0, 30 + id, 14, content=Content(["document", id], [13, 30 + id])) for id in range(3)),
        *(Request(f"own{id}", 0.0, 11 + id, 8) for id in range(3)),
    ]
    for index, request in enumerate(requests):
        request.sent = request.arrival = 0.001 * index
    return requests


def burst_scenario(**changes: Any) -> Scenario:
    engine = {"num_blocks": 20, "block_size": 8, "max_model_len": 96}
    return scenario_from({"policy": policy_of(**changes), "engine": engine, "profile": {"base": 0.001}})


def loaded(backend: str, python: Optional[str]) -> Iterator[DeviceSession]:
    options = {"threads": 1, **({"device": "cpu"} if backend == "torch" else {})}
    with DeviceSession(backend, "micro", python, options=options) as session:
        session.load([burst_scenario()])
        yield session


@pytest.fixture(scope="module")
def torch_session() -> Iterator[DeviceSession]:
    pytest.importorskip("torch")
    yield from loaded("torch", None)


@pytest.fixture(scope="module")
def kbk_session() -> Iterator[DeviceSession]:
    yield from loaded("kbk", kbk_python())


@pytest.fixture(params=["torch", pytest.param("kbk", marks=pytest.mark.kbk)])
def session(request: pytest.FixtureRequest) -> DeviceSession:
    loaded_session: DeviceSession = request.getfixturevalue(f"{request.param}_session")
    return loaded_session


@pytest.mark.parametrize("changes", [{}, {"policy": "priority"}, {"max_num_batched_tokens": 2048}], ids=str)
def test_shared_blocks_give_the_answers_of_single_runs(session: DeviceSession, changes: dict[str, Any]) -> None:
    requests, profile = sharing_burst(), Profile("flat", LinearCost(base=0.001))
    scenario = burst_scenario(**changes, async_scheduling=session.backend != "kbk")
    replayed = replay_on_backend(session, "burst", scenario, requests, profile, check_tokens=len(requests))
    check, result = replayed.live.token_check, replayed.live.result()
    assert [answer.id for answer in check.different] == []
    assert len(check.answers) == len(requests)
    events = {event for answer in check.answers for event in answer.events}
    assert {"cached", "preempted"} <= events
    # A follow-up contains the generated answers before it, so it finds all full blocks of the turn before.
    (last,) = [request for request in replayed.live.requests if request.id == "a2"]
    assert last.cached_tokens >= 8 * ((17 + 5 + 9 + 3 + 6 - 1) // 8)
    assert result["prefix_cache_hits"] > 0
    comparison = replayed.comparison
    assert comparison.calls_matched is not None
    matched, calls = comparison.calls_matched
    assert matched == calls == len(replayed.live.model_calls)


def test_without_the_cache_more_tokens_are_computed(torch_session: DeviceSession) -> None:
    runs = [
        replay_on_backend(
            torch_session, "burst", burst_scenario(enable_prefix_caching=on), sharing_burst(), None, check_tokens=9
        ).live
        for on in (True, False)
    ]
    assert all(run.token_check is not None and not run.token_check.different for run in runs)
    cached, plain = (run.result() for run in runs)
    assert cached["prompt_tokens_computed"] < 0.8 * plain["prompt_tokens_computed"]
    assert "prefix_cache_hits" not in plain


def test_a_prompt_contains_texts_and_generated_answers() -> None:
    make_prompt = Prompts("3", 500).token_ids
    short = Request(1, 0.0, 9, 1, content=Content(["a", "b"], [4, 9]))
    long = Request(2, 0.0, 14, 1, content=Content(["a", "b", "c"], [4, 11, 14]))
    other = Request(3, 0.0, 9, 1, content=Content(["b", "a"], [4, 9]))
    assert make_prompt(long)[:9] == make_prompt(short)  # fewer tokens of a text are its beginning
    assert make_prompt(other)[:4] == make_prompt(short)[4:8]
    assert make_prompt(Request(1, 0.0, 9, 1)) != make_prompt(short)


def test_an_answer_that_may_be_incomplete_has_no_name() -> None:
    first, second, third = conversation("a", [(3, 5), (2, 4), (2, 4)], 8)
    assert [r.content for r in with_known_answers([first, second, third])] == [
        first.content, second.content, third.content,
    ]  # fmt: skip
    third.follows = None  # it may be sent before the answers that it contains
    kept = with_known_answers([first, second, third])
    answers = [request.content.answer for request in kept if request.content is not None]
    assert answers == [None, None, "output:a2"]
    assert first.content is not None and first.content.answer == "output:a0"  # the trace is not changed


@pytest.mark.usefixtures("device_here")
def test_the_command_measures_hits_and_checks_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenario = {
        "workload": {
            "requests": 24,
            "arrivals": {"kind": "poisson", "rate": 400},
            "lengths": {"prompt": {"kind": "uniform", "low": 20, "high": 40}, "output": {"kind": "fixed", "tokens": 6}},
            "prefixes": {"count": 2, "tokens": 18, "zipf": 1.1, "share": 0.8},
        },
        "policy": policy_of(),
        "engine": {"num_blocks": 40, "block_size": 4},
        "profile": {"base": 0.001, "decode_live": 0.0001},
    }  # fmt: skip
    file = tmp_path / "scenario.yaml"
    file.write_text(yaml.safe_dump(scenario))
    out = tmp_path / "out"
    said = run_sim(capsys, "replay", str(file), "--backend", "fake", "--check-tokens", "all", "-o", str(out))
    assert said.code == 0, said.error
    assert "token check: 24 of 24 answers equal those of the same requests alone" in said.out
    live, simulated = (json.loads((out / run / "result.json").read_text()) for run in ("live", "sim"))
    assert live["prefix_cache_queries"] == simulated["prefix_cache_queries"]
    assert live["prefix_cache_hits"] > 0
    assert "Prefix cache hits (% of prompt tokens):" in said.out
    again = run_sim(capsys, "verify", str(out / "sim"), str(out / "live"))
    assert "with measured step times" in again.out


def test_results_without_a_cache_can_be_read() -> None:
    requests = [Request(1, 0.0, 5, 2)]
    result = LiveResult(burst_scenario(), requests).live
    del result["prefix_cache"]  # of a recording from before
    result["requests"] = [row[:-1] for row in result["requests"]]
    run = run_from_result(burst_scenario(), Profile("none", LinearCost()), requests, result)
    assert "prefix_cache_hits" not in run.result()
