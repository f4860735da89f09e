"""Rules of vllm-ascend and vllm-mindspore in small cases: limits, ends, and what differs from vLLM."""

from __future__ import annotations

from typing import Any

import pytest
from servesim.config.scenario import scenario_from
from servesim.core import BadInput, Policy, Request, Stuck
from servesim.core.content import content_of_pieces
from servesim.costs.linear import LinearCost
from servesim.engine.inbox import Inbox
from servesim.engine.lock_step import requests_by_rank
from servesim.engine.loop import Loop
from servesim.engine.server import Server
from servesim.engine.simulated import SimulatedClock
from servesim.policies.vllm_ascend import (
    AscendBatchJobs,
    AscendDynamicBatch,
    AscendProfilingChunk,
    AscendRecompute,
    AscendShortFirst,
    VLLMAscend,
    VLLMMindSpore,
)
from servesim.runs.simulate import simulate
from servesim.testing import ContractWorld, check_conservation, check_held_plans, check_hold
from servesim.traces.trace import Trace

from ..scenarios import RunLog, run_steps, serve
from .recordings import ENGINES, compare, load, play
from .test_engines_ascend import ascend  # noqa: F401  it maps engines to policies

NO_CACHE: dict[str, Any] = {"enable_prefix_caching": False, "async_scheduling": False}


def run(policy: Policy, requests: list[Request], **memory: Any) -> RunLog:
    return serve(policy, requests, **{"blocks": 100, "block_size": 4, "max_model_len": 200, **memory})


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("prefill_first_long_prompts__vllm-ascend-0.11.0", {"max_long_partial_prefills": None}),
        ("pd_phases__vllm-ascend-0.11.0", {"enable_pd_transfer": False, "decode_max_num_seqs": 0}),
        ("dynamic_batch_slo__vllm-ascend-0.13.0", {"slo_limits_for_dynamic_batch": 22.0}),
        ("short_first_aging__vllm-ascend-0.25.1rc1", {"long_max_wait_ms": 0.0}),
        ("short_first__vllm-ascend-0.25.1rc1", {"threshold": 20}),
        ("batch_jobs__vllm-ascend-0.25.1rc1", {"reserve_max_blocks": 0}),
        ("batch_jobs_burst__vllm-ascend-0.25.1rc1", {"short_decode_token_threshold": 32}),
        ("profiling_chunk__vllm-ascend-0.25.1rc1", {"fitted_a": 0.0, "fitted_b": 0.0}),
        ("profiling_chunk_smooth__vllm-ascend-0.25.1rc1", {"smooth_factor": 1.0}),
        ("recompute_consumer__vllm-ascend-0.25.1rc1", {"kv_consumer": False}),
    ],
)
def test_another_setting_does_not_reproduce_a_recording(name: str, changed: dict[str, Any]) -> None:
    recording = load(f"ascend/{name}")
    other = ENGINES[recording.meta["engine"]](recording.meta).replace(**changed)
    with pytest.raises(AssertionError):
        compare(recording, play(recording, other))


def test_the_table_is_searched_in_the_order_of_a_python_set() -> None:
    rows = [[context, count, context + count, 1.0] for context in (32, 64, 128, 256, 512) for count in (1, 8)]
    policy = AscendDynamicBatch(slo_limits_for_dynamic_batch=5, profile_table=tuple(rows))
    table = policy.initial_state()
    assert (table.contexts, table.counts) == ([32, 256, 64, 128, 512], [8, 1])
    assert table.budget(50, 1) == 256 + 8  # not 64 + 1
    assert table.budget(8 * 513, 8) == table.budget(9, 9) == 0  # no key is large enough


def test_a_table_row_above_the_limit_is_left_out_and_the_largest_chunk_wins() -> None:
    rows = ((32, 1, 8, 1.0), (32, 1, 32, 5.0), (32, 1, 64, 5.1), (64, 1, 16, 9.0))
    table = AscendDynamicBatch(slo_limits_for_dynamic_batch=5, profile_table=rows).initial_state()
    assert table.budgets == {(32, 1): 32} and table.contexts == [32]


def test_a_table_with_a_chunk_above_the_budget_ends_the_engine() -> None:
    policy = AscendDynamicBatch(
        slo_limits_for_dynamic_batch=5, profile_table=((500, 9, 900, 1.0),), max_num_batched_tokens=64, **NO_CACHE
    )
    log = run(policy, [Request("a", 0, 40, 9), Request("b", 0.5, 150, 9)])
    assert log.stuck is not None and "AssertionError" in str(log.stuck)


def test_a_prompt_goes_on_when_the_budget_of_the_table_grows() -> None:
    """With few tokens of context, the decode takes the whole budget."""
    table = ((16, 8, 1, 1.0), (64, 8, 32, 1.0))
    policy = AscendDynamicBatch(
        slo_limits_for_dynamic_batch=5, profile_table=table, max_num_batched_tokens=64, **NO_CACHE
    )
    requests = [Request("a", 0, 8, 40), Request("b", 0, 100, 2)]
    batches = [rows for _, rows in run(policy, requests).steps]
    assert batches[:2] == [[("a", 8), ("b", 56)], [("a", 1)]] and [("a", 1), ("b", 31)] in batches
    check_held_plans(policy, ContractWorld(requests, blocks=100, max_model_len=200))


def test_a_victim_that_the_step_has_scheduled_ends_the_engine() -> None:
    """The real class keeps the victim in the step, and later raises an AttributeError when it admits it again."""
    requests = [Request("low", 0, 5, 20, priority=2), Request("high", 0.5, 12, 20, priority=1)]
    stuck = run(AscendDynamicBatch(policy="priority", **NO_CACHE), requests, blocks=9).stuck
    assert stuck is not None and "AttributeError in schedule" in str(stuck)
    requests = [Request("high", 0, 5, 20, priority=1), Request("low", 0.5, 12, 20, priority=2)]
    assert run(AscendDynamicBatch(policy="priority", **NO_CACHE), requests, blocks=9).stuck is None
    assert requests[1].preemptions == 1


def test_a_prompt_that_fits_without_the_watermark_only_waits_forever() -> None:
    requests = [Request("large", 0, 40, 2), Request("small", 0, 8, 2)]
    log = run(VLLMAscend(**NO_CACHE), requests, blocks=10)
    assert (requests[0].outcome, requests[1].outcome) == (None, "finished")
    assert log.stuck is not None and "the real engine does this too" in str(log.stuck)
    requests = [Request("large", 0, 40, 1)]
    assert run(VLLMMindSpore(**NO_CACHE), requests, blocks=10).stuck is None
    assert requests[0].outcome == "finished"


@pytest.mark.parametrize(("kind", "outcome"), [(VLLMAscend, "unanswered"), (VLLMMindSpore, "refused")])
def test_a_prompt_that_can_never_run_is_ignored(kind: type[Policy], outcome: str) -> None:
    requests = [Request("small", 0, 8, 5), Request("large", 0, 45, 5)]
    run(kind(**NO_CACHE), requests, blocks=10)
    assert [request.outcome for request in requests] == ["finished", outcome]
    assert requests[1].reason == "ignored: 45 tokens, at most 44 can run"


def test_a_victim_on_a_decode_node_is_handed_back() -> None:
    requests = [Request(id, 0, 12, 20) for id in "ab"]
    run(AscendRecompute(**NO_CACHE), requests, blocks=10)
    assert [request.outcome for request in requests] == ["finished", "aborted"]
    assert (requests[1].reason, requests[1].preemptions) == ("recomputed", 0)


def test_a_request_preempted_after_it_was_scheduled_computes_one_token_less() -> None:
    """It keeps its token of this step, no decode runs until it is back, and one of its tokens counts as computed."""
    ends = Request("ends", 0, 4, 7)  # in the step of the preemption: so there are blocks to admit the other one again
    requests = [ends, Request("low", 0, 8, 20, priority=2), Request("high", 0.5, 11, 8, priority=1)]
    log = run(VLLMMindSpore(policy="priority", **NO_CACHE), requests, blocks=11)
    assert {request.outcome for request in requests} == {"finished"} and requests[1].preemptions == 1
    ((when, gone, _),) = log.preempted
    before = [rows for now, rows in log.steps if now <= when]
    assert gone == "low" and before[-1] == [("ends", 1), ("low", 1), ("high", 1)]
    written = sum(id == "low" for rows in before for id, _ in rows)
    again = next(rows for now, rows in log.steps if now > when and rows[0][0] == "low")
    assert again == [("low", 8 + written - 1)]


def test_such_a_request_keeps_no_token_after_its_client_is_gone() -> None:
    low = Request("low", 0, 8, 20, priority=2)
    requests = [Request("ends", 0, 4, 7), low, Request("high", 0.5, 11, 8, priority=1)]
    server = Server(VLLMMindSpore(policy="priority", **NO_CACHE), 11, 4, max_model_len=200)
    loop = Loop(server, Inbox(requests), SimulatedClock(LinearCost(base=1.0), hold=False))
    while not low.preemptions:
        run_steps(loop, 1)
    assert (low.status, low.cached) == ("waiting", 1)
    loop.abort(low, loop.now, "gone")
    server.check()


def test_more_names_of_jobs_than_allowed_end_the_engine() -> None:
    requests = [Request(f"#job_name[{name}]#1", 0, 8, 4) for name in "abc"]
    assert run(AscendBatchJobs(max_jobs=3, **NO_CACHE), requests).stuck is None
    log = run(AscendBatchJobs(max_jobs=2, **NO_CACHE), requests)
    assert log.stuck is not None and "more names of jobs than max_jobs" in str(log.stuck)


def test_names_of_jobs_count_only_while_requests_of_them_wait() -> None:
    requests = [Request(f"#job_name[{number}]#", number, 8, 4, limit=4) for number in range(9)]
    assert run(AscendBatchJobs(max_jobs=2, **NO_CACHE), requests).stuck is None


def test_a_head_whose_client_is_gone_ends_the_engine() -> None:
    """The queue of the real class still has it as its next request, and its scheduler raises a RuntimeError."""
    gone = Request("gone", 0.1, 8, 4)
    requests = [Request("runs", 0, 30, 4), gone, Request("waits", 0.2, 8, 4)]
    server = Server(AscendBatchJobs(reserve_max_blocks=0, **NO_CACHE), 9, 4, max_model_len=200)
    loop = Loop(server, Inbox(requests), SimulatedClock(LinearCost(base=1.0), hold=False))
    run_steps(loop, 2)
    loop.abort(gone, loop.now, "gone")
    with pytest.raises(Stuck, match="whose client is gone"):
        loop.run()


def test_cold_requests_of_a_job_go_by_equal_prompts() -> None:
    prompts = {"first": 4, "a": 9, "b": 5, "c": 9}
    requests = [Request(f"#job_name[{'x' if id == 'first' else 'j'}]#{id}", 0, n, 3) for id, n in prompts.items()]
    log = run(AscendBatchJobs(max_num_seqs=1, **NO_CACHE), requests)
    assert [str(id).rpartition("#")[2] for id in log.order()] == ["first", "a", "c", "b"]


def test_a_request_that_waits_in_the_short_lane_is_overtaken_by_no_long_one() -> None:
    rows = [("first", 4), ("long", 30), ("short", 5)]
    requests = [Request(id, number / 100, prompt, 3) for number, (id, prompt) in enumerate(rows)]
    log = run(AscendShortFirst(max_num_seqs=1, threshold=10, **NO_CACHE), requests)
    assert log.order() == ["first", "short", "long"]


def test_a_head_that_waits_for_blocks_keeps_its_pin_while_a_plan_is_held() -> None:
    requests = [Request("runs", 0, 8, 12), Request("waits", 0, 30, 3)]
    check_hold(AscendShortFirst(**NO_CACHE), ContractWorld(requests, blocks=10))


def test_chunks_of_a_prompt_become_smaller_as_its_context_grows() -> None:
    policy = AscendProfilingChunk(fitted_a=1e-3, fitted_b=1e-3, min_chunk=1, max_num_batched_tokens=512, **NO_CACHE)
    log = run(policy, [Request("a", 0, 1600, 2)], blocks=500, max_model_len=2000)
    sizes = [tokens for _, rows in log.steps for _, tokens in rows][:-1]
    assert sum(sizes) == 1600 and sizes[0] == 512
    assert sizes[:4] == sorted(sizes[:4], reverse=True) and sizes[2] < 256
    assert all(size % 64 == 0 for size in sizes[:-1])


@pytest.mark.parametrize("kind", [VLLMAscend, VLLMMindSpore])
def test_a_prefill_does_not_cache_the_next_blocks_of_decodes(kind: type[Policy]) -> None:
    """With blocks of one token, a decode would fill a block in every step, but decodes wait in a step of prompts."""
    rows = [(19, "b", 2, 4), (11, "a", 11, 12), (5, "a", 2, 5), (4, "b", 1, 9), (9, "a", 6, 8), (17, "a", 1, 5)]
    requests = [
        Request(id, id / 50, prompt, output, content=content_of_pieces([(text, shared), (id, prompt - shared)]))
        for id, (prompt, text, shared, output) in enumerate(rows)
    ]
    check_conservation(kind(), ContractWorld(requests, blocks=27, block_size=1, max_model_len=64))


# -- Data-parallel ranks ----------------------------------------------------------------------------------------------

TREE: dict[str, Any] = {"policy": {"name": "vllm-ascend-balance", "max_num_seqs": 2}, "profile": {"base": 1.0}}


def test_sessions_stay_on_a_rank_and_other_requests_take_them_in_turn() -> None:
    rows = [("a", "s"), ("b", None), ("c", "t"), ("d", "s"), ("e", None), ("f", "t")]
    requests = [Request(id, 0, 4, 2, session=session) for id, session in rows]
    assert [[r.id for r in rank] for rank in requests_by_rank(requests, 2)] == [["a", "c", "d", "f"], ["b", "e"]]


def test_a_request_runs_on_the_rank_of_the_request_that_it_follows() -> None:
    first, other = Request("a", 0, 4, 2), Request("b", 0, 4, 2, session="s")
    requests = [first, other, Request("c", 0, 4, 2, session="s", follows="a")]
    assert [[r.id for r in rank] for rank in requests_by_rank(requests, 2)] == [["a", "c"], ["b"]]


def test_a_full_rank_keeps_the_others_from_admitting() -> None:
    requests = [Request(f"r{n}", 0, 4, 9, session="full") for n in range(3)] + [Request("late", 1.5, 4, 2, session="b")]
    tree = {**TREE, "engine": {"num_blocks": 50, "data_parallel_size": 2}}
    balanced = simulate(scenario_from(tree), Trace(requests, "test", "synth"))
    first = {request.id: request.first_token for request in balanced.requests}
    assert first["r0"] == 1.0 and first["late"] is not None and first["late"] >= 9.0
    stock = {**tree, "policy": {"name": "vllm-v1", "max_num_seqs": 2, "async_scheduling": False}}
    other = simulate(scenario_from(stock), Trace(requests, "test", "synth"))
    assert {request.id: request.first_token for request in other.requests}["late"] == 3.0


def test_ranks_need_a_policy_that_waits_for_each_step() -> None:
    tree = {"policy": "vllm-v1", "engine": {"data_parallel_size": 2}}
    with pytest.raises(BadInput, match=r"engine.data_parallel_size: expected 1, or a policy with async_scheduling"):
        scenario_from(tree)
