"""Clients of the engine: the time between an answer and the next request, and clients that give up."""

from __future__ import annotations

import io
from typing import Any

import pytest
from servesim.config.scenario import CLIENT_DELAY_S, scenario_from
from servesim.core import Request
from servesim.costs.device_profile import Profile
from servesim.costs.linear import LinearCost
from servesim.policies import POLICIES
from servesim.runs.decision_log import DecisionLog
from servesim.runs.simulate import Run, simulate
from servesim.traces.trace import Trace

from ..run_checks import different_keys, wrong_states

STEP = 0.01


def serve(requests: list[Request], policy: dict[str, Any], hold: bool = True, **engine: Any) -> Run:
    scenario = scenario_from({"policy": policy, "engine": {"num_blocks": 400, "block_size": 16, **engine}})
    profile = Profile("steps", LinearCost(base=STEP, prefill_token=1e-5))
    return simulate(scenario, Trace(requests, "test", "synth"), hold=hold, profile=profile)


def closed_loop(users: int, rounds: int) -> list[Request]:
    """Every user sends the next request after its answer; answers have different lengths."""
    return [
        Request(f"{k}", 0.0, 16, 6 + 7 * k % 11, follows=None if k < users else f"{k - users}")
        for k in range(users * rounds)
    ]


def true_ttft(outputs: list[int], users: int, delay: float) -> list[float]:
    """Return the TTFT of a closed loop on a synchronous engine with steps of 10 ms, computed step by step."""
    sent = dict.fromkeys(range(users), 0.0)
    left: dict[int, int] = {}
    ttft, now = {}, 0.0
    while sent or left:
        new = [k for k, time in sent.items() if time <= now]
        if not (new or left):
            now = min(sent.values())
            continue
        end = now + STEP
        for k in new:
            ttft[k], left[k] = end - sent.pop(k), outputs[k]
        for k in list(left):
            left[k] -= 1
            if not left[k]:
                del left[k]
                if k + users < len(outputs):
                    sent[k + users] = end + delay
        now = end
    return [ttft[k] for k in range(len(outputs))]


@pytest.mark.parametrize("delay", [0.0, CLIENT_DELAY_S, 0.4 * STEP, 3.2 * STEP])
def test_ttft_of_a_closed_loop_is_that_of_an_engine_whose_truth_is_known(delay: float) -> None:
    requests = closed_loop(8, 6)
    scenario = scenario_from(
        {"policy": {"name": "vllm-v1", "async_scheduling": False}, "engine": {"client_delay": delay}}
    )
    run = simulate(scenario, Trace(requests, "test", "synth"), profile=Profile("steps", LinearCost(base=STEP)))
    simulated = [r.first_token - r.sent for r in run.requests if r.first_token is not None]
    assert simulated == pytest.approx(true_ttft([r.output for r in requests], 8, delay))


def test_the_next_request_of_a_client_misses_the_decision_after_its_answer() -> None:
    """A vLLM 0.32 server did this in 261 of 264 cases: the request was part of the second step after the answer."""
    users, policy = 4, {"name": "vllm-v1", "async_scheduling": False}
    at_once, by_default = (serve(closed_loop(users, 5), policy, **engine) for engine in ({"client_delay": 0.0}, {}))
    first, default = at_once.measures.ttft[users:].mean(), by_default.measures.ttft[users:].mean()
    assert default - first == pytest.approx(STEP - CLIENT_DELAY_S, rel=0.1)


def test_a_longer_think_time_includes_the_delay_of_the_client() -> None:
    requests = [Request("a", 0.0, 16, 3), Request("b", 0.0, 16, 3, follows="a", think_time=0.5)]
    run = serve(requests, {"name": "vllm-v1"}, client_delay=0.2)
    assert run.requests[1].sent - run.requests[0].client_end == pytest.approx(0.5)


def overload(count: int = 60) -> list[Request]:
    return [Request(k, 0.1 * (k // 8), 40 + k % 7 * 16, 20 + k * 13 % 50) for k in range(count)]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("caching", [False, True])
def test_clients_that_give_up_free_slots_and_blocks(asynchronous: bool, caching: bool) -> None:
    policy = {
        "name": "vllm-v1", "max_num_seqs": 4, "async_scheduling": asynchronous, "enable_prefix_caching": caching
    }  # fmt: skip
    run = serve(overload(), policy, client_timeout=0.6, num_blocks=60)
    lost = [r for r in run.requests if r.outcome == "lost"]
    assert {r.outcome for r in run.requests} == {"finished", "lost"}
    assert {r.scheduled is None for r in lost} == {True, False}
    for request in lost:
        assert request.client_end == pytest.approx(request.sent + 0.6)
        assert request.finish is not None and request.finish - request.client_end < 3 * STEP
        assert request.written < request.output
    assert run.server.pool.held == 0
    assert run.end < overload()[-1].arrival + 0.6 + 3 * STEP
    patient = serve(overload(), policy, num_blocks=60)
    assert run.end < 0.7 * patient.end


def test_a_request_that_cannot_run_blocks_the_queue_until_its_client_gives_up() -> None:
    requests = [Request("long", 0.0, 900, 4), Request("short", 0.1, 16, 4)]
    run = serve(requests, {"name": "vllm-v1", "enable_prefix_caching": False}, num_blocks=21, client_timeout=2.0)
    long, short = run.requests
    assert (run.stuck, long.outcome, long.finish, short.outcome) == (None, "lost", 2.0, "finished")
    assert short.first_token is not None and 2.0 < short.first_token < 2.02


def test_the_client_of_a_closed_loop_sends_its_next_request_when_it_gives_up() -> None:
    requests = [Request("a", 0.0, 16, 500), Request("b", 0.0, 16, 3, follows="a")]
    run = serve(requests, {"name": "vllm-v1"}, client_timeout=1.0)
    assert [r.outcome for r in run.requests] == ["lost", "finished"]
    assert run.requests[1].sent == pytest.approx(1.0 + CLIENT_DELAY_S)


def test_llm_serving_completes_the_requests_of_lost_clients() -> None:
    run = serve([Request("a", 0.0, 16, 200)], {"name": "llm-serving"}, client_timeout=0.5)
    assert (run.requests[0].outcome, run.requests[0].written) == ("lost", 200)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_time_outs_are_equal_with_and_without_hold(name: str) -> None:
    block_size = 1 if name in ("lightllm", "sglang") else 16
    for timeout in (0.21, 0.6):
        for requests in (overload(40), closed_loop(6, 6)):
            engine = {"client_timeout": timeout, "num_blocks": 640 // block_size + 20, "block_size": block_size}
            runs = [serve(requests, {"name": name}, fast, **engine) for fast in (True, False)]
            assert not different_keys(*runs)
            assert not wrong_states(runs[0]) and not wrong_states(runs[1])


def test_the_decision_log_has_the_requests_of_lost_clients() -> None:
    file = io.StringIO()
    scenario = scenario_from({"policy": {"name": "vllm-v1"}, "engine": {"client_timeout": 0.3}})
    trace = Trace([Request("a", 0.0, 16, 90)], "test", "synth")
    simulate(scenario, trace, (DecisionLog(file),), profile=Profile("steps", LinearCost(base=STEP)))
    assert '"kind": "reject"' in file.getvalue()
