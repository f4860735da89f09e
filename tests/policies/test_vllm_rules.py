"""Edge cases of vLLM's schedulers, worked by hand: one tick per step, with the expected batches and preemptions."""

from __future__ import annotations

from typing import Any, Optional

import pytest
from servesim.config.registry import make_policy, preset
from servesim.core import BlockPool, Policy, Request
from servesim.costs.linear import LinearCost
from servesim.engine.build import build_loop
from servesim.engine.inbox import Inbox
from servesim.engine.loop import Loop
from servesim.engine.server import Server
from servesim.engine.simulated import SimulatedClock
from servesim.policies.vllm_v0 import VLLM, VLLMChunked
from servesim.policies.vllm_v1 import VLLMV1

from .recordings import PlayedRun, Recording, play

TICK = {"c0": 1, "per_prefill_token": 0, "per_decode_seq": 0, "per_swap_block": 0}


def serve(
    policy: Policy, requests: list[list[Any]], blocks: int, size: int = 1, host_blocks: int = 0, max_model_len: int = 99
) -> PlayedRun:
    """Serve rows of (id, arrival, prompt, output[, priority]) with one tick per step."""
    knobs = {"num_blocks": blocks, "block_size": size, "num_cpu_blocks": host_blocks, "max_model_len": max_model_len}
    table = [[*request, 0][:5] for request in requests]
    return play(Recording({"knobs": knobs, "cost": TICK}, table, []), policy)


def batches(played: PlayedRun, *fields: str) -> list[Any]:
    """Return each batch as 'id:tokens id:tokens', with other fields of the step if named."""
    batches = [" ".join(f"{id}:{tokens}" for id, tokens, _ in row["sched"]) for row in played.rows]
    return [(batch, *(row[fact] for fact in fields)) if fields else batch for batch, row in zip(batches, played.rows)]


# -- v0 -------------------------------------------------------------------------------------------------------------


def test_the_watermark_is_zero_below_100_blocks() -> None:
    assert [VLLM().watermark_blocks(BlockPool(total, 16)) for total in (99, 100, 250)] == [0, 1, 2]


def test_a_request_is_preempted_although_its_block_has_space() -> None:
    played = serve(VLLM(), [["a", 0, 1, 2], ["b", 0, 1, 2]], blocks=2, size=4)
    assert batches(played, "preempted") == [
        ("a:1 b:1", []),
        ("a:1", [["b", "recompute"]]),
        ("b:2", []),  # its prompt and one generated token
    ]


def test_a_single_request_is_recomputed_for_every_token_until_it_does_not_fit() -> None:
    played = serve(VLLM(), [["a", 0, 3, 9]], blocks=4)
    assert batches(played, "preempted", "ignored") == [
        ("a:3", [], []),
        ("a:1", [], []),  # takes the last block
        ("", [["a", "recompute"]], []),
        ("", [], ["a"]),  # 5 tokens never fit
    ]
    assert played.requests["a"].outcome == "refused"


def test_a_preempted_request_above_the_prompt_limit_is_rejected() -> None:
    policy = VLLM(max_num_batched_tokens=4)
    played = serve(policy, [["a", 0, 2, 3], ["b", 0, 2, 9]], blocks=6)
    assert batches(played, "preempted", "ignored") == [
        ("a:2 b:2", [], []),
        ("a:1 b:1", [], []),  # both have 4 tokens, 3 of them cached: no block is free
        ("a:1", [["b", "recompute"]], []),  # and a finishes
        ("b:4", [], []),
        ("b:1", [], []),
        ("b:1", [], []),
        ("", [["b", "recompute"]], []),
        ("", [], ["b"]),  # 7 tokens, 4 at most
    ]


def test_a_swapped_out_request_blocks_all_prompts() -> None:
    policy = VLLM(preemption_mode="swap", max_num_seqs=2)
    played = serve(policy, [["a", 0, 3, 3], ["b", 0, 3, 3], ["c", 1, 1, 1]], blocks=7, host_blocks=9)
    assert batches(played, "preempted", "swap_in", "free_cpu") == [
        ("a:3 b:3", [], [], 9),
        ("a:1", [["b", "swap"]], [], 6),  # one block is free, two are needed
        ("a:1", [], [], 6),  # b needs 4 blocks and 2 are free; c waits behind it
        ("b:1", [], ["b"], 9),
        ("c:1", [], [], 9),
        ("b:1", [], [], 9),
    ]


@pytest.mark.parametrize(("rule", "swap_in_times"), [("touched", [2, 4]), ("any_free", [4])])
def test_the_older_block_manager_needs_one_more_block_to_swap_in(rule: str, swap_in_times: list[int]) -> None:
    policy = VLLM(preemption_mode="swap", append_rule=rule)
    played = serve(policy, [["a", 0, 2, 4], ["b", 0, 3, 3]], blocks=4, size=2, host_blocks=9)
    assert played.rows[1]["preempted"] == [["b", "swap"]]  # 3 tokens in 2 blocks; the other 2 blocks are free at tick 2
    assert [row["t"] for row in played.rows if row["swap_in"]] == swap_in_times


def test_a_request_larger_than_the_pool_is_rejected_at_swap_in() -> None:
    policy = VLLM(preemption_mode="swap", append_rule="any_free")
    played = serve(policy, [["a", 0, 3, 9]], blocks=4, host_blocks=9)
    assert batches(played, "preempted", "ignored") == [
        ("a:3", [], []),
        ("a:1", [], []),
        ("", [["a", "swap"]], []),
        ("", [], ["a"]),  # 4 host blocks and 1 more, but the pool has 4
    ]
    stuck_run = serve(policy.replace(fail_infeasible=False), [["a", 0, 3, 9]], blocks=4, host_blocks=9)
    assert "no request runs and no request will arrive (requests a)" in str(stuck_run.stuck)


def test_an_engine_without_host_memory_crashes_at_a_swap() -> None:
    played = serve(VLLM(preemption_mode="swap"), [["a", 0, 1, 2], ["b", 0, 1, 2]], blocks=2, size=4)
    assert "request b needs 1 host blocks, 0 are free" in str(played.stuck)


def test_up_to_0_4_0_a_step_that_only_rejects_is_empty() -> None:
    requests = [["a", 0, 1, 3], ["b", 1, 50, 1]]
    policy = VLLM(max_num_batched_tokens=20)
    assert batches(serve(policy, requests, blocks=9), "ignored") == [("a:1", []), ("a:1", ["b"]), ("a:1", [])]
    v0_4_0 = serve(policy.replace(ignored_step=True), requests, blocks=9)
    assert batches(v0_4_0, "ignored", "t") == [("a:1", [], 0), ("", ["b"], 1), ("a:1", [], 1), ("a:1", [], 2)]


def test_padded_prompts_count_with_the_longest_length_and_padding_is_limited() -> None:
    requests = [["a", 0, 4, 1], ["b", 0, 1, 1], ["c", 0, 4, 1]]
    padded = VLLM(max_num_batched_tokens=11, padded_prefill=True)
    assert batches(serve(padded, requests, blocks=20)) == ["a:4 b:1", "c:4"]  # 3 x 4 > 11
    assert batches(serve(padded.replace(max_paddings=2), requests, blocks=20)) == [
        "a:4",
        "b:1",
        "c:4",
    ]  # 3 tokens of padding
    assert batches(serve(padded.replace(padded_prefill=False), requests, blocks=20)) == ["a:4 b:1 c:4"]


@pytest.mark.parametrize("scope", ["queue", "request", "request-unless-idle"])
def test_a_prompt_waits_for_half_the_latency_of_the_last_prefill(scope: str) -> None:
    # From vLLM's tests: the prefill of a takes 1 s, b arrives at its end and is admitted 0.6 s later.
    policy = VLLM(delay_factor=0.5, delay_scope=scope, max_num_batched_tokens=100)
    requests = [Request("a", 0.0, 4, 9), Request("b", 1.0, 4, 9)]
    Loop(Server(policy, 100, 4), Inbox(requests), SimulatedClock(LinearCost(prefill=1.0, decode_step=0.6))).run()
    assert requests[1].scheduled == 1.6


@pytest.mark.parametrize(
    ("scope", "third"), [("queue", "b:1 c:1"), ("request", "b:1"), ("request-unless-idle", "b:1")]
)  # fmt: skip
def test_a_late_request_is_admitted_with_the_oldest_only_if_the_delay_is_per_queue(scope: str, third: str) -> None:
    policy = VLLM(delay_factor=1.0, delay_scope=scope)
    played = serve(policy, [["a", 0, 1, 9], ["b", 0.5, 1, 1], ["c", 1.5, 1, 1]], blocks=50)
    assert batches(played)[:3] == ["a:1", "a:1", third]  # at 2: b has waited 1.5, c 0.5; the delay is 1


@pytest.mark.parametrize("scope", ["queue", "request", "request-unless-idle"])
def test_a_prompt_that_has_waited_exactly_the_delay_waits_one_more_step(scope: str) -> None:
    played = serve(VLLM(delay_factor=2.0, delay_scope=scope), [["a", 0, 1, 9], ["b", 1, 1, 1]], blocks=50)
    assert batches(played, "t")[:5] == [("a:1", 0), ("a:1", 1), ("a:1", 2), ("a:1", 3), ("b:1", 4)]  # at 3: 2 == 2 * 1


def test_an_idle_engine_admits_all_prompts_unless_the_delay_is_per_request() -> None:
    requests = [["a", 0, 1, 1], ["b", 9, 1, 1], ["c", 9, 1, 1]]  # the latency of a, read at 9, is 9
    by_scope = {scope: batches(serve(VLLM(delay_factor=1.0, delay_scope=scope), requests, blocks=50))
               for scope in ("queue", "request", "request-unless-idle")}  # fmt: skip
    assert by_scope == {
        "queue": ["a:1", "b:1 c:1"],
        "request": ["a:1", "b:1", "c:1"],
        "request-unless-idle": ["a:1", "b:1 c:1"],
    }


def test_a_head_of_higher_priority_preempts_the_last_request_and_starts_a_step_later() -> None:
    policy = VLLM(policy="priority", max_num_seqs=2)
    played = serve(policy, [["a", 0, 1, 3, 1], ["b", 0, 1, 3, 2], ["c", 0.5, 1, 2, 0]], blocks=50)
    assert batches(played, "waiting") == [
        ("a:1 b:1", []),
        ("a:1", ["c", "b"]),  # c replaces b, and runs from the next step
        ("c:1", ["b"]),
        ("c:1 a:1", ["b"]),  # sorted by priority
        ("b:2", []),
        ("b:1", []),
    ]


@pytest.mark.parametrize(("kind", "written"), [(VLLM, 4), (VLLMChunked, 4), (VLLMV1, 3)])
def test_v0_cuts_an_output_one_token_later_than_v1(kind: type[Policy], written: int) -> None:
    # max_model_len is 8 and the prompt has 5 tokens: v0 stops above 8 tokens, V1 at 8.
    played = serve(kind(), [["a", 0, 5, 20]], blocks=50, max_model_len=8)
    assert (played.requests["a"].outcome, played.requests["a"].written) == ("finished", written)


def test_a_request_that_fails_in_the_swapped_queue_keeps_its_host_blocks() -> None:
    policy = VLLM(preemption_mode="swap", append_rule="any_free")
    requests = [["a", 0, 3, 9], ["b", 9, 1, 1]]
    played = serve(policy, requests, blocks=4, host_blocks=9)
    assert played.requests["a"].outcome == "refused"
    assert played.rows[-1]["free_cpu"] == played.server.pool.host_free == 5  # a had 4 host blocks
    assert played.server.pool.host_lost == 4
    assert "vLLM does not free its 4 host blocks" in str(played.requests["a"].reason)
    fixed = serve(policy.replace(free_failed_swaps=True), requests, blocks=4, host_blocks=9)
    assert (fixed.server.pool.host_free, fixed.server.pool.host_lost) == (9, 0)


def test_lost_host_blocks_end_a_later_swap() -> None:
    policy = VLLM(preemption_mode="swap", append_rule="any_free")
    requests = [["a", 0, 3, 9], ["b", 9, 3, 9]]  # b has the same end as a, but only 1 of 5 host blocks is free
    played = serve(policy, requests, blocks=4, host_blocks=5)
    assert "request b needs 4 host blocks, 1 are free" in str(played.stuck)
    assert serve(policy.replace(free_failed_swaps=True), requests, blocks=4, host_blocks=5).stuck is None


# -- chunked prefill ------------------------------------------------------------------------------------------------


def test_a_half_prefilled_swapped_request_never_returns_if_its_rest_exceeds_the_budget() -> None:
    policy = VLLMChunked(max_num_batched_tokens=4, preemption_mode="swap", append_rule="any_free")
    played = serve(policy, [["a", 0, 2, 4], ["b", 0, 10, 1]], blocks=13, host_blocks=20)
    assert batches(played, "preempted") == [
        ("a:2 b:2", []),
        ("a:1", [["b", "swap"]]),  # a took the last block; b has 8 prompt tokens left
        ("a:1", []),
        ("a:1", []),
    ]
    assert "no request runs and no request will arrive (requests b)" in str(played.stuck)


def test_a_newer_prompt_may_be_admitted_in_the_step_that_preempts_an_older_one() -> None:
    policy = VLLMChunked(max_num_batched_tokens=8, append_rule="any_free")
    played = serve(policy, [["a", 0, 2, 4], ["b", 0, 3, 4], ["c", 0.5, 1, 1]], blocks=5)
    assert batches(played, "preempted", "waiting")[:3] == [
        ("a:2 b:3", [], []),
        ("c:1 a:1", [["b", "recompute"]], ["b"]),
        ("a:1", [], ["b"]),
    ]


def test_running_prompts_and_decodes_share_one_budget_in_the_order_of_the_batch() -> None:
    policy = VLLMChunked(max_num_batched_tokens=4)
    played = serve(policy, [["a", 0, 1, 3], ["b", 0, 6, 2], ["c", 0, 2, 1]], blocks=50)
    assert batches(played, "running") == [
        ("a:1 b:3", ["a", "b"]),
        ("b:3 a:1", ["a", "b"]),  # prompts come first in the batch
        ("c:2 a:1 b:1", ["a", "b", "c"]),
    ]


def test_several_partial_prefills_share_the_budget_evenly() -> None:
    policy = VLLMChunked(max_num_batched_tokens=8, max_num_partial_prefills=2, long_prefill_token_threshold=10)
    assert batches(serve(policy, [["a", 0, 6, 1], ["b", 0, 6, 1]], blocks=50)) == ["a:4 b:4", "a:2 b:2"]


def test_a_short_prompt_overtakes_a_second_long_prompt() -> None:
    policy = VLLMChunked(max_num_batched_tokens=8, max_num_partial_prefills=2, long_prefill_token_threshold=4)
    played = serve(policy, [["a", 0, 6, 1], ["b", 0, 6, 1], ["c", 0, 3, 2]], blocks=50)
    assert batches(played, "waiting") == [("a:4 c:3", ["b"]), ("b:4 a:2 c:1", []), ("b:2", [])]


@pytest.mark.parametrize(("examine", "ignored_at"), [(False, 2), (True, 1)])
def test_a_full_token_budget_decides_when_a_prompt_that_never_fits_is_ignored(examine: bool, ignored_at: int) -> None:
    # At 1 s the decode of a and the prompt of b use all 4 tokens. c needs 60 blocks, and the pool has 50.
    policy = VLLMChunked(max_num_batched_tokens=4, examine_at_full_budget=examine)
    played = serve(policy, [["a", 0, 1, 3], ["b", 0, 6, 1], ["c", 0.5, 60, 1]], blocks=50)
    assert batches(played, "t", "ignored") == [
        ("a:1 b:3", 0, []),
        ("b:3 a:1", 1, ["c"] if examine else []),
        ("a:1", 2, [] if examine else ["c"]),
    ]
    assert played.requests["c"].finish == ignored_at


@pytest.mark.parametrize(("answer", "outcome"), [(True, "refused"), (False, "unanswered")])
def test_0_4_2_chunked_never_answers_a_request_that_fails_in_the_swapped_queue(answer: bool, outcome: str) -> None:
    policy = VLLMChunked(preemption_mode="swap", append_rule="any_free", answer_failed_swaps=answer)
    played = serve(policy, [["a", 0, 3, 9]], blocks=4, host_blocks=9)
    assert batches(played, "preempted", "ignored")[2:] == [("", [["a", "swap"]], []), ("", [], ["a"])]
    assert (played.requests["a"].outcome, played.server.pool.host_lost) == (outcome, 4)


def test_the_presets_of_v0_chunked_have_the_behaviour_of_their_version() -> None:
    fields = {name: preset(f"vllm-{name}-chunked")["policy"] for name in ("0.4.2", "0.5.0", "0.8.5")}
    policies = {name: make_policy(settings) for name, settings in fields.items()}
    assert {name: (p.examine_at_full_budget, p.answer_failed_swaps) for name, p in policies.items()} == {  # type: ignore[attr-defined]
        "0.4.2": (True, False), "0.5.0": (True, True), "0.8.5": (False, True),
    }  # fmt: skip


# -- V1 -------------------------------------------------------------------------------------------------------------


def test_v1_allocates_blocks_per_chunk_and_may_preempt_a_half_done_prompt() -> None:
    policy = VLLMV1(max_num_batched_tokens=4, scheduler_reserve_full_isl=False)
    played = serve(policy, [["a", 0, 2, 6], ["b", 0, 8, 1]], blocks=8)
    assert batches(played, "preempted", "free_gpu")[:3] == [
        ("a:2 b:2", [], 4),
        ("a:1 b:3", [], 0),
        ("a:1", [["b", "recompute"]], 4),
    ]
    reserved = serve(policy.replace(scheduler_reserve_full_isl=True), [["a", 0, 2, 6], ["b", 0, 8, 1]], blocks=8)
    assert batches(reserved)[:2] == ["a:2", "a:1"]  # b waits until its whole prompt fits


def test_v1_may_preempt_the_first_request_and_then_runs_nothing_in_that_step() -> None:
    policy = VLLMV1(policy="priority", async_scheduling=False)
    played = serve(policy, [["a", 0, 2, 4, 1], ["b", 0.5, 2, 4, 0]], blocks=5)
    assert batches(played, "preempted", "t")[:5] == [
        ("a:2", [], 0),
        ("a:1 b:2", [], 1),
        ("", [["a", "recompute"]], 2),  # no block is free, and the first request has the lowest priority
        ("b:1", [], 3),  # one tick later: the engine pauses
        ("b:1", [], 4),
    ]


@pytest.mark.parametrize(("version", "batch"), [("0.32.0", "b:1 c:1"), ("0.28.0", "b:1")])
def test_v1_runs_the_request_behind_a_victim_that_the_step_has_passed_over(version: str, batch: str) -> None:
    """a has its last token in flight, so the step passes it over; then b needs its blocks, and c comes next."""
    policy = VLLMV1(policy="priority", enable_prefix_caching=False, version=version)
    played = serve(policy, [["a", 0, 1, 4, 2], ["b", 0.5, 1, 12, 0], ["c", 0.5, 1, 12, 1]], blocks=8)
    assert batches(played, "preempted", "free_gpu")[3:5] == [
        ("a:1 b:1 c:1", [], 0),
        (batch, [["a", "recompute"]], 4 - batch.count(":")),
    ]


def test_v1_keeps_the_watermark_free_only_while_other_requests_run() -> None:
    policy = VLLMV1(watermark=0.5)
    assert batches(serve(policy, [["a", 0, 4, 1], ["b", 0, 1, 1]], blocks=7)) == ["a:4", "b:1"]


def test_v1_without_chunks_stops_at_a_prompt_above_the_remaining_budget() -> None:
    policy = VLLMV1(max_num_batched_tokens=5, enable_chunked_prefill=False)
    requests = [["a", 0, 3, 1], ["b", 0, 4, 1], ["c", 0, 1, 1]]
    assert batches(serve(policy, requests, blocks=50)) == ["a:3", "b:4 c:1"]


@pytest.mark.parametrize("prompt", [64, 65, 400])
@pytest.mark.parametrize("rejects", [None, True, False])
def test_v1_refuses_a_prompt_that_leaves_no_token_of_max_model_len(prompt: int, rejects: Optional[bool]) -> None:
    requests = [Request("a", 0.0, 63, 9), Request("b", 0.0, prompt, 9), Request("c", 0.0, 5, 1)]
    server = Server(VLLMV1(max_num_batched_tokens=32), 5000, 1, max_model_len=64)
    server.limits.change(None, rejects)
    Loop(server, Inbox(requests), SimulatedClock(LinearCost(base=1.0)), check=True).run()
    assert [(r.outcome, r.written) for r in requests] == [("finished", 1), ("refused", 0), ("finished", 1)]
    assert requests[1].reason == f"prompt of {prompt} tokens leaves no output token, max_model_len is 64"


def test_v1_chunks_long_prompts_at_the_threshold_unless_only_one_request_exists() -> None:
    policy = VLLMV1(max_num_batched_tokens=9, long_prefill_token_threshold=2)
    assert batches(serve(policy, [["a", 0, 5, 1]], blocks=50)) == ["a:5"]
    assert batches(serve(policy, [["a", 0, 5, 1], ["b", 0, 1, 3]], blocks=50)) == ["a:2 b:1", "a:2 b:1", "a:1 b:1"]


# -- fields ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", [{"b": 1}, {"a": 3}])
def test_a_failed_call_ends_its_prompts_and_decodes_and_no_other_request(fails: dict[str, int]) -> None:
    """The call from 2 to 3 s runs a's third token and b's prompt. c arrives meanwhile and then runs alone."""
    arrivals = [("a", 0.0), ("b", 1.5), ("c", 2.5)]
    requests = [Request(id, arrival, 4, 6, fails_at_token=fails.get(id)) for id, arrival in arrivals]
    policy = VLLMV1(async_scheduling=False)
    server = Server(policy, 64, 4)
    Loop(server, Inbox(requests), SimulatedClock(LinearCost(base=1.0)), check=True).run()
    assert server.pool.free == 64
    assert [(r.outcome, r.finish, r.written) for r in requests] == [
        ("failed", 3.0, 3), ("failed", 3.0, 1), ("finished", 9.0, 6),
    ]  # fmt: skip


def test_the_pause_of_v1_is_1_ms_and_a_setting() -> None:
    """`b` has its first token at 2 s. Then `a` preempts itself, and `b` runs alone."""
    for engine, end in (({}, 5.001), ({"empty_step": 0.5}, 5.5), ({"empty_step": 0}, 5.0)):
        requests = [Request("a", 0.0, 2, 4, priority=1), Request("b", 0.5, 2, 4, priority=0)]
        server = Server(VLLMV1(policy="priority", async_scheduling=False), 5, 1)
        build_loop(server, engine, requests, SimulatedClock(LinearCost(base=1.0))).run()
        assert requests[1].finish == pytest.approx(end, abs=1e-9)


@pytest.mark.parametrize(("version", "calls"), [("0.11.0", 6), ("0.11.1", 5), ("0.32.0", 5)])
def test_0_11_0_runs_one_more_asynchronous_decode_than_the_output_has_tokens(version: str, calls: int) -> None:
    request = Request("a", 0, 20, 5)
    policy = VLLMV1(version=version, scheduler_reserve_full_isl=version == "0.32.0", async_scheduling=True)
    loop = Loop(Server(policy, 10, 16), Inbox([request]), SimulatedClock(LinearCost(base=1)))
    loop.run()
    assert (request.written, loop.calls) == (5, calls)


# -- V1 with KV cache groups ---------------------------------------------------------------------------------------

# by the real versions: the batches after the first request has ended
ALONE = [["c", 16]] * 3 + [["c", 12], ["c", 1]]
WINDOW_BATCHES: dict[str, list[list[list[Any]]]] = {
    "0.19.0": [[["b", 10]], [["b", 1]], [["b", 1]], *[[row] for row in ALONE]],  # no limit of what a window needs
    "0.24.0": [
        [["b", 10], ["c", 6]], [["b", 1], ["c", 15]], [["b", 1], ["c", 15]], [["c", 16]], [["c", 8]], [["c", 1]],
    ],
    "0.27.0": [  # blocks that a step in flight reads stay
        [["b", 10]], [["b", 1]], [["b", 1], ["c", 15]], [["c", 16]], [["c", 16]], [["c", 13]], [["c", 1]],
    ],
    "0.32.0": [  # windows keep the names of few blocks
        [["b", 16]], [["b", 14]], [["b", 1]], [["b", 1], ["c", 15]], [["c", 16]], [["c", 16]], [["c", 13]],
        [["c", 1]],
    ],
}  # fmt: skip


@pytest.mark.parametrize("version", WINDOW_BATCHES)
def test_each_version_has_its_own_rules_for_windows(version: str) -> None:
    knobs = {"num_blocks": 38, "block_size": 4, "max_model_len": 100, "groups": [None, 8]}
    table = [["a", 0, 30, 3, 0], ["b", 6, 30, 3, 0], ["c", 6, 60, 2, 0]]
    content = {"a": [["text", 20], ["a", 10]], "b": [["text", 20], ["b", 10]], "c": [["c", 60]]}
    policy = VLLMV1(version=version, max_num_batched_tokens=16, max_num_seqs=8)
    played = play(Recording({"knobs": knobs, "cost": TICK}, table, [], content=content), policy)
    batches = [[row[:2] for row in step["sched"]] for step in played.busy_steps]
    assert batches == [[["a", 16]], [["a", 14]], [["a", 1]], [["a", 1]], *WINDOW_BATCHES[version]]


# -- V1 with speculative decoding ----------------------------------------------------------------------------------


def speculate(requests: list[list[Any]], more: dict[str, Any], blocks: int = 40, **fields: Any) -> PlayedRun:
    """Serve requests with 3 n-gram drafts per step, which the model always rejects."""
    settings = {"num_speculative_tokens": 3, "speculative_method": "ngram", "async_scheduling": False, **fields}
    knobs = {"num_blocks": blocks, "block_size": 16, "max_model_len": 99}
    table = [[*request, 0][:5] for request in requests]
    accept = {id: [0] * 99 for id, *_ in requests}
    return play(Recording({"knobs": knobs, "cost": TICK}, table, [], accept=accept, **more), VLLMV1(**settings))


SAME_PROMPT = {"content": {"a": [["text", 17]], "b": [["text", 17]]}}


def test_a_cached_prompt_with_empty_drafts_that_exceed_the_budget_is_never_admitted() -> None:
    played = speculate([["a", 0, 17, 2], ["b", 20, 17, 2]], SAME_PROMPT, max_num_batched_tokens=3)
    assert played.requests["a"].outcome == "finished"
    assert "no request runs and no request will arrive (requests b)" in str(played.stuck)


def test_the_last_tokens_of_a_prompt_fewer_than_the_modules_look_ahead_never_run() -> None:
    fields = {"speculative_method": "mtp", "mtp_modules": 3, "max_num_batched_tokens": 2}
    played = speculate([["a", 0, 5, 2]], {}, **fields)
    assert "no request runs and no request will arrive (requests a)" in str(played.stuck)


def test_a_prompt_limit_below_the_empty_drafts_of_a_row_ends_the_engine() -> None:
    fields = {"long_prefill_token_threshold": 2, "max_num_batched_tokens": 64}
    played = speculate([["a", 0, 1, 9], ["b", 3, 1, 9]], {}, **fields)
    assert "(AssertionError in schedule): long_prefill_token_threshold cuts empty drafts (requests a, b)" in str(
        played.stuck
    )


def test_a_prompt_limit_below_the_empty_drafts_of_a_request_without_blocks_does_not_end_the_engine() -> None:
    fields = {"long_prefill_token_threshold": 2, "max_num_batched_tokens": 128}
    played = speculate([["a", 0, 17, 9], ["b", 3, 1, 9]], {}, blocks=2, **fields)
    decided = [["a", 17], *[["a", 4]] * 2, *[["a", 2]] * 6, ["b", 1], *[["b", 4]] * 8]  # by vLLM 0.32.0
    assert [[row[:2] for row in step["sched"]] for step in played.busy_steps] == [[row] for row in decided]
