"""Servers to be calibrated: the simulator as one that keeps perfect time, and small ones that misbehave over HTTP."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Callable, Optional

from aiohttp import web
from servesim.calibrate.client.load_generator import Sending
from servesim.calibrate.endpoint.answers import Taken
from servesim.calibrate.endpoint.load_plan import Design, Pace, Point
from servesim.config.scenario import scenario_from
from servesim.core import Request, StepCost
from servesim.engine.server import Server
from servesim.engine.simulated import SimulatedClock
from servesim.engine.step import Step
from servesim.runs.simulate import build

from ..client.test_load_generator import answer, server

Refusal = Callable[[web.Request, int, int], Awaitable[Optional[web.StreamResponse]]]


@dataclass
class Tokens:
    """Notes when each request wrote."""

    requests: Sequence[Request]
    times: dict[Any, list[float]] = field(default_factory=dict)

    def begun(self, server: Server, step: Step, arrived: list[Request]) -> None:
        pass

    def ended(self, server: Server, step: Step, now: float, over: list[Request]) -> None:
        for request in self.requests:
            times = self.times.setdefault(request.id, [])
            times += [now] * (request.written - len(times))


def simulated(point: Point, design: Design, cost: StepCost, policy: Any, engine: Any, front: float) -> Taken:
    """Give a load to the simulator; its front end takes so many seconds."""
    requests = point.requests("salt", design.output, design.short, Pace(0.02, 0.012))
    scenario = scenario_from({"policy": policy, "engine": {"num_blocks": 20000, **engine}})
    notes = Tokens(requests)
    build(scenario, requests, SimulatedClock(cost), (notes,)).run()
    sendings = [
        Sending(r, r.arrival, r.arrival - front, notes.times[r.id], None, None, r.seen or r.finish, r.outcome)
        for r in requests
    ]
    return Taken(point, 0, 0.0, sendings)


@contextmanager
def fake_server(policy: str, cost: str, port: int = 0, *options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run `sim serve` with known costs as a process of its own."""
    command = [sys.executable, "-m", "servesim", "serve", "--backend", "fake", "--port", str(port), "--policy", policy]
    command += ["--option", f"cost={cost}", "--set", "engine.num_blocks=4000", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    with process.stdout:
        try:
            yield process.stdout.readline().strip().rpartition(" ")[2], process
        finally:
            process.terminate()
            process.wait(20)


@contextmanager
def moody_server(refusal: Refusal, prefill: float = 0.02, step: float = 0.01) -> Iterator[str]:
    """Serve llm-serving's stream at a steady pace; `refusal` may answer instead, told the prompt's length and count."""

    async def steady(request: web.Request, number: int) -> web.StreamResponse:
        body = await request.json()
        words, wanted = len(body["inputs"].split()), body["parameters"]["max_new_tokens"]
        refused = await refusal(request, words, number)
        if refused is not None:
            return refused
        await asyncio.sleep(prefill + words * 1e-4)
        response = await answer(request, TOKEN)
        for _ in range(wanted - 1):
            await asyncio.sleep(step)
            await response.write(TOKEN)
        await response.write(b'{"data": [{"generated_text": "", "finish_reason": "length"}]}\n')
        return response

    with server(steady) as url:
        yield url


TOKEN = b'{"event": "message", "retry": 30000, "data": [{"generated_text": " a", "tokens": {"id": 7, "text": " a"}}]}\n'
