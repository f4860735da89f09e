"""`sim serve`: /metrics has vLLM's names, and its values agree with what the clients got."""

from __future__ import annotations

import json
import time
from typing import Optional

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families
from servesim.calibrate.server.metrics import RequestTimes, ServerMetrics
from servesim.calibrate.server.service import Service

from ...events import wait_until
from .serving import ENDLESS, ask, idle_state, post, raw, service, wait_for_state

STATE = {"running": 2, "waiting": 3, "swapped": 1, "free_blocks": 25, "total_blocks": 100, "preemptions": 2,
         "prefix_cache_queries": 40, "prefix_cache_hits": 24, "prefix_cache_evictions": 5}  # fmt: skip


def samples(text: bytes) -> dict[str, float]:
    """Return the value of every sample; a reason is a part of its name, buckets are left out."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            if "le" not in sample.labels:
                assert sample.labels["model_name"] == "fake"
                found[" ".join([sample.name, *filter(None, [sample.labels.get("finished_reason")])])] = sample.value
    return found


def metrics(served: Service) -> dict[str, float]:
    status, text = ask(served, "/metrics")
    assert status == 200
    return samples(text)


def test_the_metrics_agree_with_the_answers() -> None:
    with service(cost={"base": 0.01}, engine=ENDLESS) as served:
        start = time.monotonic()
        for body in ({"prompt": "a b c", "max_tokens": 5, "n": 2}, {"prompt": "a", "max_tokens": None}):
            assert ask(served, "/v1/completions", body)[0] == 200
        assert ask(served, "/models/llama2/generate", {"inputs": "a b", "parameters": {"max_new_tokens": 4}})[0] == 200
        seconds = time.monotonic() - start
        assert ask(served, "/v1/completions", {"prompt": "x", "max_tokens": 0})[0] == 400  # never reaches the engine
        client = raw(served, post({"prompt": "x", "max_tokens": 50_000, "stream": True}, "/v1/completions"))
        wait_for_state(served, lambda state: state["running"] == 1, "a running request")
        wait_until(lambda: metrics(served)["vllm:generation_tokens_total"] > 5 + 5 + 30 + 4, "a token of it")
        assert metrics(served)["vllm:num_requests_running"] == 1
        assert metrics(served)["vllm:kv_cache_usage_perc"] > 0
        client.close()
        idle_state(served)
        found = metrics(served)
    assert found["vllm:request_success_total length"] == 3
    assert found["vllm:request_success_total stop"] == 1
    assert found["vllm:request_success_total abort"] == 1
    assert found["vllm:prompt_tokens_total"] == 3 + 3 + 1 + 3 + 1  # llm-serving adds BOS
    assert found["vllm:generation_tokens_total"] > 5 + 5 + 30 + 4
    assert found["vllm:num_requests_running"] == found["vllm:num_requests_waiting"] == 0
    assert found["vllm:kv_cache_usage_perc"] == found["vllm:gpu_cache_usage_perc"] == 0
    assert found["vllm:time_to_first_token_seconds_count"] == 5
    assert found["vllm:inter_token_latency_seconds_count"] == found["vllm:generation_tokens_total"] - 5
    assert found["vllm:time_per_output_token_seconds_sum"] == found["vllm:inter_token_latency_seconds_sum"]
    assert found["vllm:e2e_request_latency_seconds_count"] == found["vllm:request_prompt_tokens_count"] == 4
    assert found["vllm:request_generation_tokens_sum"] == 44
    assert found["vllm:request_queue_time_seconds_count"] >= 4
    assert (5 + 30 + 4) * 0.01 < found["vllm:e2e_request_latency_seconds_sum"] < 2 * seconds


@pytest.mark.parametrize(("queued", "count"), [(None, 0), (0.25, 1)])
def test_times_of_one_request(queued: Optional[float], count: int) -> None:
    server = ServerMetrics("fake")
    times = RequestTimes(prompt=7, submitted=10.0)
    for now in (10.5, 10.6, 10.9):
        server.on_token(times, now)
    server.on_end(times, "length", queued)
    server.text(STATE)
    found = samples(server.text(STATE))  # a second read counts nothing twice
    assert found["vllm:time_to_first_token_seconds_sum"] == 0.5
    assert found["vllm:inter_token_latency_seconds_count"] == 2
    assert found["vllm:inter_token_latency_seconds_sum"] == pytest.approx(0.4)
    assert found["vllm:request_time_per_output_token_seconds_sum"] == pytest.approx(0.2)
    assert found["vllm:e2e_request_latency_seconds_sum"] == pytest.approx(0.9)
    assert found["vllm:request_queue_time_seconds_count"] == count
    assert found["vllm:num_preemptions_total"] == 2
    assert found["vllm:prefix_cache_queries_total"] == 40
    assert found["vllm:prefix_cache_hits_total"] == 24
    assert found["vllm:prefix_cache_evictions_total"] == 5
    assert found["vllm:num_requests_waiting"] == 3
    assert found["vllm:kv_cache_usage_perc"] == 0.75


def test_a_preemption_is_counted_when_it_happens() -> None:
    # Two prompts of 4,000 tokens fit, their answers do not, and one alone goes on for long. They share no text: with
    # the blocks of the other request in the prefix cache, a preempted one could run again at once.
    engine = {"num_blocks": 1004, "block_size": 8, "max_model_len": 8000}
    body = {"prompt": [f"{word} " * 4000 for word in ("a", "b")], "max_tokens": 3999, "stream": True}
    policy, cost = {"name": "vllm-v1"}, {"base": 0.05}
    with service(policy=policy, cost=cost, engine=engine) as served, raw(served, post(body, "/v1/completions")):
        wait_until(lambda: metrics(served)["vllm:num_preemptions_total"], "a preemption")
        found = metrics(served)
    assert found["vllm:num_preemptions_total"] == 1
    assert found["vllm:num_requests_running"] == found["vllm:num_requests_waiting"] == 1
    assert found["vllm:time_to_first_token_seconds_count"] == 2


def test_failed_requests_have_no_latency() -> None:
    server = ServerMetrics("fake")
    server.on_end(RequestTimes(prompt=7), "error")
    found = samples(server.text(STATE))
    assert found["vllm:request_success_total error"] == 1
    assert found["vllm:e2e_request_latency_seconds_count"] == 0


def test_a_shared_beginning_is_found_in_the_prefix_cache() -> None:
    texts = []
    for cache in (True, False):
        with service(policy={"name": "vllm-v1", "enable_prefix_caching": cache}) as served:
            for end in ("x", "y z"):
                body = {"prompt": " ".join(["system"] * 20 + [end]), "max_tokens": 6}
                status, text = ask(served, "/v1/completions", body)
                assert status == 200
                texts.append(json.loads(text)["choices"][0]["text"])
            found = metrics(served)
            assert found["vllm:prefix_cache_queries_total"] == (21 + 22 if cache else 0)
            assert found["vllm:prefix_cache_hits_total"] == (16 if cache else 0)  # two blocks of 8
            assert idle_state(served)["free_blocks"] == 400  # cached blocks are free
    assert texts[:2] == texts[2:]
