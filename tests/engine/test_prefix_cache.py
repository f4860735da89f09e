"""The prefix cache: equal to a block-by-block reference on random requests that share texts."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from servesim.core import Chunk, Plan, Policy, Request
from servesim.core.content import content_of_pieces
from servesim.costs.linear import LinearCost
from servesim.engine.inbox import Inbox
from servesim.engine.loop import Loop
from servesim.engine.plans import start_step
from servesim.engine.prefix_cache import PrefixCache
from servesim.engine.server import Server
from servesim.engine.simulated import SimulatedClock
from servesim.engine.step import Step
from servesim.engine.texts import Text
from servesim.policies.vllm_v1 import VLLMV1
from servesim.testing import ContractProbe

from ..conftest import seeds
from ..policies.recordings import StepLog, load, recording_names
from ..scenarios import run_steps
from .prefix_cache_reference import Job, Reference, tokens_of

COST = {"c0": 7, "per_prefill_token": 1, "per_decode_seq": 2, "per_copied_block": 3}
COMPARED = ("t", "sched", "cached", "free_gpu", "waiting", "running", "finished", "start", "ret")
OTHER = object()  # in a free list: the hash of a text that only one request has


class World:
    """Random requests with shared texts, and the settings of an engine with little memory."""

    def __init__(self, seed: int) -> None:
        random = Random(seed)
        self.size = random.choice([1, 2, 3, 4, 4, 5, 8, 16])
        self.old = random.choice([False, False, True])  # the rules of vLLM 0.23
        longest = random.choice([3, 6, 12, 30]) * self.size
        self.knobs: dict[str, Any] = {
            "block_size": self.size,
            "num_blocks": -(-longest // self.size) * random.choice([1, 1, 2, 2, 3, 8]) + random.choice([0, 1, 2, 5]),
            "max_num_seqs": random.choice([2, 4, 8, 16]),
            "max_num_batched_tokens": random.choice([0, longest // 2, longest, 4 * longest]) + random.choice([4, 16]),
            "max_model_len": random.choice([None, longest + 1]),
            "chunked": random.random() < 0.7,
            "policy": random.choice(["fcfs", "fcfs", "priority"]),
            "long_prefill_token_threshold": random.choice([0, 0, 0, 5, 2 * self.size]),
            "reserve_full_isl": random.random() < 0.6,
            "v1_watermark": random.choice([0.0, 0.0, 0.1, 0.25]),
            "async_scheduling": seed % 2 == 1,
            "enable_prefix_caching": seed % 8 != 7,
        }
        if self.old:
            self.knobs["v1_watermark"] = 0.0
        if not self.knobs["chunked"]:
            self.knobs["max_num_batched_tokens"] = max(longest, self.knobs["max_num_batched_tokens"])
        self.twins = random.random() < 0.3  # many requests with equal prompts and answers
        self.jobs: list[tuple[Any, ...]] = []  # id, arrival, prompt, output, priority, pieces or None, answer
        self.early = Random(-seed).choice([0.0, 0.5, 1.0])  # fraction of requests that end by a stop token
        for number in range(random.randrange(3, 25)):
            self._add(random, f"r{number}", longest)
        self.host_blocks = random.choice([0, 0, 1, 3, 8, 20, 1000]) if self.knobs["enable_prefix_caching"] else 0

    def _add(self, random: Random, id: str, longest: int) -> None:
        shared = random.choice([2, 3, 6])
        pieces: list[tuple[Any, int]] = []
        kind = random.random()
        if self.twins:
            pieces = [(f"s{random.randrange(2)}", random.randrange(1, 3 * self.size + 2))]
            if self.jobs and kind < 0.8:
                _, _, _, output, _, before, answer = random.choice(self.jobs)
                pieces = list(before or pieces)
                if kind < 0.4:
                    pieces.append((answer, random.randrange(1, output + 1)))
        elif kind < 0.25 and self.jobs:  # the next turn of a conversation
            _, _, _, output, _, before, answer = random.choice(self.jobs)
            pieces = [*(before or []), (answer, random.randrange(1, output + 1))]
        elif kind < 0.45 and self.jobs:  # the same prompt once more
            pieces = list(random.choice(self.jobs)[5] or [])
        else:
            while random.random() < 0.75:
                pieces.append((f"s{random.randrange(shared)}", random.randrange(1, 3 * self.size + 2)))
        if random.random() < (0.1 if self.twins else 0.5):
            pieces.append((f"own {id}", random.randrange(1, 2 * self.size + 2)))
        pieces = cut(pieces or [(f"own {id}", random.randrange(1, longest))], random.randrange(1, longest))
        prompt = sum(tokens for _, tokens in pieces)
        output = random.randrange(1, max(2, longest - prompt + 1))
        answer = random.choice([f"a{random.randrange(1 if self.twins else 3)}", f"a {id}"])
        arrival = self.jobs[-1][1] if self.jobs else 0
        arrival += random.choice([0, 0, 1, 10, 60, 400])
        has_content = random.random() < 0.85
        self.jobs.append((
            id, arrival, prompt, output, random.randrange(3),
            pieces if has_content else None, answer if has_content else f"own answer {id}",
        ))  # fmt: skip

    def limit(self, id: str, output: int) -> int:
        """Return the output limit of a request; above its output, it ends by a stop token."""
        random = Random(id)
        return output + (random.choice([1, 3, 40]) if random.random() < self.early else 0)

    def reference(self) -> Reference:
        jobs = [
            Job(
                id,
                t,
                prompt,
                output,
                level,
                tokens_of(pieces or [(f"own prompt {id}", prompt)], answer, output),
                limit=self.limit(id, output),
            )
            for id, t, prompt, output, level, pieces, answer in self.jobs
        ]
        reference = Reference(self.knobs, COST, jobs, self.old, self.host_blocks)
        reference.run()
        return reference

    def policy(self) -> Policy:
        knobs = self.knobs
        return VLLMV1(
            max_num_seqs=knobs["max_num_seqs"], max_num_batched_tokens=knobs["max_num_batched_tokens"],
            enable_chunked_prefill=knobs["chunked"], policy=knobs["policy"], watermark=knobs.get("v1_watermark", 0.0),
            long_prefill_token_threshold=knobs["long_prefill_token_threshold"],
            scheduler_reserve_full_isl=knobs["reserve_full_isl"], version="0.23.0" if self.old else "0.32.0",
            async_scheduling=knobs["async_scheduling"], enable_prefix_caching=knobs["enable_prefix_caching"],
        )  # fmt: skip

    def simulate(self, log: CacheLog, probe: bool = False, hold: bool = False) -> tuple[Server, list[Request]]:
        """Run the requests; `probe` calls the policy twice per step."""
        requests = [
            Request(
                id, t, prompt, output, self.limit(id, output), priority=level,
                content=None if pieces is None else content_of_pieces(pieces, answer),
            )
            for id, t, prompt, output, level, pieces, answer in self.jobs
        ]  # fmt: skip
        policy = ContractProbe(inner=self.policy()) if probe else self.policy()
        server = Server(
            policy, self.knobs["num_blocks"], self.size, max_model_len=self.knobs.get("max_model_len"),
            host_cache_blocks=self.host_blocks,
        )  # fmt: skip
        cost = LinearCost(base=7, prefill_token=1, decode_live=2, swap_block=3)
        observers = () if hold else (log,)
        server.rules.empty_step = 1.0
        check = log.counts_hashes and not hold
        Loop(server, Inbox(requests), SimulatedClock(cost), observers, check).run()
        return server, requests


class EqualTexts(World):
    """Few requests with the same text, some ahead of others, in little memory: the order of equal blocks matters."""

    def __init__(self, seed: int, async_scheduling: bool) -> None:
        random = Random(f"equal texts {seed}")
        self.early = Random(seed).choice([0.0, 0.5]) if async_scheduling else 0.0
        self.size = size = random.choice([1, 2, 2, 3])
        self.old = random.choice([False, True])
        self.host_blocks = random.choice([0, 0, 0, 5])
        longest = random.choice([6, 10, 16]) * size
        self.knobs = {
            "block_size": size, "num_blocks": -(-longest // size) + random.choice([0, 1, 2, 4, 8, 20]),
            "max_num_seqs": random.choice([3, 8]), "chunked": True, "policy": random.choice(["fcfs", "priority"]),
            "max_num_batched_tokens": random.choice([3, 4, 5, 8, longest, 4 * longest]),
            "long_prefill_token_threshold": random.choice([0, 0, size, 3]),
            "reserve_full_isl": random.random() < 0.5, "async_scheduling": async_scheduling,
            "enable_prefix_caching": True,
        }  # fmt: skip
        base = random.randrange(1, random.choice([3 * size + 1, longest - 1]))
        self.jobs, arrival = [], 0
        for number in range(random.randrange(3, 7)):
            pieces: list[tuple[Any, int]] = [("s", base)]
            if random.random() < 0.3:
                pieces.append(("a", random.randrange(1, 4 * size)))
            if random.random() < 0.15:
                pieces = [(f"own {number}", random.randrange(1, 3 * size))]
            pieces = cut(pieces, longest - 1)
            prompt = sum(tokens for _, tokens in pieces)
            output = random.randrange(1, longest - prompt + 1)
            arrival += random.choice([0, 0, 1, 9, 30, 100])
            answer = "a" if random.random() < 0.9 else "b"
            self.jobs.append((f"r{number}", arrival, prompt, output, random.randrange(3), pieces, answer))


def cut(pieces: list[tuple[Any, int]], tokens: int) -> list[tuple[Any, int]]:
    """Return the first tokens of a prompt."""
    result = []
    for name, count in pieces:
        if tokens > 0:
            result.append((name, min(count, tokens)))
            tokens -= count
    return result


class CacheLog(StepLog):
    """Also records the evictions and the free list."""

    def __init__(self, names: dict[Any, int], counts_hashes: bool = True) -> None:
        super().__init__()
        self.names = names
        self.counts_hashes = counts_hashes  # type: ignore[misc]

    def on_step_start(self, server: Server, step: Step, arrived: list[Request]) -> None:
        super().on_step_start(server, step, arrived)
        if server.prefix_cache is not None and self.counts_hashes:
            self.row["evictions"] = server.prefix_cache.stats.evicted_blocks
            self.row["free"] = free_list(server.prefix_cache, self.names)


def free_list(cache: PrefixCache, names: dict[Any, int]) -> list[Any]:
    """Return the hashes of all free blocks, the next one first. `names`: the hashes of the reference."""
    cache._settle()
    hashes: list[Any] = [None] * cache.blank
    for run in cache.free_list.runs():
        if run.node is None:
            hashes += [OTHER if run.hashed else None] * run.length
        else:
            assert run.node.text is not None
            known = hash_chain(run.node.text, (run.node.start + run.length) * cache.pool.block_size, cache, names)
            hashes += reversed(known[run.node.start :])
    return hashes


def hash_chain(text: Text, end: int, cache: PrefixCache, names: dict[Any, int]) -> list[Any]:
    """Return the hashes of the first blocks of a text, as the reference computes them."""
    starts = (0, *text.ends)
    pieces = [(name, min(stop, end) - start) for name, start, stop in zip(text.names, starts, text.ends) if start < end]
    tokens, size, chain = tokens_of(pieces, None, 0), cache.pool.block_size, []
    for start in range(0, end, size):
        key = (chain[-1] if chain else None, tuple(tokens[start : start + size]))
        chain.append(names.get(key, OTHER))
    return chain


def assert_equal_lists(actual: list[Any], expected: list[Any], where: str) -> None:
    """Compare two free lists."""
    shown = [OTHER if mine is OTHER and theirs is not None else theirs for mine, theirs in zip(actual, expected)]
    assert len(actual) == len(expected) and actual == shown, f"{where}: {actual}, not {expected}"


def check(seed: int) -> None:
    """Compare a random world step by step; then once more without reading the cache between the steps, and held."""
    world = World(seed)
    reference = world.reference()
    if reference.error is not None:
        return  # a livelock of the real rules, or a request that never fits
    compare_run(f"seed {seed}", world, reference, CacheLog(reference.names), seed % 2 == 0, False)
    compare_run(f"seed {seed}, unread", world, reference, CacheLog(reference.names, False), False, False)
    compare_run(f"seed {seed}, held", world, reference, CacheLog(reference.names, False), False, True)


def compare_run(where: str, world: World, reference: Reference, log: CacheLog, probe: bool, hold: bool) -> None:
    server, requests = world.simulate(log, probe, hold)
    cache = server.prefix_cache
    keys = (*COMPARED, "hashes", "evictions") if cache is not None and log.counts_hashes else COMPARED
    for index, (expected, actual) in enumerate(zip(reference.rows, log.rows)):
        for key in keys:
            assert actual[key] == expected[key], f"{where}, step {index}, {key}: {actual[key]}, not {expected[key]}"
        assert [id for id, _ in actual["preempted"]] == expected["preempted"], f"{where}, step {index}"
        if "free" in actual:
            assert_equal_lists(actual["free"], expected["free"], f"{where}, step {index}")
    assert hold or len(log.rows) == len(reference.rows), where
    if cache is not None:
        assert_equal_lists(free_list(cache, reference.names), [block.hash for block in reference.free], where)
        assert cache.stats.evicted_blocks == reference.evictions, where
        if cache.host is not None:
            cache.host.check()
            assert (cache.host.copied_blocks, cache.host.used) == (reference.all_copied, len(reference.host)), where
        assert {name: getattr(cache.stats, name) for name in reference.stats} == reference.stats, where
    times = [[r.first_token, r.finish, r.preemptions, r.cached_tokens] for r in requests]
    assert times == [[job.first_token, job.finish, job.preemptions, job.cached] for job in reference.jobs], where
    server.check()


@pytest.mark.parametrize("name", recording_names("vllm-v1", folder="prefix"))
def test_the_reference_reproduces_the_recordings(name: str) -> None:
    recording = load(name)
    jobs = [
        Job(
            id,
            t,
            prompt,
            output,
            level,
            tokens_of(recording.pieces(id), recording.answer(id), output),
            limit=recording.max_tokens.get(id, output),
        )
        for id, t, prompt, output, level in recording.requests
    ]
    reference = Reference(recording.knobs, recording.meta["cost"], jobs)
    reference.run()
    rows = [{key: row[key] for key in step} for step, row in zip(recording.steps, reference.rows, strict=True)]
    assert rows == recording.steps
    assert [[j.id, j.first_token, j.finish, j.preemptions, j.cached] for j in jobs] == recording.per_request
    assert reference.stats == recording.prefix_cache_stats


@pytest.mark.parametrize("part", seeds(3, 10))
def test_cache_equals_a_block_by_block_model(part: int) -> None:
    for seed in range(20 * part, 20 * part + 20):
        check(seed)


def check_equal_texts(seed: int, async_scheduling: bool) -> None:
    """Compare a world without reading the cache between the steps, with single steps and with held ones."""
    world = EqualTexts(seed, async_scheduling)
    reference = world.reference()
    if reference.error is None:
        for hold in (False, True):
            log = CacheLog(reference.names, counts_hashes=False)
            compare_run(f"equal texts, seed {seed}", world, reference, log, False, hold)


RARE = (408, 793, 939, 1279, 1462, 1512, 1708)  # they have an order of equal blocks that few others have


@pytest.mark.parametrize("part", seeds(1, 4))
def test_equal_blocks_of_several_requests_are_used_in_the_order_in_which_they_were_cached(part: int) -> None:
    for seed in (*range(40 * part, 40 * part + 40), *(RARE if part == 0 else ())):
        check_equal_texts(seed, async_scheduling=False)
        check_equal_texts(seed, async_scheduling=True)


def test_a_preempted_request_caches_no_block_that_it_has_not_filled() -> None:
    check(3841)  # it loses its blocks while requests around it fill theirs


def test_a_scheduled_and_then_preempted_request_caches_its_block_after_earlier_requests() -> None:
    """`a` and `v` fill equal blocks in the step in which `x` preempts `v` and itself. `r` must find that of `a`."""
    world = EqualTexts(0, async_scheduling=False)
    world.size, world.old, world.host_blocks = 1, False, 0
    world.knobs = {
        "block_size": 1, "num_blocks": 20, "max_num_seqs": 8, "max_num_batched_tokens": 12, "chunked": True,
        "policy": "priority", "long_prefill_token_threshold": 0, "reserve_full_isl": False,
        "async_scheduling": False, "enable_prefix_caching": True,
    }  # fmt: skip
    world.jobs = [
        ("a", 0, 2, 12, 0, [("s", 2)], "answer"),
        ("v", 0, 2, 12, 2, [("s", 2)], "answer"),
        ("x", 1, 18, 1, 1, [("x", 18)], "own"),
        ("r", 25, 6, 2, 0, [("s", 2), ("answer", 4)], "other"),
    ]
    reference = world.reference()
    assert reference.rows[2]["preempted"] == ["v", "x"]
    compare_run("two victims", world, reference, CacheLog(reference.names, counts_hashes=False), False, False)


def serve(prompts: list[list[tuple[str, int]]], gap: float = 100.0, blocks: int = 50) -> list[list[Any]]:
    """Serve prompts one after another, in blocks of 4 tokens; return the ids and cached tokens of all admissions."""
    requests = [
        Request(index, gap * index, sum(tokens for _, tokens in pieces), 2, content=content_of_pieces(pieces))
        for index, pieces in enumerate(prompts)
    ]
    log = StepLog()
    server = Server(VLLMV1(), blocks, 4)
    Loop(server, Inbox(requests), SimulatedClock(LinearCost(base=1.0)), (log,), check=True).run()
    return [row for step in log.rows for row in step["cached"]]


@pytest.mark.parametrize(("tokens", "cached"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12)])
@pytest.mark.parametrize("gap", [0.0, 100.0])  # 0: in the same step, before the first one has run
def test_the_last_token_of_a_prompt_is_always_computed(tokens: int, cached: int, gap: float) -> None:
    assert serve([[("a", tokens)], [("a", tokens)]], gap) == [[0, 0], [1, cached]]


def test_equal_text_after_a_different_beginning_is_not_equal() -> None:
    assert serve([[("a", 8), ("b", 8)], [("c", 8), ("b", 8)], [("a", 8), ("c", 8)]]) == [[0, 0], [1, 0], [2, 8]]
    assert serve([[("a", 6), ("b", 8)], [("a", 6), ("b", 5), ("c", 2)], [("a", 5), ("b", 8)]]) == [
        [0, 0],
        [1, 8],
        [2, 4],
    ]


def test_the_end_of_a_text_is_evicted_before_its_beginning() -> None:
    """10 blocks: `a` leaves 6 cached blocks, and `b` needs 8 blocks, 4 of them those at the end of `a`."""
    assert serve([[("a", 24)], [("b", 30)], [("a", 24)]], blocks=10) == [[0, 0], [1, 0], [2, 8]]


def test_an_aborted_request_leaves_its_full_blocks_in_the_cache() -> None:
    content = content_of_pieces([("a", 10)])
    first, second = Request(0, 0.0, 10, 50, content=content), Request(1, 99.0, 10, 2, content=content)
    server = Server(VLLMV1(), 20, 4)
    loop = Loop(server, Inbox([first, second]), SimulatedClock(LinearCost(base=1.0), hold=False), check=True)
    run_steps(loop, 3)
    loop.abort(first, loop.now, "the client disconnected")
    server.check()
    assert (first.outcome, server.pool.free) == ("aborted", 20)
    loop.run()
    assert (second.outcome, second.cached_tokens) == ("finished", 8)


def test_a_plan_cannot_use_tokens_that_are_not_cached() -> None:
    server = Server(VLLMV1(), 20, 4)
    request = Request(0, 0.0, 10, 2, content=content_of_pieces([("a", 10)]))
    server.submit(request, 0.0, 0.0)
    with pytest.raises(AssertionError, match="8 cached tokens planned, 0 found"):
        start_step(server, Plan(chunks=[Chunk(request, 2, cached=8)]), 0.0)
