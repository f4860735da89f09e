"""Live runs with asynchronous scheduling: the decisions of the simulation, and the tokens of a synchronous run."""

from __future__ import annotations

import gc
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from servesim.calibrate.device.backend import MODELS, Backend, Row
from servesim.calibrate.device.fake import FakeBackend
from servesim.calibrate.live import driver
from servesim.calibrate.live.replay_job import RESULT_FIELDS, replay
from servesim.calibrate.live.setup import replay_arguments
from servesim.calibrate.probe.host_overhead import fit_saved
from servesim.calibrate.replay.measured_run import run_from_result
from servesim.calibrate.replay.replay import as_backend_scenario, profile_of_run
from servesim.calibrate.replay.resimulate import resimulate
from servesim.calibrate.replay.verify import compare
from servesim.config.scenario import Scenario, scenario_from
from servesim.core import Request, Shape
from servesim.core.content import content_of_pieces
from servesim.costs.device_profile import Profile
from servesim.costs.linear import LinearCost
from servesim.costs.parts import HostPart
from servesim.engine.clocks import VirtualClock
from servesim.engine.simulated import SimulatedClock
from servesim.files.step_table import ModelCall, model_call
from servesim.policies.vllm_v1 import VLLMV1
from servesim.policies.vllm_v1.rules import VLLMRules
from servesim.runs.build import build_scenario_loop, copy_requests
from servesim.runs.decision_log import InMemoryLog
from servesim.runs.run_folder import run_data

from ...commands.running import run_sim

COST = LinearCost(base=0.5, prefill_token=0.125, decode_live=0.25)  # steps may end at arrival times
MICRO = MODELS["micro"]


@pytest.fixture(autouse=True)
def no_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A live run starts with a garbage collection, which is slow with the objects of pytest."""
    monkeypatch.setattr(gc, "collect", lambda: 0)


def scenario_of(blocks: int, **changes: Any) -> Scenario:
    policy = {"name": "vllm-v1", "max_num_seqs": 6, "max_num_batched_tokens": 24, "async_scheduling": True, **changes}
    engine = {"num_blocks": blocks, "block_size": 4, "reject_oversized": "always"}
    return as_backend_scenario(scenario_from({"policy": policy, "engine": engine}))


def draw_requests(seed: int, count: int = 9) -> list[Request]:
    """Return requests with common beginnings; some end before their limit, as if by a stop token."""
    rng = random.Random(seed)
    requests = []
    for id in range(count):
        content = content_of_pieces([("system", rng.randint(1, 9)), (f"prompt:{id}", rng.randint(1, 12))])
        output = rng.randint(1, 12)
        limit = output + rng.choice((0, 0, 1, 6))
        requests.append(Request(id, rng.randint(0, 40) / 8, content.ends[-1], output, limit, content=content))
    return requests


def run_live(backend: Backend, scenario: Scenario, requests: Sequence[Request], **options: Any) -> dict[str, Any]:
    args = replay_arguments(scenario, requests, MICRO, options.pop("warm_up", 0))
    clock = options.pop("clock", None)
    result: dict[str, Any] = json.loads(json.dumps(replay(backend, {**args, **options}, clock=clock)))
    return result


def fake_backend() -> FakeBackend:
    backend = FakeBackend({})
    backend.load(MICRO, 64, 4)
    return backend


def simulate(scenario: Scenario, requests: Sequence[Request]) -> tuple[list[Request], list[Any]]:
    simulated, log = copy_requests(requests), InMemoryLog()
    build_scenario_loop(scenario, simulated, SimulatedClock(COST), (log,)).run()
    return simulated, json.loads(json.dumps(log.rows))


@pytest.mark.parametrize("cache", [False, True], ids=["no cache", "prefix cache"])
def test_on_a_virtual_clock_decisions_times_and_tokens_are_those_of_the_simulation(cache: bool) -> None:
    preemptions, early_ends, overlapped = 0, 0, 0
    for seed in range(40):
        requests = draw_requests(seed)
        scenario = scenario_of(10 + seed % 8, enable_prefix_caching=cache)
        live = run_live(fake_backend(), scenario, requests, clock=VirtualClock(COST), check_tokens=len(requests))
        simulated, decisions = simulate(scenario, requests)
        assert live["decisions"] == decisions
        for row, request in zip(live["requests"], simulated):
            assert row[2:] == [getattr(request, name) for name in RESULT_FIELDS]
        assert [answer for answer in live["token_check"]["answers"] if answer["different"]] == []
        assert live["blocks_left"] == live["blocks"]
        preemptions += sum(request.preemptions for request in simulated)
        early_ends += sum(request.output < request.limit for request in simulated)
        overlapped += sum("start" in decision for decision in decisions)
    assert preemptions > 20
    assert early_ends > 100
    assert overlapped > 500


def test_an_engine_that_drops_the_token_of_a_preempted_request_computes_it_again() -> None:
    class Dropping(VLLMV1):
        def rules(self) -> VLLMRules:
            rules = super().rules()
            rules.drops_tokens_in_flight = True
            return rules

    preemptions = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            driver, "make_policy", lambda policy: Dropping(**{k: v for k, v in policy.items() if k != "name"})
        )
        for seed in range(30):
            requests = draw_requests(seed)
            scenario = scenario_of(10, enable_prefix_caching=False)
            live = run_live(fake_backend(), scenario, requests, clock=VirtualClock(COST), check_tokens=len(requests))
            assert [answer for answer in live["token_check"]["answers"] if answer["different"]] == []
            preemptions += sum(row[2 + RESULT_FIELDS.index("preemptions")] for row in live["requests"])
    assert preemptions > 10


def cpu_backend() -> Backend:
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install '.[torch]'")
    from servesim.calibrate.device.torch.backend import TorchBackend

    torch.set_num_threads(1)
    backend = TorchBackend("cpu", threads=1)
    backend.load(MICRO, 64, 4)
    return backend


@pytest.mark.parametrize("cache", [False, True], ids=["no cache", "prefix cache"])
def test_on_torch_tokens_are_those_of_a_synchronous_run_and_measured_times_give_its_decisions(cache: bool) -> None:
    backend, requests = cpu_backend(), draw_requests(3, 16)
    for request in requests:
        request.sent = request.arrival = request.arrival / 50
    answers = {}
    for asynchronous in (False, True):
        scenario = scenario_of(14, enable_prefix_caching=cache, async_scheduling=asynchronous)
        live = run_live(backend, scenario, requests, check_tokens=len(requests), warm_up=8)
        assert live["stuck"] is None
        checked = live["token_check"]["answers"]
        assert sum(answer["beyond_ties"] for answer in checked) == 0
        answers[asynchronous] = {answer["id"]: answer["tokens"] for answer in checked}
        assert sum(row[2 + RESULT_FIELDS.index("preemptions")] for row in live["requests"]) > 0
        profile = Profile("none", LinearCost(base=0.002))
        measured = run_data(run := run_from_result(scenario, profile, copy_requests(requests), live), run.decisions)
        resimulated, calls_matched = resimulate(measured, profile)
        assert calls_matched == len(live["calls"])
        comparison = compare(resimulated, measured)
        assert comparison.decisions.identical
        assert all(abs(row.error or 0.0) < 1e-6 for row in comparison.rows)
    assert answers[False] == answers[True]
    starts, ends = [call[0] for call in live["calls"]], [call[2] for call in live["calls"]]
    assert all(start >= end for start, end in zip(starts[1:], ends))  # one after another
    assert sum(start == end for start, end in zip(starts[1:], ends)) > len(ends) // 2  # most wait for the one before


def test_a_step_in_flight_takes_the_time_of_the_device_or_that_of_the_host() -> None:
    result = run_live(fake_backend(), scenario_of(40), draw_requests(1), clock=VirtualClock(COST))
    alone, saved = LinearCost(base=0.010, prefill_token=1e-5), HostPart(step=0.001, row=0.0001, token=2e-6)
    shapes = [Shape(decode_rows=rows, decode_live=rows, context=40 * rows) for rows in range(1, 17)]
    shapes += [Shape(prefill_rows=1, prefill_tokens=n, prefill_live=n, squares=n * n) for n in range(50, 800, 50)]
    warm_up = []
    for shape in shapes:
        rows = shape.prefill_rows + shape.decode_live
        seconds = alone.seconds(shape) - saved.seconds(rows, shape.prefill_rows, shape.prefill_live)
        warm_up.append(ModelCall(0.0, 0.0, seconds, shape).flat())
    result["backend"]["backend"], result["warm_up_calls"] = "torch", warm_up
    profile, four, prompt = Profile("flat", alone), shapes[3], shapes[-1]
    for steps, host, shape, expected in (
        (2, HostPart(step=0.002), four, 0.010 - 0.0014),  # what overlaps is a part of a step alone
        (2, HostPart(step=0.002), prompt, 0.010 + 0.0075 - 0.0011 - 0.0015),
        (2, HostPart(step=0.012), four, 0.012),
        (1, HostPart(step=0.002), four, 0.012),
    ):
        scenario = scenario_of(40, async_scheduling=steps > 1)
        live = run_from_result(scenario, profile, draw_requests(1), result)
        assert profile_of_run(profile, live, host).cost.seconds(shape) == pytest.approx(expected)


@pytest.mark.usefixtures("virtual_time")
def test_the_warm_up_shows_what_overlaps() -> None:
    """Launching a step of this device takes the host 4 ms. In flight, that is hidden by the step before."""

    class SlowLaunch(FakeBackend):
        def launch(self, rows: Sequence[Row]) -> None:
            time.sleep(0.004)
            super().launch(rows)

    backend = SlowLaunch({"base": 0.02})
    backend.load(MICRO, 64, 4)
    result = run_live(backend, scenario_of(40), draw_requests(1), warm_up=30)
    calls = [model_call(row) for row in result["warm_up_calls"]]
    saved = fit_saved(calls, LinearCost(base=0.024))
    assert saved.seconds(rows=4) == pytest.approx(0.004, rel=0.05)


def test_a_stopped_run_leaves_no_step_on_the_device(tmp_path: Path) -> None:
    backend, stop = cpu_backend(), tmp_path / "stop"
    stop.touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("servesim.calibrate.live.driver.REPORT_INTERVAL_S", 0.0)
        live = run_live(backend, scenario_of(40), draw_requests(1), stop=str(stop))
    assert live["stopped"] is True
    assert len(backend.launched) == 0  # type: ignore[attr-defined]


@pytest.mark.live
def test_a_replay_on_the_fake_backend_agrees_within_a_percent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = {"prompt": {"kind": "uniform", "low": 5, "high": 40}, "output": {"kind": "uniform", "low": 2, "high": 20}}
    scenario = {
        "workload": {"requests": 30, "arrivals": {"kind": "poisson", "rate": 40}, "lengths": lengths},
        "policy": {"name": "vllm-v1", "max_num_seqs": 8, "max_num_batched_tokens": 64, "async_scheduling": True},
        "engine": {"num_blocks": 30, "block_size": 8},
        "profile": {"base": 0.003, "prefill_token": 0.0001, "decode_live": 0.0002},
    }
    (tmp_path / "scenario.yaml").write_text(yaml.safe_dump(scenario))
    metrics = ["makespan", "preemptions", "model_calls", "mean_ttft_ms", "mean_tpot_ms", "p99_e2el_ms"]
    options = ["--backend", "fake", "--tolerance", "1%", "--metrics", *metrics, "--check-tokens", "10"]
    said = run_sim(capsys, "replay", str(tmp_path / "scenario.yaml"), *options, "-o", str(tmp_path))
    assert said.code == 0, said.error
    assert "decisions: identical" in said.out
    report = json.loads((tmp_path / "verify.json").read_text())
    assert report["comparisons"][0]["decisions"]["identical"] is True
