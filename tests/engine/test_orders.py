"""Orders of waiting, ageing and promotion work alike under every family."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from servesim.core import ORDERS, Policy, Request
from servesim.policies import POLICIES

from ..small import Story, serve

# The field by which each family says how many run at once; one at a time makes the order of waiting visible.
ROWS = (
    "decode_batch",
    "max_num_seqs",
    "max_ragged_sequence_count",
    "running_max_req_size",
    "max_running_requests",
    "max_batch_size",
)
# SRPT is an order itself; levels come before orders in MLFQ, so everybody joins the same one here.
FAMILIES = sorted(name for name in POLICIES if name != "srpt")
# nano-vllm's bound holds for a prefill alone, however many run, and it dies where memory is short.
BOUNDED = sorted(name for name in POLICIES if name != "nano-vllm")
ALONE: dict[str, dict[str, Any]] = {
    "mlfq": {"use_skip_join": False, "base_quantum": 1000.0},
    "splitfuse": {"mend_flush": True},
}


def one_at_a_time(name: str, **knobs: Any) -> Policy:
    """Return a family's policy with a batch of one."""
    known = {field.name for field in fields(POLICIES[name])}
    rows = next(row for row in ROWS if row in known)
    return POLICIES[name](**{rows: 1, **ALONE.get(name, {}), **knobs})


def told(policy: Policy, requests: list[Request]) -> Story:
    """Serve with much memory, and nobody left behind."""
    story = serve(policy, requests, blocks=4000, max_model_len=200)
    assert story.stuck is None
    assert all(request.outcome == "finished" for request in requests)
    return story


def crowd() -> list[Request]:
    """Return one that takes the only place, and some that wait for it meanwhile."""
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


def test_every_order_is_tried() -> None:
    assert set(EXPECTED) == set(ORDERS)


@pytest.mark.parametrize("order", EXPECTED)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_serves_waiting_in_the_order_asked_for(name: str, order: str) -> None:
    story = told(one_at_a_time(name, order=order, group_width=10), crowd())
    assert story.order() == ["first", *EXPECTED[order]]


@pytest.mark.parametrize("order", ["arrival", "longest-output", "priority"])
def test_srpt_goes_by_what_is_left_and_by_the_order_among_equals(order: str) -> None:
    requests = [Request("first", 0, 5, 2)]
    requests += [Request(i, 0.1, 5, 9, limit=9, priority=p) for i, p in enumerate([2, 0, 1])]
    expected = {"arrival": [0, 1, 2], "longest-output": [0, 1, 2], "priority": [1, 2, 0]}
    assert told(one_at_a_time("srpt", order=order), requests).order() == ["first", *expected[order]]
    assert told(one_at_a_time("srpt", order=order), crowd()).order() == ["first", *EXPECTED["shortest-output"]]


@pytest.mark.parametrize(("late", "order"), [(1.75, ["new", "old"]), (2.25, ["old", "new"])])
@pytest.mark.parametrize("name", sorted({*FAMILIES} & {*BOUNDED}))
def test_a_class_is_overtaken_once_ageing_has_made_up_for_the_gap(name: str, late: float, order: list[str]) -> None:
    # Two classes apart at a level a second: after 2 s the old one of the lower class is ahead.
    policy = one_at_a_time(name, order="priority", aging=1.0)
    requests = [Request("first", 0, 5, 9)]
    requests += [Request("old", 0.25, 5, 1, priority=2), Request("new", 0.25 + late, 5, 1, priority=0)]
    assert told(policy, requests).order() == ["first", *order]


@pytest.mark.parametrize(("aging", "order"), [(0.0, ["b", "c", "a"]), (1e6, ["a", "b", "c"])])
@pytest.mark.parametrize("name", sorted({*FAMILIES} & {*BOUNDED}))
def test_no_ageing_is_strict_priority_and_endless_ageing_is_first_come_first_served(
    name: str, aging: float, order: list[str]
) -> None:
    policy = one_at_a_time(name, order="priority", aging=aging)
    requests = [Request("first", 0, 5, 9), Request("a", 0.25, 5, 1, priority=2), Request("b", 1.25, 5, 1, priority=0)]
    requests.append(Request("c", 2.25, 5, 1, priority=1))
    assert told(policy, requests).order() == ["first", *order]


def stream() -> list[Request]:
    """Return a long request that comes first, and short ones that come faster than they are served."""
    return [Request("long", 0.5, 5, 20), *(Request(i, 0.4 + i, 5, 3) for i in range(30))]


@pytest.mark.parametrize("name", BOUNDED)
def test_a_promotion_bounds_how_long_anybody_waits(name: str) -> None:
    starved = told(one_at_a_time(name, order="shortest-output"), stream()).requests["long"]
    promoted = told(one_at_a_time(name, order="shortest-output", max_wait=10.0), stream()).requests["long"]
    assert starved.scheduled is not None
    assert promoted.scheduled is not None
    longest = 4.0  # a short one that has just begun: its three steps, and one to notice (SGLang's last decode)
    assert starved.scheduled - starved.arrival > 60.0
    assert 10.0 <= promoted.scheduled - promoted.arrival <= 10.0 + longest


@pytest.mark.parametrize("name", BOUNDED)
def test_everybody_finishes_under_memory_pressure_in_any_order(name: str) -> None:
    for order in ORDERS:
        requests = [Request(i, i / 2, 5 + i % 7, 4 + i % 11, priority=i % 3) for i in range(25)]
        knobs = {**ALONE.get(name, {}), "order": order}
        if name == "llm-serving":
            knobs["decode_batch"] = 8
        story = serve(POLICIES[name](**knobs), requests, blocks=48, host_blocks=48, max_model_len=32)
        assert story.stuck is None, order
        assert all(request.outcome == "finished" for request in requests), order
