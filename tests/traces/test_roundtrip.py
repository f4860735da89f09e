"""Write and read back: servesim formats keep every field, other formats the fields that they can hold."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servesim.core import ClientRequest, Request
from servesim.core.content import Content, content_of_ids, content_of_pieces
from servesim.core.request import CLIENT_FIELDS
from servesim.traces.contents import id_size
from servesim.traces.export import export, to_text
from servesim.traces.read.formats import load
from servesim.traces.trace import Trace

letters = st.characters(codec="utf-8", exclude_characters="\0", exclude_categories=["Cs"])
names = st.text(letters, min_size=1, max_size=8)
times = st.floats(0, 1e6, allow_nan=False)
tokens = st.integers(1, 100) | st.integers(1, 3000) | st.integers(1, 100_000)


@st.composite
def contents(draw: st.DrawFn, prompt: int, id_size: int | None) -> Content | None:
    """Hash ids of one size, or pieces of texts with any names and perhaps a named answer; or nothing."""
    if draw(st.booleans()):
        return None
    if id_size is not None:
        count = -(-prompt // id_size)
        shared, own = draw(st.lists(st.integers(0, 3), max_size=2)), draw(st.integers(0, 2**63))
        return content_of_ids([*shared, *range(own, own + count)][:count], id_size, prompt)
    texts = st.integers(-3, 3) | st.sampled_from(["3", "a b", "x:1", "-1"]) | names
    pieces = draw(st.lists(st.tuples(texts, st.integers(1, 600)), max_size=4))
    used = sum(tokens for _, tokens in pieces)
    if used > prompt:
        pieces, used = [], 0
    return content_of_pieces([*pieces, ("rest", prompt - used)], draw(st.none() | texts))


@st.composite
def traces(draw: st.DrawFn, chains: bool = True) -> Trace:
    """A random trace: some requests belong to a session, some of these follow the previous one of it."""
    id_size = draw(st.none() | st.sampled_from([16, 512]))
    arrivals = sorted(draw(st.lists(times, min_size=1, max_size=12)))
    named = draw(st.sampled_from([lambda k: k, lambda k: f"r{k}", lambda k: 7 * k + 1]))
    ids: list[Any] = [named(k) for k in range(len(arrivals))]
    sessions = draw(st.lists(names, min_size=1, max_size=3, unique=True))
    last: dict[str, Request] = {}
    requests = []
    for id, arrival in zip(ids, arrivals):
        session = draw(st.none() | st.sampled_from(sessions))
        output = draw(tokens)
        prompt = draw(tokens)
        request = Request(
            id,
            arrival,
            prompt,
            output,
            limit=output + draw(st.integers(0, 2) | st.integers(0, 1000)),
            priority=draw(st.integers(-3, 3)),
            session=session,
            content=draw(contents(prompt, id_size)),
            fails_at_token=draw(st.none() | st.integers(1, 50)),
        )
        if chains and session in last and draw(st.booleans()):
            request.follows = last[session].id
            request.think_time = draw(st.floats(0, 1000, allow_nan=False))
        if session is not None:
            last[session] = request
        requests.append(request)
    return Trace(requests, "drawn", "synth")


def fields(trace: Trace, *omitted: str) -> list[dict[str, Any]]:
    """Return the client's fields of each request, without the omitted ones."""
    names_kept = [name for name in CLIENT_FIELDS if name not in omitted]
    return [{name: getattr(request, name) for name in names_kept} for request in trace.requests]


def write_and_read(trace: Trace, format: str, suffix: str) -> Trace:
    """Write a trace to a file and read it back."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"trace{suffix}"
        export(trace, path, format)
        return load(path)


@settings(max_examples=40)
@given(traces(), st.sampled_from([".csv", ".jsonl.gz"]))
def test_servesim_files_keep_every_field(trace: Trace, suffix: str) -> None:
    assert fields(write_and_read(trace, "servesim", suffix)) == fields(trace)


@settings(max_examples=40)
@given(traces())
def test_mooncake_keeps_lengths_prefixes_sessions_priorities_chains_and_milliseconds(trace: Trace) -> None:
    returned = write_and_read(trace, "mooncake", ".jsonl")
    # The reader uses the row as id: compare in the order written.
    index = {request.id: k for k, request in enumerate(trace.requests)}
    after = [None if r.follows is None else index[r.follows] for r in trace.requests]
    in_written_order = sorted(returned.requests, key=lambda request: int(request.id))
    for original, copy, predecessor in zip(trace.requests, in_written_order, after):
        assert (copy.prompt, copy.output) == (original.prompt, original.output)
        assert (copy.session, copy.priority) == (original.session, original.priority)
        assert copy.follows == predecessor
        assert copy.think_time == pytest.approx(original.think_time, rel=1e-12, abs=1e-12)
        if predecessor is None:
            assert copy.arrival == round(original.arrival * 1000) / 1000
    assert_same_sharing(trace, in_written_order, id_size(trace.contents) or 512)


def assert_same_sharing(trace: Trace, copies: Sequence[ClientRequest], size: int) -> None:
    """Assert that every two prompts begin with as many equal blocks as before; without content they share nothing."""
    for (one, first), (other, second) in combinations(zip(trace.requests, copies), 2):
        known = 0 if one.content is None or other.content is None else equal_beginning(one.content, other.content)
        assert first.content is not None and second.content is not None
        assert equal_beginning(first.content, second.content) // size == known // size


def equal_beginning(one: Content, other: Content) -> int:
    """Return the number of equal tokens at the beginning, piece by piece."""
    equal = 0
    for (name, tokens), (other_name, other_tokens) in zip(one.pieces, other.pieces):
        if name != other_name:
            return equal
        equal += min(tokens, other_tokens)
        if tokens != other_tokens:
            return equal
    return equal


@pytest.mark.parametrize("size", [512, 64])
def test_mooncake_has_one_hash_id_per_block_and_new_ids_are_unique(size: int) -> None:
    requests = [
        Request(0, 0.0, size * 2, 1, content=content_of_ids((5, 9), size, size * 2)),
        Request(1, 1.0, size * 2 + 1, 1),
        Request(2, 2.0, 1, 1),
        Request(3, 3.0, size * 4, 1),
    ]
    text, notes = to_text(Trace(requests, "t", "synth"), "mooncake")
    rows = [json.loads(line) for line in text.splitlines()]
    assert [row["hash_ids"] for row in rows] == [[5, 9], [10, 11, 12], [13], [14, 15, 16, 17]]
    assert all(len(row["hash_ids"]) == -(-row["input_length"] // size) for row in rows)  # as guidellm requires
    assert notes[0] == "hash ids generated for 3 requests: readers such as guidellm expect one per block"
    assert notes[1:] == (["one hash id is 64 tokens, not 512: set the block size of the reader"] if size == 64 else [])


@settings(max_examples=30)
@given(traces(chains=False))
def test_a_round_trip_through_timed_trace_keeps_arrivals_lengths_and_prefixes(trace: Trace) -> None:
    returned = write_and_read(write_and_read(trace, "timed-trace", ".jsonl"), "servesim", ".csv")
    for original, copy in zip(trace.requests, returned.requests):
        assert (copy.arrival, copy.prompt, copy.output) == (original.arrival, original.prompt, original.output)
    assert_same_sharing(trace, returned.requests, id_size(trace.contents) or 16)


def test_generated_hash_ids_differ_from_real_ones() -> None:
    requests = [Request(0, 0.0, 40, 1, content=content_of_ids((5, 9, 7), 16, 40)), Request(1, 1.0, 40, 1)]
    text, notes = to_text(Trace(requests, "t", "synth"), "timed-trace")
    assert [line.partition('"hash_ids": ')[2] for line in text.splitlines()] == ["[5, 9, 7]}", "[10, 11, 12]}"]
    assert notes == [
        "hash ids generated for 1 requests: without them vLLM would send empty prompts",
        "replay with --dataset-name timed_trace --self-timed --timed-trace-chunk-hash-size 16",
    ]


def test_contents_become_hash_ids_of_the_prompt_up_to_each_block() -> None:
    """As Mooncake's: an id names the whole prompt up to the end of its block, and a tail is not a whole block."""
    texts = [
        [("system", 600), ("a", 700)],
        [("system", 600), ("a", 700), ("output:0", 30), ("b", 300)],  # 1300 tokens, 2 whole blocks are equal
        [("system", 600), ("c", 700)],
        [("system", 600), ("a", 700)],
        [("x", 512), ("system", 600)],  # the same text at another place is another block
    ]
    requests = [Request(k, k, sum(n for _, n in p), 1, content=content_of_pieces(p)) for k, p in enumerate(texts)]
    text, notes = to_text(Trace(requests, "t", "synth"), "mooncake")
    [first, second, third, fourth, fifth] = [json.loads(line)["hash_ids"] for line in text.splitlines()]
    assert [len(ids) for ids in (first, second, third, fifth)] == [3, 4, 3, 3]
    assert first[:2] == second[:2] and first[0] == third[0] and first == fourth
    assert len({*first, *second, *third, *fifth}) == 3 + 2 + 2 + 3
    assert notes == []


def test_empty_columns_are_not_written() -> None:
    text, _ = to_text(Trace([Request(0, 0.5, 40, 7)], "t", "synth"))
    assert text == "arrival_s,prompt_tokens,output_tokens\n0.5,40,7\n"
