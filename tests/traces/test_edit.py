"""Scale, slice, repeat, merge and jitter a trace; the old trace stays unchanged."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from servesim.core import BadInput, Request
from servesim.core.content import Content, content_of_ids, content_of_pieces
from servesim.core.request import CLIENT_FIELDS
from servesim.traces.edit import jitter, merge, repeat, scale, set_rate, slice_time
from servesim.traces.trace import Trace


def trace(*requests: Request) -> Trace:
    return Trace(list(requests), "drawn", "synth")


def session() -> Trace:
    """Two requests of one session, and one without a session between them."""
    return trace(
        Request(0, 1.0, 10, 4, limit=8, session="s", content=content_of_ids((3, 4), 8, 10)),
        Request(1, 2.0, 20, 5, content=content_of_pieces([(3, 8), ("b", 12)], "c")),
        Request(2, 4.0, 30, 6, session="s", follows=0, think_time=3.0, priority=2),
    )


def client_fields(requests: list[Request]) -> list[dict[str, Any]]:
    return [{name: getattr(request, name) for name in CLIENT_FIELDS} for request in requests]


def test_scaling_the_rate_shortens_gaps_and_think_times() -> None:
    faster = scale(session(), rate=2)
    assert [(r.arrival, r.think_time) for r in faster.requests] == [(0.5, 0.0), (1.0, 0.0), (2.0, 1.5)]
    assert [(r.prompt, r.output, r.limit) for r in faster.requests] == [(10, 4, 8), (20, 5, 5), (30, 6, 6)]


def test_scaling_lengths_keeps_at_least_one_token_and_scales_the_parts_of_prompts() -> None:
    shorter = scale(session(), prompt=0.5, output=0.01)
    assert [(r.prompt, r.output, r.limit) for r in shorter.requests] == [(5, 1, 1), (10, 1, 1), (15, 1, 1)]
    assert [r.content for r in shorter.requests] == [
        content_of_ids((3, 4), 4, 5),
        content_of_pieces([(3, 4), ("b", 6)], "c"),
        None,
    ]
    assert [r.content for r in scale(session(), output=3).requests] == [r.content for r in session().requests]
    tiny = scale(session(), prompt=0.01).requests
    assert [(r.prompt, r.content) for r in tiny[:2]] == [(1, content_of_ids([4], 1, 1)), (1, Content(["b"], [1], "c"))]


def test_set_rate_scales_the_time() -> None:
    steady = trace(*(Request(k, 10.0 * k, 1, 1) for k in range(11)))
    assert set_rate(steady, 5).span == pytest.approx(2.0)
    with pytest.raises(BadInput, match="all requests arrive at the same time"):
        set_rate(trace(Request(0, 0.0, 1, 1)), 5)


def test_a_slice_counts_from_its_start_and_removes_dependencies_on_requests_outside() -> None:
    middle = slice_time(session(), 2.0, 5.0)
    assert [(r.id, r.arrival, r.follows, r.think_time) for r in middle.requests] == [
        (1, 0.0, None, 0.0),
        (2, 2.0, None, 0.0),
    ]
    complete = slice_time(session(), 0.5)
    assert [(r.id, r.arrival, r.follows, r.think_time) for r in complete.requests] == [
        (0, 0.5, None, 0.0),
        (1, 1.5, None, 0.0),
        (2, 3.5, 0, 3.0),
    ]
    with pytest.raises(BadInput, match="no request arrives from 7 to 9 s"):
        slice_time(session(), 7.0, 9.0)


def test_copies_are_one_mean_gap_apart_with_separate_sessions() -> None:
    twice = repeat(session(), 2)
    assert [(r.id, r.arrival, r.session, r.follows) for r in twice.requests] == [
        (0, 1.0, "s", None),
        (1, 2.0, None, None),
        (2, 4.0, "s", 0),
        (3, 5.5, "s#1", None),
        (4, 6.5, None, None),
        (5, 8.5, "s#1", 3),
    ]
    assert [r.content for r in twice.requests] == CONTENTS + NEW_CONTENTS  # otherwise the second copy would be cached


def test_merging_keeps_equal_ids_sessions_and_texts_distinct() -> None:
    both = merge([session(), session()])
    assert [(r.id, r.arrival, r.session, r.follows) for r in both.requests] == [
        (0, 1.0, "s", None),
        (1, 1.0, "s#1", None),
        (2, 2.0, None, None),
        (3, 2.0, None, None),
        (4, 4.0, "s", 0),
        (5, 4.0, "s#1", 1),
    ]
    assert [r.content for r in both.requests] == [r for pair in zip(CONTENTS, NEW_CONTENTS) for r in pair]


CONTENTS = [content_of_ids((3, 4), 8, 10), content_of_pieces([(3, 8), ("b", 12)], "c"), None]
NEW_CONTENTS = [content_of_ids((8, 9), 8, 10), content_of_pieces([(8, 8), ("b#1", 12)], "c#1"), None]


def test_jitter_delays_each_arrival_by_less_than_its_bound() -> None:
    rounded = trace(*(Request(k, 3.0 * (k // 10), 1, 1) for k in range(100)))
    jittered = jitter(rounded, 3.0, seed=1)
    by_id = {r.id: r.arrival for r in jittered.requests}
    assert all(0 <= by_id[r.id] - r.arrival < 3.0 for r in rounded.requests)
    assert len(set(by_id.values())) == 100
    assert [r.arrival for r in jittered.requests] == sorted(by_id.values())
    assert client_fields(jittered.requests) == client_fields(jitter(rounded, 3.0, seed=1).requests)


def test_the_old_trace_stays_unchanged() -> None:
    old = session()
    before = client_fields(old.requests)
    for changed in (scale(old, 2, 2, 2), slice_time(old, 1.5), repeat(old, 3), merge([old, old]), jitter(old, 5.0)):
        assert changed is not old
    assert client_fields(old.requests) == before


@given(st.lists(st.tuples(st.floats(0, 100), st.booleans()), min_size=1, max_size=20), st.integers(1, 3))
def test_every_edit_gives_a_valid_trace(samples: list[tuple[float, bool]], times: int) -> None:
    requests: list[Request] = []
    for k, (arrival, chained) in enumerate(sorted(samples)):
        after = requests[-1].id if requests and chained else None
        requests.append(Request(k, arrival, 5, 5, session="s", follows=after, think_time=1.0 if chained else 0.0))
    for changed in (repeat(trace(*requests), times), jitter(trace(*requests), 9.0), merge([trace(*requests)] * times)):
        earlier_ids: set[Any] = set()
        arrivals = [r.arrival for r in changed.requests]
        assert arrivals == sorted(arrivals)
        for request in changed.requests:
            assert request.follows is None or request.follows in earlier_ids
            assert request.id not in earlier_ids
            earlier_ids.add(request.id)


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
def test_a_factor_must_be_a_number_above_0(factor: float) -> None:
    for change in (lambda: scale(session(), rate=factor), lambda: jitter(session(), factor)):
        with pytest.raises(BadInput, match="expected a number above 0"):
            change()
