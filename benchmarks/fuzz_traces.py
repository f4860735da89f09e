"""One small valid trace of every format, for fuzz.py."""

from __future__ import annotations

import json
from typing import Any


def lines(*records: Any) -> bytes:
    """Return records as JSON lines."""
    return "".join(json.dumps(record) + "\n" for record in records).encode()


CHAT = {
    "chat_id": 6,
    "parent_chat_id": -1,
    "timestamp": 1.5,
    "input_length": 31,
    "output_length": 7,
    "hash_ids": [4, 5],
}
EVENT = {"schema": "dynamo.request.trace.v1", "event_type": "request_end"}
DYNAMO = {
    "request_received_ms": 1_600_000_000_000, "input_tokens": 31, "output_tokens": 7,
    "replay": {"input_length": 31, "input_sequence_hashes": [1, 2], "trace_block_size": 16},
}  # fmt: skip
BODY = {"messages": [{"role": "user", "content": "a b c"}], "max_tokens": 7}
TURNS = [{"from": "human", "value": "one two three"}, {"from": "gpt", "value": "four five"}]
BLIS = (
    b"request_id,session_id,input_tokens,output_tokens,arrival_time_us,send_time_us,prefix_group,prefix_length,status\n"
    b"0,,31,7,2000000,0,g,16,ok\n1,,8,2,3000000,3250000,,,ok\n"
)
RESULT = {"input": "one two three", "resp_text": " four five", "res_time": 0.5, "first_token_time": 0.2}
LOG = (
    b"2025-02-03 04:05:06,000 - a.log - INFO - Start send request, avg interval is 1.0\n"
    b"2025-02-03 04:05:06,010 - a.log - INFO - poisson random interval time is 1.0s\n"
    b"2025-02-03 04:05:06,510 - a.log - INFO - poisson random interval time is 0.5s\n"
    b"2025-02-03 04:05:07,010 - a.log - INFO - {'input': 'one two three', 'resp_text': ' four five', 'res_time': 1.0, "
    b"'first_token_time': 0.3}\n"
    b"2025-02-03 04:05:07,010 - a.log - INFO - {'input': 'six', 'resp_text': ' a', 'res_time': 0.5, "
    b"'first_token_time': 0.2}\n"
)
DATASET = json.dumps({"600": {"input_tokens": "{30: 0.25, 50: 0.75}", "output_tokens": "{6: 1.0}"}}).encode()
MOONCAKE = {"timestamp": 1250, "input_length": 600, "output_length": 7, "hash_ids": [5, 6]}

# format -> files; the first one is the trace
VLLM_RESULT = {
    "input_lens": [8, 31, 9], "output_lens": [2, 3, 0], "ttfts": [0.1, 0.2, 0.0], "itls": [[0.1], [0.1, 0.2], []],
    "start_times": [9.5, 9.0, 9.7], "errors": ["", "", "timeout"], "request_rate": "inf", "max_concurrency": 2,
}  # fmt: skip
SGLANG_RESULT = {
    "dataset_name": "random", "request_rate": 2.0, "duration": 5.0, "completed": 3, "mean_e2e_latency_ms": 500.0,
    "total_input_tokens": 48, "total_output_tokens": 5, "random_input_len": 31, "random_output_len": 3,
    "random_range_ratio": 0.5, "mean_ttft_ms": 100.0, "max_concurrency": None,
}  # fmt: skip
GUIDELLM_REQUEST = {
    "request_id": "x", "request_start_time": 1.7e9, "request_end_time": 1.7e9 + 1, "request_latency": 0.5,
    "time_to_first_token_ms": 80.0, "prompt_tokens": 31, "output_tokens": 7,
}  # fmt: skip
AIPERF_RECORD = {
    "metadata": {"session_num": 0, "request_start_ns": 1759813207532900363, "was_cancelled": False},
    "metrics": {
        "input_sequence_length": {"value": 31, "unit": "tokens"},
        "output_sequence_length": {"value": 7, "unit": "tokens"},
        "time_to_first_token": {"value": 80.0, "unit": "ms"},
        "request_latency": {"value": 500.0, "unit": "ms"},
        "inter_chunk_latency": {"value": [4.9, 5.3], "unit": "ms"},
    },
    "error": None,
}
TRACES: dict[str, dict[str, bytes]] = {
    "servesim": {"a.csv": b"arrival_s,prompt_tokens,output_tokens,priority\n0.25,31,7,0\n0.75,8,2,1\n1,9,3,0\n"},
    "servesim-json": {
        "a.jsonl": lines(*({"id": k, "arrival_s": k / 4, "prompt_tokens": 9, "output_tokens": 3} for k in range(3)))
    },
    "vidur": {"a.csv": b"arrived_at,num_prefill_tokens,num_decode_tokens\n0.25,31,7\n0.5,9,2\n"},
    "vidur-lengths": {"a.csv": b"num_prefill_tokens,num_decode_tokens\n31,7\n8,2\n"},
    "azure": {
        "a.csv": b"TIMESTAMP,ContextTokens,GeneratedTokens\n2024-03-01 07:00:00.5,31,7\n2024-03-01 07:00:02.75,8,2\n"
    },
    "burstgpt": {
        "a.csv": b"Timestamp,Session ID,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        b"3,s,GPT-4,31,7,38,API log\n9,s,GPT-4,8,0,8,API log\n"
    },
    "splitwise": {
        "a.csv": b"request_id,arrival_timestamp,batch_size,prompt_size,token_size\n0,2.5,1,31,7\n1,3,1,9,2\n"
    },
    "blis": {"a.csv": BLIS},
    "blis-header": {"a_header.yaml": b"trace_version: 2\ntime_unit: us\n", "a.csv": BLIS},
    "bailian": {"a.jsonl": lines(CHAT, {**CHAT, "chat_id": 7, "parent_chat_id": 6, "timestamp": 2.5})},
    "llmservingsim": {
        "a.jsonl": lines(
            {"input_toks": 31, "output_toks": 7, "arrival_time_ns": 250_000_000},
            {"session_id": "s", "arrival_time_ns": 500, "sub_requests": [
                {"input_toks": 5, "output_toks": 6, "tool_duration_ns": 1000}, {"input_toks": 9, "output_toks": 2},
            ]},
        )
    },
    "apex": {"a.jsonl": lines({"RequestID": 3, "StartTimeOffset": 75000, "ContextTokens": 31, "GeneratedTokens": 7})},
    "dynamo": {"a.jsonl": lines({**EVENT, "request": DYNAMO}, {"event": {**EVENT, "request": DYNAMO}})},
    "evalscope": {
        "a.jsonl": lines({"timestamp": 20.5, "body": BODY}, {"timestamp": "2025-01-01T00:00:00Z", "body": BODY})
    },
    "aiperf": {
        "a.jsonl": lines(
            {"session_id": "q", "timestamp": 400, "input_length": 31, "output_length": 7},
            {"session_id": "q", "delay": 200, "input_length": 40, "output_length": 2, "extra": {"priority": 1}},
            {"session_id": "s", "turns": [{"text": "a b", "output_length": 5}, {"texts": ["c"], "output_length": 6}]},
        )
    },
    "mooncake": {"a.jsonl": lines(MOONCAKE, {**MOONCAKE, "timestamp": 2000})},
    "timed-trace": {"a.jsonl": lines({**MOONCAKE, "timestamp": 1.25}, {**MOONCAKE, "timestamp": 1.5})},
    "guidellm": {"a.jsonl": lines({"timestamp": 1.25, "input_length": 31, "output_length": 7})},
    "sharegpt": {"a.json": json.dumps([{"id": "x", "conversations": TURNS}, {"conversations": TURNS[:1]}]).encode()},
    "custom": {"a.jsonl": lines({"prompt": "one two three", "output_tokens": 7}, {"prompt": "four"})},
    "sglang-bench": {"a.jsonl": lines({**VLLM_RESULT, **SGLANG_RESULT})},
    "vllm-bench": {"a.json": json.dumps(VLLM_RESULT).encode()},
    "guidellm-results": {
        "a.json": json.dumps({"benchmarks": [{"requests": {"successful": [GUIDELLM_REQUEST], "errored": []}}]}).encode()
    },
    "aiperf-results": {"a.jsonl": lines(AIPERF_RECORD, {**AIPERF_RECORD, "error": {"type": "Timeout"}})},
    "performance-serving-result": {"a.json": json.dumps([RESULT, RESULT]).encode()},
    "performance-serving-log": {"a.txt": LOG},
    "servegen": {
        "chunk-0-trace.csv": b"600,0.005,1.0,Gamma,1.0,200\n1200,0.01,1.2,Weibull,1.0,100\n",
        "chunk-0-dataset.json": DATASET,
    },
}  # fmt: skip
