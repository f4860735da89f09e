"""Queue orders, ageing and promotion give the same order with every policy."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from servesim.core import ORDERS, Policy, Request
from servesim.policies import POLICIES

from ..scenarios import RunLog, serve

# The field of each policy that limits the batch; with a batch of 1 the queue order is visible.
BATCH_SIZE_FIELDS = (
    "decode_batch", "max_num_seqs", "max_ragged_sequence_count", "running_max_req_size", "max_running_requests",
    "max_batch_size",
)  # fmt: skip
# Batch jobs of vllm-ascend have an order of their own, and `order` is for equal prompts of a job.
NAMES = sorted(name for name in POLICIES if name != "vllm-ascend-batch-jobs")
EXTRA_FIELDS: dict[str, dict[str, Any]] = {
    "splitfuse": {"wait_for_flush": True},
    "vllm-ascend-recompute": {"kv_consumer": False},  # a decode node does not finish preempted requests
    # its seats do not limit the running requests; with these weights, a prompt starts when no request runs
    "mindie": {"max_prefill_batch_size": 1, "stage_policy": "throughput", "decode_time_ms_per_req": 0},
}


def one_at_a_time(name: str, **knobs: Any) -> Policy:
    """Return the policy with a batch of 1."""
    known = {field.name for field in fields(POLICIES[name])}
    rows = next(row for row in BATCH_SIZE_FIELDS if row in known)
    return POLICIES[name](**{rows: 1, **EXTRA_FIELDS.get(name, {}), **knobs})


def run_policy(policy: Policy, requests: list[Request]) -> RunLog:
    """Serve with enough KV blocks; all requests must finish."""
    log = serve(policy, requests, blocks=4000, max_model_len=200)
    assert log.stuck is None
    assert all(request.outcome == "finished" for request in requests)
    return log


def one_running_rest_waiting() -> list[Request]:
    """Return a request that fills the batch of 1, and six that wait for it."""
    rows = [(7, 9, 3), (90, 2, 0), (30, 70, 2), (3, 40, 1), (60, 5, 3), (20, 20, 0)]  # prompt, limit, priority
    waiting = [Request(i, 0.1 + i / 100, prompt, limit, priority=p) for i, (prompt, limit, p) in enumerate(rows)]
    return [Request("first", 0, 5, 5), *waiting]


EXPECTED = {
    "arrival": [0, 1, 2, 3, 4, 5],
    "shortest-output": [1, 4, 0, 5, 3, 2],
    "longest-output": [2, 3, 5, 0, 4, 1],
    "shortest-prompt": [3, 0, 5, 2, 4, 1],
    "longest-prompt": [1, 4, 2, 5, 0, 3],
    "shortest-total": [0, 5, 3, 4, 1, 2],
    "longest-total": [2, 1, 4, 3, 5, 0],
    "output-groups": [0, 1, 4, 5, 3, 2],  # limits of 9 2 5, 20, 40, 70 by tens
    "priority": [1, 5, 3, 2, 0, 4],
}


def test_every_order_is_tested() -> None:
    assert set(EXPECTED) == set(ORDERS)


@pytest.mark.parametrize("order", EXPECTED)
@pytest.mark.parametrize("name", NAMES)
def test_every_policy_serves_the_waiting_queue_in_the_set_order(name: str, order: str) -> None:
    log = run_policy(one_at_a_time(name, order=order, group_width=10), one_running_rest_waiting())
    assert log.order() == ["first", *EXPECTED[order]]


@pytest.mark.parametrize(("delay", "order"), [(1.75, ["new", "old"]), (2.25, ["old", "new"])])
@pytest.mark.parametrize("name", NAMES)
def test_ageing_moves_an_old_request_ahead_of_a_higher_priority(name: str, delay: float, order: list[str]) -> None:
    # Priorities 2 and 0, ageing of 1 level per second: after 2 s the old request is ahead.
    policy = one_at_a_time(name, order="priority", aging=1.0)
    requests = [Request("first", 0, 5, 9)]
    requests += [Request("old", 0.25, 5, 1, priority=2), Request("new", 0.25 + delay, 5, 1, priority=0)]
    assert run_policy(policy, requests).order() == ["first", *order]


@pytest.mark.parametrize(("aging", "order"), [(0.0, ["b", "c", "a"]), (1e6, ["a", "b", "c"])])
@pytest.mark.parametrize("name", NAMES)
def test_no_ageing_is_strict_priority_and_fast_ageing_is_first_come_first_served(
    name: str, aging: float, order: list[str]
) -> None:
    policy = one_at_a_time(name, order="priority", aging=aging)
    requests = [Request("first", 0, 5, 9), Request("a", 0.25, 5, 1, priority=2), Request("b", 1.25, 5, 1, priority=0)]
    requests.append(Request("c", 2.25, 5, 1, priority=1))
    assert run_policy(policy, requests).order() == ["first", *order]


def overload() -> list[Request]:
    """Return an early long request, and short ones that arrive faster than the server runs them."""
    return [Request("long", 0.5, 5, 20), *(Request(i, 0.4 + i, 5, 3) for i in range(30))]


@pytest.mark.parametrize("name", NAMES)
def test_max_wait_bounds_the_waiting_time(name: str) -> None:
    starved = run_policy(one_at_a_time(name, order="shortest-output"), overload()).requests["long"]
    promoted = run_policy(one_at_a_time(name, order="shortest-output", max_wait=10.0), overload()).requests["long"]
    assert starved.scheduled is not None
    assert promoted.scheduled is not None
    slack = 4.0  # three steps of a short request that has just started, and one more step in SGLang
    assert starved.scheduled - starved.arrival > 60.0
    assert 10.0 <= promoted.scheduled - promoted.arrival <= 10.0 + slack


@pytest.mark.parametrize("name", NAMES)
def test_all_requests_finish_under_memory_pressure_in_any_order(name: str) -> None:
    for order in ORDERS:
        requests = [Request(i, i / 2, 5 + i % 7, 4 + i % 11, priority=i % 3) for i in range(25)]
        knobs = {**EXTRA_FIELDS.get(name, {}), "order": order}
        if name == "llm-serving":
            knobs["decode_batch"] = 8
        log = serve(POLICIES[name](**knobs), requests, blocks=48, host_blocks=48, max_model_len=32)
        assert log.stuck is None, order
        assert all(request.outcome == "finished" for request in requests), order
