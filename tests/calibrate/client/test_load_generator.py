"""The load generator: every request ends in the books, whatever the server does to it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Callable

import pytest

aiohttp = pytest.importorskip("aiohttp")
from aiohttp import web  # noqa: E402
from servesim.calibrate.client.load_generator import Load, send  # noqa: E402
from servesim.calibrate.client.protocols import Event, LlmServing, OpenAI, ids, words  # noqa: E402
from servesim.calibrate.replay.http_client import about, as_live  # noqa: E402
from servesim.config.scenario import scenario_from  # noqa: E402
from servesim.core import Request  # noqa: E402
from servesim.costs.device_profile import Profile  # noqa: E402
from servesim.costs.linear import LinearCost  # noqa: E402

from ...conftest import RECORDINGS  # noqa: E402

pytestmark = pytest.mark.live

CAPTURE = RECORDINGS / "llm-serving" / "http_capture.txt"
TOKEN = b'{"event": "message", "retry": 30000, "data": [{"generated_text": " a", "tokens": {"id": 7, "text": " a"}}]}\n'
LAST = b'{"event": "message", "data": [{"generated_text": " a a", "finish_reason": "length", "generated_tokens": 2}]}\n'
OUT_OF_RANGE = b'{"data": [{"generated_text": "Error202: prompt out of range", "tokens": {"id": 0}}]}\n'


@contextmanager
def server(handler: Callable[[web.Request, int], Any]) -> Iterator[str]:
    """Serve llm-serving's stream with a handler that is told which request of how many this is."""
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
    started.wait(10)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        done.set()
        thread.join(10)


async def answer(request: web.Request, *parts: bytes) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    for part in parts:
        await response.write(part)
    return response


def some(count: int, gap: float = 0.0) -> list[Request]:
    return [Request(id, id * gap, 4, 2) for id in range(count)]


def outcomes(load: Load) -> dict[str, int]:
    found: dict[str, int] = {}
    for sending in load.sendings:
        found[str(sending.outcome)] = found.get(str(sending.outcome), 0) + 1
    return found


def test_every_way_a_server_can_fail_is_counted_and_none_is_lost() -> None:
    async def moody(request: web.Request, number: int) -> web.StreamResponse:
        kind = number % 8
        if kind == 0:
            return web.Response(status=503, text="busy")
        if kind == 1:
            return await answer(request, OUT_OF_RANGE)
        if kind == 2:
            return await answer(request, TOKEN)  # and nothing more
        if kind == 3:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if kind == 4:
            return await answer(request, b"what is this?\n")
        if kind == 5:
            await asyncio.sleep(5)
        return await answer(request, b": You can't see this ping\n\n", TOKEN, TOKEN[:40], TOKEN[40:], LAST)

    with server(moody) as url:
        load = send(url, LlmServing(), some(80), timeout=2.0)
    assert outcomes(load) == {"finished": 20, "refused": 20, "broken": 30, "timed out": 10}
    assert sum(outcomes(load).values()) == 80
    reasons = about(load)["reasons"]
    assert reasons["HTTP 503: busy"] == 10
    assert reasons["Error202: prompt out of range"] == 10
    assert reasons["the stream ended before the answer did"] == 10
    assert sum(count for reason, count in reasons.items() if "not a line of this interface" in reason) == 10
    assert about(load)["pings"] == 20
    assert about(load)["wrong_length"] == 0


def test_a_server_that_is_not_there_is_reported_at_once() -> None:
    load = send("http://127.0.0.1:9", LlmServing(), some(20), timeout=5.0)
    assert outcomes(load) == {"broken": 20}


def test_a_server_killed_in_the_middle_breaks_what_is_open_and_nothing_hangs() -> None:
    async def slow(request: web.Request, number: int) -> web.StreamResponse:
        if number <= 5:
            return await answer(request, TOKEN, TOKEN, LAST)
        response = await answer(request, TOKEN)
        await asyncio.sleep(60)
        return response

    done: dict[str, Load] = {}
    with server(slow) as url:
        client = threading.Thread(target=lambda: done.update(load=send(url, LlmServing(), some(40), timeout=30.0)))
        client.start()
        threading.Event().wait(1.0)
    client.join(15)
    assert not client.is_alive()
    assert outcomes(done["load"]) == {"finished": 5, "broken": 35}


def test_requests_are_sent_when_they_are_due_whatever_became_of_the_others() -> None:
    async def late(request: web.Request, number: int) -> web.StreamResponse:
        await asyncio.sleep(0.6)
        return await answer(request, TOKEN, TOKEN, LAST)

    with server(late) as url:
        load = send(url, LlmServing(), some(20, gap=0.02), timeout=10.0)
    assert outcomes(load) == {"finished": 20}
    assert load.most_open >= 15
    lateness = about(load)["lateness_ms"]
    assert 0 <= lateness["mean"] <= lateness["p99"] <= lateness["max"] < 400


def test_a_follower_is_sent_after_its_predecessors_end_and_its_own_delay() -> None:
    async def prompt(request: web.Request, number: int) -> web.StreamResponse:
        await asyncio.sleep(0.1)
        return await answer(request, TOKEN, TOKEN, LAST)

    first, second = Request("a", 0.0, 3, 2), Request("b", 0.0, 3, 2, after="a", delay=0.2)
    with server(prompt) as url:
        load = send(url, LlmServing(), [first, second], timeout=10.0)
    a, b = load.sendings
    assert a.end is not None
    assert b.sent is not None
    assert 0.2 <= b.sent - a.end < 0.6


def test_what_clients_saw_becomes_the_figures_of_a_run() -> None:
    async def steady(request: web.Request, number: int) -> web.StreamResponse:
        response = await answer(request, TOKEN)
        await asyncio.sleep(0.1)
        await response.write(TOKEN + LAST)
        return response

    requests = some(4)
    with server(steady) as url:
        load = send(url, LlmServing(), requests, timeout=10.0)
    run = as_live(load, scenario_from({}), Profile("none", LinearCost()), requests)
    result = run.result()
    assert result["completed"] == 4
    assert result["total_output_tokens"] == 8
    assert 80 < result["mean_tpot_ms"] < 400
    assert result["outcomes"] == {"finished": 4}


def test_the_recorded_streams_of_llm_serving_are_read() -> None:
    read = {name: [LlmServing().event(line) for line in body] for name, body in captured().items() if "stream" in name}
    assert read["generate_stream sse default full_text"] == [Event(tokens=1)] * 3 + [Event(total=3, over=True)]
    assert read["generate_stream sse no full text"] == [Event(tokens=1)] * 2
    assert read["generate_stream raw"] == [Event(tokens=1)] * 2 + [Event(total=2, over=True)]
    assert read["llama2 stream=true"][-1] == Event(total=2, over=True)
    assert all(event.error == "Error202: prompt out of range" for event in read["out of range stream"])


def captured() -> dict[str, list[bytes]]:
    """Return the bodies of the recorded answers, by title."""
    found: dict[str, list[bytes]] = {}
    for block in CAPTURE.read_bytes().split(b"##### ")[1:]:
        title, _, rest = block.partition(b"\n")
        _, _, body = rest.replace(b"\r\n", b"\n").partition(b"\n\n")
        found[title.decode().strip()] = [line for line in body.split(b"\n") if line.strip()]
    return found


def test_openai_streams_are_read_as_vllm_writes_them() -> None:
    api = OpenAI("llama")
    assert api.event(b'data: {"choices": [{"index": 0, "text": " a", "finish_reason": null}]}') == Event(tokens=1)
    assert api.event(b'data: {"choices": [], "usage": {"completion_tokens": 7}}') == Event(total=7)
    assert api.event(b"data: [DONE]") == Event(over=True)
    assert api.event(b": ping") == Event(ping=True)
    assert api.event(b'data: {"error": {"message": "no"}}').error == "{'message': 'no'}"


def test_prompts_have_the_length_that_was_asked_for_and_are_the_same_every_time() -> None:
    request = Request("x", 0.0, 37, 5, limit=9)
    assert len(ids(request)) == len(words(request).split()) == 37
    assert ids(request) == ids(Request("x", 1.0, 37, 5))
    assert OpenAI("m").body(request)["max_tokens"] == 5
    assert LlmServing().body(request)["parameters"] == {
        "do_sample": "False", "return_full_text": "True", "max_new_tokens": 5,
    }  # fmt: skip
    assert json.dumps(LlmServing().body(request))
