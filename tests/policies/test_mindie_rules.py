"""MindIE-LLM: settings, messages, and the parts that learn from results."""

from __future__ import annotations

import random

import pytest
from servesim.calibrate.live.block_tables import BlockTables
from servesim.config.registry import make_policy, preset
from servesim.config.scenario import scenario_from
from servesim.core import BadInput, Request, Stuck
from servesim.costs.linear import LinearCost
from servesim.engine.inbox import Inbox
from servesim.engine.loop import Loop
from servesim.engine.server import Server
from servesim.engine.simulated import SimulatedClock
from servesim.policies import POLICIES
from servesim.policies.mindie.feedback import Batch, DynamicBatch, Feedback, LatencyFit, Recent
from servesim.testing import ContractWorld, draw_requests, simulated

from . import mindie_reference

MindIE = POLICIES["mindie"]
COST = LinearCost(base=0.005, prefill_token=0.0001, decode_live=0.0002)


def run(requests: list[Request], blocks: int = 1000, max_model_len: int = 512, **fields: object) -> list[Request]:
    server = Server(MindIE(**fields), blocks, 16, 0, max_model_len)
    Loop(server, Inbox(requests), SimulatedClock(COST), check=True).run()
    assert server.pool.free == blocks
    return requests


def test_the_preset_has_the_shipped_settings() -> None:
    settings = preset("mindie-3.0")
    assert make_policy(settings["policy"]) == MindIE(max_input_token_len=2048)
    engine = scenario_from({**settings, "profile": {"base": 0.01}}).engine
    assert (engine.block_size, engine.max_model_len) == (128, 2560)


def test_a_lonely_request_waits_five_milliseconds() -> None:
    (request,) = run([Request("a", 1.0, 100, 3)])
    assert request.first_token == pytest.approx(1.0 + 0.005 + 0.015)
    assert request.finish == pytest.approx(1.02 + 2 * 0.0052)


def test_max_iter_times_limits_the_output_not_the_prompt() -> None:
    (request,) = run([Request("a", 0.0, 100, 30)], max_iter_times=7)
    assert (request.written, request.outcome) == (7, "finished")


def test_prompts_above_max_input_token_len_are_rejected() -> None:
    short, long = run([Request("a", 0.0, 20, 3), Request("b", 0.0, 21, 3)], max_input_token_len=20)
    assert (short.outcome, long.outcome) == ("finished", "refused")
    assert long.reason == "prompt of 21 tokens, the engine accepts at most 20"


def test_more_requests_than_seats_decode_in_turns() -> None:
    requests = run([Request(id, 0.0, 16, 9) for id in range(4)], max_batch_size=2)
    last = [request.finish for request in requests]
    assert last[0] == last[1] and last[2] == last[3]
    assert last[2] - last[0] == pytest.approx(0.0054)  # all run at the same time; a pair every second round


def test_the_engine_dies_in_its_own_words_if_a_prompt_is_larger_than_the_memory() -> None:
    text = "MindIE's scheduler thread ends with an exception: Prompt sequence too long. .requests a."
    with pytest.raises(Stuck, match=text):
        run([Request("a", 0.0, 200, 3)], blocks=10)


def test_a_preempted_request_that_needs_exactly_all_blocks_is_never_admitted_again() -> None:
    requests = [Request("a", 0.0, 2, 14), Request("b", 0.0, 105, 16)]
    with pytest.raises(Stuck, match=r"no progress, .*the real engine does this too .rules of MindIE-LLM 3.0.0"):
        run(requests, blocks=8, max_model_len=128, max_batch_size=8, max_prefill_batch_size=8)
    assert (requests[0].outcome, requests[1].preemptions) == ("finished", 1)


def test_wrong_settings_are_errors() -> None:
    server = Server(MindIE(), 10, 16)
    server.rules.empty_step = 0.0
    with pytest.raises(BadInput, match=r"engine.empty_step: expected more than 0"):
        Loop(server, Inbox([]), SimulatedClock(COST))
    refusals = MindIE(max_batch_size=4, max_preempt_count=5).engine_refusals(256, 2560)
    assert [text.split()[0] for text in refusals] == [
        "max_prefill_batch_size",
        "max_preempt_count",
        "engine.block_size",
    ]


@pytest.mark.parametrize("seed", range(2))
def test_the_latency_predictor_learns_as_restated(seed: int) -> None:
    rng = random.Random(seed)
    fit, other, adopted = LatencyFit(), mindie_reference.Fit(), 0
    for _ in range(3000):
        is_empty, is_prefill = rng.random() < 0.5, rng.random() < 0.2
        rows, blocks, tokens = rng.randint(1, 60), rng.randint(50, 900), rng.randint(1, 2000)
        statistics = (False, 0, 0, 0) if is_empty else (is_prefill, tokens * is_prefill, rows, blocks)
        fit = fit.decided(1, is_empty, statistics)
        other.round(*statistics)
        if not is_empty:
            ms = 3 + tokens // 8 if is_prefill else int(2 + 0.3 * rows + 0.1 * blocks + rng.random() * 3)
            fit = fit.booked(1, ms)
            other.result(ms)
        assert (fit.slope, fit.intercept, fit.decode) == (other.slope, other.intercept, other.decode)
        adopted += fit.decode[1] > 0
    assert adopted and fit.slope != LatencyFit().slope


def test_points_on_a_line_through_0_are_rejected() -> None:
    """The intercept of the engine is exactly 0; computed from the slope, it is 2e-15."""
    fields = {"stage_policy": "latency", "prefill_expected_time": 100, "max_batch_size": 8, "max_prefill_batch_size": 8}
    requests = run([Request("a", 0.0, 52, 40), Request("b", 0.03, 50, 2)], max_prefill_tokens=512, **fields)
    assert requests[1].scheduled == pytest.approx(0.0622)
    fit = LatencyFit()
    for tokens in (3, 6, 9):
        fit = fit.decided(1, True, (False, 0, 0, 0)).decided(1, False, (True, tokens, 0, 0)).booked(1, 7 * tokens)
    assert (fit.slope, fit.intercept) == (LatencyFit().slope, LatencyFit().intercept)


def test_with_asynchronous_scheduling_the_predictor_counts_from_the_newest_round() -> None:
    """Two prefills of 52 tokens are out; the first one returns 8 ms after its own dispatch, 3 ms after the second."""
    feedback = Feedback(LatencyFit(), None)
    for time in (0, 5000):
        feedback.decided(Batch(time, (), None), (True, 52, 1, 4), is_empty=False)
    assert feedback.received(8000, overlaps=True).fit.sums[:2] == (52, 3)  # type: ignore[union-attr]


def test_a_series_keeps_the_sum_of_its_newest_values_in_every_state() -> None:
    rng, states, values = random.Random(1), [Recent(50, [0], [0])], []
    for _ in range(300):
        value, times = rng.randint(1, 9), rng.randint(1, 60 if rng.random() < 0.1 else 7)
        states[-1].added(7, 1)  # a decision that is made twice
        states.append(states[-1].added(value, times))
        values += [value] * times
        assert (states[-1].count, states[-1].total()) == (len(values), sum(values[-50:]))


@pytest.mark.parametrize("seed", range(2))
def test_the_dynamic_batch_size_is_as_restated(seed: int) -> None:
    rng = random.Random(seed)
    other = mindie_reference.MindIE({"maxBatchSize": 32, "dynamicBatchSizeEnable": True}, [], {})
    ours = DynamicBatch(32, 50)
    for _ in range(1500):
        rows, gap, live, waiting = rng.randint(1, 32), rng.randint(30, 70), rng.randint(0, 40), rng.randint(0, 3)
        ours.rows, ours.gaps = ours.rows.added(rows, rows), ours.gaps.added(gap, rows)
        other.dynamic.rows.append(rows)
        other.dynamic.gaps.extend([gap] * rows)
        other.running.clear()
        other.running.extend([None] * live)  # type: ignore[list-item]
        other.waiting.clear()
        other.waiting.extend([None] * waiting)  # type: ignore[list-item]
        ours.update(32, 50, live, waiting)
        other.dynamic.update()
        assert (ours.seats, ours.prefill_seats) == (other.seats, other.prefill_seats)


@pytest.mark.parametrize("fields", [{}, {"async_scheduling": True}, {"split_fuse": True, "max_preempt_count": 2}])
def test_block_tables_of_a_live_run_follow_requests_that_finish_in_their_queue(fields: dict[str, object]) -> None:
    for seed in range(8):
        world = ContractWorld(draw_requests(seed), blocks=24)
        tables = BlockTables(world.blocks, world.block_size, world.host_blocks)
        outcome = simulated(MindIE(max_batch_size=3, **fields), world, observer=tables)  # it compares the counts
        assert outcome.stuck is not None or len(tables.free) == world.blocks
