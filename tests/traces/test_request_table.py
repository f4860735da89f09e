"""A table of requests behaves as the list of requests that it was made from."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from servesim.core import ClientRequest, Request
from servesim.core.content import content_of_ids
from servesim.runs.build import copy_requests
from servesim.traces.trace import Columns, RequestTable, Trace, build_trace, has_field, table_of


def various_requests() -> list[ClientRequest]:
    """Every kind of value: whole and broken times, ids that numpy cannot hold, absent and given fields."""
    return [
        ClientRequest(0, 0.1, 5, 300),
        ClientRequest("a", 2, 7, 8, limit=9, priority=-1, session="s", content=content_of_ids((1, 2), 4, 7)),
        ClientRequest(2**70, 2.5, 1, 1, follows="a", think_time=0.25, fails_at_token=1),
    ]


def fields(requests: object) -> list[tuple[str, ...]]:
    """Values with their types: 2 and 2.0 are written differently."""
    return [tuple(map(repr, request.client_fields())) for request in requests]  # type: ignore[attr-defined]


def test_a_table_gives_back_every_value_with_its_type() -> None:
    requests = various_requests()
    table = table_of(requests)
    assert fields(table) == fields(requests)
    assert fields([table[k] for k in range(-3, 3)]) == fields([requests[k] for k in range(-3, 3)])
    assert fields(table[1:]) == fields(requests[1:])
    assert fields(table.pick([2, 0])) == fields([requests[2], requests[0]])
    assert fields(pickle.loads(pickle.dumps(table))) == fields(requests)
    with pytest.raises(IndexError):
        table[3]


def test_numbers_are_arrays_and_default_columns_are_not_stored() -> None:
    table = table_of([ClientRequest(k, k / 3, k + 1, 300) for k in range(1000)])
    assert isinstance(table.column("arrival"), np.ndarray) and isinstance(table.column("prompt"), np.ndarray)
    assert len(pickle.dumps(table)) < 1000 * 5 * 8 + 2000  # id, arrival, prompt, output, limit
    assert table_of(table) is table
    empty = build_trace(Columns([5, 6], [1, 1], content=[None, None], hash_ids=[(), ()]), "file", "servesim").requests
    assert isinstance(empty, RequestTable) and not has_field(empty, "content")


def test_a_run_gets_new_requests_from_a_table_and_from_a_list() -> None:
    requests = various_requests()
    copies = [copy_requests(requests), copy_requests(table_of(requests))]
    assert fields(copies[0]) == fields(copies[1]) == fields(requests)
    assert all(type(request) is Request for request in copies[1])
    copies[1][0].sent = 7.0
    assert fields(copy_requests(table_of(requests))) == fields(requests)


def test_the_arrays_of_a_trace_are_the_same_for_a_table_and_a_list() -> None:
    requests = various_requests()
    as_list, as_table = Trace(requests, "t", "synth"), Trace(table_of(requests), "t", "synth")
    for name in ("arrivals", "prompts", "outputs"):
        assert getattr(as_list, name).tolist() == getattr(as_table, name).tolist()
        assert getattr(as_list, name).dtype == getattr(as_table, name).dtype
    assert as_list.span == as_table.span == 2.4


def test_followers_of_unusable_rows_follow_their_predecessors_after_sorting() -> None:
    columns = Columns(
        prompt=[5, 5, 0, 5, 5], output=[2, 0, 2, 2, 2], arrival=[4.0, None, None, None, 1.0], id=[*"abcde"],
        follows=[None, "a", "b", "c", None], think_time=[0.0, 0.5, 0.25, 1.0, 0.0],
    )  # fmt: skip
    trace = build_trace(columns, "file", "servesim")
    assert isinstance(trace.requests, RequestTable)
    rows = [(r.id, r.arrival, r.follows, r.think_time) for r in trace.requests]
    assert rows == [("e", 1.0, None, 0.0), ("a", 4.0, None, 0.0), ("d", 5.75, "a", 1.75)]
    assert trace.dropped == {"no output tokens": 1, "no prompt tokens": 1}
