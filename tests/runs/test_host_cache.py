"""The host cache: what it finds, what its copies cost, and who refuses it. engine/test_prefix_cache.py: its order."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from servesim.config.scenario import Scenario, scenario_from
from servesim.core import Request
from servesim.core.content import content_of_pieces
from servesim.runs.simulate import simulate
from servesim.traces.trace import Trace

COST = {"prefill": 0.01, "prefill_token": 1e-4, "decode_step": 0.02, "swap_block": 99.0}
MODEL = {"layers": 1, "hidden": 256, "heads": 2, "intermediate": 256, "vocab": 9}  # 1024 bytes per token
UNLIMITED = {"blocks": 10**9, "bandwidth": "1e18"}


def scenario(blocks: int, host: dict[str, Any] | None = None, size: int = 4) -> Scenario:
    engine = {"num_blocks": blocks, "block_size": size, **({"host_cache": host, "model": MODEL} if host else {})}
    return scenario_from({"policy": {"name": "vllm-v1"}, "engine": engine, "profile": COST})


def conversations(seed: int) -> Trace:
    """Return random prompts with shared beginnings and earlier answers, one after the other."""
    random, requests = Random(seed), []
    texts: list[list[tuple[str, int]]] = [[(f"system {index}", 30)] for index in range(3)]
    for id in range(60):
        pieces = [*random.choice(texts), (f"turn {id}", random.randrange(1, 20))]
        prompt, output = sum(tokens for _, tokens in pieces), random.randrange(2, 30)
        requests.append(Request(id, 100.0 * id, prompt, output, content=content_of_pieces(pieces, f"answer {id}")))
        if prompt < 150:
            texts.append([*pieces, (f"answer {id}", output)])
    return Trace(requests, "test", "synth")


@pytest.mark.parametrize("seed", range(2))
def test_an_unlimited_host_cache_finds_what_an_unlimited_device_cache_finds(seed: int) -> None:
    """For requests that come one after the other: both have every block that was ever computed."""
    results = [simulate(item, conversations(seed)).result() for item in (
        scenario(100_000), scenario(60, UNLIMITED), scenario(60),
    )]  # fmt: skip
    device, host, small = (result["prefix_hit_rate"] for result in results)
    assert device == host > small
    assert results[1]["host_cache_hits"] > 0


def test_more_host_blocks_find_more() -> None:
    hits = [
        simulate(scenario(60, {**UNLIMITED, "blocks": blocks}), conversations(1)).result()["host_cache_hits"]
        for blocks in (1, 50, 100, 200, 400)
    ]
    assert hits == sorted(hits) and hits[0] < hits[-1]


def test_a_copy_takes_its_bytes_by_the_bandwidth_and_the_latency() -> None:
    """9 blocks of 4 tokens: `b` evicts 7 of the 8 blocks of `a`, which are copied back: 7 * 4096 bytes."""
    requests = [
        Request(index, 10.0 * index, 34, 2, content=content_of_pieces([(name, 34)])) for index, name in enumerate("aba")
    ]
    trace = Trace(requests, "test", "synth")
    plain = simulate(scenario(9), trace)
    copied = simulate(scenario(9, {"blocks": 50, "bandwidth": "1MB", "latency": 0.25}), trace)
    before, after = plain.result(), copied.result()
    tokens = after["host_cache_hits"]
    assert before["prefix_cache_hits"] + tokens == after["prefix_cache_hits"] == 32
    seconds = 0.25 + tokens * 1024 / 1e6
    assert after["host_copy_s"] == pytest.approx(seconds)
    assert after["busy_s"] == pytest.approx(before["busy_s"] - tokens * 1e-4 + seconds)
    assert copied.requests[2].cached_tokens == 32
    assert not any("host" in name for name in before)
    assert after["outside_profile"] == []


def test_hold_gives_the_same_result() -> None:
    host = {"blocks": 80, "bandwidth": "10MB", "latency": 0.001}
    requests = conversations(2).requests
    trace = Trace([Request(r.id, r.arrival / 500, r.prompt, r.output, content=r.content) for r in requests], "", "")
    fast, single = (simulate(scenario(70, host), trace, hold=fast) for fast in (True, False))
    for a, b in zip(fast.requests, single.requests):
        assert (a.first_token, a.finish, a.cached_tokens) == (b.first_token, b.finish, b.cached_tokens)
    assert fast.cache_metrics == single.cache_metrics and fast.cache_metrics["host_cache_hits"] > 0
