"""Malformed files: every one gives a one-line error with file and row."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st
from servesim.core import BadInput
from servesim.traces.read.formats import load

HEADER = b"arrival_s,prompt_tokens,output_tokens\n"
MOONCAKE = b'{"timestamp": 0, "input_length": 10, "output_length": 3, "hash_ids": [0]}\n'

# name, content, expected error after the file name


def written(folder: Path, content: bytes) -> Path:
    (folder / "trace").write_bytes(content)
    return folder / "trace"


BROKEN: Any = {
    "empty": b"",
    "blank": b" \n\n",
    "header alone": HEADER,
    "cut in a row": HEADER + b"0,5,6\n1,7",
    "cut in a quote": HEADER + b'0,5,6\n1,"7',
    "wrong delimiter": b"arrival_s;prompt_tokens;output_tokens\n0;5;6\n",
    "tabs": b"arrival_s\tprompt_tokens\toutput_tokens\n0\t5\t6\n",
    "delimiter changes": HEADER + b"0,5,6\n1;7;8\n",
    "text for a number": HEADER + b"0,5,6\n1,many,8\n",
    "half a token": HEADER + b"0,5.5,6\n",
    "negative length": HEADER + b"0,5,6\n1,-7,8\n",
    "negative arrival": HEADER + b"-1,5,6\n",
    "NaN arrival": HEADER + b"0,5,6\nnan,5,6\n",
    "NaN length": HEADER + b"0,nan,6\n",
    "endless arrival": HEADER + b"inf,5,6\n",
    "huge length": HEADER + b"0,99999999999,6\n",
    "number of 5000 digits": HEADER + b"0," + b"9" * 5000 + b",6\n",
    "quoted number of a million digits": HEADER + b'0,5,6\n0,"' + b"9" * 10**6 + b'",6\n',
    "number of a million digits": HEADER + b"0,5,6\n0," + b"9" * 10**6 + b",6\n",
    "grouped digits": HEADER + b"0,1_000,6\n",
    "out of order": HEADER + b"5,5,6\n4,5,6\n",
    "all dropped": HEADER + b"0,5,0\n",
    "binary": bytes(range(256)),
    "binary later": HEADER + b"0,5,6\n\xff\xfe\xfd\n",
    "damaged gzip": gzip.compress(HEADER + b"0,5,6\n" * 1000)[:-20],
    "column twice": b"arrival_s,prompt_tokens,output_tokens,prompt_tokens\n0,1,2,3\n",
    "JSON cut": MOONCAKE + MOONCAKE[:30],
    "JSON of another type": MOONCAKE + b"[1, 2]\n",
    "number in quotes": MOONCAKE + MOONCAKE.replace(b"10", b'"10"'),
    "key missing": MOONCAKE + b'{"timestamp": 5, "input_length": 10}\n',
    "truth for a number": MOONCAKE.replace(b"10", b"true"),
    "JSON NaN": MOONCAKE + MOONCAKE.replace(b"10", b"NaN"),
    "JSON number of 400 digits": MOONCAKE.replace(b" 0,", b" " + b"9" * 400 + b","),
    "nested without end": b"[" * 100_000,
    "hash ids of text": MOONCAKE.replace(b"[0]", b'["a"]'),
    "a date that never was": b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-02-30 00:00:00,5,6\n",
    "a number for a date": b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-02-28 00:00:00,5,6\n17,5,6\n",
    "an id twice": b"arrival_s,prompt_tokens,output_tokens,id\n0,5,6,a\n1,5,6,a\n",
    "follows an unknown id": b"arrival_s,prompt_tokens,output_tokens,id,follows\n0,5,6,a,\n1,5,6,b,c\n",
    "a chat without turns": b'[{"conversations": 5}]',
    "a turn without text": b'[{"conversations": [{"from": "human"}, {"value": "x"}]}]',
    "a body of text": b'{"timestamp": 0, "body": "hi"}\n',
    "a block of no tokens": b'{"event": {"event_type": "request_end", "request": {"request_received_ms": 7, "replay": '
    b'{"input_length": 8, "input_sequence_hashes": [1], "trace_block_size": 0}}}}\n',
    "a log of nothing": b"2024-07-21 10:52:52,358 - test_llama.log - INFO - Start\n",
    "a log with a broken answer": b"2024-07-21 10:52:52,358 - a - INFO - {'input': 'x\n",
}


def test_a_malformed_file_gives_a_one_line_error_with_file_and_row(
    tmp_path: Path, expected_errors: Callable[..., None]
) -> None:
    expected_errors("traces", lambda content: load(written(tmp_path, content)), BROKEN)


SEEDS: list[bytes] = [
    HEADER + b"0,5,6\n1.5,7,8\n2,9,10\n",
    b"arrival_s,prompt_tokens,output_tokens,id,limit_tokens,priority,session_id,hash_ids,follows,think_time_s,fails_at_token\n"
    b"0.5,10,8,a,16,2,s,7 8,,,3\n1.5,11,9,b,,,,,a,0.25,\n",
    b"arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,120,30\n0.5,64,12\n",
    b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6800000,120,30\n2023-11-16 18:15:47.1800000,64,12\n",
    b"Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Log Type\n5,0f0e,2,m,120,30,c\n",
    b"request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size\n0,2,0,1,1,120,30\n",
    b"request_id,prefix_group,prefix_length,input_tokens,output_tokens,arrival_time_us,status\n0,g,40,9,8,7,ok\n",
    MOONCAKE + MOONCAKE.replace(b": 0", b": 3052"),
    b'{"chat_id": 0, "parent_chat_id": -1, "timestamp": 0.5, "input_length": 4, "output_length": 3, "hash_ids": [1]}\n',
    b'{"session_id": "c0", "timestamp": 0, "input_length": 120, "output_length": 30}\n'
    b'{"session_id": "c0", "delay": 1500, "input_length": 700, "output_length": 12}\n',
    b'{"session_id": "s", "turns": [{"text": "a b", "output_length": 5}, {"texts": ["c"], "output_length": 6}]}\n',
    b'{"input_toks": 120, "output_toks": 30, "arrival_time_ns": 0}\n{"session_id": "s0", "arrival_time_ns": 500, '
    b'"sub_requests": [{"input_toks": 64, "output_toks": 12, "tool_duration_ns": 100}]}\n',
    b'{"RequestID": 0, "StartTimeOffset": 0, "ContextTokens": 120, "GeneratedTokens": 30}\n',
    b'{"timestamp": "2025-01-01T00:00:00Z", "body": {"messages": [{"role": "u", "content": "hi"}], "max_tokens": 3}}\n',
    b'{"schema": "x", "event_type": "request_end", "request": {"input_tokens": 5, "output_tokens": 6, '
    b'"request_received_ms": 7, "replay": {"input_length": 8, "input_sequence_hashes": [1], "trace_block_size": 6}}}\n',
    b'{"prompt": "hello there", "output_tokens": 12}\n',
    b'[{"id": "a", "conversations": [{"from": "human", "value": "hello there"}, {"from": "gpt", "value": "hi"}]}]',
    b'[{"input": "I love", "resp_text": " it", "res_time": 0.61, "first_token_time": 0.42}]',
    b"2024-07-21 10:52:52,360 - t.log - INFO - poisson random interval time is 0.182s\n"
    b"2024-07-21 10:52:54,010 - t.log - INFO - {'input': 'I love', 'resp_text': ' it', 'res_time': 1.651}\n",
]
WORDS = b'-1 nan NaN inf 1e400 null true "x" [] {} [[[[ 0 1.5 , ; " \' \0 \xff 2023-13-45 - _ 1_0 () \\'.split(b" ")
WORDS += [b"", b"\n", b"\r", b"\xe2\x80\xa8", b"9" * 5000]


@st.composite
def damaged_file(draw: st.DrawFn) -> bytes:
    """A valid file, damaged: truncated, pieces replaced, doubled or shuffled, or compressed and truncated."""
    data = draw(st.sampled_from(SEEDS))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        end = draw(st.integers(start, min(len(data), start + 12)))
        data = data[:start] + draw(st.sampled_from(WORDS) | st.binary(max_size=4)) + data[end:]
    if draw(st.booleans()):
        data = data[: draw(st.integers(0, len(data)))]
    if draw(st.integers(0, 9)) == 0:
        data = gzip.compress(data)
        data = data[: draw(st.integers(0, len(data)))]
    return data


def check_load(data: bytes, name: str = "trace") -> None:
    """Check that the file gives a valid trace or a one-line error."""
    complaint = trace = None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(data)
        try:
            trace = load(path)
        except BadInput as bad:
            complaint = str(bad)
    if trace is None:
        assert complaint.startswith(f"{path}: row ")
        assert "\n" not in complaint
        assert len(complaint) < 1000
        return
    assert trace.requests
    ids = set()
    before = 0.0
    for request in trace.requests:
        assert before <= request.arrival < float("inf")
        assert request.prompt >= 1
        assert request.output >= 1
        assert request.limit >= 1
        assert request.think_time >= 0
        assert request.follows is None or request.follows in ids
        assert request.id not in ids
        ids.add(request.id)
        before = request.arrival


@settings(max_examples=250)
@given(damaged_file())
def test_a_damaged_file_gives_a_valid_trace_or_a_one_line_error(data: bytes) -> None:
    check_load(data)


@settings(max_examples=100)
@given(st.binary(max_size=200))
@example(b"{")
@example(b"[")
@example(b"0")
@example(b"\xef\xbb\xbf")
@example(b'""')
def test_random_bytes_give_a_one_line_error(data: bytes) -> None:
    check_load(data)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)
KEYS = [
    "timestamp", "input_length", "output_length", "hash_ids", "session_id", "delay", "turns", "text", "messages",
    "payload", "extra", "body", "completion_tokens", "conversations", "prompt", "output_tokens", "prompt_tokens",
    "arrival_s", "id", "follows", "arrival_time_ns", "sub_requests", "input_toks", "output_toks", "event",
    "event_type", "request", "schema", "chat_id", "parent_chat_id", "StartTimeOffset", "ContextTokens",
    "GeneratedTokens", "input", "resp_text", "res_time", "priority",
]  # fmt: skip


@settings(max_examples=80)
@given(st.lists(st.dictionaries(st.sampled_from(KEYS), json_values, min_size=1, max_size=6), min_size=1, max_size=3))
def test_known_keys_with_random_values_give_a_valid_trace_or_a_one_line_error(rows: list[dict[str, object]]) -> None:
    check_load("".join(json.dumps(row) + "\n" for row in rows).encode())
