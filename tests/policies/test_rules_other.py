"""Static batching, Orca, Sarathi, SplitFuse and LightLLM by cases worked by hand."""

from __future__ import annotations

import pytest
from servesim.core import BadInput, Request
from servesim.costs.linear import LinearCost
from servesim.policies import POLICIES
from servesim.policies.lightllm import Wait

from ..small import serve

STATIC, ORCA, SARATHI = POLICIES["static"], POLICIES["orca"], POLICIES["sarathi"]
ALTERNATING, SPLITFUSE, LIGHTLLM = POLICIES["sarathi-alternating"], POLICIES["splitfuse"], POLICIES["lightllm"]


def test_a_static_batch_runs_to_its_end_before_the_next_begins() -> None:
    story = serve(STATIC(max_num_seqs=2), [Request("a", 0, 4, 3), Request("b", 0, 4, 1), Request("c", 0, 4, 1)])
    assert story.ran == [(0, [("a", 4), ("b", 4)]), (1, [("a", 1)]), (2, [("a", 1)]), (3, [("c", 4)])]


@pytest.mark.parametrize(("pad", "end"), [(False, 5.0), (True, 7.0)])
def test_padded_static_batches_pay_for_rows_that_have_ended(pad: bool, end: float) -> None:
    cost = LinearCost(base=1.0, decode_row=1.0)
    story = serve(STATIC(pad_finished=pad), [Request("a", 0, 4, 3), Request("b", 0, 4, 1)], cost=cost)
    assert story.end == end


def test_a_static_batch_waits_to_fill_up_for_as_long_as_it_may() -> None:
    requests = [Request("a", 0, 4, 1), Request("b", 2, 4, 1), Request("c", 6, 4, 1)]
    story = serve(STATIC(max_num_seqs=4, batch_waiting_time=5.0), requests)
    assert story.ran == [(5, [("a", 4), ("b", 4)]), (11, [("c", 4)])]


def test_a_static_batch_that_is_full_waits_no_longer() -> None:
    story = serve(STATIC(max_num_seqs=2, batch_waiting_time=5.0), [Request("a", 0, 4, 1), Request("b", 2, 4, 1)])
    assert story.ran == [(2, [("a", 4), ("b", 4)])]


def test_every_static_request_takes_a_slot_of_the_longest_length() -> None:
    requests = [Request(id, 0, 4, 2) for id in "abc"]
    story = serve(STATIC(), requests, blocks=9, block_size=4, max_model_len=16)
    assert [sorted(id for id, _ in batch) for _, batch in story.ran] == [["a", "b"], ["a", "b"], ["c"], ["c"]]


def test_a_pool_smaller_than_a_slot_is_refused_in_one_line() -> None:
    with pytest.raises(BadInput, match=r"engine\.num_blocks: expected at least 4, one slot, got 3"):
        serve(STATIC(), [Request("a", 0, 4, 2)], blocks=3, block_size=4, max_model_len=16)


def test_a_prompt_longer_than_the_model_takes_is_dropped_when_its_turn_comes() -> None:
    for kind in (STATIC, ORCA, SARATHI, ALTERNATING):
        requests = [Request("a", 0, 4, 1), Request("long", 0, 20, 1), Request("b", 0, 4, 1)]
        story = serve(kind(), requests, blocks=100, max_model_len=16, refuses=False)
        assert story.rejected == [(0, "long")]
        assert story.ran[0] == (0, [("a", 4), ("b", 4)])


def test_orca_lets_nobody_pass_a_head_that_does_not_fit() -> None:
    requests = [Request("a", 0, 4, 6), Request("b", 0, 4, 8), Request("c", 0, 1, 1)]
    story = serve(ORCA(), requests, blocks=20)  # promised: 10, 12, 2 tokens
    assert story.ran[0] == (0, [("a", 4)])
    assert story.ran[6] == (6, [("b", 4), ("c", 1)])


def test_orcas_slots_may_be_fewer_than_the_pool() -> None:
    requests = [Request("a", 0, 4, 2), Request("b", 0, 4, 2)]
    assert serve(ORCA(n_slots=12), requests).ran[0] == (0, [("a", 4), ("b", 4)])
    requests = [Request("a", 0, 4, 2), Request("b", 0, 4, 2)]
    assert serve(ORCA(n_slots=11), requests).ran[0] == (0, [("a", 4)])


def test_orca_runs_prompts_and_decodes_together_in_order_of_arrival_and_sarathis_baseline_prompts_first() -> None:
    def requests() -> list[Request]:
        return [Request("a", 0, 4, 3), Request("b", 0.5, 4, 1)]

    assert serve(ORCA(), requests()).ran[1] == (1, [("a", 1), ("b", 4)])
    assert serve(ORCA(reserve="model"), requests(), max_model_len=16).ran[1] == (1, [("b", 4), ("a", 1)])


def test_sarathi_fills_the_chunk_after_all_decodes() -> None:
    requests = [Request("a", 0, 4, 4), Request("b", 0.5, 9, 2), Request("c", 0.5, 3, 2)]
    story = serve(SARATHI(chunk_size=6), requests)
    assert story.ran[:4] == [
        (0, [("a", 4)]),
        (1, [("b", 5), ("a", 1)]),
        (2, [("b", 4), ("c", 1), ("a", 1)]),
        (3, [("c", 2), ("a", 1), ("b", 1)]),
    ]


def test_sarathis_chunks_shrink_from_stage_to_stage() -> None:
    policy = SARATHI(
        enable_dynamic_chunking_schedule=True,
        low_chunk_size=32,
        high_chunk_size=128,
        chunk_schedule_stages=4,
        chunk_schedule_max_tokens=400,
    )
    story = serve(policy, [Request("a", 0, 300, 1)])
    assert [batch for _, batch in story.ran] == [[("a", 128)], [("a", 96)], [("a", 64)], [("a", 12)]]


def test_a_dynamic_schedule_must_be_complete() -> None:
    with pytest.raises(ValueError, match="low_chunk_size: expected a number"):
        SARATHI(enable_dynamic_chunking_schedule=True)
    with pytest.raises(ValueError, match="high_chunk_size: expected a multiple of 32, got 100"):
        SARATHI(enable_dynamic_chunking_schedule=True, low_chunk_size=32, high_chunk_size=100)


def test_sarathi_preempts_although_the_last_block_has_room_and_the_victim_shuts_the_door() -> None:
    requests = [Request("a", 0, 4, 8), Request("b", 0, 4, 8), Request("c", 1.5, 1, 1)]
    story = serve(SARATHI(chunk_size=16), requests, blocks=4, block_size=4)
    # At 2 both hold two blocks that are half full and no block is free: b goes, and c may not enter behind it.
    assert story.evicted[0] == (2, "b", "recompute")
    assert story.ran[2:4] == [(2, [("a", 1)]), (3, [("b", 6), ("a", 1)])]


def test_a_victim_of_sarathi_that_was_half_way_comes_back_at_once_for_the_rest_it_had() -> None:
    requests = [Request("a", 0, 4, 8), Request("h", 0.5, 12, 1)]
    story = serve(SARATHI(chunk_size=5), requests, blocks=5, block_size=4)
    assert story.ran[1:3] == [(1, [("h", 4), ("a", 1)]), (2, [("h", 4), ("a", 1)])]
    assert story.evicted[0] == (2, "h", "recompute")


def test_alternating_steps_take_turns_and_a_decode_turn_with_nothing_to_decode_is_empty() -> None:
    story = serve(ALTERNATING(chunk_size=4), [Request("a", 0, 8, 2)])
    assert story.ran == [(0, [("a", 4)]), (1, [("a", 4)]), (2, [("a", 1)])]
    story = serve(ALTERNATING(chunk_size=4), [Request("a", 0, 2, 4), Request("b", 0.5, 8, 2)])
    assert [batch for _, batch in story.ran] == [
        [("a", 2)], [("a", 1)], [("b", 4)], [("a", 1)], [("b", 4)], [("a", 1), ("b", 1)]
    ]  # fmt: skip


def test_splitfuse_cuts_a_prompt_to_fill_the_batch_exactly() -> None:
    requests = [Request("a", 0, 5, 3), Request("b", 0, 6, 2), Request("c", 0, 9, 1)]
    story = serve(SPLITFUSE(max_ragged_batch_size=8), requests)
    assert [batch for _, batch in story.ran] == [
        [("a", 5), ("b", 3)], [("a", 1), ("b", 3), ("c", 4)], [("a", 1), ("b", 1), ("c", 5)]
    ]  # fmt: skip


def test_splitfuse_flushes_what_has_finished_with_the_second_pass_after() -> None:
    requests = [Request("c", 0, 1, 4), Request("a", 0, 4, 1), Request("b", 0, 5, 1)]
    story = serve(SPLITFUSE(), requests, blocks=9)
    # a ends at 1; its blocks are back when the pass that begins at 2 runs, so b is scheduled at 3.
    assert (2, "a") in story.released
    assert [batch for _, batch in story.ran] == [
        [("c", 1), ("a", 4)], [("c", 1)], [("c", 1)], [("c", 1), ("b", 5)]
    ]  # fmt: skip


def test_splitfuse_dies_when_only_the_finished_hold_memory_and_says_so() -> None:
    def requests() -> list[Request]:
        return [Request("a", 0, 4, 1), Request("b", 0, 7, 1)]

    story = serve(SPLITFUSE(), requests(), blocks=10)
    assert story.stuck is not None
    assert [request.id for request in story.stuck.requests] == ["b"]
    assert "MII asserts" in str(story.stuck)
    assert serve(SPLITFUSE(mend_flush=True), requests(), blocks=10).ran == [(0, [("a", 4)]), (1, [("b", 7)])]


def test_splitfuse_stalls_who_finds_no_block_and_puts_it_first_next_time() -> None:
    requests = [Request("a", 0, 4, 3), Request("b", 0, 3, 4), Request("c", 0, 4, 3)]
    story = serve(SPLITFUSE(), requests, blocks=4, block_size=4)
    # One block is free at 1: a takes it, b has room in its own, c has to sit out; at 2 so has b, behind c.
    assert story.ran[1:4] == [(1, [("a", 1), ("b", 1)]), (2, [("a", 1)]), (3, [("c", 1)])]
    assert story.evicted == [(3, "b", "recompute")]  # a is over and not flushed: nothing at all could run


def test_splitfuse_evicts_the_last_holder_only_when_nothing_at_all_can_run() -> None:
    requests = [Request("a", 0, 2, 4), Request("b", 0, 2, 4)]
    story = serve(SPLITFUSE(mend_flush=True), requests, blocks=6)
    assert story.ran[:3] == [(0, [("a", 2), ("b", 2)]), (1, [("a", 1), ("b", 1)]), (2, [("a", 1)])]
    assert story.evicted == [(2, "b", "recompute")]


def test_lightllm_lets_requests_in_after_every_so_many_decodes() -> None:
    story = serve(LIGHTLLM(max_wait_tokens=3), [Request("a", 0, 2, 10), Request("b", 0.5, 2, 2)])
    assert [batch for _, batch in story.ran[:6]] == [
        [("a", 2)], [("a", 1)], [("a", 1)], [("a", 1)], [("b", 2)], [("a", 1), ("b", 1)]
    ]  # fmt: skip


@pytest.mark.parametrize(("total", "first"), [(4, ["a"]), (5, ["a", "b"])])
def test_lightllms_peak_must_stay_below_its_memory(total: int, first: list[str]) -> None:
    # Each holds 2 tokens after its prefill and adds none that must be kept: 4 in all, which 4 do not allow.
    story = serve(LIGHTLLM(), [Request("a", 0, 1, 2), Request("b", 0, 1, 2)], blocks=total)
    assert [id for id, _ in story.ran[0][1]] == first


def test_lightllms_peak_counts_that_answers_end_one_after_the_other() -> None:
    # Held once they run 5 and 5, still to come 8 and 4: 5 + 8 = 13 alone, 10 + 2 * 4 = 18 when the short one ends.
    def requests() -> list[Request]:
        return [Request("a", 0, 4, 10), Request("b", 0, 4, 6)]

    assert [id for id, _ in serve(LIGHTLLM(), requests(), blocks=19).ran[0][1]] == ["a", "b"]
    assert [id for id, _ in serve(LIGHTLLM(), requests(), blocks=18).ran[0][1]] == ["a"]


def test_lightllm_pauses_the_latest_when_its_hopes_were_too_high() -> None:
    policy = LIGHTLLM(router_token_ratio=0.9, router_max_new_token_len=1, max_wait_tokens=2)
    story = serve(policy, [Request("a", 0, 3, 6), Request("b", 0, 3, 6)], blocks=11)
    # 3 + 3 cached and 2 a step: at 3 all but one of 11 are taken, and the turn that pauses b runs nothing.
    assert story.evicted[0] == (3, "b", "recompute")
    assert story.ran[3] == (3, [("a", 1)])
    assert all(request.outcome == "finished" for request in story.requests.values())


def test_lightllms_parts_share_the_step_with_decodes_in_order_of_admission() -> None:
    policy = LIGHTLLM(splitfuse_mode=True, splitfuse_block_size=4, max_wait_tokens=1)
    story = serve(policy, [Request("a", 0, 6, 4), Request("b", 0.5, 5, 2)])
    assert [batch for _, batch in story.ran] == [
        [("a", 4)], [("a", 2), ("b", 4)], [("a", 1), ("b", 1)], [("a", 1), ("b", 1)], [("a", 1)]
    ]  # fmt: skip


def test_lightllm_counts_decodes_over_a_leap_as_one_by_one() -> None:
    policy = LIGHTLLM(max_wait_tokens=10)
    memory = Wait(4, 2)
    for iterations in range(1, 40):
        tokens = 4
        for _ in range(iterations):
            tokens = 1 if tokens >= 10 else tokens + 1
        assert policy.leap(memory, iterations) == Wait(tokens, 2)
