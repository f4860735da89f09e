"""Servers for endpoint calibration: the simulator with exact step times, and small faulty HTTP servers."""

from __future__ import annotations

import asyncio
import subprocess
import threading
import time
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Callable, Optional

from aiohttp import web
from servesim.calibrate.client.load_generator import SentRequest
from servesim.calibrate.endpoint.answers import LoadResult
from servesim.calibrate.endpoint.load_plan import Design, Point, ServerSpeed
from servesim.config.scenario import scenario_from
from servesim.core import Request, StepCost
from servesim.engine.server import Server
from servesim.engine.simulated import SimulatedClock
from servesim.engine.step import Step
from servesim.runs.build import build_scenario_loop

from ...events import PATIENCE_S
from ...warm import sim
from ..client.test_load_generator import answer, server

FaultyReply = Callable[[web.Request, int, int], Awaitable[Optional[web.StreamResponse]]]


@dataclass
class TokenTimes:
    """Records the token times of each request."""

    requests: Sequence[Request]
    times: dict[Any, list[float]] = field(default_factory=dict)

    def on_step_start(self, server: Server, step: Step, arrived: list[Request]) -> None:
        pass

    def on_step_end(self, server: Server, step: Step, now: float, finished: list[Request]) -> None:
        for request in self.requests:
            times = self.times.setdefault(request.id, [])
            times += [now] * (request.written - len(times))


def simulate_load(point: Point, design: Design, cost: StepCost, policy: Any, engine: Any, front: float) -> LoadResult:
    """Run a load on the simulator, with a front end that takes `front` seconds."""
    requests = point.requests("salt", design.output, design.short_prompt, ServerSpeed(0.02, 0.012))
    scenario = scenario_from({"policy": policy, "engine": {"num_blocks": 20000, **engine}})
    tokens = TokenTimes(requests)
    build_scenario_loop(scenario, requests, SimulatedClock(cost), (tokens,)).run()
    sent_requests = [
        SentRequest(r, r.sent, r.sent - front, tokens.times[r.id], None, None, r.client_end or r.finish, r.outcome)
        for r in requests
    ]
    return LoadResult(point, 0, sent_requests)


@contextmanager
def fake_server(policy: str, cost: str, port: int = 0, *options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run `sim serve` with known costs in a separate process."""
    command = [sim(), "serve", "--backend", "fake", "--port", str(port), "--policy", policy]
    command += ["--option", f"cost={cost}", "--set", "engine.num_blocks=4000", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    with process.stdout:
        try:
            yield process.stdout.readline().strip().rpartition(" ")[2], process
        finally:
            process.terminate()
            process.wait(PATIENCE_S)


@contextmanager
def late_sleeps(seconds: float) -> Iterator[list[float]]:
    """Sleep again and again in a thread; yield how late each sleep ended, as a fraction of it."""
    delays: list[float] = []
    done = threading.Event()

    def measure() -> None:
        while not done.is_set() or not delays:
            start = time.perf_counter()
            time.sleep(seconds)
            delays.append((time.perf_counter() - start) / seconds - 1)

    thread = threading.Thread(target=measure)
    thread.start()
    try:
        yield delays
    finally:
        done.set()
        thread.join()


@contextmanager
def faulty_server(faulty_reply: FaultyReply, prefill: float = 0.02, step: float = 0.01) -> Iterator[str]:
    """Serve llm-serving's stream at a steady speed, unless `faulty_reply(request, words, number)` returns a reply."""

    async def steady(request: web.Request, number: int) -> web.StreamResponse:
        body = await request.json()
        words, tokens = len(body["inputs"].split()), body["parameters"]["max_new_tokens"]
        reply = await faulty_reply(request, words, number)
        if reply is not None:
            return reply
        await asyncio.sleep(prefill + words * 1e-4)
        response = await answer(request, TOKEN)
        for _ in range(tokens - 1):
            await asyncio.sleep(step)
            await response.write(TOKEN)
        await response.write(b'{"data": [{"generated_text": "", "finish_reason": "length"}]}\n')
        return response

    with server(steady) as url:
        yield url


TOKEN = b'{"event": "message", "retry": 30000, "data": [{"generated_text": " a", "tokens": {"id": 7, "text": " a"}}]}\n'
