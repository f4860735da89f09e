"""KV cache groups of vLLM V1: blocks over time, names and hits of the rules' tables, and properties of random runs."""

from __future__ import annotations

import random
from typing import Any, Optional

import pytest
from servesim.core import Plan, Policy, Request, Stuck, View
from servesim.core.content import content_of_pieces
from servesim.costs.linear import LinearCost
from servesim.engine.inbox import Inbox
from servesim.engine.loop import Loop
from servesim.engine.server import Server
from servesim.engine.simulated import SimulatedClock
from servesim.engine.step import Step
from servesim.policies.vllm_v1 import VLLMV1
from servesim.policies.vllm_v1.group_cache import Block, GroupCache

Groups = list[Optional[int]]


def cache_of(server: Server) -> GroupCache:
    assert isinstance(server.prefix_cache, GroupCache)
    return server.prefix_cache


def chain(block: Optional[Block]) -> list[Block]:
    """Return the blocks with the name of this one."""
    return [] if block is None else [block, *chain(block.next)]


def state_of(cache: GroupCache) -> tuple[Any, ...]:
    """Return a copy of everything that a decision must not change."""
    tables = {
        request: ([list(cells) for cells in table.groups], list(table.gone), table.named)
        for request, table in cache.tables.items()
    }
    names = [{key: chain(block) for key, block in group.items()} for group in cache.ring.names]
    free = [(block, block.refs, block.key) for block in cache.ring.in_order()]
    return tables, names, free, cache.free, cache.idle_blocks, cache.pool.free, cache.ring.evicted, cache.absent


class Held:
    """Notes the blocks that requests hold after each decision, by group."""

    def __init__(self) -> None:
        self.steps: list[list[int]] = []

    def on_step_start(self, server: Server, step: Step, arrived: list[Request]) -> None:
        cells = zip(*(table.groups for table in cache_of(server).tables.values()))
        self.steps.append([sum(len(cell) - cell.count(None) for cell in group) for group in cells])

    def on_step_end(self, server: Server, step: Step, now: float, finished: list[Request]) -> None:
        pass


def run(
    groups: Groups, requests: list[Request], blocks: int = 400, scheduler: Optional[Policy] = None, **fields: Any
) -> tuple[Server, list[list[int]], float]:
    """Run requests and verify the server after every step. Return it, the blocks of each step, and the end."""
    policy = scheduler or VLLMV1(**{"async_scheduling": False, "max_num_batched_tokens": 4096, **fields})
    server, held = Server(policy, blocks, 16, max_model_len=2048, kv_cache_groups=groups), Held()
    clock = SimulatedClock(LinearCost(base=1.0, prefill_token=0.01, decode_live=0.1))
    loop = Loop(server, Inbox(requests), clock, (held,) if groups else (), check=True)
    loop.run()
    return server, held.steps, loop.now


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (4096, [[38, 38], [38, 9], [38, 9]]),  # a step stores its tokens in full in every group
        (512, [[32, 32], [38, 14], [38, 9]]),  # in two chunks of 512 and 88 tokens
    ],
)
def test_a_window_frees_its_blocks_at_the_next_decision(budget: int, expected: list[list[int]]) -> None:
    steps = run([None, 128], [Request("a", 0.0, 600, 5)], max_num_batched_tokens=budget)[1]
    assert steps[:3] == expected


def test_a_decode_holds_nine_blocks_of_a_window_of_128_tokens_and_eight_in_one_of_16_steps() -> None:
    steps = run([128, None], [Request("a", 0.0, 600, 200)])[1]
    windows = [window for window, _ in steps[2:200]]
    assert set(windows) == {8, 9} and windows[:160].count(8) == 10
    assert [full for _, full in steps[2:200]] == [-(-(600 + written) // 16) for written in range(2, 200)]


def test_with_a_step_in_flight_the_window_is_freed_one_step_later() -> None:
    fields = {"max_num_batched_tokens": 512, "async_scheduling": True}
    steps = run([None, 128], [Request("a", 0.0, 600, 5)], **fields)[1]
    assert steps[:4] == [[32, 32], [38, 38], [38, 14], [38, 9]]


@pytest.mark.parametrize(
    ("groups", "budget", "need"),
    [
        ([None], 4096, 38),
        ([None, 128], 4096, 76),  # 600 tokens are 38 blocks in each group
        ([128, None, 128], 64, 38 + 2 * 13),  # with chunks of 64 tokens, a window holds at most 127 + 64 tokens
    ],
)
def test_a_request_needs_the_blocks_of_all_groups(groups: Groups, budget: int, need: int) -> None:
    with pytest.raises(Stuck, match=f"request a needs {need} blocks, the engine has {need - 1}; the real engine does"):
        run(groups, [Request("a", 0.0, 600, 5)], need - 1, max_num_batched_tokens=budget)
    for blocks in (need - 1, need):
        policy = VLLMV1(async_scheduling=False, max_num_batched_tokens=budget)
        server = Server(policy, blocks, 16, max_model_len=2048, kv_cache_groups=groups)
        server.limits.rejects_oversized = True
        reason = server.limits.rejection_reason(Request("a", 0.0, 600, 5))
        expected = f"needs {need} blocks for 600+5 tokens, the pool has {blocks}"
        assert reason == (expected if blocks < need else None)


def test_a_request_that_waits_for_blocks_of_a_second_group_lacks_blocks() -> None:
    requests = [Request("a", 0.0, 600, 40), Request("b", 0.0, 600, 40)]
    server, _, end = run([None, None], requests, 120, max_num_batched_tokens=600)
    assert server.waits.metrics(end)["waiting_blocks"] > 0.4


def texts(*pieces: list[tuple[str, int]], output: int = 60) -> list[Request]:
    """Return requests one after another with these prompts. The answer of request number k is the text `answer k`."""
    return [
        Request(number, 1000.0 * number, sum(tokens for _, tokens in prompt), output,
                content=content_of_pieces(prompt, f"answer {number}"))
        for number, prompt in enumerate(pieces)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("groups", "interval", "expected"),
    [
        ([None], 0, [256, 256, 192, 80]),
        ([None, 64], None, [256, 256, 192, 80]),
        ([None, 64], 64, [256, 256, 192, 80]),
        ([None, 64], 0, [192, 256, 192, 0]),
        ([64, None, 64], 0, [192, 256, 192, 0]),
    ],
)
def test_hits_of_a_window_depend_on_the_retention_interval(
    groups: Groups, interval: Optional[int], expected: list[int]
) -> None:
    prompt, turn = ("prompt", 200), ("answer 0", 60)
    requests = texts(
        [prompt], [prompt, turn, ("b", 40)], [prompt, turn, ("c", 40)], [prompt], [("prompt", 90), ("e", 9)]
    )
    run(groups, requests, prefix_cache_retention_interval=interval)
    assert [request.cached_tokens for request in requests[1:]] == expected


@pytest.mark.parametrize(("groups", "expected"), [([None], 8), ([None, 64], 9), ([64, None], 9), ([64], 8)])
def test_a_drafter_that_drops_the_last_hit_needs_one_block_more(groups: Groups, expected: int) -> None:
    """A prompt of ten blocks that is known completely: with groups, each kind looks one block further."""
    requests = texts([("prompt", 160)], [("prompt", 160)])
    run(groups, requests, num_speculative_tokens=3)
    assert requests[1].cached_tokens == 16 * expected


def test_admission_counts_what_a_chunked_prompt_holds_at_once_in_a_window() -> None:
    """500 tokens: 32 blocks of full attention, and at most nb(31 + 32) + 1 = 5 of the window with 32 in flight."""
    fields = {"max_num_batched_tokens": 32, "enable_prefix_caching": False}
    request = Request("a", 0.0, 500, 5)
    _, steps, _ = run([None, 32], [request], blocks=37, **fields)
    assert request.outcome == "finished" and max(map(sum, steps)) <= 37
    with pytest.raises(Exception, match="no request runs"):
        run([None, 32], [Request("a", 0.0, 500, 5)], blocks=36, **fields)


# -- Random runs ------------------------------------------------------------------------------------------------------


def random_requests(source: random.Random) -> list[Request]:
    """Return requests that share beginnings, some of them with the answers of others."""
    requests, time = [], 0.0
    for number in range(25):
        time += source.choice([0.0, 0.5, 4.0])
        pieces = [(f"system {source.randrange(2)}", source.choice([32, 50, 96]))]
        if number and source.random() < 0.4:
            pieces.append((f"answer {source.randrange(number)}", source.randint(1, 30)))
        pieces.append((f"own {number}", source.randint(1, 120)))
        prompt, output = sum(tokens for _, tokens in pieces), source.randint(1, 60)
        content = content_of_pieces(pieces, f"answer {number}") if source.random() < 0.9 else None
        limit = output + source.choice([0, 0, 5])
        requests.append(Request(number, time, prompt, output, limit, source.randrange(2), content=content))
    return requests


def random_fields(source: random.Random) -> dict[str, Any]:
    method = source.choice(["eagle", "draft_model", "mtp"])
    return {
        "async_scheduling": source.random() < 0.5,
        "enable_prefix_caching": source.random() < 0.8,
        "max_num_batched_tokens": source.choice([32, 64, 512]),
        "max_num_seqs": source.choice([4, 16]),
        "scheduler_reserve_full_isl": source.random() < 0.7,
        "watermark": source.choice([0.0, 0.05]),
        "policy": source.choice(["fcfs", "fcfs", "priority"]),
        "prefix_cache_retention_interval": source.choice([0, 0, None, 32, 96]),
        "num_speculative_tokens": source.choice([0, 0, 3]),
        "speculative_method": method,
        "mtp_modules": source.choice([1, 2]) if method == "mtp" else 1,
    }


class DecidesTwice(VLLMV1):
    """Decides every step twice: the second plan is equal. A plan that is taken back leaves the cache as it was."""

    def decide(self, view: View) -> Plan:
        cache = view.prefix_cache.cache  # type: ignore[union-attr]
        before = state_of(cache)
        plan = super().decide(view)
        cache.roll_back()
        assert state_of(cache) == before
        second_plan = super().decide(view)
        assert second_plan == plan
        return plan if len(cache.tables) % 2 else second_plan  # the changes of the second one are made already


ALL_GROUPS: list[Groups] = [[None, 32], [48, None], [40], [None, 24, 24, 24], [24, 64, None], [20, 50], [1, None]]


@pytest.mark.parametrize("seed", range(14))
def test_random_runs_lose_no_block_and_decisions_change_nothing(seed: int) -> None:
    source = random.Random(seed)
    groups, requests = ALL_GROUPS[seed % len(ALL_GROUPS)], random_requests(source)
    policy = DecidesTwice(**random_fields(source))
    blocks = source.choice([20, 30, 60]) * len(groups)
    server, steps, _ = run(groups, requests, blocks, policy)
    assert [request.written for request in requests] == [request.stop_at for request in requests]
    assert max(map(sum, steps)) > 0 and cache_of(server).free == blocks and not cache_of(server).tables


@pytest.mark.parametrize("seed", range(8))
def test_one_full_group_of_random_runs_is_the_cache_without_groups(seed: int) -> None:
    source = random.Random(seed)
    requests, fields = random_requests(source), random_fields(source)
    others = [Request(*request.client_fields()) for request in requests]
    server, _, end = run([None], requests, 40, **fields)
    other, _, other_end = run([], others, 40, **fields)
    assert end == other_end
    for one, two in zip(requests, others):
        assert (one.first_token, one.finish, one.preemptions, one.cached_tokens) == (
            two.first_token, two.finish, two.preemptions, two.cached_tokens,
        )  # fmt: skip
    assert (server.kv_use.block_sum, server.kv_use.peak_blocks) == (other.kv_use.block_sum, other.kv_use.peak_blocks)
    if not fields["enable_prefix_caching"]:  # otherwise rejected drafts are counted at different moments
        assert server.kv_use.token_sum == other.kv_use.token_sum
