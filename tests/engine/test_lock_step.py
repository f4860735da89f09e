"""Data-parallel ranks in lock step, for random requests and settings."""

from __future__ import annotations

import io
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from servesim.config.registry import make_policy
from servesim.core import BadInput, Policy, Request, Stuck
from servesim.engine.inbox import Inbox
from servesim.engine.lock_step import LockStep
from servesim.engine.loop import Loop
from servesim.engine.replica import Replica
from servesim.engine.router_view import RouterTexts
from servesim.engine.server import Server
from servesim.engine.simulated import SimulatedClock
from servesim.policies import POLICIES
from servesim.routers.simple import RoundRobin
from servesim.runs.build import copy_requests
from servesim.runs.decision_log import DecisionLog
from servesim.testing import ContractWorld, Outcome, Recorder, simulated

from ..policy_values import known_fields, policy_fields
from .test_contract import worlds

NAMES = [name for name in POLICIES if name.startswith(("vllm-", "mindie", "llm-serving"))]


def in_lock_step(policy: Policy, world: ContractWorld, ranks: int, busy: int, observer: Any = None) -> list[Outcome]:
    """Serve the requests on the first ranks in turn; the others get none. The observer sees the busy ranks."""
    requests, clock = copy_requests(world.requests), SimulatedClock(world.cost)
    loops = []
    for rank in range(ranks):
        server = Server(policy, world.blocks, world.block_size, world.host_blocks, world.max_model_len)
        server.limits.change(None, world.rejects)
        inbox = Inbox(requests[rank::busy] if rank < busy else [], world.lag, end_lag=world.end_lag)
        observers = (observer,) if observer is not None and rank < busy else ()
        loops.append(Loop(server, inbox, clock, observers, check=True))
    stuck = None
    try:
        LockStep([Replica(loop) for loop in loops], RoundRobin(), [], RouterTexts(), 0, 0.0).run()
    except (Stuck, BadInput) as error:
        stuck = str(error)
    return [Outcome(requests[rank::busy], loop.server, loop.calls, stuck) for rank, loop in enumerate(loops[:busy])]


def test_no_rank_goes_on_after_one_is_stuck() -> None:
    """The engine preempts a request that can never fit, again and again, until the loop ends."""
    fields = {"enable_prefix_caching": False, "long_prefill_token_threshold": 4, "scheduler_reserve_full_isl": False}
    policy = make_policy({"name": "vllm-ascend-profiling-chunk", **fields})
    world = ContractWorld([Request(0, 0.0, 11, 3)], 10, 1, 0, 40, rejects=None)
    alone, log = Recorder(), Recorder()
    expected = simulated(policy, world, hold=False, observer=alone)
    (got,) = in_lock_step(policy, world, 3, 1, log)
    assert expected.stuck is not None and got.stuck == expected.stuck
    assert len(log.steps) == len(alone.steps)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=10)
@given(data=st.data())
def test_ranks_without_requests_change_nothing(name: str, data: st.DataObject) -> None:
    policy, world = draw_policy(name, data), data.draw(worlds())
    assume(getattr(policy, "pipeline_parallel_size", 1) == 1)  # a scenario with ranks has one stage
    alone, log = Recorder(), Recorder()
    expected = simulated(policy, world, hold=False, observer=alone)
    (got,) = in_lock_step(policy, world, 3, 1, log)
    assert log.steps == alone.steps
    assert (got.times(), got.stuck, got.calls) == (expected.times(), expected.stuck, expected.calls)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=10)
@given(data=st.data())
def test_no_rank_loses_requests_or_blocks(name: str, data: st.DataObject) -> None:
    file = io.StringIO()
    ranks = in_lock_step(
        draw_policy(name, data), data.draw(worlds()), 3, data.draw(st.integers(2, 3)), DecisionLog(file)
    )
    assert len(file.getvalue().splitlines()) >= sum(rank.calls for rank in ranks)
    for rank in ranks:
        if rank.stuck is None:
            assert all(request.outcome is not None and request.client_end is not None for request in rank.requests)
            assert rank.server.tokens_generated == sum(request.written for request in rank.requests)
            assert rank.server.pool.held == sum(request._blocks for request in rank.server.finished)


def draw_policy(name: str, data: st.DataObject) -> Policy:
    """Draw a policy that decides a step after the last one has returned."""
    kind = POLICIES[name]
    values = data.draw(policy_fields(kind))
    if "async_scheduling" in known_fields(kind):
        values["async_scheduling"] = False
    return kind(**values)
