"""Malformed files: every one gives a one-line error with file and row."""

from __future__ import annotations

import gzip
import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from servesim.cli import main
from servesim.core import BadInput
from servesim.traces.read.formats import load

HEADER = b"arrival_s,prompt_tokens,output_tokens\n"
MOONCAKE = b'{"timestamp": 0, "input_length": 10, "output_length": 3, "hash_ids": [0]}\n'

# name, content, expected error after the file name
BROKEN: list[tuple[str, bytes, str]] = [
    ("empty", b"", "row 1: the file is empty"),
    ("blank", b" \n\n", "row 1: the file is empty"),
    ("header alone", HEADER, "row 2: no rows after the header"),
    ("cut in a row", HEADER + b"0,5,6\n1,7", "row 3: expected 3 columns, got 2"),
    ("cut in a quote", HEADER + b'0,5,6\n1,"7', "row 3: expected comma-separated values: unexpected end of data"),
    (
        "wrong delimiter",
        b"arrival_s;prompt_tokens;output_tokens\n0;5;6\n",
        "row 1: no known trace format has .*separated by ';'",
    ),
    ("tabs", b"arrival_s\tprompt_tokens\toutput_tokens\n0\t5\t6\n", "row 1: no known trace format has"),
    ("delimiter changes", HEADER + b"0,5,6\n1;7;8\n", "row 3: expected 3 columns, got 1"),
    (
        "text for a number",
        HEADER + b"0,5,6\n1,many,8\n",
        "row 3: prompt_tokens: expected a whole number of tokens, got 'many'",
    ),
    ("half a token", HEADER + b"0,5.5,6\n", "row 2: prompt_tokens: expected a whole number of tokens, got '5.5'"),
    (
        "negative length",
        HEADER + b"0,5,6\n1,-7,8\n",
        "row 3: prompt_tokens: expected a whole number of tokens, at least 0, got '-7'",
    ),
    ("negative arrival", HEADER + b"-1,5,6\n", "row 2: arrival_s: expected a time of 0 or more, at least 0, got '-1'"),
    ("NaN arrival", HEADER + b"0,5,6\nnan,5,6\n", "row 3: arrival_s: expected a time of 0 or more, got 'nan'"),
    ("NaN length", HEADER + b"0,nan,6\n", "row 2: prompt_tokens: expected a whole number of tokens, got 'nan'"),
    (
        "endless arrival",
        HEADER + b"inf,5,6\n",
        r"row 2: arrival_s: expected a time of 0 or more, at most 1e\+11, got 'inf'",
    ),
    ("huge length", HEADER + b"0,99999999999,6\n", r"row 2: prompt_tokens: expected a whole number of tokens, at most"),
    (
        "number of 5000 digits",
        HEADER + b"0," + b"9" * 5000 + b",6\n",
        r"row 2: prompt_tokens: expected .* got '9999.*\.\.\.$",
    ),
    (
        "quoted number of a million digits",
        HEADER + b'0,5,6\n0,"' + b"9" * 10**6 + b'",6\n',
        "row 3: prompt_tokens: expected a whole number of tokens, got '99",
    ),
    (
        "number of a million digits",
        HEADER + b"0,5,6\n0," + b"9" * 10**6 + b",6\n",
        r"row 3: prompt_tokens: expected a whole number of tokens, got '9999.*\.\.\.$",
    ),
    ("grouped digits", HEADER + b"0,1_000,6\n", "row 2: prompt_tokens: expected a whole number of tokens, got '1_000'"),
    ("out of order", HEADER + b"5,5,6\n4,5,6\n", "row 3: arrival 4 s after a row with 5 s: expected rows in order"),
    ("all dropped", HEADER + b"0,5,0\n", "row 2: no request can be served: 1 x no output tokens"),
    ("binary", bytes(range(256)), "row 1: expected text, got binary data"),
    ("binary later", HEADER + b"0,5,6\n\xff\xfe\xfd\n", "row 3: expected UTF-8 text, got binary data"),
    ("damaged gzip", gzip.compress(HEADER + b"0,5,6\n" * 1000)[:-20], "row 1: damaged gzip file"),
    (
        "column twice",
        b"arrival_s,prompt_tokens,output_tokens,prompt_tokens\n0,1,2,3\n",
        "row 1: expected every column once",
    ),
    ("JSON cut", MOONCAKE + MOONCAKE[:30], "row 2, column .*: expected JSON"),
    ("JSON of another type", MOONCAKE + b"[1, 2]\n", r"row 2: expected a JSON object, got \[1, 2\]"),
    (
        "number in quotes",
        MOONCAKE + MOONCAKE.replace(b"10", b'"10"'),
        "row 2: input_length: expected a whole number of tokens, got '10'",
    ),
    (
        "key missing",
        MOONCAKE + b'{"timestamp": 5, "input_length": 10}\n',
        "row 2: output_length: expected a whole number of tokens, got None",
    ),
    (
        "truth for a number",
        MOONCAKE.replace(b"10", b"true"),
        "row 1: input_length: expected a whole number of tokens, got True",
    ),
    ("JSON NaN", MOONCAKE + MOONCAKE.replace(b"10", b"NaN"), "row 2: expected JSON: NaN is not a number"),
    ("JSON number of 5000 digits", MOONCAKE.replace(b"10", b"9" * 5000), "row 1: expected JSON: Exceeds the limit"),
    (
        "JSON number of 400 digits",
        MOONCAKE.replace(b" 0,", b" " + b"9" * 400 + b","),
        "row 1: timestamp: expected a time of 0 or more",
    ),
    ("nested without end", b"[" * 100_000, "row 1: expected JSON"),
    ("hash ids of text", MOONCAKE.replace(b"[0]", b'["a"]'), "row 1: hash_ids: expected hash ids, whole numbers"),
    (
        "a date that never was",
        b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-02-28 00:00:00,5,6\n2023-02-30 00:00:00,5,6\n",
        "row 3: TIMESTAMP: expected a date that exists, got '2023-02-30 00:00:00'",
    ),
    (
        "a number for a date",
        b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-02-28 00:00:00,5,6\n17,5,6\n",
        "row 3: TIMESTAMP: expected a date as 2023-11-16",
    ),
    (
        "an id twice",
        b"arrival_s,prompt_tokens,output_tokens,id\n0,5,6,a\n1,5,6,a\n",
        "row 3: id: expected an unused id, got 'a'",
    ),
    (
        "follows an unknown id",
        b"arrival_s,prompt_tokens,output_tokens,id,follows\n0,5,6,a,\n1,5,6,b,c\n",
        "row 3: follows: expected the id of an earlier row, got 'c'",
    ),
    ("a chat without turns", b'[{"conversations": 5}]', "row 1: conversations: expected a list of turns, got 5"),
    (
        "a turn without text",
        b'[{"conversations": [{"from": "human"}, {"value": "x"}]}]',
        r"row 1: conversations\[0\].value: expected a text",
    ),
    ("a body of text", b'{"timestamp": 0, "body": "hi"}\n', "row 1: body: expected an object, got 'hi'"),
    (
        "a log of nothing",
        b"2024-07-21 10:52:52,358 - test_llama.log - INFO - Start\n",
        "row 1: expected lines with send times, found none",
    ),
    (
        "a log with a broken answer",
        b"2024-07-21 10:52:52,358 - a - INFO - {'input': 'x\n",
        "row 1: expected a Python dictionary",
    ),
]


@pytest.mark.parametrize(("content", "message"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN])
def test_a_malformed_file_gives_a_one_line_error_with_file_and_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, message: str
) -> None:
    path = tmp_path / "trace"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=message) as caught:
        load(path)
    line = str(caught.value)
    assert line.startswith(f"{path}: ")
    assert "\n" not in line
    assert len(line) < 700
    assert main(["trace", "convert", str(path), "-o", str(tmp_path / "out")]) == 2
    printed = capsys.readouterr()
    assert printed.err == f"sim: {line}\n"
    assert printed.out == ""
    assert not (tmp_path / "out").exists()


def test_a_missing_file_and_a_folder_are_reported(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="nowhere: no such file"):
        load(tmp_path / "nowhere")
    with pytest.raises(BadInput, match="cannot be read: Is a directory"):
        load(tmp_path)


def test_the_error_for_a_missing_column_lists_the_columns_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(HEADER + b"0,5,6\n")
    with pytest.raises(BadInput, match="no column 'tokens' for prompt: expected one of arrival_s, output_tokens"):
        load(path, columns={"prompt": "tokens"})
    with pytest.raises(BadInput, match="no field 'prompts' for --column: expected arrival, prompt, output"):
        load(path, columns={"prompts": "prompt_tokens"})


def test_the_error_for_a_servegen_client_without_lengths_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "chunk-0-trace.csv"
    path.write_text("0,1.5,1.0,Gamma,1.0,1.0\n")
    with pytest.raises(BadInput, match=r"chunk-0-dataset\.json: no such file"):
        load(path)
    dataset = tmp_path / "chunk-0-dataset.json"
    for content, message in [
        ("[]", "expected an object of times"),
        (
            '{"0": {"input_tokens": "{1: 0.5", "output_tokens": "{}"}}',
            r"0\.input_tokens: expected \{tokens: probability",
        ),
        ('{"0": {"input_tokens": "{1: -1}", "output_tokens": "{1: 1}"}}', r"0\.input_tokens: expected"),
        ('{"0": {"output_tokens": "{1: 1}"}}', r"0\.input_tokens: expected .* got None"),
    ]:
        dataset.write_text(content)
        with pytest.raises(BadInput, match=message):
            load(path)
    dataset.write_text('{"0": {"input_tokens": "{1: 1}", "output_tokens": "{1: 1}"}}')
    for row, message in [
        ("0,1.5,1.0,Zipf,1.0,1.0", "row 1: pattern: expected one of Gamma, Weibull"),
        ("0,-1,1.0,Gamma,1.0,1.0", "row 1: rate: expected"),
        ("0,1,1.0,Gamma,0,1.0", "row 1: shape: expected"),
        ("0,1e9,1.0,Gamma,1,1.0", "about 6e.11 requests, expected at most 5000000"),
        ("0,1,1.0,Gamma,1,1.0\n0,1,1.0,Gamma,1,1.0", "row 2: start: expected more than 0"),
    ]:
        path.write_text(row + "\n")
        with pytest.raises(BadInput, match=message):
            load(path)


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
        assert complaint is not None
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


@settings(max_examples=700, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(damaged_file())
def test_a_damaged_file_gives_a_valid_trace_or_a_one_line_error(data: bytes) -> None:
    check_load(data)


@settings(max_examples=300, deadline=None)
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
    "timestamp",
    "input_length",
    "output_length",
    "hash_ids",
    "session_id",
    "delay",
    "turns",
    "text",
    "messages",
    "payload",
    "extra",
    "body",
    "completion_tokens",
    "conversations",
    "prompt",
    "output_tokens",
    "prompt_tokens",
    "arrival_s",
    "id",
    "follows",
    "arrival_time_ns",
    "sub_requests",
    "input_toks",
    "output_toks",
    "event",
    "event_type",
    "request",
    "schema",
    "chat_id",
    "parent_chat_id",
    "StartTimeOffset",
    "ContextTokens",
    "GeneratedTokens",
    "input",
    "resp_text",
    "res_time",
    "priority",
]


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.dictionaries(st.sampled_from(KEYS), json_values, min_size=1, max_size=6), min_size=1, max_size=3))
def test_known_keys_with_random_values_give_a_valid_trace_or_a_one_line_error(rows: list[dict[str, object]]) -> None:
    check_load("".join(json.dumps(row) + "\n" for row in rows).encode())
