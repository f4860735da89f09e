"""The load generator records an outcome for every request, also when the server fails."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Callable

import pytest

aiohttp = pytest.importorskip("aiohttp")
from aiohttp import web  # noqa: E402
from servesim.calibrate.client import load_generator  # noqa: E402
from servesim.calibrate.client.load_generator import KEEP_ALIVE_S, LoadGenerator, send  # noqa: E402
from servesim.calibrate.client.protocols import Event, LlmServing, OpenAI  # noqa: E402
from servesim.calibrate.client.server_counters import served_model  # noqa: E402
from servesim.calibrate.replay.http_client import Target, client_metrics, run_from_responses  # noqa: E402
from servesim.config.scenario import scenario_from  # noqa: E402
from servesim.core import BadInput, Request  # noqa: E402
from servesim.costs.device_profile import Profile  # noqa: E402
from servesim.costs.linear import LinearCost  # noqa: E402

from ...conftest import RECORDINGS  # noqa: E402
from ...events import PATIENCE_S  # noqa: E402
from .recording_server import recording_server  # noqa: E402

CAPTURE = RECORDINGS / "llm-serving" / "http_capture.txt"
TOKEN = b'{"event": "message", "retry": 30000, "data": [{"generated_text": " a", "tokens": {"id": 7, "text": " a"}}]}\n'
LAST = b'{"event": "message", "data": [{"generated_text": " a a", "finish_reason": "length", "generated_tokens": 2}]}\n'
OUT_OF_RANGE = b'{"data": [{"generated_text": "Error202: prompt out of range", "tokens": {"id": 0}}]}\n'


@contextmanager
def server(handler: Callable[[web.Request, int], Any]) -> Iterator[str]:
    """Serve llm-serving's stream. The handler gets the request and its number, counted from 1."""
    started, done = threading.Event(), threading.Event()
    port = 0

    async def run() -> None:
        nonlocal port
        count = 0

        async def handle(request: web.Request) -> web.StreamResponse:
            nonlocal count
            count += 1
            await request.read()
            return await handler(request, count)

        app = web.Application()
        app.router.add_post("/models/llama2/generate_stream", handle)
        app.router.add_post("/v1/completions", handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        started.set()
        while not done.is_set():
            await asyncio.sleep(0.02)
        await runner.cleanup()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    assert started.wait(PATIENCE_S)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        done.set()
        thread.join(PATIENCE_S)


async def answer(request: web.Request, *parts: bytes) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    for part in parts:
        await response.write(part)
    return response


def make_requests(count: int, gap: float = 0.0) -> list[Request]:
    return [Request(id, id * gap, 4, 2) for id in range(count)]


def outcomes(load: LoadGenerator) -> dict[str, int]:
    return dict(Counter(str(sent.outcome) for sent in load.sent_requests))


def test_every_kind_of_server_failure_is_counted() -> None:
    async def faulty(request: web.Request, number: int) -> web.StreamResponse:
        kind = int(request.headers["X-Request-Id"]) % 8  # a request without an answer is sent twice
        if kind == 0:
            return web.Response(status=503, text="busy")
        if kind == 1:
            return await answer(request, OUT_OF_RANGE)
        if kind == 2:
            return await answer(request, TOKEN)  # incomplete
        if kind == 3:
            request.transport.abort()
            return web.Response()
        if kind == 4:
            return await answer(request, b"what is this?\n")
        return await answer(request, b": You can't see this ping\n\n", TOKEN, TOKEN[:40], TOKEN[40:], LAST)

    with server(faulty) as url:
        load = send(url, LlmServing(), make_requests(80), timeout=PATIENCE_S)
    assert outcomes(load) == {"finished": 30, "refused": 20, "broken": 30}
    reasons = client_metrics(load)["reasons"]
    assert reasons["HTTP 503: busy"] == 10
    assert reasons["Error202: prompt out of range"] == 10
    assert reasons["the stream ended before the response was complete"] == 10
    assert sum(count for reason, count in reasons.items() if "unexpected line for this API" in reason) == 10
    assert client_metrics(load)["pings"] == 30
    assert client_metrics(load)["short_answers"] == {"requests": 0, "tokens": 0, "asked": 0}


def test_requests_without_an_answer_time_out() -> None:
    async def hang(request: web.Request, number: int) -> web.StreamResponse:
        response = web.StreamResponse() if number % 2 else await answer(request, TOKEN)
        await asyncio.sleep(600)
        return response

    with server(hang) as url:
        load = send(url, LlmServing(), make_requests(10), timeout=0.5)
    assert outcomes(load) == {"timed out": 10}


def test_a_server_gets_the_ids_of_the_trace() -> None:
    got = []

    async def handle(request: web.Request, _: int) -> web.StreamResponse:
        got.append(request.headers.get("X-Request-Id"))
        return web.Response(body=LAST)

    with server(handle) as url:
        send(url, LlmServing(), [Request(id, 0.0, 3, 2) for id in (7, "a b", "a\nb")], PATIENCE_S)
    assert set(got) == {"7", "a b", None}


def test_an_unreachable_server_is_reported_at_once() -> None:
    load = send("http://127.0.0.1:9", LlmServing(), make_requests(20), timeout=PATIENCE_S)
    assert outcomes(load) == {"broken": 20}


def test_a_request_whose_connection_is_dropped_is_sent_once_more() -> None:
    seen: Counter[str] = Counter()

    async def drops(request: web.Request, _: int) -> web.StreamResponse:
        id = request.headers["X-Request-Id"]
        seen[id] += 1
        if id == "0" or (id == "1" and seen[id] == 1):
            assert request.transport is not None
            request.transport.abort()
        return await answer(request, TOKEN, TOKEN, LAST)

    with server(drops) as url:
        load = send(url, LlmServing(), make_requests(3), timeout=PATIENCE_S)
    assert seen == {"0": 2, "1": 2, "2": 1}
    assert [(sent.outcome, sent.repeated) for sent in load.sent_requests] == [
        ("broken", True), ("finished", True), ("finished", False),
    ]  # fmt: skip
    assert client_metrics(load)["repeated"] == 2


def test_an_idle_connection_is_closed_before_vllm_closes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert KEEP_ALIVE_S < 5.0  # of vLLM
    monkeypatch.setattr(load_generator, "KEEP_ALIVE_S", 0.1)
    ports = []

    async def note_port(request: web.Request, _: int) -> web.StreamResponse:
        assert request.transport is not None
        ports.append(request.transport.get_extra_info("peername")[1])
        return web.Response(body=b"data: [DONE]\n")

    with server(note_port) as url:
        second = Request(1, 0.0, 4, 1, follows=0, think_time=0.5)
        send(url, OpenAI("m"), [Request(0, 0.0, 4, 1), second], timeout=PATIENCE_S)
    assert len(set(ports)) == 2


def test_a_killed_server_breaks_open_requests_without_a_hang() -> None:
    all_answered = threading.Event()

    async def slow(request: web.Request, number: int) -> web.StreamResponse:
        if number <= 5:
            return await answer(request, TOKEN, TOKEN, LAST)
        response = await answer(request, TOKEN)
        if number == 40:
            all_answered.set()
        await asyncio.sleep(600)
        return response

    done: dict[str, LoadGenerator] = {}
    with server(slow) as url:
        client = threading.Thread(
            target=lambda: done.update(load=send(url, LlmServing(), make_requests(40), timeout=PATIENCE_S))
        )
        client.start()
        assert all_answered.wait(PATIENCE_S)
    client.join(PATIENCE_S)
    assert not client.is_alive()
    assert outcomes(done["load"]) == {"finished": 5, "broken": 35}


@pytest.mark.live
def test_requests_are_sent_on_time_without_waiting_for_responses() -> None:
    async def late(request: web.Request, number: int) -> web.StreamResponse:
        await asyncio.sleep(3)
        return await answer(request, TOKEN, TOKEN, LAST)

    with server(late) as url:
        load = send(url, LlmServing(), make_requests(20, gap=0.02), timeout=120.0)
    assert outcomes(load) == {"finished": 20}
    assert load.max_open >= 15
    lateness = client_metrics(load)["lateness_ms"]
    # It would be more if a request waited for the one before.
    assert 0 <= lateness["mean"] <= lateness["p99"] <= lateness["max"] < 3000


def test_a_follower_is_sent_after_its_predecessor_ended_and_its_think_time() -> None:
    async def prompt(request: web.Request, number: int) -> web.StreamResponse:
        return await answer(request, TOKEN, TOKEN, LAST)

    first, second = Request("a", 0.0, 3, 2), Request("b", 0.0, 3, 2, follows="a", think_time=0.2)
    with server(prompt) as url:
        load = send(url, LlmServing(), [first, second], timeout=PATIENCE_S)
    a, b = load.sent_requests
    assert a.ended_at is not None
    assert b.sent_at is not None
    assert b.sent_at - a.ended_at >= 0.2


@pytest.mark.live
def test_client_side_times_become_the_metrics_of_a_run() -> None:
    gaps = []  # of the server

    async def steady(request: web.Request, number: int) -> web.StreamResponse:
        response = await answer(request, TOKEN)
        start = time.perf_counter()
        await asyncio.sleep(0.1)
        gaps.append(time.perf_counter() - start)
        await response.write(TOKEN + LAST)
        return response

    requests = make_requests(4)
    with server(steady) as url:
        load = send(url, LlmServing(), requests, timeout=120.0)
    run = run_from_responses(load, scenario_from({}), Profile("none", LinearCost()), requests)
    result = run.result()
    assert result["completed"] == 4
    assert result["total_output_tokens"] == 8
    assert result["mean_tpot_ms"] == pytest.approx(1e3 * sum(gaps) / 4, rel=0.3)
    assert result["outcomes"] == {"finished": 4}


def test_tokens_that_arrive_together_have_one_gap_with_drafts_and_a_gap_of_0_without() -> None:
    requests = [Request("a", 0.0, 4, 4)]
    load = LoadGenerator("http://x", OpenAI("m"), requests, 1.0)
    (sent,) = load.sent_requests
    sent.sent_at, sent.times, sent.ended_at, sent.outcome = 0.0, [1.0, 1.3, 1.3, 1.4], 1.4, "finished"
    speculation = {"speculative": {"method": "ngram", "tokens": 3, "acceptance": 0.5}}
    for tree, mean in ((speculation, 200.0), ({}, 400.0 / 3)):
        scenario = scenario_from({"policy": {"name": "vllm-v1"}, **tree})
        result = run_from_responses(load, scenario, Profile("none", LinearCost()), requests).result()
        assert result["mean_itl_ms"] == pytest.approx(mean)


def test_recorded_streams_of_llm_serving_are_parsed() -> None:
    bodies = {name: body for name, body in captured().items() if "stream" in name}
    read = {name: [counts(LlmServing().event(line)) for line in body] for name, body in bodies.items()}
    end = Event(output_tokens=3, complete=True)
    assert read["generate_stream sse default full_text"] == [Event(tokens=1)] * 3 + [end]
    assert read["generate_stream sse no full text"] == [Event(tokens=1)] * 2
    assert read["generate_stream raw"] == [Event(tokens=1)] * 2 + [Event(output_tokens=2, complete=True)]
    assert read["llama2 stream=true"][-1] == Event(output_tokens=2, complete=True)
    assert all(event.error == "Error202: prompt out of range" for event in read["out of range stream"])


def counts(event: Event) -> Event:
    """Return an event without its text."""
    return event._replace(text="", token_ids=None)


def captured() -> dict[str, list[bytes]]:
    """Return the bodies of the recorded responses, by title."""
    bodies: dict[str, list[bytes]] = {}
    for block in CAPTURE.read_bytes().split(b"##### ")[1:]:
        title, _, rest = block.partition(b"\n")
        _, _, body = rest.replace(b"\r\n", b"\n").partition(b"\n\n")
        bodies[title.decode().strip()] = [line for line in body.split(b"\n") if line.strip()]
    return bodies


def test_an_event_of_vllm_can_have_several_tokens() -> None:
    """vLLM joins the tokens of several steps if the reader is slow. The running count tells how many they are."""
    generator = LoadGenerator("http://x", OpenAI("m"), [Request("a", 0.0, 4, 6)], 1.0, None)
    (sent,) = generator.sent_requests
    for now, count in ((1.0, 1), (2.0, 3), (3.0, 4), (4.0, 6)):
        event = {"choices": [{"text": " a"}], "usage": {"prompt_tokens": 4, "completion_tokens": count}}
        assert not generator._read_line(b"data: " + json.dumps(event).encode(), sent, now)
    generator._read_line(b'data: {"choices": [], "usage": {"completion_tokens": 6}}', sent, 4.0)
    assert generator._read_line(b"data: [DONE]", sent, 4.0)
    assert sent.times == [1.0, 2.0, 2.0, 3.0, 4.0, 4.0]
    assert sent.written == 6
    assert OpenAI("m").body(sent.request)["stream_options"]["continuous_usage_stats"] is True


def test_a_server_that_refuses_the_running_count_is_asked_without_it() -> None:
    """Old versions of vLLM accept no unknown options. All requests that were refused are sent again."""
    with recording_server(refused="continuous_usage_stats") as old:
        sent = send(old.url, OpenAI("m"), [Request(f"{k}", 0.0, 8, 1) for k in range(5)], PATIENCE_S).sent_requests
        assert [(s.outcome, s.written) for s in sent] == [("finished", 1)] * 5
    with recording_server(refused="ignore_eos") as other:
        (sent_one,) = send(other.url, OpenAI("m"), [Request("x", 0.0, 8, 1)], PATIENCE_S).sent_requests
        assert sent_one.outcome == "refused" and "extra fields not permitted: ignore_eos" in str(sent_one.reason)


def test_bodies_have_the_requested_lengths() -> None:
    request = Request("x", 0.0, 37, 5, limit=9)
    assert len(OpenAI("m").body(request)["prompt"]) == 37
    assert len(LlmServing().body(request)["inputs"].split()) == 36  # the server adds BOS
    assert OpenAI("m").body(request)["max_tokens"] == 5
    assert LlmServing().body(request)["parameters"] == {
        "do_sample": "False", "return_full_text": "True", "max_new_tokens": 5,
    }  # fmt: skip
    assert json.dumps(LlmServing().body(request))


def test_a_model_that_the_server_does_not_list_is_refused_before_any_request() -> None:
    with recording_server(models=[{"id": "llama"}]) as known, recording_server() as silent:
        assert served_model(known.url, "llama") == ("llama", None)
        assert served_model(silent.url, "anything") == ("anything", None)  # it lists no models
        with pytest.raises(BadInput, match=r"--served-model nope: the server at .* has no such model; it has llama"):
            Target(known.url, model="nope").make_api("1")
