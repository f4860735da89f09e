"""What a server counts itself, read from its /metrics."""

from __future__ import annotations

import socket
import threading

import pytest

pytest.importorskip("aiohttp")
from servesim.calibrate.client.load_generator import send
from servesim.calibrate.client.protocols import OpenAI
from servesim.calibrate.client.server_counters import (
    counted_between,
    parse_metrics,
    read_counters,
    read_settings,
    round_trip_ms,
    speculation_between,
)
from servesim.core import Request

from ...events import PATIENCE_S
from ..server.serving import service
from .recording_server import recording_server

# Lines of vLLM 0.32.0 after a run with few KV blocks, and a second engine.
VLLM = """\
# HELP vllm:num_preemptions_total Cumulative number of preemption from the engine.
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="tiny"} 47.0
vllm:num_preemptions_total{engine="1",model_name="tiny"} 3.0
# HELP vllm:time_to_first_token_seconds Histogram of time to first token in seconds.
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.001",model_name="tiny"} 0.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="tiny"} 60.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="tiny"} 60.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="tiny"} 479.267
process_cpu_seconds_total 12.5
"""
# Of vLLM 0.32.0 with --num-gpu-blocks-override 513; shortened.
SETTINGS = (
    'vllm:cache_config_info{_block_size_resolved="True",block_size="32",cache_dtype="auto",enable_prefix_caching="True",'
    'engine="0",kv_cache_dtype_skip_layers="[]",num_cpu_blocks="None",num_gpu_blocks="513",'
    'num_gpu_blocks_override="513",user_specified_block_size="True"} 1.0\n'
)
FIRST_TOKEN = "vllm:time_to_first_token_seconds"


def test_counters_of_vllm_are_summed_over_engines() -> None:
    with recording_server() as server:
        server.metrics = VLLM
        counters = read_counters(server.url)
    assert counters["vllm:num_preemptions_total"] == 50
    assert "process_cpu_seconds_total" not in counters
    counted = counted_between(dict.fromkeys(counters, 0.0), counters, finished=60)
    assert counted["preemptions"] == 50
    assert counted["mean_ttft_ms"] == pytest.approx(1e3 * 479.267 / 60)
    assert "mean_e2el_ms" not in counted


DRAFTS = """\
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 210.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 600.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 250.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 150.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 70.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="1"} 10.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 20.0
vllm:spec_decode_num_accepted_tokens_per_pos_created{engine="0",model_name="m",position="0"} 1.79e+09
vllm:inter_token_latency_seconds_count{engine="0",model_name="m"} 300.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} 40.0
"""


def test_acceptance_of_drafts_by_position_is_that_between_two_readings() -> None:
    counters = parse_metrics(DRAFTS)
    earlier = {"vllm:spec_decode_num_drafts_total": 10.0, "vllm:inter_token_latency_seconds_count": 50.0}
    earlier["vllm:spec_decode_num_accepted_tokens_per_pos_total/0"] = 10.0
    assert speculation_between(earlier, counters) == {"tokens": 3, "acceptance": [0.7, 0.4, 0.1], "proposals": 0.8}
    assert counted_between(earlier, counters, 0) == {"drafted": 600, "accepted": 250, "requests": 40}
    assert speculation_between(counters, counters) is None  # no drafts in between
    assert speculation_between({}, {"vllm:inter_token_latency_seconds_count": 3.0}) is None  # no speculation


def test_counters_of_sim_serve_have_the_times_inside_the_server() -> None:
    requests = [Request(id, 0.0, 5, 10) for id in range(8)]
    with service(cost={"base": 0.01}) as served:
        url = f"http://127.0.0.1:{served.port}"
        before = read_counters(url)
        load = send(url, OpenAI("fake"), requests, timeout=PATIENCE_S)
        counted = counted_between(before, read_counters(url), finished=8)
        trip = round_trip_ms(url)
    at_client = [1e3 * (sent.times[0] - (sent.sent_at or 0.0)) for sent in load.sent_requests]
    assert (counted["preemptions"], counted["requests"]) == (0, 8)
    assert 10 <= counted["mean_ttft_ms"] <= sum(at_client) / 8
    assert counted["mean_e2el_ms"] >= 100
    assert trip is not None and trip > 0


@pytest.mark.parametrize(
    ("before", "after", "counted"),
    [
        ({}, {f"{FIRST_TOKEN}_count": 2.0, f"{FIRST_TOKEN}_sum": 1.0}, {}),  # no answer at first
        ({f"{FIRST_TOKEN}_count": 9.0, f"{FIRST_TOKEN}_sum": 3.0}, {}, {}),  # no answer at the end
        ({f"{FIRST_TOKEN}_count": 9.0}, {f"{FIRST_TOKEN}_count": 2.0, f"{FIRST_TOKEN}_sum": 1.0}, {}),  # restarted
        (
            {f"{FIRST_TOKEN}_count": 9.0, f"{FIRST_TOKEN}_sum": 3.0},
            {f"{FIRST_TOKEN}_count": 12.0, f"{FIRST_TOKEN}_sum": 4.0},
            {"requests": 3},  # one of another client
        ),
    ],
)
def test_unknown_values_are_left_out(
    before: dict[str, float], after: dict[str, float], counted: dict[str, int]
) -> None:
    assert counted_between(before, after, finished=2) == counted


@pytest.mark.parametrize(
    "answer",
    [
        b"no HTTP\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nvllm:num_preemptions_total 1",
        b"HTTP/1.1 200 OK\r\n\r\nvllm:num_preemptions_total NaN\nvllm:num_preemptions_total one\n",
        b"",
    ],
    ids=["no HTTP", "cut", "no number", "nothing"],
)
def test_a_wrong_answer_has_no_counters(answer: bytes) -> None:
    """The run was measured: an error would lose it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        counters = read_counters(f"http://127.0.0.1:{listener.getsockname()[1]}")
        thread.join(PATIENCE_S)
    assert counted_between({"vllm:num_preemptions_total": 0.0}, counters, finished=1) == {}


def test_a_server_without_metrics_has_no_counters() -> None:
    with recording_server() as server:
        assert read_counters(server.url) == {}
        assert (round_trip_ms(server.url) or 0) > 0  # a 404 is an answer
    assert read_counters("http://127.0.0.1:9") == {}
    assert round_trip_ms("http://127.0.0.1:9") is None


def test_settings_of_vllm_are_read_without_its_null_block() -> None:
    with recording_server(models=[{"id": "tiny", "owned_by": "vllm"}]) as server:
        server.metrics, server.version = VLLM + SETTINGS, "0.32.0+cpu"
        settings = {"version": "0.32.0", "block_size": 32, "num_blocks": 512, "prefix_cache": True}
        assert read_settings(server.url) == settings
        server.metrics = SETTINGS.replace(',engine="0"', "").replace('"True"', '"?"')  # V0 has no null block
        assert read_settings(server.url) == {"version": "0.32.0", "block_size": 32, "num_blocks": 513}
    assert read_settings("http://127.0.0.1:9") == {}
