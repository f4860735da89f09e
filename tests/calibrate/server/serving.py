"""A server for the tests: it runs in a thread, on a free port of 127.0.0.1, with a fake backend."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Optional
from urllib.error import HTTPError
from urllib.request import Request as Ask
from urllib.request import urlopen

import pytest

pytest.importorskip("aiohttp")

from servesim.calibrate.live.setup import DeviceSession
from servesim.calibrate.server.http import ServerOptions
from servesim.calibrate.server.service import Service
from servesim.config.scenario import scenario_from
from servesim.web import bound

ENGINE = {"num_blocks": 400, "block_size": 8, "max_model_len": 200}
COST = {"base": 0.003, "prefill_token": 0.00001, "decode_live": 0.00002}


@contextmanager
def service(
    queue: int = 1000,
    policy: Any = None,
    cost: Any = None,
    options: Any = None,
    api_key: Optional[str] = None,
    names: tuple[str, ...] = (),
    engine: Any = None,
    tokenizer: Any = None,
) -> Iterator[Service]:
    """Serve from a thread of this process, with a fake backend."""
    scenario = scenario_from(
        {"policy": policy or {"name": "llm-serving", "decode_batch": 64}, "engine": {**ENGINE, **(engine or {})}}
    )
    backend = DeviceSession("fake", options={"cost": cost or COST, **(options or {})})
    with bound("127.0.0.1", 0) as sockets, backend as session:
        session.load([scenario])
        served = Service(session, scenario, sockets, ServerOptions(queue, api_key, names, 30, tokenizer))
        ready = threading.Event()
        thread = threading.Thread(target=lambda: asyncio.run(served.run(lambda port: ready.set())))
        thread.start()
        assert ready.wait(120)
        try:
            yield served
        finally:
            served.stop()
            thread.join(120)
        assert not thread.is_alive()


def ask(served: Service, path: str, body: Any = None, headers: Optional[dict[str, str]] = None) -> tuple[int, bytes]:
    data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        with urlopen(Ask(f"http://127.0.0.1:{served.port}{path}", data, headers or {}), timeout=120) as answer:
            return answer.status, answer.read()
    except HTTPError as error:
        with error:
            return error.code, error.read()


def idle_state(served: Service, seconds: float = 120.0) -> dict[str, Any]:
    """Wait until no request is open; return the engine's state."""
    until = time.monotonic() + seconds
    while True:
        state: dict[str, Any] = json.loads(ask(served, "/serving/state")[1])
        if not (state["open"] or state["waiting"] or state["running"]) or time.monotonic() > until:
            return state
        time.sleep(0.05)


def raw(served: Service, data: bytes) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", served.port), timeout=120)
    client.sendall(data)
    return client


def post(body: dict[str, Any], path: str = "/models/llama2/generate_stream") -> bytes:
    data = json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
