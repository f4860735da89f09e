"""vLLM's edge cases, worked out by hand: small scenarios, a tick a step, what runs and who gives way written out."""

from __future__ import annotations

from typing import Any

import pytest
from servesim.core import BlockPool, Policy, Request
from servesim.costs.linear import LinearCost
from servesim.engine.inbox import Inbox
from servesim.engine.loop import Loop
from servesim.engine.server import Server
from servesim.engine.simulated import SimulatedClock
from servesim.policies.nano_vllm import NanoVLLM
from servesim.policies.vllm_v0 import VLLM
from servesim.policies.vllm_v0_chunked import VLLMChunked
from servesim.policies.vllm_v1 import VLLMV1

from .recordings import Played, Recording, play

TICK = {"c0": 1, "per_prefill_token": 0, "per_decode_seq": 0, "per_swap_block": 0}


def serve(
    policy: Policy, requests: list[list[Any]], blocks: int, size: int = 1, host: int = 0, longest: int = 99
) -> Played:
    """Serve (id, arrival, prompt, output[, priority]) with a tick a step."""
    knobs = {"num_blocks": blocks, "block_size": size, "num_cpu_blocks": host, "max_model_len": longest}
    table = [[*request, 0][:5] for request in requests]
    return play(Recording({"knobs": knobs, "cost": TICK}, table, []), policy)


def story(played: Played, *facts: str) -> list[Any]:
    """Return the batches as 'id:tokens id:tokens', with other facts of each turn beside them where asked for."""
    batches = [" ".join(f"{id}:{tokens}" for id, tokens, _ in row["sched"]) for row in played.rows]
    return [(batch, *(row[fact] for fact in facts)) if facts else batch for batch, row in zip(batches, played.rows)]


# -- v0 -------------------------------------------------------------------------------------------------------------


def test_the_watermark_is_nothing_below_a_hundred_blocks() -> None:
    assert [VLLM().reserve(BlockPool(total, 16)) for total in (99, 100, 250)] == [0, 1, 2]


def test_a_request_is_preempted_although_its_block_has_room() -> None:
    played = serve(VLLM(), [["a", 0, 1, 2], ["b", 0, 1, 2]], blocks=2, size=4)
    assert story(played, "preempted") == [
        ("a:1 b:1", []),
        ("a:1", [["b", "recompute"]]),
        ("b:2", []),  # its prompt and the token it had
    ]


def test_a_request_alone_that_cannot_grow_is_run_anew_for_every_token_until_it_fits_no_more() -> None:
    played = serve(VLLM(), [["a", 0, 3, 9]], blocks=4)
    assert story(played, "preempted", "ignored") == [
        ("a:3", [], []),
        ("a:1", [], []),  # takes the last block
        ("", [["a", "recompute"]], []),
        ("", [], ["a"]),  # 5 tokens never fit
    ]
    assert played.requests["a"].outcome == "refused"


def test_a_request_that_grew_beyond_the_prompt_limit_is_dropped_when_it_would_run_again() -> None:
    policy = VLLM(max_num_batched_tokens=4)
    played = serve(policy, [["a", 0, 2, 3], ["b", 0, 2, 9]], blocks=6)
    assert story(played, "preempted", "ignored") == [
        ("a:2 b:2", [], []),
        ("a:1 b:1", [], []),  # both have 4 tokens, 3 of them cached: no block is left
        ("a:1", [["b", "recompute"]], []),  # and a ends
        ("b:4", [], []),
        ("b:1", [], []),
        ("b:1", [], []),
        ("", [["b", "recompute"]], []),
        ("", [], ["b"]),  # 7 tokens, 4 at most
    ]


def test_who_is_swapped_out_holds_up_all_prompts() -> None:
    policy = VLLM(preemption_mode="swap", max_num_seqs=2)
    played = serve(policy, [["a", 0, 3, 3], ["b", 0, 3, 3], ["c", 1, 1, 1]], blocks=7, host=9)
    assert story(played, "preempted", "swap_in", "free_cpu") == [
        ("a:3 b:3", [], [], 9),
        ("a:1", [["b", "swap"]], [], 6),  # one block is left, and two want to grow
        ("a:1", [], [], 6),  # b needs 4 and 2 are free; c has to wait behind it
        ("b:1", [], ["b"], 9),
        ("c:1", [], [], 9),
        ("b:1", [], [], 9),
    ]


@pytest.mark.parametrize(("rule", "back_at"), [("touched", [2, 4]), ("any_free", [4])])
def test_the_older_block_manager_wants_one_block_more_to_swap_in(rule: str, back_at: list[int]) -> None:
    policy = VLLM(preemption_mode="swap", append_rule=rule)
    played = serve(policy, [["a", 0, 2, 4], ["b", 0, 3, 3]], blocks=4, size=2, host=9)
    assert played.rows[1]["preempted"] == [["b", "swap"]]  # with 3 tokens in 2 blocks, the other 2 being free at 2
    assert [row["t"] for row in played.rows if row["swap_in"]] == back_at


def test_a_request_larger_than_the_memory_fails_on_its_way_back_from_the_host() -> None:
    policy = VLLM(preemption_mode="swap", append_rule="any_free")
    played = serve(policy, [["a", 0, 3, 9]], blocks=4, host=9)
    assert story(played, "preempted", "ignored") == [
        ("a:3", [], []),
        ("a:1", [], []),
        ("", [["a", "swap"]], []),
        ("", [], ["a"]),  # 4 blocks on the host and one more, of 4
    ]
    waits = serve(policy.but(fail_infeasible=False), [["a", 0, 3, 9]], blocks=4, host=9)
    assert "nothing runs, nothing arrives (requests a)" in str(waits.stuck)


def test_an_engine_without_host_memory_dies_of_a_swap() -> None:
    played = serve(VLLM(preemption_mode="swap"), [["a", 0, 1, 2], ["b", 0, 1, 2]], blocks=2, size=4)
    assert "the engine dies: 1 host blocks to swap out request b, 0 are free" in str(played.stuck)


def test_a_pass_that_only_ignores_makes_an_empty_step_up_to_0_4_0() -> None:
    requests = [["a", 0, 1, 3], ["b", 1, 50, 1]]
    policy = VLLM(max_num_batched_tokens=20)
    assert story(serve(policy, requests, blocks=9), "ignored") == [("a:1", []), ("a:1", ["b"]), ("a:1", [])]
    old = serve(policy.but(ignored_step=True), requests, blocks=9)
    assert story(old, "ignored", "t") == [("a:1", [], 0), ("", ["b"], 1), ("a:1", [], 1), ("a:1", [], 2)]


def test_padded_prompts_are_counted_at_the_longest_and_their_padding_is_limited() -> None:
    requests = [["a", 0, 4, 1], ["b", 0, 1, 1], ["c", 0, 4, 1]]
    padded = VLLM(max_num_batched_tokens=11, padded_prefill=True)
    assert story(serve(padded, requests, blocks=20)) == ["a:4 b:1", "c:4"]  # 3 x 4 > 11
    assert story(serve(padded.but(max_paddings=2), requests, blocks=20)) == ["a:4", "b:1", "c:4"]  # 3 tokens of padding
    assert story(serve(padded.but(padded_prefill=False), requests, blocks=20)) == ["a:4 b:1 c:4"]


@pytest.mark.parametrize("scope", ["queue", "request", "request-unless-idle"])
def test_a_prompt_waits_for_half_of_the_last_prefills_latency(scope: str) -> None:
    # vLLM's own test: a's prompt takes 1 s, b arrives as it ends, and is admitted 0.6 s later.
    policy = VLLM(delay_factor=0.5, delay_scope=scope, max_num_batched_tokens=100)
    requests = [Request("a", 0.0, 4, 9), Request("b", 1.0, 4, 9)]
    Loop(Server(policy, 100, 4), Inbox(requests), SimulatedClock(LinearCost(prefill=1.0, decode_step=0.6))).run()
    assert requests[1].scheduled == 1.6


@pytest.mark.parametrize(
    ("scope", "third"), [("queue", "b:1 c:1"), ("request", "b:1"), ("request-unless-idle", "b:1")]
)  # fmt: skip
def test_whoever_came_late_goes_with_the_oldest_only_where_the_queue_waits_as_one(scope: str, third: str) -> None:
    policy = VLLM(delay_factor=1.0, delay_scope=scope)
    played = serve(policy, [["a", 0, 1, 9], ["b", 0.5, 1, 1], ["c", 1.5, 1, 1]], blocks=50)
    assert story(played)[:3] == ["a:1", "a:1", third]  # at 2: b has waited for 1.5 of at least 1, c for 0.5


def test_nobody_runs_and_all_prompts_go_unless_the_first_of_them_counts() -> None:
    requests = [["a", 0, 1, 1], ["b", 9, 1, 1], ["c", 9, 1, 1]]  # the latency of a is read at 9: it is 9
    stories = {scope: story(serve(VLLM(delay_factor=1.0, delay_scope=scope), requests, blocks=50))
               for scope in ("queue", "request", "request-unless-idle")}  # fmt: skip
    assert stories == {
        "queue": ["a:1", "b:1 c:1"],
        "request": ["a:1", "b:1", "c:1"],
        "request-unless-idle": ["a:1", "b:1 c:1"],
    }


def test_a_head_of_higher_priority_pushes_out_the_last_and_starts_a_step_later() -> None:
    policy = VLLM(policy="priority", max_num_seqs=2)
    played = serve(policy, [["a", 0, 1, 3, 1], ["b", 0, 1, 3, 2], ["c", 0.5, 1, 2, 0]], blocks=50)
    assert story(played, "waiting") == [
        ("a:1 b:1", []),
        ("a:1", ["c", "b"]),  # c takes b's place, and runs from the next step on
        ("c:1", ["b"]),
        ("c:1 a:1", ["b"]),  # sorted by priority
        ("b:2", []),
        ("b:1", []),
    ]


# -- chunked prefill ------------------------------------------------------------------------------------------------


def test_a_prompt_swapped_out_halfway_never_comes_back_if_its_rest_exceeds_the_budget() -> None:
    policy = VLLMChunked(max_num_batched_tokens=4, preemption_mode="swap", append_rule="any_free")
    played = serve(policy, [["a", 0, 2, 4], ["b", 0, 10, 1]], blocks=13, host=20)
    assert story(played, "preempted") == [
        ("a:2 b:2", []),
        ("a:1", [["b", "swap"]]),  # a took the last block; b, at the end, has 8 tokens to go
        ("a:1", []),
        ("a:1", []),
    ]
    assert "nothing runs, nothing arrives (requests b)" in str(played.stuck)


def test_a_younger_prompt_may_be_admitted_in_the_step_that_preempts_an_older() -> None:
    policy = VLLMChunked(max_num_batched_tokens=8, append_rule="any_free")
    played = serve(policy, [["a", 0, 2, 4], ["b", 0, 3, 4], ["c", 0.5, 1, 1]], blocks=5)
    assert story(played, "preempted", "waiting")[:3] == [
        ("a:2 b:3", [], []),
        ("c:1 a:1", [["b", "recompute"]], ["b"]),
        ("a:1", [], ["b"]),
    ]


def test_running_prompts_and_decodes_share_one_budget_in_the_order_of_the_batch() -> None:
    policy = VLLMChunked(max_num_batched_tokens=4)
    played = serve(policy, [["a", 0, 1, 3], ["b", 0, 6, 2], ["c", 0, 2, 1]], blocks=50)
    assert story(played, "running") == [
        ("a:1 b:3", ["a", "b"]),
        ("b:3 a:1", ["a", "b"]),  # prompts stand first in the batch
        ("c:2 a:1 b:1", ["a", "b", "c"]),
    ]


def test_several_partial_prefills_share_the_budget_evenly() -> None:
    policy = VLLMChunked(max_num_batched_tokens=8, max_num_partial_prefills=2, long_prefill_token_threshold=10)
    assert story(serve(policy, [["a", 0, 6, 1], ["b", 0, 6, 1]], blocks=50)) == ["a:4 b:4", "a:2 b:2"]


def test_a_second_long_prompt_waits_while_a_short_one_passes_it() -> None:
    policy = VLLMChunked(max_num_batched_tokens=8, max_num_partial_prefills=2, long_prefill_token_threshold=4)
    played = serve(policy, [["a", 0, 6, 1], ["b", 0, 6, 1], ["c", 0, 3, 2]], blocks=50)
    assert story(played, "waiting") == [("a:4 c:3", ["b"]), ("b:4 a:2 c:1", []), ("b:2", [])]


# -- V1 -------------------------------------------------------------------------------------------------------------


def test_v1_takes_memory_chunk_by_chunk_and_may_lose_a_half_done_prompt() -> None:
    policy = VLLMV1(max_num_batched_tokens=4, scheduler_reserve_full_isl=False)
    played = serve(policy, [["a", 0, 2, 6], ["b", 0, 8, 1]], blocks=8)
    assert story(played, "preempted", "free_gpu")[:3] == [
        ("a:2 b:2", [], 4),
        ("a:1 b:3", [], 0),
        ("a:1", [["b", "recompute"]], 4),
    ]
    whole = serve(policy.but(scheduler_reserve_full_isl=True), [["a", 0, 2, 6], ["b", 0, 8, 1]], blocks=8)
    assert story(whole)[:2] == ["a:2", "a:1"]  # b waits until all of it fits


def test_v1_may_preempt_the_head_itself_and_then_runs_nothing_in_that_step() -> None:
    policy = VLLMV1(policy="priority")
    played = serve(policy, [["a", 0, 2, 4, 1], ["b", 0.5, 2, 4, 0]], blocks=5)
    assert story(played, "preempted", "t")[:5] == [
        ("a:2", [], 0),
        ("a:1 b:2", [], 1),
        ("", [["a", "recompute"]], 2),  # no block is left, and the one who asks first is the last in rank
        ("b:1", [], 2),
        ("b:1", [], 3),
    ]


def test_v1_leaves_the_watermark_free_only_while_others_run() -> None:
    policy = VLLMV1(watermark=0.5)
    assert story(serve(policy, [["a", 0, 4, 1], ["b", 0, 1, 1]], blocks=7)) == ["a:4", "b:1"]


def test_v1_without_chunks_stops_at_a_prompt_that_exceeds_what_is_left_of_the_budget() -> None:
    policy = VLLMV1(max_num_batched_tokens=5, enable_chunked_prefill=False)
    requests = [["a", 0, 3, 1], ["b", 0, 4, 1], ["c", 0, 1, 1]]
    assert story(serve(policy, requests, blocks=50)) == ["a:3", "b:4 c:1"]


def test_v1_cuts_long_prompts_to_the_threshold_unless_they_are_alone() -> None:
    policy = VLLMV1(max_num_batched_tokens=9, long_prefill_token_threshold=2)
    assert story(serve(policy, [["a", 0, 5, 1]], blocks=50)) == ["a:5"]
    assert story(serve(policy, [["a", 0, 5, 1], ["b", 0, 1, 3]], blocks=50)) == ["a:2 b:1", "a:2 b:1", "a:1 b:1"]


# -- nano-vllm ------------------------------------------------------------------------------------------------------


def test_nano_vllm_cuts_only_the_first_prompt_of_a_step() -> None:
    policy = NanoVLLM(max_num_batched_tokens=4)
    played = serve(policy, [["a", 0, 6, 2], ["b", 0, 2, 1], ["c", 0, 1, 1]], blocks=50)
    assert story(played) == ["a:4", "a:2 b:2", "c:1", "a:1"]
    assert story(serve(policy, [["a", 0, 1, 1], ["b", 0, 6, 1]], blocks=50)) == ["a:1", "b:4", "b:2"]


def test_nano_vllm_counts_a_step_and_not_the_batch() -> None:
    played = serve(NanoVLLM(max_num_seqs=2), [["a", 0, 1, 3], ["b", 0, 1, 2], ["c", 0, 1, 2]], blocks=50)
    assert story(played) == ["a:1 b:1", "c:1", "a:1 b:1", "a:1 c:1"]  # three run, two of them a step


def test_nano_vllm_takes_a_block_only_where_one_is_needed() -> None:
    played = serve(NanoVLLM(), [["a", 0, 1, 4], ["b", 0, 1, 4]], blocks=2, size=2)
    assert story(played, "preempted") == [
        ("a:1 b:1", []),
        ("a:1 b:1", []),  # nothing is free, but the blocks have room
        ("a:1", [["b", "recompute"]]),
        ("a:1", []),  # b, 3 tokens long, wants two blocks
        ("b:3", []),
        ("b:1", []),
    ]


# -- fields ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (VLLM, {"delay_scope": "all"}, "delay_scope: expected one of queue, request, request-unless-idle, got 'all'"),
        (VLLM, {"watermark": 1.0}, "watermark: expected a share below 1, got 1.0"),
        (VLLM, {"max_num_seqs": 0}, "max_num_seqs: expected at least 1, got 0"),
        (VLLMChunked, {"delay_scope": "request"}, "delay_scope: expected one of queue, request-unless-idle"),
        (VLLMV1, {"policy": "lifo"}, "policy: expected one of fcfs, priority, got 'lifo'"),
    ],
)
def test_a_bad_field_is_named(kind: type[Policy], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**fields)


@pytest.mark.parametrize("fails", [{"b": 1}, {"a": 3}])
def test_a_call_that_fails_ends_prompts_and_decodes_alike_and_nobody_else(fails: dict[str, int]) -> None:
    """From 2 to 3 run a's third token and b's prompt; c comes meanwhile and has the server to itself."""
    asked = [("a", 0.0), ("b", 1.5), ("c", 2.5)]
    requests = [Request(id, arrival, 4, 6, fails=fails.get(id)) for id, arrival in asked]
    policy = VLLMV1()
    server = Server(policy, 64, 4)
    Loop(server, Inbox(requests), SimulatedClock(LinearCost(base=1.0)), check=True).run()
    assert server.pool.free == 64
    assert [(r.outcome, r.finish, r.written) for r in requests] == [
        ("failed", 3.0, 3), ("failed", 3.0, 1), ("finished", 9.0, 6),
    ]  # fmt: skip
