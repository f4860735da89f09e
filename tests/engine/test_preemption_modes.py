"""What happens to the KV blocks of a preempted request: kept, swapped or dropped, worked out by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from servesim.calibrate.live.block_tables import BlockTables
from servesim.core import Chunk, Plan, Policy, Preemption, Request, View
from servesim.costs.linear import LinearCost
from servesim.engine.clocks import VirtualClock
from servesim.engine.inbox import Inbox
from servesim.engine.loop import Loop
from servesim.engine.server import Server
from servesim.runs.request_rows import COLUMNS, request_rows
from servesim.testing import check_policy

from ..scenarios import RunLog, serve


@dataclass(frozen=True)
class NewestFirst(Policy):
    """One request runs at a time: a new one preempts it, and the last one that was preempted continues."""

    mode: str = "keep"  # of the preemption
    later: str = ""  # mode of a second preemption one step later, of a request whose blocks were kept

    def decide(self, view: View) -> Plan:
        preempt = [Preemption(kept, self.later, "swapped") for kept in view.swapped if self.later and kept.blocks]
        if view.waiting:
            request = view.waiting[0]
            preempt += [Preemption(running, self.mode, "swapped") for running in view.running]
            return Plan(preempt=preempt, chunks=[Chunk(request, request.pending)])
        if view.running or not view.swapped:
            return Plan(preempt=preempt, decode=view.decoding > 0)
        request = view.swapped[-1]
        if request.cached:
            return Plan(swap_in=[request], decode=True)
        return Plan(chunks=[Chunk(request, request.pending)])


def requests() -> list[Request]:
    return [Request("a", 0, 2, 5), Request("b", 0.5, 2, 2)]


def run(policy: Policy, **engine: Any) -> RunLog:
    return serve(policy, requests(), host_blocks=10, cost=LinearCost(base=1.0, swap_block=0.25), **engine)


def test_a_kept_request_continues_without_a_copy() -> None:
    log = run(NewestFirst(mode="keep"))
    assert log.steps == [
        (0, [("a", 2)]), (1, [("b", 2)]), (2, [("b", 1)]), *((t, [("a", 1)]) for t in (3, 4, 5, 6))
    ]  # fmt: skip
    assert (log.preempted, log.swapped_in) == ([(1, "a", "keep")], [(3, "a")])
    assert next(request_rows([log.requests["a"]]))[COLUMNS.index("stalled")] == 2.0


def test_a_swapped_request_is_copied_out_and_in() -> None:
    log = run(NewestFirst(mode="swap"))
    assert [t for t, _ in log.steps] == [0, 1, 2.5, 3.5, 5, 6, 7]  # two blocks, out in b's first step, in at 3.5 s
    assert (log.preempted, log.swapped_in) == ([(1, "a", "swap")], [(3.5, "a")])


def test_a_request_whose_blocks_are_dropped_computes_its_tokens_again() -> None:
    log = run(NewestFirst(mode="recompute"))
    assert log.steps[3:] == [(3, [("a", 3)]), (4, [("a", 1)]), (5, [("a", 1)]), (6, [("a", 1)])]
    assert (log.preempted, log.swapped_in) == ([(1, "a", "recompute")], [])


@pytest.mark.parametrize(
    ("later", "times", "resumed"), [("swap", [0, 1, 2, 3.5, 5, 6, 7], 1), ("recompute", [0, 1, 2, 3, 4, 5, 6], 3)]
)
def test_a_later_plan_swaps_or_drops_kept_blocks(later: str, times: list[float], resumed: int) -> None:
    log = run(NewestFirst(mode="keep", later=later))
    assert [t for t, _ in log.steps] == times
    assert [row[1:] for row in log.preempted] == [("a", "keep"), ("a", later)]
    assert log.steps[3][1] == [("a", resumed)]
    assert log.requests["a"].preemptions == 1


@pytest.mark.parametrize(("mode", "later"), [("keep", ""), ("swap", ""), ("recompute", ""), ("keep", "swap")])
def test_the_block_tables_of_a_live_run_follow(mode: str, later: str) -> None:
    """The tables compare their counts with those of the server after every step."""
    server, tables = Server(NewestFirst(mode=mode, later=later), 20, 1, 10), BlockTables(20, 1, 10)
    served = [Request(id, 0.7 * id, 2 + id, 5) for id in range(4)]
    Loop(server, Inbox(served), VirtualClock(LinearCost(base=1.0)), (tables,), check=True).run()
    assert [request.written for request in served] == [5] * 4
    assert len(tables.free) == 20 and not tables.tables and not tables.host_tables


def test_the_policy_follows_the_contract() -> None:
    check_policy(NewestFirst(mode="recompute"), seed=3)
