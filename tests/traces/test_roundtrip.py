"""What is written down comes back: everything in our own formats, what they can hold in others'."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servesim.core import BadInput, Request
from servesim.core.request import ASKED
from servesim.traces.export import export, exported
from servesim.traces.read.load import load
from servesim.traces.trace import Trace

letters = st.characters(codec="utf-8", exclude_characters="\0", exclude_categories=["Cs"])
names = st.text(letters, min_size=1, max_size=8)
moments = st.floats(0, 1e6, allow_nan=False)
tokens = st.integers(1, 100_000)


@st.composite
def traces(draw: st.DrawFn, chains: bool = True) -> Trace:
    """Any trace: some requests belong to sessions, some wait for the one before them in theirs."""
    arrivals = sorted(draw(st.lists(moments, min_size=1, max_size=12)))
    named = draw(st.sampled_from([lambda k: k, lambda k: f"r{k}", lambda k: 7 * k + 1]))
    ids: list[Any] = [named(k) for k in range(len(arrivals))]
    sessions = draw(st.lists(names, min_size=1, max_size=3, unique=True))
    last: dict[str, Request] = {}
    requests = []
    for id, arrival in zip(ids, arrivals):
        session = draw(st.none() | st.sampled_from(sessions))
        output = draw(tokens)
        request = Request(
            id,
            arrival,
            draw(tokens),
            output,
            limit=output + draw(st.integers(0, 2) | st.integers(0, 1000)),
            priority=draw(st.integers(-3, 3)),
            session=session,
            prefix=tuple(draw(st.lists(st.integers(0, 2**63), max_size=4))),
            fails=draw(st.none() | st.integers(1, 50)),
        )
        if chains and session in last and draw(st.booleans()):
            request.after = last[session].id
            request.delay = draw(st.floats(0, 1000, allow_nan=False))
        if session is not None:
            last[session] = request
        requests.append(request)
    return Trace(requests, "drawn", "synth")


def fields(trace: Trace, *without: str) -> list[dict[str, Any]]:
    """Return what each request asks for, but for what a format cannot hold."""
    kept = [name for name in ASKED if name not in without]
    return [{name: getattr(request, name) for name in kept} for request in trace.requests]


def back(trace: Trace, format: str, suffix: str) -> Trace:
    """Return the trace as it is after being written and read."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"trace{suffix}"
        export(trace, path, format)
        return load(path)


@settings(max_examples=80, deadline=None)
@given(traces())
def test_our_csv_loses_nothing(trace: Trace) -> None:
    assert fields(back(trace, "servesim", ".csv")) == fields(trace)


@settings(max_examples=60, deadline=None)
@given(traces())
def test_our_jsonl_loses_nothing(trace: Trace) -> None:
    assert fields(back(trace, "servesim", ".jsonl.gz")) == fields(trace)


@settings(max_examples=80, deadline=None)
@given(traces())
def test_mooncake_keeps_lengths_prefixes_sessions_priorities_chains_and_milliseconds(trace: Trace) -> None:
    returned = back(trace, "mooncake", ".jsonl")
    # Ids are numbered anew, and a request's place in the file is its id: compare in the order written.
    place = {request.id: k for k, request in enumerate(trace.requests)}
    after = [None if r.after is None else place[r.after] for r in trace.requests]
    again = sorted(returned.requests, key=lambda request: int(request.id))
    for ours, theirs, waits in zip(trace.requests, again, after):
        assert (theirs.prompt, theirs.output) == (ours.prompt, ours.output)
        assert (tuple(theirs.prefix), theirs.session, theirs.priority) == (ours.prefix, ours.session, ours.priority)
        assert theirs.after == waits
        assert theirs.delay == pytest.approx(ours.delay, rel=1e-12, abs=1e-12)
        if waits is None:
            assert theirs.arrival == round(ours.arrival * 1000) / 1000


@settings(max_examples=60, deadline=None)
@given(traces(chains=False))
def test_ours_to_mooncake_to_ours_keeps_whole_milliseconds_exactly(trace: Trace) -> None:
    for request in trace.requests:
        request.arrival = round(request.arrival * 1000) / 1000
    returned = back(back(trace, "mooncake", ".jsonl"), "servesim", ".csv")
    assert fields(returned, "id", "limit", "fails") == fields(trace, "id", "limit", "fails")


@settings(max_examples=60, deadline=None)
@given(traces(chains=False))
def test_ours_to_timed_trace_to_ours_keeps_arrivals_lengths_and_prefixes(trace: Trace) -> None:
    returned = back(back(trace, "timed-trace", ".jsonl"), "servesim", ".csv")
    block = trace.block or 16
    for ours, theirs in zip(trace.requests, returned.requests):
        assert (theirs.arrival, theirs.prompt, theirs.output) == (ours.arrival, ours.prompt, ours.output)
        assert theirs.prefix[: len(ours.prefix)] == ours.prefix
        assert len(theirs.prefix) >= -(-ours.prompt // block)


def test_made_up_hash_ids_never_meet_real_ones() -> None:
    requests = [Request(0, 0.0, 40, 1, prefix=(5, 9)), Request(1, 1.0, 40, 1)]
    text, notes = exported(Trace(requests, "t", "synth"), "timed-trace")
    assert [line.partition('"hash_ids": ')[2] for line in text.splitlines()] == ["[5, 9, 10]}", "[11, 12, 13]}"]
    assert notes == [
        "hash ids made up for 2 requests: without them vLLM would send empty prompts",
        "replay with --dataset-name timed_trace --self-timed --timed-trace-chunk-hash-size 16",
    ]


def test_what_a_format_cannot_hold_is_said_aloud() -> None:
    requests = [
        Request(0, 0.0004, 40, 1, limit=5, session="s", priority=1, fails=1),
        Request(1, 1.0, 40, 1, after=0, delay=1.0),
    ]
    trace = Trace(requests, "t", "synth")
    assert exported(trace, "mooncake")[1] == [
        "arrivals of 1 requests rounded to whole milliseconds",
        "limits of 1 requests cannot be held by this format",
        "failures of 1 requests cannot be held by this format",
        "1 requests wait for another's end: their earliest possible arrival is written instead",
    ]
    assert "sessions of 1 requests cannot be held by this format" in exported(trace, "timed-trace")[1]
    assert exported(trace)[1] == []


def test_columns_in_which_nobody_says_anything_are_not_written() -> None:
    text, _ = exported(Trace([Request(0, 0.5, 40, 7)], "t", "synth"))
    assert text == "arrival_s,prompt_tokens,output_tokens\n0.5,40,7\n"


def test_an_unknown_format_lists_those_that_can_be_written() -> None:
    with pytest.raises(BadInput, match="to: expected one of servesim, mooncake, timed-trace, got 'parquet'"):
        exported(Trace([Request(0, 0.5, 40, 7)], "t", "synth"), "parquet")


def test_the_same_trace_gives_the_same_bytes_packed_or_not(tmp_path: Path) -> None:
    trace = Trace([Request(0, 0.5, 40, 7)], "t", "synth")
    for name in ("a.csv.gz", "b.csv.gz"):
        export(trace, tmp_path / name)
    assert (tmp_path / "a.csv.gz").read_bytes() == (tmp_path / "b.csv.gz").read_bytes()
