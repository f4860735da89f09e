"""A server for the tests: it and its engine run in threads, on a free port of 127.0.0.1, with a fake backend."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, Callable, Optional
from urllib.error import HTTPError
from urllib.request import Request as Ask
from urllib.request import urlopen

import pytest

pytest.importorskip("aiohttp")

from servesim.calibrate.live.setup import DeviceSession
from servesim.calibrate.server.engine_process import EngineLoop
from servesim.calibrate.server.http import ServerOptions
from servesim.calibrate.server.service import Service
from servesim.config.scenario import scenario_from
from servesim.engine.step import Step
from servesim.web import bound

from ...events import PATIENCE_S, wait_until
from ..device.worker_here import WorkerHere

ENGINE = {"num_blocks": 400, "block_size": 8, "max_model_len": 200}
ENDLESS = {"num_blocks": 20_000, "max_model_len": 100_000}  # for answers that last longer than any test
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
    process: bool = False,
) -> Iterator[Service]:
    """Serve from a thread of this process, with a fake backend: in a thread too, or in a process of its own."""
    scenario = scenario_from(
        {"policy": policy or {"name": "llm-serving", "decode_batch": 64}, "engine": {**ENGINE, **(engine or {})}}
    )
    backend = DeviceSession("fake", options={"cost": cost or COST, **(options or {})})
    if not process:
        worker: Any = WorkerHere(**backend.options)
        backend._worker = worker
    with bound("127.0.0.1", 0) as sockets, backend as session:
        session.load([scenario])
        served = Service(session, scenario, sockets, ServerOptions(queue, api_key, names, 30, tokenizer))
        ready = threading.Event()
        thread = threading.Thread(target=lambda: asyncio.run(served.run(lambda port: ready.set())))
        thread.start()
        assert ready.wait(PATIENCE_S)
        try:
            yield served
        finally:
            served.stop()
            thread.join(PATIENCE_S)
        assert not thread.is_alive()


def ask(served: Service, path: str, body: Any = None, headers: Optional[dict[str, str]] = None) -> tuple[int, bytes]:
    data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        with urlopen(Ask(f"http://127.0.0.1:{served.port}{path}", data, headers or {}), timeout=PATIENCE_S) as answer:
            return answer.status, answer.read()
    except HTTPError as error:
        with error:
            return error.code, error.read()


def wait_for_state(served: Service, wanted: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
    """Wait until the state of the server is as wanted; return it."""
    state: dict[str, Any] = {}

    def is_wanted() -> bool:
        state.update(json.loads(ask(served, "/serving/state")[1]))
        return wanted(state)

    wait_until(is_wanted, f"{what} in {state}")
    return state


def idle_state(served: Service) -> dict[str, Any]:
    """Wait until no request is open; return the engine's state."""
    return wait_for_state(
        served, lambda state: not (state["open"] or state["waiting"] or state["running"]), "no request"
    )


def gather_bursts(monkeypatch: pytest.MonkeyPatch, *sizes: int) -> None:
    """Let the engine compute nothing of a burst before all its requests have reached it, however slowly they come."""
    handle, compute, ends = EngineLoop._handle, EngineLoop.compute, list(accumulate(sizes))
    submitted = 0

    def count_and_handle(engine: EngineLoop, message: dict[str, Any]) -> None:
        nonlocal submitted
        submitted += "submit" in message
        handle(engine, message)

    def wait_and_compute(engine: EngineLoop, step: Step) -> None:
        end = next((end for end in ends if end >= submitted), submitted)
        wait_until(lambda: submitted + engine.messages.qsize() >= end, f"{end} requests at the engine")
        compute(engine, step)

    monkeypatch.setattr(EngineLoop, "_handle", count_and_handle)
    monkeypatch.setattr(EngineLoop, "compute", wait_and_compute)


def raw(served: Service, data: bytes) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", served.port), timeout=PATIENCE_S)
    client.sendall(data)
    return client


def post(body: dict[str, Any], path: str = "/models/llama2/generate_stream") -> bytes:
    data = json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
