"""`request.arrival` is when the scheduler gets a request. With a front-end lag this is later than the send time.

Every step takes 1 s, so with lag 7 the scheduler gets a request that was sent during the first call at 7 s.
"""

from __future__ import annotations

from typing import Any

import pytest
import servesim
from servesim.core import Policy, Request
from servesim.costs.linear import LinearCost
from servesim.engine.inbox import Inbox
from servesim.engine.loop import Loop
from servesim.engine.rules import rules_of
from servesim.engine.server import Server
from servesim.engine.simulated import SimulatedClock
from servesim.policies.llm_serving import LLMServing
from servesim.policies.vllm_v0 import VLLM
from servesim.policies.vllm_v1 import VLLMV1
from servesim.runs.packed_requests import mark_client_timeouts

from ..scenarios import RunLog


def serve_with_lag(policy: Policy, requests: list[Request], blocks: int = 100) -> RunLog:
    server = Server(policy, blocks + rules_of(policy).reserved_blocks, 4)
    log = RunLog({request.id: request for request in requests}, server)
    Loop(server, Inbox(requests, lag=7), SimulatedClock(LinearCost(base=1.0)), (log,), check=True).run()
    return log


def test_the_scheduler_gets_a_request_seven_calls_later_and_metrics_count_from_sending() -> None:
    requests = [Request("a", 0.0, 4, 20), Request("b", 0.5, 4, 2)]
    serve_with_lag(LLMServing(decode_batch=2), requests)
    assert [(r.sent, r.arrival, r.visible_at) for r in requests] == [(0.0, 0.0, 0.0), (0.5, 7.0, 7.0)]
    assert [r.client_fields()[1] for r in requests] == [0.0, 0.5]


@pytest.mark.parametrize("policy", [VLLM(), VLLMV1()])
def test_the_front_end_of_vllm_stamps_requests_when_they_are_sent(policy: Policy) -> None:
    requests = [Request("a", 0.0, 4, 20), Request("b", 0.5, 4, 2)]
    serve_with_lag(policy, requests)
    assert [(r.arrival, r.visible_at) for r in requests] == [(0.0, 0.0), (0.5, 7.0)]


@pytest.mark.parametrize(("factor", "first_token"), [(0.0, 8.0), (0.5, 9.0), (2.0, 11.0), (4.0, 13.0)])
def test_the_delay_factor_counts_from_arrival(factor: float, first_token: float) -> None:
    # The prefill of a took 1 s. b must have waited more than the factor, in whole steps from 7 s on, and runs for 1 s.
    requests = [Request("a", 0.0, 4, 20), Request("b", 0.5, 4, 2)]
    serve_with_lag(LLMServing(decode_batch=2, delay_factor=factor), requests)
    assert requests[1].first_token == first_token


def test_a_higher_delay_factor_raises_ttft_with_the_lag_of_llm_serving() -> None:
    workload: dict[str, Any] = {"contest": {"X": 2, "T": 60}}
    ttft = [
        servesim.run(preset="debias", workload=workload, settings={"policy.delay_factor": factor}).metrics[
            "mean_ttft_ms"
        ]
        for factor in (0, 0.5, 2, 4)
    ]
    assert all(1.1 * low < high for low, high in zip(ttft, ttft[1:])), ttft


@pytest.mark.parametrize(("max_wait", "order"), [(3.0, "a short long"), (2.0, "a long short")])
def test_max_wait_counts_from_arrival(max_wait: float, order: str) -> None:
    # The slot is free at 9 s. The long request was sent at 0.5 s, but it has waited for 2 s only.
    requests = [Request("a", 0.0, 4, 9), Request("long", 0.5, 4, 9), Request("short", 0.75, 4, 3)]
    policy = LLMServing(order="shortest-output", max_wait=max_wait)
    assert " ".join(serve_with_lag(policy, requests).order()) == order


@pytest.mark.parametrize(("victim", "preempted"), [("newest", "c"), ("oldest", "a")])
def test_requests_that_arrive_together_are_older_in_the_order_of_sending(victim: str, preempted: str) -> None:
    # b and c are sent one after the other, and the scheduler gets both at 7 s.
    requests = [Request("a", 0.0, 4, 30), Request("b", 0.5, 4, 30), Request("c", 0.75, 4, 30)]
    log = serve_with_lag(LLMServing(decode_batch=3, victim=victim), requests, blocks=9)
    assert requests[1].arrival == requests[2].arrival
    assert log.preempted[0][1] == preempted


def test_the_client_timeout_counts_from_sending() -> None:
    requests = [Request("a", 0.0, 4, 20), Request("b", 0.5, 4, 2)]
    serve_with_lag(LLMServing(decode_batch=2), requests)
    assert requests[1].client_end == 9.0  # 8.5 s after sending, and 2 s after its arrival
    mark_client_timeouts(requests[1:], 8.5)
    assert requests[1].outcome == "finished"
    mark_client_timeouts(requests[1:], 8.0)
    assert (requests[1].outcome, requests[1].client_end) == ("lost", 8.5)


def served_at_once(policy: Policy, requests: list[Request], per_request: float) -> list[float | None]:
    """Return when the scheduler sees each request of a burst; every step takes 1 s."""
    server = Server(policy, 100, 4)
    inbox = Inbox(requests, seconds=0.25, per_request=per_request)
    Loop(server, inbox, SimulatedClock(LinearCost(base=1.0)), check=True).run()
    assert len(inbox) == 0
    return [request.first_token for request in requests]


def test_a_front_end_passes_on_a_burst_one_by_one() -> None:
    requests = [Request(id, 0.0, 4, 2) for id in range(4)]
    policy = VLLMV1(async_scheduling=False)
    assert served_at_once(policy, requests, 0.5) == [1.75, 2.75, 2.75, 3.75]
    assert [request.visible_at for request in requests] == [0.75, 1.25, 1.75, 2.25]
    assert served_at_once(policy, [Request(id, 0.0, 4, 2) for id in range(4)], 0.0) == [1.25] * 4


def test_a_request_that_follows_another_passes_the_front_end_too() -> None:
    requests = [Request("a", 0.0, 4, 2), Request("b", 0.0, 4, 2, follows="a", think_time=1.0)]
    served_at_once(VLLMV1(async_scheduling=False), requests, 0.5)
    assert requests[1].sent == 3.75 and requests[1].visible_at == 4.5
