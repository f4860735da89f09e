"""Steps in flight: a step is decided before the last one has returned. Recordings are in test_engines_vllm.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from servesim.core import Request
from servesim.costs.linear import LinearCost
from servesim.engine.inbox import Inbox
from servesim.engine.loop import Loop
from servesim.engine.server import Server
from servesim.engine.simulated import SimulatedClock
from servesim.policies.vllm_v1 import VLLMV1
from servesim.policies.vllm_v1.rules import VLLMRules
from servesim.testing import (
    ContractWorld,
    check_conservation,
    check_held_plans,
    check_hold,
    check_live_matches_simulated,
    draw_requests,
)

from ..policies.recordings import PlayedRun, Recording, play
from ..scenarios import run_steps

TICK = {"c0": 1, "per_prefill_token": 0, "per_decode_seq": 0, "per_swap_block": 0}


def serve(rows: list[list[Any]], limits: dict[str, int] | None = None, **fields: Any) -> PlayedRun:
    """Serve rows of (id, arrival, prompt, output) with one second per step."""
    knobs = {"num_blocks": 50, "block_size": 4, "max_model_len": 40}
    table = [[*row, 0] for row in rows]
    return play(Recording({"knobs": knobs, "cost": TICK}, table, [], max_tokens=limits or {}), VLLMV1(**fields))


def steps_of(played: PlayedRun) -> list[tuple[float, float, str]]:
    """Return decision, start and batch of every step."""
    batches = [" ".join(f"{id}:{tokens}" for id, tokens, _ in row["sched"]) for row in played.rows]
    return [(row["t"], row["start"], batch) for row, batch in zip(played.rows, batches)]


def test_from_idle_two_steps_are_decided_at_once_and_an_arrival_joins_the_step_after_the_next() -> None:
    played = serve([["a", 0, 4, 5], ["b", 1.5, 4, 1]])
    assert steps_of(played) == [
        (0, 0, "a:4"), (0, 1, "a:1"), (1, 2, "a:1"), (2, 3, "a:1 b:4"), (3, 4, "a:1"),
    ]  # fmt: skip
    assert (played.requests["b"].first_token, played.finish_time) == (4, 5)
    times = steps_of(serve([["a", 0, 4, 5], ["b", 1.5, 4, 1]], async_scheduling=False))
    assert times[:3] == [(0, 0, "a:4"), (1, 1, "a:1"), (2, 2, "a:1 b:4")]


def test_the_end_by_a_limit_is_foreseen_and_the_end_by_a_stop_token_is_not() -> None:
    assert [batch for _, _, batch in steps_of(serve([["a", 0, 4, 3]]))] == ["a:4", "a:1", "a:1"]
    stopped = serve([["a", 0, 4, 3]], {"a": 9})
    assert [batch for _, _, batch in steps_of(stopped)] == ["a:4", "a:1", "a:1", "a:1"]
    request = stopped.requests["a"]
    assert (request.finish, request.written, request.last_token) == (3, 3, 3)
    assert stopped.server.tokens_generated == 3
    assert stopped.finish_time == 4  # the device still runs the additional decode
    at_max_model_len = serve([["a", 0, 37, 3]], {"a": 9})
    assert [batch for _, _, batch in steps_of(at_max_model_len)] == ["a:37", "a:1", "a:1"]


def test_a_request_that_waits_for_its_last_token_counts_for_max_num_seqs() -> None:
    played = serve([["a", 0, 4, 2], ["b", 0, 4, 1]], max_num_seqs=1)
    assert steps_of(played) == [(0, 0, "a:4"), (0, 1, "a:1"), (2, 2, "b:4")]


def test_an_aborted_request_loses_its_token_in_flight() -> None:
    requests = [Request("a", 0.0, 4, 9), Request("b", 0.0, 4, 9)]
    server = Server(VLLMV1(), 50, 4)
    clock = SimulatedClock(LinearCost(base=1.0), hold=False)
    loop = Loop(server, Inbox(requests), clock, check=True)
    run_steps(loop, 4)
    assert (requests[0].written, requests[0].in_flight) == (4, 1)
    loop.abort(requests[0], loop.now, "the client disconnected")
    loop.run()
    assert (requests[0].outcome, requests[0].written) == ("aborted", 3)
    assert (requests[1].outcome, requests[1].finish) == ("finished", 9.0)
    assert server.tokens_generated == 12
    assert server.pool.free == 50


@dataclass(frozen=True)
class Overlapped(VLLMV1):
    """Steps in flight as SGLang has them: no end is foreseen, and a preempted request loses its token in flight."""

    foresees: bool = False
    drops: bool = True

    enable_prefix_caching: bool = False

    def rules(self) -> VLLMRules:
        rules = super().rules()
        rules.foresees_ends, rules.drops_tokens_in_flight = self.foresees, self.drops
        return rules


@pytest.mark.parametrize("check", [check_held_plans, check_hold, check_conservation, check_live_matches_simulated])
@pytest.mark.parametrize(("foresees", "drops"), [(False, True), (False, False), (True, True)])
def test_an_engine_with_other_rules_follows_the_contract(check: Any, foresees: bool, drops: bool) -> None:
    for seed in range(6):
        policy = Overlapped(
            foresees=foresees, drops=drops, max_num_batched_tokens=(40, 200)[seed % 2], max_num_seqs=8,
            policy=("fcfs", "priority")[seed % 3 == 0],
        )  # fmt: skip
        check(policy, ContractWorld(draw_requests(seed, 40), blocks=14 + seed, end_lag=seed % 2 == 0))


def test_a_dropped_token_is_computed_again() -> None:
    """Eight blocks of one token: when `a` needs the ninth, `b` is preempted, whose token is in flight."""
    knobs = {"num_blocks": 8, "block_size": 1, "max_model_len": 40}
    table = [["a", 0, 2, 5, 0], ["b", 0, 2, 6, 0]]
    tokens = {}
    for drops in (False, True):
        recording = Recording({"knobs": knobs, "cost": TICK}, table, [])
        played = play(recording, Overlapped(drops=drops, enable_prefix_caching=False))
        assert [request.outcome for request in played.requests.values()] == ["finished", "finished"]
        tokens[drops] = [
            count for row in played.rows for id, count, kind in row["sched"] if id == "b" and kind == "P" and row["t"]
        ]
    assert tokens[True][0] == tokens[False][0] - 1
