"""Speculative decoding: all decoding requests in one pass gives the same run as request by request."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any, Optional

import pytest
from servesim.core import Request
from servesim.core.content import content_of_pieces
from servesim.costs.linear import LinearCost
from servesim.engine.draft_cohort import DraftCohort
from servesim.engine.inbox import Inbox
from servesim.engine.loop import Loop
from servesim.engine.server import Server
from servesim.engine.simulated import SimulatedClock
from servesim.policies.vllm_v1 import VLLMV1

from ..conftest import seeds
from ..policies.recordings import StepLog

CACHE_COUNTS = ("requests", "queries", "hits", "preempted_queries", "preempted_hits", "evicted_blocks")
COST = LinearCost(base=0.005, prefill_token=1e-4, decode_live=2e-4, context=1e-6, draft_token=6e-5)


def random_case(seed: int, has_groups: bool) -> tuple[VLLMV1, dict[str, Any], list[Request], Optional[float]]:
    """Return a policy, the settings of a server, requests and the patience of the clients."""
    draw = random.Random(seed)
    method = draw.choice(["ngram", "eagle", "mtp", "draft_model"])
    tokens = draw.choice([1, 2, 3, 5])
    more: dict[str, Any] = {}
    if has_groups:
        tokens = draw.choice([0, 0, tokens])
        more["version"] = "0.32.0" if tokens else draw.choice(["0.19.0", "0.22.0", "0.25.0", "0.28.0", "0.32.0"])
        more["prefix_cache_retention_interval"] = draw.choice([0, 0, None, 32, 96])
    fields = dict(
        num_speculative_tokens=tokens, speculative_method=method, mtp_modules=draw.choice([1, 3]),
        async_scheduling=method != "ngram" and draw.random() < 0.7,
        enable_prefix_caching=draw.random() < 0.6,
        max_num_seqs=draw.choice([4, 16]), max_num_batched_tokens=draw.choice([24, 64, 512]),
        long_prefill_token_threshold=draw.choice([0, 0, 0, 20]), watermark=draw.choice([0.0, 0.05]),
        scheduler_reserve_full_isl=draw.random() < 0.8, policy=draw.choice(["fcfs", "fcfs", "priority"]),
        **more,
    )  # fmt: skip
    if more.get("version", "0.32.0") < "0.24":
        fields["watermark"] = 0.0
    blocks = draw.choice([60, 80, 120, 2000])
    memory: dict[str, Any] = {"block_size": draw.choice([4, 16]), "max_model_len": draw.choice([120, 300])}
    if memory["block_size"] == 4:
        blocks *= 2
    timeout = None
    if has_groups:
        memory["kv_cache_groups"] = draw.choice([[None, 32], [None, 128], [48, None, 48], [40], [20, 50], [None, None]])
        blocks, timeout = blocks * len(memory["kv_cache_groups"]), draw.choice([None, None, 0.6])
    memory["blocks"] = blocks
    requests, shares, now = [], draw.random() < 0.5, 0.0
    for number in range(draw.choice([12, 30])):
        now += draw.choice([0.0, 0.01, 0.05])
        prompt, output = draw.randint(1, 90), draw.randint(1, 60)
        content = None
        if shares and draw.random() < 0.8:
            shared = min(prompt, draw.choice([0, 16, 48, 64]))
            pieces = [(f"system:{draw.randint(0, 1)}", shared), (f"user:{number}", prompt - shared)]
            content = content_of_pieces([piece for piece in pieces if piece[1]], f"output:{number}")
        limit = draw.choice([output, output + 7])
        request = Request(f"r{number}", now, prompt, output, limit, priority=draw.randint(0, 2), content=content)
        request.acceptance = number % 6 / 5
        requests.append(request)
    return VLLMV1(**fields), memory, requests, timeout


def run(seed: int, one_by_one: bool, observed: bool, has_groups: bool) -> dict[str, Any]:
    """Run a random case. Return everything that it counts."""
    policy, memory, requests, timeout = random_case(seed, has_groups)
    server = Server(policy, **memory)
    cohort = server.draft_cohort
    assert isinstance(cohort, DraftCohort)
    drafts = cohort.drafts
    luck = {request.id: random.Random(f"{seed} {request.id}") for request in requests}
    rate = random.Random(seed).choice([0.0, 0.5, 0.8, 1.0])

    def accept(request: Request, count: int) -> int:
        accepted = 0
        while accepted < count and luck[request.id].random() < rate:
            accepted += 1
        return accepted

    rates = random.Random(seed).sample([0.3, 0.9, 0.6, 0.5, 0.7], drafts.tokens)
    known = [("rate", rate, ()), ("list", None, rates), ("column", None, ())]
    kind, one_rate, rates_by_position = random.Random(seed).choice([("function", None, ()), *known])
    if kind == "function":
        drafts.accept = accept
    else:
        drafts.connect(seed, one_rate, rates_by_position, 0, 1.0)
    cohort.enabled = cohort.enabled and not one_by_one
    log = Log()
    clock = SimulatedClock(COST)
    loop = Loop(server, Inbox(requests, timeout=timeout), clock, (log,) if observed else (), check=observed)
    stuck = None
    try:
        loop.run()
    except RuntimeError as error:
        stuck = str(error)
    gaps: Counter[float] = Counter()
    for seconds, count in zip(server.token_gaps.seconds, server.token_gaps.counts):
        gaps[seconds] += count
    work = {
        kind: [getattr(totals, name) for name in ("steps", "prompts", "prompt_tokens", "prompt_pairs", "prompt_cached",
                                                  "decode_rows", "decode_pairs", "draft_tokens", "draft_pairs")]
        for kind, totals in server.work.by_kind().items()
    }  # fmt: skip
    return {
        "rows": log.rows, "stuck": stuck, "now": loop.now, "calls": loop.calls, "gaps": gaps, "work": work,
        "largest": clock.largest_shape._replace(longest=0), "tokens": server.tokens_generated,
        "kv": [getattr(server.kv_use, name) for name in ("tokens", "absent", "block_sum", "token_sum", "peak_blocks")],
        "drafts": (drafts.rows, drafts.drafted, drafts.accepted_at, drafts.lost),
        "cache": [getattr(server.prefix_cache and server.prefix_cache.stats, name, None) for name in CACHE_COUNTS],
        "requests": [
            (r.id, r.outcome, r.scheduled, r.first_token, r.last_token, r.finish, r.preemptions, r.cached_tokens,
             r.written, r.queued, r.drafted, r.accepted)
            for r in requests
        ],
        "seconds": [round(x, 9) for r in requests for x in (r.prefilling, r.decoding)],
        "kinds": [round(totals.seconds, 9) for totals in server.work.by_kind().values()],
    }  # fmt: skip


class Log(StepLog):
    def planned_drafts(self, server: Server, step: Any) -> list[list[Any]]:
        return [[step.kind]]

    def on_step_end(self, server: Server, step: Any, now: float, finished: list[Request]) -> None:
        if step in self.open:  # otherwise it only removes requests whose clients gave up
            super().on_step_end(server, step, now, finished)


def compare(seed: int, has_groups: bool) -> None:
    expected = run(seed, True, True, has_groups)
    got = run(seed, False, True, has_groups)
    for index, (a, b) in enumerate(zip(expected["rows"], got["rows"])):
        assert a == b, f"step {index}: { ({key: (a[key], b[key]) for key in a if a[key] != b[key]}) }"
    for key in expected:
        assert got[key] == expected[key], key
    alone = run(seed, False, False, has_groups)
    for key in expected:
        if key != "rows":
            assert alone[key] == expected[key], key


@pytest.mark.parametrize("seed", seeds(40, 120))
def test_one_pass_over_all_decodes_gives_the_same_run_as_request_by_request(seed: int) -> None:
    compare(seed, has_groups=False)


@pytest.mark.parametrize("seed", seeds(40, 120))
def test_one_pass_gives_the_same_run_with_kv_cache_groups(seed: int) -> None:
    compare(seed, has_groups=True)
