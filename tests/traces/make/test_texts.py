"""Synthetic prefixes and conversations: who shares what, and that nothing else of the workload changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from servesim.core import ClientRequest
from servesim.traces.edit import merge, repeat
from servesim.traces.make.synth import synthesise
from servesim.traces.reuse import prefix_reuse

POISSON = {"kind": "poisson", "rate": 5}
LENGTHS = {"prompt": [10, 90], "output": [5, 50]}
PREFIXES = {"count": 20, "tokens": 1500, "zipf": 1.1, "share": 0.7}
WORKLOAD = {"requests": 4000, "arrivals": POISSON, "lengths": LENGTHS, "priorities": {0: 1, 1: 1}}


def prefix_of(request: ClientRequest) -> tuple[Any, int] | None:
    """Return name and tokens of the prefix of a request; the rest of its prompt is its own."""
    if request.content is None:
        return None
    prefix, own = request.content.pieces
    assert own == (f"prompt:{request.id}", request.prompt - prefix[1])
    return prefix


def test_prefixes_follow_zipfs_law_and_their_share() -> None:
    drawn = [prefix_of(request) for request in synthesise({**WORKLOAD, "prefixes": PREFIXES}, 1).requests]
    with_prefix = [prefix for prefix in drawn if prefix is not None]
    assert len(with_prefix) / len(drawn) == pytest.approx(0.7, abs=0.03)
    assert {tokens for _, tokens in with_prefix} == {1500}
    counts = Counter(name for name, _ in with_prefix)
    assert set(counts) == {f"prefix:{k}" for k in range(20)}
    weights = np.arange(1, 21) ** -1.1
    for k in (0, 1, 4):
        assert counts[f"prefix:{k}"] / len(with_prefix) == pytest.approx(weights[k] / weights.sum(), rel=0.2)


def test_prefixes_change_nothing_but_the_prompts_which_get_longer_by_them() -> None:
    plain, shared = synthesise(WORKLOAD, 3).requests, synthesise({**WORKLOAD, "prefixes": PREFIXES}, 3).requests
    for one, other in zip(plain, shared):
        prefix = prefix_of(other)
        assert other.prompt - (0 if prefix is None else prefix[1]) == one.prompt
        assert (one.id, one.arrival, one.output, one.priority) == (
            other.id,
            other.arrival,
            other.output,
            other.priority,
        )
    assert synthesise(WORKLOAD, 3).requests[5].content is None


def test_each_prefix_has_one_length_of_the_distribution() -> None:
    keys = {"count": 50, "tokens": {"kind": "lognormal", "mean": 800, "sd": 400}}
    drawn = {prefix_of(request) for request in synthesise({**WORKLOAD, "prefixes": keys}, 1).requests}
    assert None not in drawn  # share: 1
    assert len(drawn) == 50  # a prefix is always equally long
    lengths = [prefix[1] for prefix in drawn if prefix is not None]
    assert len(set(lengths)) > 40 and np.mean(lengths) == pytest.approx(800, rel=0.3)


def check_turns(requests: list[ClientRequest], turn_before: dict[Any, ClientRequest]) -> None:
    """Assert that a prompt is the one before, its answer and new text; `turn_before`: by request id."""
    for request in requests:
        before = turn_before.get(request.id)
        if before is None:
            continue
        pieces = [*before.content.pieces, (before.content.answer, before.output)]
        assert request.content.pieces[:-1] == pieces
        assert request.content.pieces[-1][0] == f"prompt:{request.id}"
        assert request.content.ends[-1] == request.prompt


def test_the_prompt_of_a_turn_is_the_one_before_its_answer_and_new_text() -> None:
    workload = {**WORKLOAD, "requests": 300, "sessions": {"turns": [1, 6], "think_time": 4}, "prefixes": PREFIXES}
    trace = synthesise(workload, 2)
    assert len(trace) == 300
    by_id = {request.id: request for request in trace.requests}
    before = {r.id: by_id[r.follows] for r in trace.requests if r.follows is not None}
    assert len(before) > 100
    check_turns(list(trace.requests), before)
    for request in trace.requests:
        assert request.think_time == (4.0 if request.follows is not None else 0.0)
        if request.follows is not None:
            assert request.session == by_id[request.follows].session
    turns = Counter(request.session for request in trace.requests)
    assert set(turns.values()) == {1, 2, 3, 4, 5, 6}
    assert trace.notes == ["the prompt of a turn contains the earlier turns and answers of its session"]
    arrivals = [request.arrival for request in trace.requests]
    assert arrivals == sorted(arrivals)


def test_a_duration_is_that_of_the_session_starts() -> None:
    workload = {"duration": 60, "arrivals": POISSON, "lengths": LENGTHS, "sessions": {"turns": 3, "think_time": 100}}
    trace = synthesise(workload, 0)
    starts = [request for request in trace.requests if request.follows is None]
    assert len(trace) == 3 * len(starts)
    plain = synthesise({"duration": 60, "arrivals": POISSON, "lengths": LENGTHS}, 0)
    assert [request.arrival for request in starts] == [request.arrival for request in plain.requests]


@pytest.mark.parametrize(
    "loop", [{"concurrency": 4}, {"arrivals": {"kind": "closed", "users": 4, "think_time": 2.0}}], ids=["short", "kind"]
)
def test_users_of_a_closed_loop_start_a_new_conversation_after_the_last_turn(loop: dict[str, Any]) -> None:
    trace = synthesise({**loop, "requests": 60, "lengths": LENGTHS, "sessions": {"turns": 3}}, 0)
    plain = synthesise({**loop, "requests": 60, "lengths": LENGTHS}, 0)
    fields = [[(r.arrival, r.follows, r.think_time, r.session, r.output) for r in t.requests] for t in (trace, plain)]
    assert fields[0] == fields[1]
    by_id = {request.id: request for request in trace.requests}
    users: dict[Any, list[ClientRequest]] = {}
    for request in trace.requests:
        users.setdefault(request.session, []).append(request)
    before = {}
    for requests in users.values():
        for k, request in enumerate(requests):
            if k % 3:
                before[request.id] = by_id[request.follows]
            elif request.content is not None:
                assert request.content.pieces == [(f"prompt:{request.id}", request.prompt)]
    check_turns(list(trace.requests), before)


def test_copies_and_mixes_do_not_share_their_texts() -> None:
    workload = {**WORKLOAD, "requests": 50, "prefixes": {"count": 3, "tokens": 100}, "sessions": {"turns": 2}}
    one = synthesise(workload, 0)
    reuse = prefix_reuse(one)
    for several in (repeat(one, 3), merge([one, one]), synthesise({"mix": [workload, workload]}, 0)):
        copies = prefix_reuse(several)
        assert copies is not None and copies["seen_blocks"] == pytest.approx(reuse["seen_blocks"], abs=0.05)
        assert len({request.id for request in several.requests}) == len(several)


WRONG_PREFIXES: Any = [
    {"prefixes": {"count": 0, "tokens": 5}},
    {"prefixes": {"count": 3}},
    {"prefixes": {"count": 3, "tokens": 5, "share": 2}},
    {"prefixes": {"count": 3, "tokens": 5, "zipf": -1}},
    {"sessions": {"turns": 0}},
    {"sessions": {"turns": 2, "thinktime": 3}},
    {"sessions": {"turns": 2, "think_time": 3}, "arrivals": {"kind": "closed", "users": 4}},
]


def test_a_wrong_key_is_one_line(expected_errors: Callable[..., None]) -> None:
    expected_errors("prefixes", lambda keys: synthesise({**WORKLOAD, **keys}, 0), WRONG_PREFIXES)
