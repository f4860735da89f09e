"""MLFQ and SRPT, hand-worked cases: these policies are written from source code, without recordings."""

from __future__ import annotations

import pytest
from servesim.core import Request
from servesim.costs.linear import LinearCost
from servesim.policies import POLICIES
from servesim.runs.request_rows import COLUMNS, request_row

from ..scenarios import serve

MLFQ, SRPT = POLICIES["mlfq"], POLICIES["srpt"]


def test_these_policies_are_marked_as_not_validated() -> None:
    assert {kind().traits.validated_against for kind in (MLFQ, SRPT)} == {"not validated: written from the source code"}


@pytest.mark.parametrize(
    ("prompt", "level"), [(1, 0), (100, 0), (101, 1), (200, 1), (201, 2), (400, 2), (401, 3), (12_800, 7), (12_801, 8)]
)
def test_a_request_joins_the_first_level_whose_slice_covers_its_prefill(prompt: int, level: int) -> None:
    policy = MLFQ(base_quantum=0.01, threshold=2.0, profiled_prefill_token=1e-4)
    assert policy.first_level(Request("a", 0, prompt, 1)) == level
    assert policy.replace(use_skip_join=False).first_level(Request("a", 0, prompt, 1)) == 0


def test_request_moves_down_a_level_after_its_slice_and_keeps_its_blocks() -> None:
    policy = MLFQ(max_batch_size=1, base_quantum=1.5, use_skip_join=False, proactive_offloading=False)
    log = serve(policy, [Request("a", 0, 2, 5), Request("b", 0.5, 2, 2)])
    # A slice of 1.5 s ends after two steps of 1 s; then only b is in the top level.
    assert [batch for _, batch in log.steps] == [
        [("a", 2)], [("a", 1)], [("b", 2)], [("b", 1)], [("a", 1)], [("a", 1)], [("a", 1)]
    ]  # fmt: skip
    assert (log.preempted, log.swapped_in) == ([(2, "a", "keep")], [(4, "a")])
    assert request_row(log.requests["a"])[COLUMNS.index("stalled")] == 2.0


def test_the_slice_of_a_lower_level_is_longer() -> None:
    policy = MLFQ(max_batch_size=1, base_quantum=1.0, threshold=3.0, use_skip_join=False, proactive_offloading=False)
    log = serve(policy, [Request("a", 0, 1, 9), Request("b", 0.5, 1, 9)])
    # More than 1 s in the top level is two steps, more than 3 s one level down is four steps. A request moves to the
    # front of its new level, so b continues after its first slice, and a after its second.
    assert "".join(batch[0][0] for _, batch in log.steps) == "aa" + "bb" + "bbbb" + "aaaa" + "aaa" + "bbb"


def test_a_starved_request_returns_to_the_top_level() -> None:
    policy = MLFQ(
        max_batch_size=1,
        base_quantum=0.5,
        use_skip_join=False,
        proactive_offloading=False,
        starvation_period=4,
        starvation_threshold=3.0,
    )
    requests = [Request("a", 0, 1, 3), *(Request(f"b{i}", 0.5, 1, 1) for i in range(12))]
    log = serve(policy, requests)
    # Step 4 starts at 3 s, 2 s after a ran; step 8 starts at 7 s, 6 s after it ran: a runs next.
    assert log.steps[8] == (8, [("a", 1)])


@pytest.mark.parametrize(("host", "how", "resumed"), [(10, "swap", ("a", 1)), (0, "recompute", ("a", 4))])
def test_kv_blocks_are_swapped_out_or_dropped_when_the_batch_needs_them(
    host: int, how: str, resumed: tuple[str, int]
) -> None:
    policy = MLFQ(max_batch_size=1, base_quantum=0.5, use_skip_join=False, proactive_offloading=False)
    log = serve(policy, [Request("a", 0, 3, 4), Request("b", 0.5, 4, 1)], blocks=6, host_blocks=host)
    assert log.preempted == [(1, "a", how)]
    assert log.steps[:3] == [(0, [("a", 3)]), (1, [("b", 4)]), (2, [resumed])]


def test_swapped_blocks_are_prefetched_if_no_request_is_preempted() -> None:
    policy = MLFQ(max_batch_size=1, base_quantum=0.5, use_skip_join=False)
    requests = [Request("a", 0, 3, 3), Request("b", 0.5, 8, 1), Request("c", 1.5, 1, 2)]
    log = serve(policy, requests, blocks=11, host_blocks=20)
    assert log.preempted[0] == (1, "a", "swap")  # b needs 8 blocks and 1 in reserve, 8 are free
    assert log.prefetched == [(2, "a")]
    assert log.swapped_in == [(4, "a")]


@pytest.mark.parametrize(("host", "start"), [(4, 4.0), (100, 2.0)])
def test_new_prompts_wait_while_host_memory_is_nearly_full(host: int, start: float) -> None:
    policy = MLFQ(max_batch_size=1, base_quantum=0.5, use_skip_join=False, proactive_offloading=False)
    requests = [Request("a", 0, 4, 3), Request("b", 0.5, 4, 2), Request("c", 1.5, 1, 1)]
    log = serve(policy, requests, blocks=7, host_blocks=host)
    assert log.preempted[0] == (1, "a", "swap")  # 4 blocks, swapped in at 3 s when b has finished
    assert log.requests["c"].scheduled == start


def test_srpt_runs_the_request_with_the_fewest_remaining_tokens() -> None:
    log = serve(SRPT(max_batch_size=1), [Request("a", 0, 2, 5), Request("b", 0.5, 2, 2), Request("c", 0.5, 2, 4)])
    assert "".join(batch[0][0] for _, batch in log.steps) == "a" + "bb" + "aaaa" + "cccc"


def test_srpt_counts_prefill_and_decode_tokens_and_stops_at_the_first_request_that_does_not_fit() -> None:
    requests = [Request("a", 0, 2, 9), Request("b", 0.5, 4, 3), Request("c", 0.5, 1, 5)]
    log = serve(SRPT(max_tokens_per_batch=5), requests)
    # 4 tokens of b and 1 of c fit; 1 more of a does not: a pauses although the batch has a free row.
    assert log.steps[1] == (1, [("b", 4), ("c", 1)])
    assert log.preempted == [(1, "a", "keep")]
    assert log.steps[2] == (2, [("b", 1), ("c", 1), ("a", 1)])


def test_preemption_adds_the_time_to_copy_blocks() -> None:
    policy = MLFQ(max_batch_size=1, base_quantum=0.5, use_skip_join=False, proactive_offloading=False)
    requests = [Request("a", 0, 3, 4), Request("b", 0.5, 4, 1)]
    cost = LinearCost(base=1.0, swap_block=0.25)
    log = serve(policy, requests, blocks=6, host_blocks=10, cost=cost)
    assert [t for t, _ in log.steps[:4]] == [0, 1, 2.75, 4.5]  # swap out 3 blocks in b's step, swap in 3 in a's
