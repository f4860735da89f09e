"""Every trace format: small samples in this file, and hand-made example files if they are present."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from servesim.core import BadInput, Request
from servesim.core.content import content_of_ids, content_of_pieces
from servesim.traces.read.formats import FORMATS, load
from servesim.traces.trace import Trace


def write(folder: Path, text: str, name: str = "trace") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def jsonl(*rows: dict[str, Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def triples(trace: Trace) -> list[tuple[float, int, int]]:
    return [(request.arrival, request.prompt, request.output) for request in trace.requests]


def single(trace: Trace) -> Request:
    assert len(trace) == 1
    return trace.requests[0]


def count_words(text: str) -> int:
    return len(text.split())


BLIS = "request_id,session_id,input_tokens,output_tokens,arrival_time_us,send_time_us,status\n"
CHAT = '[{"id": "x", "conversations": [{"from": "human", "value": "one two three"}, {"from": "gpt", "value": "4 5"}]}]'
ANSWER = '"input": "one two three", "resp_text": " four five"'
HASHES = '"input_length": {}, "output_length": 7, "hash_ids": [5, 6]'
AIPERF = """{"metadata": {"x_request_id": "x", "request_start_ns": 1759813207532900363}, "error": null, "metrics": {
"input_sequence_length": {"value": 31, "unit": "tokens"}, "output_sequence_length": {"value": 7, "unit": "tokens"},
"time_to_first_token": {"value": 80.0, "unit": "ms"}, "request_latency": {"value": 500.0, "unit": "ms"}}}""".replace(
    "\n", " "
)
GUIDELLM = """{"benchmarks": [{"requests": {"errored": [], "incomplete": [], "successful": [
{"request_id": "x", "request_start_time": 1.7e9, "request_latency": 0.5, "time_to_first_token_ms": 80.0,
"prompt_tokens": 31, "output_tokens": 7}]}}]}""".replace("\n", " ")
SGLANG_BENCH = """{"backend": "sglang", "dataset_name": "sharegpt", "request_rate": Infinity, "max_concurrency": 1,
"duration": 1.1, "completed": 2, "mean_e2e_latency_ms": 500.0, "input_lens": [31, 8], "output_lens": [7, 2],
"ttfts": [0.2, 0.1], "itls": [[0.1, 0.1, 0.1, 0.1, 0.1, 0.05], [0.1]], "errors": ["", ""]}""".replace("\n", " ")
VLLM_BENCH = """{"input_lens": [8, 31], "output_lens": [2, 7], "ttfts": [0.1, 0.2], "errors": ["", ""],
"itls": [[0.1], [0.1, 0.1, 0.1, 0.1, 0.1, 0.1]], "start_times": [9.5, 9.0]}""".replace("\n", " ")
DYNAMO = """{"schema": "dynamo.request.trace.v1", "event_type": "request_end",
"request": {"request_received_ms": 1600000000000, "input_tokens": 31, "output_tokens": 7}}""".replace("\n", " ")
EVALSCOPE = '{"timestamp": 20.5, "body": {"messages": [{"role": "user", "content": "a b c"}], "max_tokens": 7}}'
TURNS = """{"session_id": "q", "timestamp": 400, "input_length": 31, "output_length": 7}
{"session_id": "q", "delay": 200, "input_length": 40, "output_length": 2}"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
3,GPT-4,31,7,38,API log\n9,GPT-4,8,0,8,API log\n"""
LOG_OF_ONE = f"""2025-02-03 04:05:06,000 - a.log - INFO - Start send request, avg interval is 1.0
2025-02-03 04:05:06,010 - a.log - INFO - poisson random interval time is 1.0s
2025-02-03 04:05:07,010 - a.log - INFO - {{{ANSWER}, "res_time": 1.0, "first_token_time": 0.3}}
""".replace('"', "'")
ONE = [(0.0, 31, 7)]

# format -> file name, text, expected (arrival, prompt, output) per request
SAMPLES: dict[str, tuple[str, str, list[tuple[Any, int, int]]]] = {
    "servesim": (
        "a.csv", "arrival_s,prompt_tokens,output_tokens\n0.25,31,7\n0.75,8,2\n", [(0.25, 31, 7), (0.75, 8, 2)],
    ),
    "vidur": ("a.csv", "arrived_at,num_prefill_tokens,num_decode_tokens\n0.25,31,7\n", [(0.25, 31, 7)]),
    "vidur-lengths": ("a.csv", "num_prefill_tokens,num_decode_tokens\n31,7\n8,2\n", [*ONE, (0.0, 8, 2)]),
    "azure": (
        "a.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-03-01 07:00:00.5,31,7\n2024-03-01 07:00:02.75,8,2\n",
        [*ONE, (2.25, 8, 2)],
    ),
    "burstgpt": ("a.csv", BURSTGPT, [(3.0, 31, 7)]),
    "splitwise": (
        "a.csv", "request_id,arrival_timestamp,batch_size,prompt_size,token_size\n0,2.5,1,31,7\n", [(2.5, 31, 7)],
    ),
    "blis": ("a.csv", f"{BLIS}0,,31,7,2000000,0,ok\n1,,8,2,3000000,3250000,ok\n", [(2.0, 31, 7), (3.25, 8, 2)]),
    "blis-header": ("a_header.yaml", "trace_version: 2\ntime_unit: us\n", [(2.0, 31, 7)]),
    "bailian": (
        "a.jsonl", f'{{"chat_id": 6, "parent_chat_id": -1, "timestamp": 1.5, {HASHES.format(31)}}}', [(1.5, 31, 7)],
    ),
    "llmservingsim": (
        "a.jsonl", '{"input_toks": 31, "output_toks": 7, "arrival_time_ns": 250000000}', [(0.25, 31, 7)],
    ),
    "apex": (
        "a.jsonl", '{"RequestID": 3, "StartTimeOffset": 750000000, "ContextTokens": 31, "GeneratedTokens": 7}',
        [(0.75, 31, 7)],
    ),
    "dynamo": ("a.jsonl", DYNAMO, ONE),
    "evalscope": ("a.jsonl", EVALSCOPE, [(0.0, 3, 7)]),
    "aiperf": ("a.jsonl", TURNS, [(0.4, 31, 7), (pytest.approx(0.6), 40, 2)]),
    "mooncake": ("a.jsonl", f'{{"timestamp": 1250, {HASHES.format(600)}}}', [(1.25, 600, 7)]),
    "timed-trace": ("a.jsonl", f'{{"timestamp": 1.25, {HASHES.format(31)}}}', [(1.25, 31, 7)]),
    "guidellm": ("a.jsonl", '{"timestamp": 1.25, "input_length": 31, "output_length": 7}', [(1.25, 31, 7)]),
    "sglang-bench": ("a.jsonl", SGLANG_BENCH, [*ONE, (pytest.approx(0.75), 8, 2)]),
    "vllm-bench": ("a.json", VLLM_BENCH, [*ONE, (0.5, 8, 2)]),
    "guidellm-results": ("a.json", GUIDELLM, ONE),
    "aiperf-results": ("a.jsonl", AIPERF, ONE),
    "sharegpt": ("a.json", CHAT, [(0.0, 3, 2)]),
    "custom": ("a.jsonl", '{"prompt": "one two three", "output_tokens": 7}', [(0.0, 3, 7)]),
    # The server adds one token to every prompt: 3 words are 4 tokens.
    "performance-serving-result": (
        "a.json", f'[{{{ANSWER}, "res_time": 0.5, "first_token_time": 0.2}}]', [(0.0, 4, 2)],
    ),
    "performance-serving-log": ("a.txt", LOG_OF_ONE, [(0.0, 4, 2)]),
}  # fmt: skip


@pytest.mark.parametrize("format", SAMPLES)
def test_a_small_sample_is_detected_and_read(tmp_path: Path, format: str) -> None:
    name, text, expected = SAMPLES[format]
    if format == "blis-header":
        write(tmp_path, f"{BLIS}0,,31,7,2000000,0,ok\n", "a.csv")
    trace = load(write(tmp_path, text, name), tokenizer=count_words)
    assert (trace.format, triples(trace)) == (format, expected)


def test_every_format_has_a_sample() -> None:
    assert {*SAMPLES, "servegen"} == set(FORMATS)  # servegen samples its requests: see the next test


def test_a_servegen_client_has_its_rate_and_its_lengths(tmp_path: Path) -> None:
    trace_file = write(tmp_path, "0,0.0,0.0,,0,0\n600,2.0,1.1,Gamma,0.8,0.9\n", "chunk-3-trace.csv")
    lengths = {"600": {"input_tokens": "{30: 0.25, 50: 0.75}", "output_tokens": "{6: 1.0}"}}
    lengths_file = write(tmp_path, json.dumps(lengths), "chunk-3-dataset.json")
    trace = load(trace_file, seed=3)
    assert trace.format == "servegen"
    assert len(trace) == 1200  # 2 per second in the window from 600 to 1200 s
    assert trace.requests[0].arrival >= 600
    assert trace.requests[-1].arrival < 1200
    assert {request.prompt for request in trace.requests} == {30, 50}
    assert {request.output for request in trace.requests} == {6}
    assert triples(trace) == triples(load(lengths_file, seed=3))
    assert triples(trace) != triples(load(trace_file, seed=4))


def test_servesim_csv_fills_every_field_of_a_request(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "arrival_s,prompt_tokens,output_tokens,id,limit_tokens,generated_tokens,priority,session_id,hash_ids,follows,think_time_s,"
        "fails_at_token\n"
        "0.5,20,8,a,16,5,2,s,7 8,,,3\n"
        "1.5,11,9,b,,,,,,a,0.25,\n",
    )
    first, second = load(path).requests
    assert (first.id, first.arrival, first.prompt, first.output, first.limit) == ("a", 0.5, 20, 5, 16)
    assert (first.priority, first.session, first.follows, first.fails_at_token) == (2, "s", None, 3)
    assert first.content == content_of_pieces([(7, 16), (8, 4)])
    assert (second.id, second.output, second.limit, second.priority, second.session) == ("b", 9, 9, 0, None)
    assert (second.content, second.follows, second.think_time, second.fails_at_token) == (None, "a", 0.25, None)


def test_short_column_names_are_servesim_format_too(tmp_path: Path) -> None:
    assert triples(load(write(tmp_path, "arrival,prompt,output\n0.045610,378,327\n"))) == [(0.04561, 378, 327)]


def test_lengths_without_arrivals_arrive_at_0_with_a_note(tmp_path: Path) -> None:
    trace = load(write(tmp_path, "prompt_tokens,output_tokens\n5,6\n7,8\n"))
    assert triples(trace) == [(0.0, 5, 6), (0.0, 7, 8)]
    assert not trace.timed
    assert "no arrival times" in trace.remarks()[0]


def test_gzip_is_detected_with_any_file_name(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(gzip.compress(b"arrival_s,prompt_tokens,output_tokens\n0,5,6\n"))
    assert triples(load(path)) == [(0.0, 5, 6)]


def test_windows_line_ends_blank_lines_and_a_byte_order_mark_are_accepted(tmp_path: Path) -> None:
    text = "\ufeff\r\narrival_s,prompt_tokens,output_tokens\r\n\r\n0,5,6\r\n\r\n1,7,8\r\n"
    assert triples(load(write(tmp_path, text))) == [(0.0, 5, 6), (1.0, 7, 8)]


def test_rows_without_tokens_are_skipped_and_counted(tmp_path: Path) -> None:
    trace = load(write(tmp_path, "arrival_s,prompt_tokens,output_tokens\n0,5,6\n1,0,6\n2,5,0\n3,5,0\n"))
    assert triples(trace) == [(0.0, 5, 6)]
    assert trace.dropped == {"no prompt tokens": 1, "no output tokens": 2}
    assert [line.split(": ", 1)[1] for line in trace.remarks()] == [
        "2 of 4 rows skipped: no output tokens",
        "1 of 4 rows skipped: no prompt tokens",
    ]


def test_columns_and_time_unit_can_be_set(tmp_path: Path) -> None:
    path = write(tmp_path, "when,tokens_in,tokens_out,who\n1500,5,6,x\n2500,7,8,y\n")
    columns = {"arrival": "when", "prompt": "tokens_in", "output": "tokens_out", "session": "who"}
    trace = load(path, columns=columns, unit="ms")
    assert triples(trace) == [(1.5, 5, 6), (2.5, 7, 8)]
    assert [request.session for request in trace.requests] == ["x", "y"]


@pytest.mark.parametrize(("unit", "seconds"), [("s", 3052.0), ("ms", 3.052), ("us", 0.003052), ("ns", 3.052e-06)])
def test_times_are_read_in_the_unit_of_the_user(tmp_path: Path, unit: str, seconds: float) -> None:
    path = write(tmp_path, jsonl({"timestamp": 3052, "input_length": 5, "output_length": 6}))
    assert single(load(path, unit=unit)).arrival == seconds


def test_whole_time_stamps_are_milliseconds_and_fractional_ones_are_seconds(tmp_path: Path) -> None:
    whole = {"timestamp": 500, "input_length": 20, "output_length": 6, "hash_ids": [3, 4]}
    assert load(write(tmp_path, jsonl(whole))).format == "mooncake"
    fraction = {**whole, "timestamp": 0.5}
    trace = load(write(tmp_path, jsonl(fraction)))
    assert (trace.format, single(trace).arrival) == ("timed-trace", 0.5)
    assert single(trace).content == content_of_pieces([(3, 16), (4, 4)])
    assert load(write(tmp_path, "timestamp,input_length,output_length\n0,5,6\n")).format == "guidellm"


def test_tokens_per_hash_id_are_derived_from_the_lengths(tmp_path: Path) -> None:
    rows = [{"timestamp": 0, "input_length": 1025, "output_length": 6, "hash_ids": [3, 4, 5]}]
    assert single(load(write(tmp_path, jsonl(*rows)))).content == content_of_pieces([(3, 512), (4, 512), (5, 1)])
    short = single(load(write(tmp_path, jsonl({**rows[0], "input_length": 33}))))
    assert short.content == content_of_pieces([(3, 16), (4, 16), (5, 1)])


def test_rows_whose_hash_ids_do_not_fit_the_prompt_are_skipped_and_counted(tmp_path: Path) -> None:
    fits = {"timestamp": 0, "input_length": 1025, "output_length": 6, "hash_ids": [3, 4, 5]}
    rows = [fits, {**fits, "hash_ids": [3, 4]}, {**fits, "hash_ids": [3, 4, 5, 6]}, {**fits, "hash_ids": []}]
    trace = load(write(tmp_path, jsonl(*rows)))
    reason = "hash ids do not fit the prompt length: expected one per 512 tokens"
    assert (trace.dropped, [request.content is None for request in trace.requests]) == ({reason: 2}, [False, True])
    assert trace.remarks()[0].endswith(f"2 of 4 rows skipped: {reason}")
    with pytest.raises(BadInput, match=r"row 1: no request can be served: 1 x hash ids do not fit the prompt length"):
        load(write(tmp_path, jsonl({**fits, "input_length": 5000})))
    bailian = {"chat_id": 0, "parent_chat_id": -1, "timestamp": 0.5, "input_length": 1025, "hash_ids": [3, 4, 5]}
    with pytest.raises(BadInput, match="expected one per 16 tokens"):  # never another size in this format
        load(write(tmp_path, jsonl({**bailian, "output_length": 1})))


def test_hash_ids_of_whole_blocks_only_leave_the_rest_of_a_prompt_to_itself(tmp_path: Path) -> None:
    path = write(tmp_path, "prompt_tokens,output_tokens,hash_ids\n299,3,0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17\n"
                 "30,3,0\n9,3,\n64,3,0 1 2 3\n")  # fmt: skip
    trace = load(path)
    assert trace.dropped == {}
    assert trace.requests[1].content == content_of_pieces([(0, 16), ("prompt:1", 14)])
    assert trace.requests[2].content is None
    assert trace.requests[3].content == content_of_ids([0, 1, 2, 3], 16, 64)


def test_contents_name_texts_and_the_rest_of_a_prompt_is_its_own(tmp_path: Path) -> None:
    text = "prompt_tokens,output_tokens,content,answer\n100,7,system:60 7:20 a%20b:20,\n80,5,system:60,x\n5,5,,\n"
    first, second, third = load(write(tmp_path, text)).requests
    assert first.content == content_of_pieces([("system", 60), (7, 20), ("a b", 20)])
    assert second.content == content_of_pieces([("system", 60), ("prompt:1", 20)], "x")
    assert third.content is None
    row = {"prompt_tokens": 100, "output_tokens": 7, "content": [["system", 60], ["7", 40]], "answer": 3}
    assert single(load(write(tmp_path, jsonl(row)))).content == content_of_pieces([("system", 60), ("7", 40)], 3)
    long = load(write(tmp_path, jsonl(row, {**row, "prompt_tokens": 99})))
    assert long.dropped == {"content longer than the prompt": 1}
    for damaged in ("system", "system:x", "system:0", ":"):
        with pytest.raises(BadInput, match="row 2: content: expected texts and their tokens, e"):
            load(write(tmp_path, f"prompt_tokens,output_tokens,content\n100,7,{damaged}\n"))


def test_azure_time_stamps_keep_seven_digits_with_and_without_a_zone(tmp_path: Path) -> None:
    header = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    for zone in ("", "+00:00", "Z", "+0800"):
        stamps = (f"2023-11-16 18:15:46.6805900{zone}", f"2023-11-16 18:15:50.9951690{zone}")
        trace = load(write(tmp_path, header + "".join(f"{stamp},374,44\n" for stamp in stamps)))
        assert [request.arrival for request in trace.requests] == [0.0, pytest.approx(4.314579, abs=1e-9)]


def test_azure_2025_has_one_more_column_and_mixed_time_zones(tmp_path: Path) -> None:
    text = (
        "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n"
        "2025-01-01T00:00:00Z,0,5,6\n"
        "2025-01-01T01:00:01+01:00,2,7,8\n"
    )
    assert triples(load(write(tmp_path, text))) == [(0.0, 5, 6), (1.0, 7, 8)]


def test_burstgpt_version_3_is_read_by_column_name_and_failures_are_skipped(tmp_path: Path) -> None:
    text = (
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,0f0e,2.5,ChatGPT,120,30,150,Conversation log\n"
        "45,,0.9,GPT-4,64,0,64,API log\n"
        "46.5,,0.9,GPT-4,64,12,76,API log\n"
    )
    trace = load(write(tmp_path, text))
    assert [(r.arrival, r.prompt, r.output, r.session) for r in trace.requests] == [
        (5.0, 120, 30, "0f0e"),
        (46.5, 64, 12, None),
    ]
    assert trace.dropped == {"failed: no response tokens": 1}


def test_a_bailian_chat_has_the_session_of_its_first_chat(tmp_path: Path) -> None:
    row = {"timestamp": 0.0, "input_length": 40, "output_length": 30, "type": "text", "turn": 1, "hash_ids": [1, 2, 3]}
    chats = [(3, -1), (4, 3), (5, -1), (6, 4), (7, 99)]
    text = jsonl(*({**row, "chat_id": chat, "parent_chat_id": parent} for chat, parent in chats))
    trace = load(write(tmp_path, text))
    assert [(r.id, r.session) for r in trace.requests] == [(3, "3"), (4, "3"), (5, "5"), (6, "3"), (7, "99")]
    assert {repr(request.content) for request in trace.requests} == {"Content([(1, 16), (2, 16), (3, 8)])"}


def test_blis_adds_the_prefix_of_a_group_and_skips_failures(tmp_path: Path) -> None:
    header = "request_id,session_id,prefix_group,prefix_length,input_tokens,output_tokens,server_input_tokens,"
    header += "arrival_time_us,send_time_us,status,vllm_priority\n"
    rows = (
        "0,s,g,40,100,30,0,1000000,1500000,ok,2\n"
        "1,,g,40,60,30,110,2000000,0,ok,\n"
        "2,,,0,60,30,64,2500000,0,ok,\n"
        "3,,,0,60,30,64,2600000,0,timeout,\n"
    )
    trace = load(write(tmp_path, header + rows))
    assert triples(trace) == [(1.5, 140, 30), (2.0, 100, 30), (2.5, 64, 30)]
    first, second, third = trace.requests
    assert first.content == content_of_pieces([("prefix:g", 40), ("prompt:0", 100)])
    assert second.content == content_of_pieces([("prefix:g", 40), ("prompt:1", 60)])
    assert third.content is None
    assert (first.session, first.priority) == ("s", 2)
    assert trace.dropped == {"status timeout": 1}


def test_a_llmservingsim_session_has_its_tool_times_as_delays(tmp_path: Path) -> None:
    calls = [
        {"input_toks": 64, "output_toks": 12, "tool_duration_ns": 100_000_000},
        {"input_toks": 90, "output_toks": 8, "tool_duration_ns": 50_000_000},
        {"input_toks": 99, "output_toks": 8},
    ]
    trace = load(write(tmp_path, jsonl({"session_id": "s0", "arrival_time_ns": 500_000_000, "sub_requests": calls})))
    assert [(r.id, r.follows, r.think_time, r.session) for r in trace.requests] == [
        (0, None, 0.0, "s0"),
        (1, 0, 0.1, "s0"),
        (2, 1, 0.05, "s0"),
    ]


def test_the_next_turn_of_an_aiperf_session_follows_after_its_delay(tmp_path: Path) -> None:
    text = jsonl(
        {"session_id": "a", "timestamp": 1000, "input_length": 10, "output_length": 3},
        {"session_id": "b", "timestamp": 1500.5, "input_length": 20, "output_length": 3, "extra": {"priority": 4}},
        {"session_id": "a", "delay": 250, "input_length": 30, "output_length": 3},
        {"session_id": "a", "input_length": 40, "output_length": 3},
        {"input_length": 50, "timestamp": 4000},
    )
    trace = load(write(tmp_path, text))
    rows = sorted((r.id, r.arrival, r.follows, r.think_time, r.session, r.priority) for r in trace.requests)
    assert rows == [
        (0, 1.0, None, 0.0, "a", 0),
        (1, 1.5005, None, 0.0, "b", 4),
        (2, 1.25, 0, 0.25, "a", 0),
        (3, 1.25, 2, 0.0, "a", 0),
    ]
    assert trace.dropped == {"no output length": 1}


def test_turns_of_one_aiperf_row_include_the_earlier_turns(tmp_path: Path) -> None:
    turns = [{"text": "one two", "output_length": 5}, {"texts": ["three", "four"], "output_length": 6, "delay": 100}]
    trace = load(write(tmp_path, jsonl({"session_id": "s", "turns": turns})), tokenizer=lambda t: len(t.split()))
    assert [(r.prompt, r.output, r.follows, r.think_time) for r in trace.requests] == [
        (2, 5, None, 0.0),
        (9, 6, 0, 0.1),
    ]


def test_messages_and_payloads_are_counted_without_images(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "one two"}, {"type": "image_url", "image_url": {"url": "x"}}]
    text = jsonl(
        {"timestamp": 0, "messages": [{"role": "user", "content": parts}], "output_length": 4},
        {"timestamp": 5, "payload": {"prompt": "one two three", "max_tokens": 50}},
    )
    trace = load(write(tmp_path, text), tokenizer=lambda t: len(t.split()))
    assert triples(trace) == [(0.0, 2, 4), (0.005, 3, 50)]


def test_evalscope_times_count_from_the_first_and_the_limit_is_kept(tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 30}
    dated = jsonl(
        {"timestamp": "2025-01-01T00:00:00Z", "body": body, "completion_tokens": 12},
        {"timestamp": "2025-01-01T00:00:02.5Z", "body": body},
    )
    trace = load(write(tmp_path, dated))
    assert [(r.arrival, r.output, r.limit) for r in trace.requests] == [(0.0, 12, 30), (2.5, 30, 30)]
    counted = jsonl({"timestamp": 1_735_689_600.25, "body": body}, {"timestamp": 1_735_689_601.25, "body": body})
    assert [r.arrival for r in load(write(tmp_path, counted)).requests] == [0.0, 1.0]


def test_dynamo_lengths_and_hashes_come_from_request_end_events(tmp_path: Path) -> None:
    def request_end(received: int, **request: Any) -> dict[str, Any]:
        event = {"schema": "dynamo.request.trace.v1", "event_type": "request_end"}
        return {**event, "request": {"request_received_ms": received, "output_tokens": 4, **request}}

    replay = {"trace_block_size": 64, "input_length": 100, "input_sequence_hashes": [101, 102]}
    text = jsonl(
        request_end(1_700_000_001_000, input_tokens=10),
        {"timestamp": 1, "event": request_end(1_700_000_001_500, replay=replay)},
        {"schema": "dynamo.request.trace.v1", "event_type": "tool_end"},
    )
    trace = load(write(tmp_path, text))
    assert triples(trace) == [(0.0, 10, 4), (0.5, 100, 4)]
    assert trace.requests[1].content == content_of_ids([101, 102], 64, 100)
    assert trace.notes == ["1 events skipped: not the end of a request"]


def test_custom_prompts_without_a_length_get_vllms_default(tmp_path: Path) -> None:
    trace = load(write(tmp_path, jsonl({"prompt": "eight letters or so"})))
    assert (single(trace).prompt, single(trace).output) == (5, 256)
    assert any("256 used" in note for note in trace.notes)
    assert any("estimated" in note for note in trace.notes)


def test_a_conversation_of_one_turn_is_skipped(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "hello there"}, {"from": "gpt", "value": "hi"}, {"from": "human", "value": "x"}]
    text = json.dumps([{"conversations": turns[:1]}, {"conversations": turns}])
    trace = load(write(tmp_path, text))
    assert triples(trace) == [(0.0, 3, 1)]
    assert trace.dropped == {"fewer than two turns": 1}


DAY = "2024-07-21 10:52:"
LOG = "\n".join(
    [
        DAY + "52,000 - test_llama.log - INFO - Start send request, avg interval is 0.2",
        DAY + "52,001 - test_llama.log - INFO - poisson random interval time is 0.2s",
        DAY + "52,203 - test_llama.log - INFO - poisson random interval time is 0.2s",
        DAY + "52,406 - test_llama.log - INFO - poisson random interval time is 0.2s",
        DAY + "53,101 - test_llama.log - INFO - first_token_time is 0.742",
        DAY + "53,000 - test_llama.log - INFO - {'input': 'third', 'resp_text': ' a b', 'res_time': 0.59}",
        "Test Progress --> 1/3",
        DAY + "54,010 - test_llama.log - INFO - {'input': 'the \"first\"', 'resp_text': ' a', 'res_time': 2.005}",
        "Test Progress --> 2/3",
        DAY + "54,012 - test_llama.log - INFO - All Tasks Done; Exec Time is 1.654",
    ]
)


def test_responses_in_a_log_are_matched_to_their_send_times(tmp_path: Path) -> None:
    trace = load(write(tmp_path, LOG), tokenizer=lambda text: len(text.split()))
    assert [(r.arrival, r.prompt, r.output) for r in trace.requests] == [
        (pytest.approx(0.0), 3, 1),
        (pytest.approx(0.405), 2, 2),
    ]
    assert "1 of 3 requests have no response in the log: skipped" in trace.notes


def test_rows_out_of_order_are_sorted_with_a_note_but_refused_in_servesim_files(tmp_path: Path) -> None:
    rows = "2.0,5,6\n1.0,7,8\n"
    vidur = load(write(tmp_path, "arrived_at,num_prefill_tokens,num_decode_tokens\n" + rows))
    assert triples(vidur) == [(1.0, 7, 8), (2.0, 5, 6)]
    assert vidur.notes == ["rows were not in order of arrival: sorted"]
    servesim_file = write(tmp_path, "arrival_s,prompt_tokens,output_tokens\n" + rows)
    with pytest.raises(BadInput, match=r"row 3: arrival 1 s after a row with 2 s.*sim trace convert"):
        load(servesim_file)
    assert triples(load(servesim_file, sort=True)) == [(1.0, 7, 8), (2.0, 5, 6)]


def test_limit_and_window_select_requests(tmp_path: Path) -> None:
    path = write(tmp_path, "arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{k},5,6\n" for k in range(10)))
    assert [r.arrival for r in load(path, limit=3).requests] == [0.0, 1.0, 2.0]
    assert [r.arrival for r in load(path, window=(4.0, 6.0)).requests] == [0.0, 1.0]


def test_a_named_format_is_used(tmp_path: Path) -> None:
    path = write(tmp_path, jsonl({"timestamp": 2, "input_length": 5, "output_length": 6}))
    assert single(load(path)).arrival == 0.002
    assert single(load(path, format="guidellm")).arrival == 2.0
    with pytest.raises(BadInput, match="format: expected one of servegen, servesim, vidur"):
        load(path, format="moonkake")


def test_a_servegen_folder_gives_all_clients_and_a_window_selects_requests(tmp_path: Path) -> None:
    for client, rate in ((0, 2.0), (1, 1.0)):
        write(tmp_path, f"0,{rate},1.0,Gamma,1.0,1.0\n600,0,0,,0,0\n", f"chunk-{client}-trace.csv")
        lengths = {"0": {"input_tokens": f"{{{10 + client}: 1.0}}", "output_tokens": "{5: 0.25, 7: 0.75}"}}
        write(tmp_path, json.dumps(lengths), f"chunk-{client}-dataset.json")
    trace = load(tmp_path, seed=1)
    assert len(trace) == 1800
    assert sum(r.prompt == 10 for r in trace.requests) == 1200
    assert sum(r.output == 7 for r in trace.requests) == pytest.approx(1350, abs=60)
    window = load(tmp_path, seed=1, window=(100.0, 200.0))
    inside = [r.arrival - 100 for r in trace.requests if 100 <= r.arrival < 200]
    assert [r.arrival for r in window.requests] == pytest.approx(inside)
