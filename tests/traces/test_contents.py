"""Contents of prompts in traces: token ids, texts, conversations."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servesim.core import BadInput, Request
from servesim.core.content import Content, content_of_pieces
from servesim.traces.contents import TokenTexts
from servesim.traces.edit import as_conversations
from servesim.traces.export import export
from servesim.traces.read.formats import load
from servesim.traces.reuse import prefix_reuse
from servesim.traces.trace import Trace

tokens = st.lists(st.integers(0, 2), min_size=1, max_size=8)


def equal_beginning(one: list[Any], other: list[Any]) -> int:
    """Return the number of equal elements at the beginning."""
    return next((k for k, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def expand(content: Content) -> list[Any]:
    """Return the tokens of a content."""
    return [(name, k) for name, count in content.pieces for k in range(count)]


@settings(max_examples=50)
@given(st.lists(st.tuples(tokens, tokens), min_size=1, max_size=10))
def test_prompts_of_token_ids_share_exactly_their_equal_beginnings(rows: list[tuple[list[int], list[int]]]) -> None:
    texts = TokenTexts()
    contents = [texts.add(prompt, answer) for prompt, answer in rows]
    assert [content.ends[-1] for content in contents] == [len(prompt) for prompt, _ in rows]
    for ((one, _), first), ((other, _), second) in combinations(zip(rows, contents), 2):
        assert equal_beginning(expand(first), expand(second)) == equal_beginning(one, other)


@settings(max_examples=50)
@given(st.lists(tokens, min_size=1, max_size=6), st.lists(tokens, min_size=6, max_size=6), st.data())
def test_a_prompt_of_token_ids_contains_the_answer_of_the_turn_before(
    questions: list[list[int]], answers: list[list[int]], data: st.DataObject
) -> None:
    """A client that may cut the last answer: the next prompt has as much of it as the token ids show."""
    texts, prompt = TokenTexts(), []
    last: tuple[Content, list[int]] | None = None
    for k, question in enumerate(questions):
        answer = [10 * k + token for token in answers[k]]  # no two answers are equal
        if last is not None:
            kept = data.draw(st.integers(0, len(last[1])))
            prompt = prompt + last[1][:kept]
        prompt = prompt + question
        content = texts.add(prompt, answer)
        if last is not None:
            before, text = last
            whole = content_of_pieces([*before.pieces, (before.answer, len(text))])
            known = before.ends[-1] + equal_beginning(text, prompt[before.ends[-1] :])
            assert equal_beginning(expand(whole), expand(content)) == known
        last = content, answer


def write(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_llmservingsim_token_ids_are_the_content(tmp_path: Path) -> None:
    turns = [([1, 2, 3, 4], [5, 6]), ([1, 2, 3, 4, 5, 6, 7], [8]), ([9, 9], [1])]
    calls = [{"input_toks": len(p), "output_toks": len(a), "input_tok_ids": p, "output_tok_ids": a} for p, a in turns]
    rows = [{"session_id": "s", "arrival_time_ns": 0, "sub_requests": calls}, {"arrival_time_ns": 5, **calls[0]}]
    trace = load(write(tmp_path, *rows, {"arrival_time_ns": 6, **calls[0], "input_toks": 5}))
    first, second, third, again = sorted(trace.requests, key=lambda request: request.id)
    assert second.content.pieces[:2] == [("prompt:0", 4), (first.content.answer, 2)]
    assert third.content is None  # no other prompt has this text
    assert again.content == first.content
    assert trace.dropped == {"token ids do not fit the length: expected one per token": 1}


def test_equal_messages_are_equal_texts(tmp_path: Path) -> None:
    def body(*texts: str) -> dict[str, Any]:
        return {"timestamp": 1.5, "body": {"messages": [{"content": text} for text in texts], "max_tokens": 9}}

    rows = [body("be kind and brief", "hello"), body("be kind and brief", "bye now"), body("alone")]
    first, second, third = load(write(tmp_path, *rows), tokenizer=lambda text: len(text.split())).requests
    assert first.content.pieces[0] == second.content.pieces[0]
    assert [content.ends for content in (first.content, second.content)] == [[4, 5], [4, 6]]
    assert first.content.names[1] != second.content.names[1]
    assert third.content is None


def test_equal_prompts_of_a_data_set_are_equal_texts(tmp_path: Path) -> None:
    rows = [{"prompt": "one two"}, {"prompt": "one two three"}, {"prompt": "one two"}]
    first, second, third = load(write(tmp_path, *rows)).requests
    assert first.content == third.content is not None
    assert second.content is None


def test_the_turns_of_an_aiperf_conversation_contain_the_earlier_ones(tmp_path: Path) -> None:
    turns = [{"input_length": 10, "output_length": 3}, {"input_length": 5, "output_length": 4, "delay": 5}]
    rows = [{"turns": turns}, {"turns": turns[:1]}]
    delta = {"session_id": "d", "message_mode": "delta", "input_length": 7, "output_length": 2}
    trace = load(write(tmp_path, *rows, {**delta, "timestamp": 1}, delta))
    first, second, single, one, two = sorted(trace.requests, key=lambda request: request.id)
    assert second.content == content_of_pieces([("prompt:0", 10), ("output:0", 3), ("prompt:1", 5)], "output:1")
    assert first.content == content_of_pieces([("prompt:0", 10)], "output:0")
    assert single.content is None
    assert one.content is not None and one.content.answer == "output:3"
    assert two.content == content_of_pieces([("prompt:3", 7), ("output:3", 2), ("prompt:4", 7)], "output:4")
    assert "the prompt of a turn contains the earlier turns and answers of its session" in trace.notes


def sessions() -> Trace:
    return Trace(
        [
            Request(0, 0.0, 10, 4, limit=9, session="s"),
            Request(1, 1.0, 99, 5),
            Request(2, 2.0, 20, 6, session="s"),
            Request(3, 3.0, 26, 2, session="s"),  # exactly the conversation so far
            Request(4, 4.0, 9, 2, session="s"),  # shorter: the client has cut it
        ],
        "t",
        "servesim",
    )


def test_a_session_becomes_a_conversation_if_the_user_says_so(tmp_path: Path) -> None:
    trace = as_conversations(sessions())
    assert [request.content for request in trace.requests] == [
        content_of_pieces([("prompt:0", 10)], "output:0"),
        None,
        content_of_pieces([("prompt:0", 10), ("output:0", 4), ("prompt:2", 6)], "output:2"),
        content_of_pieces([("prompt:0", 10), ("output:0", 4), ("prompt:2", 6), ("output:2", 6)], "output:3"),
        content_of_pieces([("prompt:4", 9)], "output:4"),
    ]
    assert trace.notes[-1] == "1 turns are too short for this: they have texts of their own"
    export(sessions(), tmp_path / "t.csv")
    assert [r.content for r in load(tmp_path / "t.csv", conversations=True).requests] == [
        request.content for request in trace.requests
    ]
    assert prefix_reuse(load(tmp_path / "t.csv")) is None
    with pytest.raises(BadInput, match="conversations: expected requests with a session and without a content"):
        as_conversations(trace)


def test_pieces_may_come_from_json() -> None:
    """A worker process receives them as lists; the compiled function must accept both."""
    assert content_of_pieces([["a", 3], ["b", 2]], "c") == content_of_pieces([("a", 3), ("b", 2)], "c")
