"""Static batching, Orca, Sarathi, SplitFuse and LightLLM: hand-worked cases."""

from __future__ import annotations

import pytest
from servesim.core import BadInput, Request
from servesim.costs.linear import LinearCost
from servesim.engine.inbox import Inbox
from servesim.engine.loop import Loop
from servesim.engine.server import Server
from servesim.engine.simulated import SimulatedClock
from servesim.policies import POLICIES
from servesim.policies.papers.lightllm import RouterState
from servesim.runs.decision_log import InMemoryLog

from ..scenarios import serve

STATIC, ORCA, SARATHI = POLICIES["static"], POLICIES["orca"], POLICIES["sarathi"]
ALTERNATING, SPLITFUSE, LIGHTLLM = POLICIES["sarathi-alternating"], POLICIES["splitfuse"], POLICIES["lightllm"]


def test_a_static_batch_finishes_before_the_next_one_starts() -> None:
    log = serve(STATIC(max_num_seqs=2), [Request("a", 0, 4, 3), Request("b", 0, 4, 1), Request("c", 0, 4, 1)])
    assert log.steps == [(0, [("a", 4), ("b", 4)]), (1, [("a", 1)]), (2, [("a", 1)]), (3, [("c", 4)])]


@pytest.mark.parametrize(("pad", "end"), [(False, 5.0), (True, 7.0)])
def test_padded_static_batches_still_compute_finished_rows(pad: bool, end: float) -> None:
    cost = LinearCost(base=1.0, decode_row=1.0)
    log = serve(STATIC(pad_finished=pad), [Request("a", 0, 4, 3), Request("b", 0, 4, 1)], cost=cost)
    assert log.finish_time == end


def test_a_static_batch_waits_up_to_its_waiting_time() -> None:
    requests = [Request("a", 0, 4, 1), Request("b", 2, 4, 1), Request("c", 6, 4, 1)]
    log = serve(STATIC(max_num_seqs=4, batch_waiting_time=5.0), requests)
    assert log.steps == [(5, [("a", 4), ("b", 4)]), (11, [("c", 4)])]


def test_a_full_static_batch_starts_at_once() -> None:
    log = serve(STATIC(max_num_seqs=2, batch_waiting_time=5.0), [Request("a", 0, 4, 1), Request("b", 2, 4, 1)])
    assert log.steps == [(2, [("a", 4), ("b", 4)])]


def test_every_static_request_reserves_the_maximum_length() -> None:
    requests = [Request(id, 0, 4, 2) for id in "abc"]
    log = serve(STATIC(), requests, blocks=9, block_size=4, max_model_len=16)
    assert [sorted(id for id, _ in batch) for _, batch in log.steps] == [["a", "b"], ["a", "b"], ["c"], ["c"]]


def test_a_pool_smaller_than_one_slot_gives_a_one_line_error() -> None:
    with pytest.raises(BadInput, match=r"engine\.num_blocks: expected at least 4 \(blocks of one request\), got 3"):
        serve(STATIC(), [Request("a", 0, 4, 2)], blocks=3, block_size=4, max_model_len=16)


def test_a_prompt_above_max_model_len_is_rejected_at_the_head_of_the_queue() -> None:
    for kind in (STATIC, ORCA, SARATHI, ALTERNATING):
        requests = [Request("a", 0, 4, 1), Request("long", 0, 20, 1), Request("b", 0, 4, 1)]
        log = serve(kind(), requests, blocks=100, max_model_len=16, rejects_oversized=False)
        assert log.rejected == [(0, "long")]
        assert log.steps[0] == (0, [("a", 4), ("b", 4)])


def test_orca_admits_no_request_before_a_head_that_does_not_fit() -> None:
    requests = [Request("a", 0, 4, 6), Request("b", 0, 4, 8), Request("c", 0, 1, 1)]
    log = serve(ORCA(), requests, blocks=20)  # reserved: 10, 12, 2 tokens
    assert log.steps[0] == (0, [("a", 4)])
    assert log.steps[6] == (6, [("b", 4), ("c", 1)])


def test_orcas_slots_may_be_fewer_than_the_pool() -> None:
    requests = [Request("a", 0, 4, 2), Request("b", 0, 4, 2)]
    assert serve(ORCA(n_slots=12), requests).steps[0] == (0, [("a", 4), ("b", 4)])
    requests = [Request("a", 0, 4, 2), Request("b", 0, 4, 2)]
    assert serve(ORCA(n_slots=11), requests).steps[0] == (0, [("a", 4)])


def test_orca_orders_the_batch_by_arrival_and_sarathis_baseline_puts_prompts_first() -> None:
    def requests() -> list[Request]:
        return [Request("a", 0, 4, 3), Request("b", 0.5, 4, 1)]

    assert serve(ORCA(), requests()).steps[1] == (1, [("a", 1), ("b", 4)])
    assert serve(ORCA(reserve="model"), requests(), max_model_len=16).steps[1] == (1, [("b", 4), ("a", 1)])


@pytest.mark.parametrize(("reserve", "rejected_at"), [("model", 1), ("request", 3)])
def test_sarathis_orca_drops_a_long_head_even_while_all_places_are_taken(reserve: str, rejected_at: int) -> None:
    requests = [Request("a", 0, 4, 3), Request("long", 0.5, 20, 1), Request("b", 0.5, 4, 1)]
    log = serve(ORCA(max_num_seqs=1, reserve=reserve), requests, blocks=100, max_model_len=16)
    assert log.rejected == [(rejected_at, "long")]
    assert log.steps == [(0, [("a", 4)]), (1, [("a", 1)]), (2, [("a", 1)]), (3, [("b", 4)])]


def test_sarathi_fills_the_chunk_after_all_decodes() -> None:
    requests = [Request("a", 0, 4, 4), Request("b", 0.5, 9, 2), Request("c", 0.5, 3, 2)]
    log = serve(SARATHI(chunk_size=6), requests)
    assert log.steps[:4] == [
        (0, [("a", 4)]),
        (1, [("b", 5), ("a", 1)]),
        (2, [("b", 4), ("c", 1), ("a", 1)]),
        (3, [("c", 2), ("a", 1), ("b", 1)]),
    ]


def test_sarathis_dynamic_chunks_shrink_in_steps() -> None:
    policy = SARATHI(
        enable_dynamic_chunking_schedule=True,
        low_chunk_size=32,
        high_chunk_size=128,
        chunk_schedule_stages=4,
        chunk_schedule_max_tokens=400,
    )
    log = serve(policy, [Request("a", 0, 300, 1)])
    assert [batch for _, batch in log.steps] == [[("a", 128)], [("a", 96)], [("a", 64)], [("a", 12)]]


def test_sarathi_preempts_although_the_last_block_has_space_and_the_victim_blocks_admission() -> None:
    requests = [Request("a", 0, 4, 8), Request("b", 0, 4, 8), Request("c", 1.5, 1, 1)]
    log = serve(SARATHI(chunk_size=16), requests, blocks=4, block_size=4)
    # At 2 s both have two blocks, half full, and no block is free: b is preempted, and c must wait behind it.
    assert log.preempted[0] == (2, "b", "recompute")
    assert log.steps[2:4] == [(2, [("a", 1)]), (3, [("b", 6), ("a", 1)])]


def test_sarathi_admits_a_half_prefilled_victim_again_at_once_for_its_remaining_tokens() -> None:
    requests = [Request("a", 0, 4, 8), Request("h", 0.5, 12, 1)]
    log = serve(SARATHI(chunk_size=5), requests, blocks=5, block_size=4)
    assert log.steps[1:3] == [(1, [("h", 4), ("a", 1)]), (2, [("h", 4), ("a", 1)])]
    assert log.preempted[0] == (2, "h", "recompute")


def test_prefill_and_decode_steps_alternate_and_a_decode_step_may_be_empty() -> None:
    log = serve(ALTERNATING(chunk_size=4), [Request("a", 0, 8, 2)])
    assert log.steps == [(0, [("a", 4)]), (1, [("a", 4)]), (2, [("a", 1)])]
    log = serve(ALTERNATING(chunk_size=4), [Request("a", 0, 2, 4), Request("b", 0.5, 8, 2)])
    assert [batch for _, batch in log.steps] == [
        [("a", 2)], [("a", 1)], [("b", 4)], [("a", 1)], [("b", 4)], [("a", 1), ("b", 1)]
    ]  # fmt: skip


def test_splitfuse_chunks_a_prompt_to_fill_the_batch_exactly() -> None:
    requests = [Request("a", 0, 5, 3), Request("b", 0, 6, 2), Request("c", 0, 9, 1)]
    log = serve(SPLITFUSE(max_ragged_batch_size=8), requests)
    assert [batch for _, batch in log.steps] == [
        [("a", 5), ("b", 3)], [("a", 1), ("b", 3), ("c", 4)], [("a", 1), ("b", 1), ("c", 5)]
    ]  # fmt: skip


def test_splitfuse_frees_finished_requests_two_steps_later() -> None:
    requests = [Request("c", 0, 1, 4), Request("a", 0, 4, 1), Request("b", 0, 5, 1)]
    log = serve(SPLITFUSE(), requests, blocks=9)
    # a finishes at 1 s; the step that starts at 2 s frees its blocks, so b is scheduled at 3 s.
    assert (2, "a") in log.released
    assert [batch for _, batch in log.steps] == [
        [("c", 1), ("a", 4)], [("c", 1)], [("c", 1)], [("c", 1), ("b", 5)]
    ]  # fmt: skip


def test_splitfuse_is_stuck_if_only_finished_requests_have_blocks() -> None:
    def requests() -> list[Request]:
        return [Request("a", 0, 4, 1), Request("b", 0, 7, 1)]

    log = serve(SPLITFUSE(), requests(), blocks=10)
    assert [request.id for request in log.stuck.requests] == ["b"]
    assert "MII fails with an assertion" in str(log.stuck)
    assert serve(SPLITFUSE(wait_for_flush=True), requests(), blocks=10).steps == [(0, [("a", 4)]), (1, [("b", 7)])]


def test_splitfuse_stalls_a_request_without_a_block_and_runs_it_first_later() -> None:
    requests = [Request("a", 0, 4, 3), Request("b", 0, 3, 4), Request("c", 0, 4, 3)]
    log = serve(SPLITFUSE(), requests, blocks=4, block_size=4)
    # At 1 s one block is free: a takes it, b has space in its own block, c pauses. At 2 s b pauses too, behind c.
    assert log.steps[1:4] == [(1, [("a", 1), ("b", 1)]), (2, [("a", 1)]), (3, [("c", 1)])]
    assert log.preempted == [(3, "b", "recompute")]  # a has finished but its blocks are not free: nothing could run


def test_splitfuse_preempts_the_last_request_only_if_nothing_can_run() -> None:
    requests = [Request("a", 0, 2, 4), Request("b", 0, 2, 4)]
    log = serve(SPLITFUSE(wait_for_flush=True), requests, blocks=6)
    assert log.steps[:3] == [(0, [("a", 2), ("b", 2)]), (1, [("a", 1), ("b", 1)]), (2, [("a", 1)])]
    assert log.preempted == [(2, "b", "recompute")]


def test_lightllm_admits_requests_every_max_wait_tokens_decodes() -> None:
    log = serve(LIGHTLLM(max_wait_tokens=3), [Request("a", 0, 2, 10), Request("b", 0.5, 2, 2)])
    assert [batch for _, batch in log.steps[:6]] == [
        [("a", 2)], [("a", 1)], [("a", 1)], [("a", 1)], [("b", 2)], [("a", 1), ("b", 1)]
    ]  # fmt: skip


@pytest.mark.parametrize(("total", "first"), [(4, ["a"]), (5, ["a", "b"])])
def test_lightllms_peak_must_stay_below_the_pool_size(total: int, first: list[str]) -> None:
    # Each request has 2 tokens after its prefill and adds none: the peak is 4, which must be below the total.
    log = serve(LIGHTLLM(), [Request("a", 0, 1, 2), Request("b", 0, 1, 2)], blocks=total)
    assert [id for id, _ in log.steps[0][1]] == first


def test_lightllms_peak_counts_that_outputs_end_one_after_the_other() -> None:
    # After prefill 5 and 5 tokens, future 8 and 4: 5 + 8 = 13 for a alone, 10 + 2 * 4 = 18 when b finishes.
    def requests() -> list[Request]:
        return [Request("a", 0, 4, 10), Request("b", 0, 4, 6)]

    assert [id for id, _ in serve(LIGHTLLM(), requests(), blocks=19).steps[0][1]] == ["a", "b"]
    assert [id for id, _ in serve(LIGHTLLM(), requests(), blocks=18).steps[0][1]] == ["a"]


def test_lightllm_pauses_the_newest_request_if_its_estimate_was_too_low() -> None:
    policy = LIGHTLLM(router_token_ratio=0.9, router_max_new_token_len=1, max_wait_tokens=2)
    log = serve(policy, [Request("a", 0, 3, 6), Request("b", 0, 3, 6)], blocks=11)
    # 3 + 3 cached, 2 more per step: at 3 s, 10 of 11 tokens are used, and the step that pauses b runs nothing.
    assert log.preempted[0] == (3, "b", "recompute")
    assert log.steps[3] == (3, [("a", 1)])
    assert all(request.outcome == "finished" for request in log.requests.values())


def test_lightllms_chunks_share_the_step_with_decodes_in_order_of_admission() -> None:
    policy = LIGHTLLM(splitfuse_mode=True, splitfuse_block_size=4, max_wait_tokens=1)
    log = serve(policy, [Request("a", 0, 6, 4), Request("b", 0.5, 5, 2)])
    assert [batch for _, batch in log.steps] == [
        [("a", 4)], [("a", 2), ("b", 4)], [("a", 1), ("b", 1)], [("a", 1), ("b", 1)], [("a", 1)]
    ]  # fmt: skip


@pytest.mark.parametrize(("splitfuse", "ends"), [(True, [10.0, 20.0]), (False, [1.0, 11.0])])
def test_a_one_token_prompt_costs_a_decode_in_lightllms_splitfuse_mode(splitfuse: bool, ends: list[float]) -> None:
    cost = LinearCost(prefill_token=1.0, decode_row=10.0)
    log = serve(LIGHTLLM(splitfuse_mode=splitfuse), [Request("a", 0, 1, 2)], cost=cost)
    assert [log.requests["a"].first_token, log.requests["a"].finish] == ends


def test_lightllms_first_chunk_of_one_token_is_a_prefill_if_more_of_the_prompt_is_left() -> None:
    policy = LIGHTLLM(splitfuse_mode=True, splitfuse_block_size=1)
    log = serve(
        policy, [Request("a", 0, 2, 1), Request("b", 20, 1, 1)], cost=LinearCost(prefill_token=1.0, decode_row=10.0)
    )
    # The first token of a is a chunk, its second one and the only one of b are decodes.
    assert [log.requests["a"].first_token, log.requests["b"].first_token] == [11.0, 30.0]


def test_lightllm_counts_the_decodes_of_a_held_plan() -> None:
    policy, state, counts = LIGHTLLM(max_wait_tokens=10), RouterState(8, 2), []
    for _ in range(5):
        state = policy.held_state(state, 0.0)
        counts.append(state.decodes)
    assert counts == [9, 10, 1, 2, 3] and state.paused == 2


def test_the_decision_log_lists_a_prompt_of_one_token_as_a_prompt() -> None:
    log = InMemoryLog()
    server = Server(LIGHTLLM(splitfuse_mode=True), 100, 1)
    Loop(server, Inbox([Request("a", 0.0, 1, 2)]), SimulatedClock(LinearCost(base=1.0)), (log,)).run()
    assert [(row["kind"], row["prompts"]) for row in log.rows if row["chunks"]] == [("prefill", ["a"]), ("decode", [])]
