"""MLFQ, SRPT and SGLang by cases worked by hand: they were read in their sources, not recorded."""

from __future__ import annotations

import pytest
from servesim.core import Request
from servesim.costs.linear import LinearCost
from servesim.policies import POLICIES
from servesim.policies.sglang import State
from servesim.runs.metrics import COLUMNS, row

from ..small import serve

MLFQ, SRPT, SGLANG = POLICIES["mlfq"], POLICIES["srpt"], POLICIES["sglang"]


def test_these_policies_say_that_they_are_not_proven() -> None:
    assert {kind().traits.validated_against for kind in (MLFQ, SRPT, SGLANG)} == {"not proven: read only"}


@pytest.mark.parametrize(
    ("prompt", "level"), [(1, 0), (100, 0), (101, 1), (200, 1), (201, 2), (400, 2), (401, 3), (12_800, 7), (12_801, 8)]
)
def test_a_request_joins_the_first_level_whose_slice_lasts_for_its_prompt(prompt: int, level: int) -> None:
    policy = MLFQ(base_quantum=0.01, threshold=2.0, profiled_prefill_token=1e-4)
    assert policy.joins(Request("a", 0, prompt, 1)) == level
    assert policy.but(use_skip_join=False).joins(Request("a", 0, prompt, 1)) == 0


def test_who_uses_up_its_slice_goes_down_a_level_and_keeps_its_cache() -> None:
    policy = MLFQ(max_batch_size=1, base_quantum=1.5, use_skip_join=False, proactive_offloading=False)
    story = serve(policy, [Request("a", 0, 2, 5), Request("b", 0.5, 2, 2)])
    # A slice of 1.5 s is over after two steps of a second; b has the top level for itself then.
    assert [batch for _, batch in story.ran] == [
        [("a", 2)], [("a", 1)], [("b", 2)], [("b", 1)], [("a", 1)], [("a", 1)], [("a", 1)]
    ]  # fmt: skip
    assert (story.evicted, story.swapped_in) == ([(2, "a", "keep")], [(4, "a")])
    assert row(story.requests["a"])[COLUMNS.index("stalled")] == 2.0


def test_the_slice_of_a_lower_level_is_longer() -> None:
    policy = MLFQ(max_batch_size=1, base_quantum=1.0, threshold=3.0, use_skip_join=False, proactive_offloading=False)
    story = serve(policy, [Request("a", 0, 1, 9), Request("b", 0.5, 1, 9)])
    # More than 1 s at the top (two steps), more than 3 s one level down (four steps); who goes down goes to the front
    # of its new level, so b runs on after its first slice, and a after its second.
    assert "".join(batch[0][0] for _, batch in story.ran) == "aa" + "bb" + "bbbb" + "aaaa" + "aaa" + "bbb"


def test_who_has_not_run_for_long_goes_back_to_the_top() -> None:
    policy = MLFQ(
        max_batch_size=1,
        base_quantum=0.5,
        use_skip_join=False,
        proactive_offloading=False,
        starvation_period=4,
        starvation_threshold=3.0,
    )
    requests = [Request("a", 0, 1, 3), *(Request(f"b{i}", 0.5, 1, 1) for i in range(12))]
    story = serve(policy, requests)
    # The 4th iteration begins at 3, 2 s after a ran; the 8th at 7, which is 6 s after: a runs next.
    assert story.ran[8] == (8, [("a", 1)])


@pytest.mark.parametrize(("host", "how", "resumed"), [(10, "swap", ("a", 1)), (0, "recompute", ("a", 4))])
def test_caches_go_to_the_host_when_the_batch_needs_their_blocks_or_are_lost(
    host: int, how: str, resumed: tuple[str, int]
) -> None:
    policy = MLFQ(max_batch_size=1, base_quantum=0.5, use_skip_join=False, proactive_offloading=False)
    story = serve(policy, [Request("a", 0, 3, 4), Request("b", 0.5, 4, 1)], blocks=6, host_blocks=host)
    assert story.evicted == [(1, "a", how)]
    assert story.ran[:3] == [(0, [("a", 3)]), (1, [("b", 4)]), (2, [resumed])]


def test_swapped_caches_come_back_ahead_of_need_while_nobody_has_to_give_way() -> None:
    policy = MLFQ(max_batch_size=1, base_quantum=0.5, use_skip_join=False)
    requests = [Request("a", 0, 3, 3), Request("b", 0.5, 8, 1), Request("c", 1.5, 1, 2)]
    story = serve(policy, requests, blocks=11, host_blocks=20)
    assert story.evicted[0] == (1, "a", "swap")  # b's 8 blocks and one in reserve are more than the 8 that are free
    assert story.fetched == [(2, "a")]
    assert story.swapped_in == [(4, "a")]


@pytest.mark.parametrize(("host", "start"), [(4, 4.0), (100, 2.0)])
def test_new_prompts_wait_while_the_host_is_nearly_full(host: int, start: float) -> None:
    policy = MLFQ(max_batch_size=1, base_quantum=0.5, use_skip_join=False, proactive_offloading=False)
    requests = [Request("a", 0, 4, 3), Request("b", 0.5, 4, 2), Request("c", 1.5, 1, 1)]
    story = serve(policy, requests, blocks=7, host_blocks=host)
    assert story.evicted[0] == (1, "a", "swap")  # 4 blocks, which come back at 3 when b is over
    assert story.requests["c"].scheduled == start


def test_srpt_gives_the_batch_to_who_has_least_to_write() -> None:
    story = serve(SRPT(max_batch_size=1), [Request("a", 0, 2, 5), Request("b", 0.5, 2, 2), Request("c", 0.5, 2, 4)])
    assert "".join(batch[0][0] for _, batch in story.ran) == "a" + "bb" + "aaaa" + "cccc"


def test_srpt_counts_prompts_and_decodes_and_stops_at_the_first_that_does_not_fit() -> None:
    requests = [Request("a", 0, 2, 9), Request("b", 0.5, 4, 3), Request("c", 0.5, 1, 5)]
    story = serve(SRPT(max_tokens_per_batch=5), requests)
    # b's 4 tokens and one of c would fit, a's one more would not: a sits out although there is a row for it.
    assert story.ran[1] == (1, [("b", 4), ("c", 1)])
    assert story.evicted == [(1, "a", "keep")]
    assert story.ran[2] == (2, [("b", 1), ("c", 1), ("a", 1)])


def test_sglangs_share_of_answers_to_come_decays_with_every_decode() -> None:
    policy = SGLANG()
    step = (0.7 - 0.7 * 0.14) / 600
    assert policy.leap(State(0.7), 1).ratio == pytest.approx(0.7 - step, abs=1e-15)
    assert policy.leap(State(0.7), 10_000).ratio == 0.7 * 0.14
    one_by_one = State(0.7)
    for _ in range(37):
        one_by_one = policy.leap(one_by_one, 1)
    assert policy.leap(State(0.7), 37) == one_by_one


@pytest.mark.parametrize(("conservativeness", "second"), [(1.0, [("a", 1)]), (0.1, [("b", 5)])])
def test_sglang_leaves_room_for_a_share_of_what_is_still_to_come(
    conservativeness: float, second: list[tuple[str, int]]
) -> None:
    requests = [Request("a", 0, 5, 20), Request("b", 0.5, 5, 8)]
    story = serve(SGLANG(schedule_conservativeness=conservativeness), requests, blocks=30)
    assert story.ran[1] == (1, second)  # 25 free - 19 to come * 0.7 = 11.7, b wants 13


def test_sglang_retracts_the_least_advanced_the_longest_prompt_first_to_the_back() -> None:
    policy = SGLANG(schedule_conservativeness=0.0, retract_decode_steps=1)
    requests = [Request("a", 0, 4, 6), Request("b", 0.5, 2, 6), Request("c", 1.5, 6, 3)]
    story = serve(policy, requests, blocks=16)
    assert story.ran[:5] == [
        (0, [("a", 4)]),
        (1, [("b", 2)]),
        (2, [("c", 6)]),
        (3, [("a", 1), ("b", 1), ("c", 1)]),
        (4, [("b", 1), ("a", 1)]),
    ]
    assert story.evicted == [(4, "c", "recompute")]


def test_sglang_cuts_one_prompt_and_mixes_decodes_in_only_if_told_to() -> None:
    def requests() -> list[Request]:
        return [Request("a", 0, 4, 4), Request("b", 0.5, 10, 2)]

    story = serve(SGLANG(chunked_prefill_size=6), requests())
    assert [batch for _, batch in story.ran[:4]] == [[("a", 4)], [("b", 6)], [("b", 4)], [("a", 1), ("b", 1)]]
    story = serve(SGLANG(chunked_prefill_size=6, enable_mixed_chunk=True), requests())
    assert [batch for _, batch in story.ran[:3]] == [[("a", 4)], [("b", 5), ("a", 1)], [("b", 5), ("a", 1)]]


def test_sglang_serves_the_longest_output_first_if_told_to() -> None:
    requests = [Request("a", 0, 4, 2), Request("b", 0, 4, 9), Request("c", 0, 4, 5)]
    assert serve(SGLANG(schedule_policy="lof", max_running_requests=1), requests).order() == ["b", "c", "a"]


def test_preemption_costs_what_copying_costs() -> None:
    policy = MLFQ(max_batch_size=1, base_quantum=0.5, use_skip_join=False, proactive_offloading=False)
    requests = [Request("a", 0, 3, 4), Request("b", 0.5, 4, 1)]
    cost = LinearCost(base=1.0, swap_block=0.25)
    story = serve(policy, requests, blocks=6, host_blocks=10, cost=cost)
    assert [t for t, _ in story.ran[:4]] == [0, 1, 2.75, 4.5]  # three blocks out with b's step, three in with a's
