"""The reuse of a trace equals that of simple caches: one block at a time, compared with all earlier ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Optional

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servesim.core import Request
from servesim.core.content import content_of_ids, content_of_pieces
from servesim.traces.read.formats import load
from servesim.traces.reuse import PrefixTree, cached_blocks, prefix_reuse, seen_blocks, stack_distances
from servesim.traces.trace import Trace

Block = tuple[Any, ...]  # all tokens of a request up to the end of the block: equal only if the whole beginning is


def blocks_of(request: Request, size: int, end: int) -> list[Block]:
    """Return the whole blocks of the first `end` tokens of a request: its prompt, then its answer."""
    pieces: list[tuple[Any, int]] = [(f"own {request.id}", request.prompt)]
    answer: Optional[Any] = None
    if request.content is not None:
        pieces, answer = request.content.pieces, request.content.answer
    tokens = [(name, k) for name, count in pieces for k in range(count)]
    tokens += [(f"answer {request.id}" if answer is None else answer, k) for k in range(request.output)]
    return [tuple(tokens[: stop + size]) for stop in range(0, end - size + 1, size)]


def hits_of_cache(requests: list[Request], size: int, capacity: int) -> int:
    """Return the hit tokens of a cache of `capacity` blocks: a list, the block that is evicted next at the end."""
    cache: list[Block] = []
    hits = 0
    for request in requests:
        for block in blocks_of(request, size, request.prompt - 1):
            if block not in cache:
                break
            hits += size
        for block in reversed(blocks_of(request, size, request.prompt + request.output - 1)):
            if block in cache:
                cache.remove(block)
            cache.insert(0, block)
        del cache[capacity:]
    return hits


@st.composite
def sharing_requests(draw: st.DrawFn) -> list[Request]:
    """Requests whose prompts are made of few texts; some continue an earlier prompt and its answer."""
    requests: list[Request] = []
    for k in range(draw(st.integers(1, 12))):
        output = draw(st.integers(1, 9))
        pieces = draw(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 12)), min_size=1, max_size=4))
        earlier = draw(st.none() | st.sampled_from(requests)) if requests else None
        if earlier is not None and earlier.content is not None:
            before, cut = earlier.content.pieces, draw(st.integers(0, 4))
            pieces = (
                before[: len(before) - cut] + [(earlier.content.answer or "x", earlier.output)] * (not cut) + pieces
            )
        content = content_of_pieces(pieces, draw(st.none() | st.just(f"output:{k}")))
        prompt = content.ends[-1]
        requests.append(Request(k, k, prompt, output, content=draw(st.sampled_from([content, content, content, None]))))
    return requests


@settings(max_examples=30)
@given(sharing_requests(), st.sampled_from([1, 2, 3, 4, 8]))
def test_hit_rates_are_those_of_a_cache_that_evicts_the_least_recently_used_block(
    requests: list[Request], size: int
) -> None:
    reuse = prefix_reuse(Trace(requests, "t", "synth"), size)
    if all(request.content is None for request in requests):
        assert reuse is None
        return
    tree = PrefixTree(size)
    tree.add_all(requests)
    distances, counts = stack_distances(tree, requests)
    for capacity in (1, 2, 3, 5, 8, 13, 21, 10**6):
        assert cached_blocks(distances, counts, capacity) * size == hits_of_cache(requests, size, capacity)
    tokens = sum(request.prompt for request in requests)
    assert reuse["hit_rate"] * tokens == pytest.approx(hits_of_cache(requests, size, 10**6))
    assert reuse["cache_sizes"][-1]["hit_rate"] == reuse["hit_rate"]


@settings(max_examples=30)
@given(sharing_requests(), st.sampled_from([1, 2, 3, 4, 8]))
def test_blocks_seen_before_are_those_of_an_earlier_prompt_or_answer(requests: list[Request], size: int) -> None:
    known: set[Block] = set()
    seen = total = 0
    for request in requests:
        prompt = blocks_of(request, size, request.prompt)
        total += len(prompt)
        seen += sum(block in known for block in prompt)
        known.update(prompt, blocks_of(request, size, request.prompt + request.output - 1))
    assert seen_blocks(requests, size) == (seen, total)


def test_a_prefix_is_shared_up_to_its_first_new_block() -> None:
    ids = [(0, 1, 2), (0, 1, 3), (9, 1, 3)]  # nothing of the last one: its first block is new
    requests = [
        Request(k, k, p, 1, content=content_of_ids(i, 512, p)) for k, i, p in zip(range(3), ids, (1100, 1500, 1500))
    ]
    assert seen_blocks(requests, 512) == (2, 6)
    assert seen_blocks(requests, 16) == (64, 68 + 93 + 93)  # two ids of 32 blocks each
    assert seen_blocks(requests, 1024) == (1, 3)
    assert prefix_reuse(Trace([Request(0, 0.0, 5, 1)], "t", "synth")) is None


def test_the_hit_rates_of_real_traces_are_the_published_ones(shared: Path) -> None:
    """Mooncake: 37.3 % with blocks of 512 tokens. A6000: vLLM counted 82,645 queries and 21,264 hits."""
    mooncake = prefix_reuse(load(shared / "data" / "traces" / "mooncake_conversation.csv.gz"), 512)
    assert mooncake is not None and mooncake["hit_rate"] == pytest.approx(0.373, abs=0.0005)
    pulse = load(shared / "data" / "measured" / "llmservingsim-ispass26" / "workloads" / "pulse.csv.gz")
    reuse = prefix_reuse(pulse, 16)
    assert reuse is not None and reuse["hit_rate"] * 82_645 == pytest.approx(21_264, abs=1e-6)
    assert pulse.prompts.sum() == 82_645
