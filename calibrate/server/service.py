"""`sim serve`: a server of our own, the live driver behind llm-serving's endpoints and OpenAI's completions."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Callable, Optional

from aiohttp import web
from servesim.calibrate.client.load_generator import room_for
from servesim.calibrate.device.worker_client import WorkerFailed
from servesim.calibrate.live.setup import Stage
from servesim.config.scenario import Scenario
from servesim.core import BadInput

from .engine_client import Counter
from .http import BODY, Front, watch, worded
from .llm_serving_api import ServingApi
from .openai_api import OpenAIApi

CLOSE = 5.0  # seconds for the desk's socket to end
LINE = 1 << 26  # bytes of one message from the desk


def application(front: Front) -> web.Application:
    """Return the server's paths."""

    async def state(request: web.Request) -> web.Response:
        counter = front.counter
        return web.json_response({**counter.state, "open": len(counter.tickets), "served": counter.served})

    async def health(request: web.Request) -> web.Response:
        return web.Response(status=503 if front.counter.closed else 200)

    app = web.Application(middlewares=[worded], client_max_size=BODY)
    app.add_routes(ServingApi(front).routes())
    app.add_routes(OpenAIApi(front).routes())
    app.add_routes([web.get("/serving/state", state), web.get("/health", health)])
    return app


class Service:
    """A loaded stage with an HTTP server before it."""

    def __init__(self, stage: Stage, scenario: Scenario, host: str, port: int, queue: int) -> None:
        self.stage = stage
        self.scenario = scenario
        self.host = host
        self.port = port
        self.queue = queue  # requests that may be open at a time
        self.last: dict[str, Any] = {}  # the desk's state at its end
        self.failure: Optional[WorkerFailed] = None  # of the engine, while it served
        self.end: Callable[[], object] = lambda: None  # has it end, from any thread

    async def run(self, ready: Optional[Callable[[int], None]] = None) -> None:
        """Serve until SIGINT or SIGTERM, or until the engine is gone; `ready` is told the port."""
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        self.end = lambda: loop.call_soon_threadsafe(stop.set)
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(ValueError, RuntimeError):  # not in the main thread
                loop.add_signal_handler(number, stop.set)
        counter = Counter(self.queue)
        async with self._desk(counter) as engine:
            front = self._front(counter)
            runner = web.AppRunner(application(front), handler_cancellation=True, keepalive_timeout=30)
            await runner.setup()
            await self._listen(runner)
            watching = asyncio.create_task(watch(runner, front))
            if ready is not None:
                ready(self.port)
            waiting: asyncio.Future[Any] = asyncio.create_task(stop.wait())
            await asyncio.wait([waiting, engine], return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            watching.cancel()
            await runner.cleanup()
            counter.stop()
            try:
                self.last = await engine
            except WorkerFailed as error:
                self.failure = error
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(counter.gone.wait(), CLOSE)

    async def _listen(self, runner: web.AppRunner) -> None:
        site = web.TCPSite(runner, self.host, self.port, backlog=4096)
        try:
            await site.start()
        except OSError as error:
            raise BadInput(f"--host {self.host} --port {self.port}: cannot listen there: {error.strerror}") from None
        assert runner.addresses
        self.port = runner.addresses[0][1]

    @contextlib.asynccontextmanager
    async def _desk(self, counter: Counter) -> AsyncIterator[asyncio.Future[dict[str, Any]]]:
        """Have the worker's desk connect to a socket that nobody else can reach."""
        with tempfile.TemporaryDirectory(prefix="servesim-") as folder:
            path = str(Path(folder) / "desk")
            server = await asyncio.start_unix_server(counter.attend, path, limit=LINE)
            engine = asyncio.get_running_loop().run_in_executor(None, self._engine, path)
            connected: asyncio.Future[Any] = asyncio.create_task(counter.ready.wait())
            await asyncio.wait([connected, engine], return_when=asyncio.FIRST_COMPLETED)
            if engine.done():
                engine.result()
            try:
                yield engine
            finally:
                server.close()

    def _engine(self, path: str) -> dict[str, Any]:
        """Run the desk in the worker until it ends; return its last state."""
        engine = self.scenario.engine.model_dump(mode="json")
        state: dict[str, Any] = self.stage.worker.call(
            "serve", None, None, policy=self.scenario.policy, engine=engine, socket=path, pace=self.stage.pace
        )
        return state

    def _front(self, counter: Counter) -> Front:
        about, model, policy = self.stage.about, self.stage.model, self.scenario.make_policy()
        context = self.scenario.engine.max_model_len or model.context
        batch = getattr(policy, "decode_batch", getattr(policy, "max_num_seqs", 0))
        return Front(counter, model.name, model.vocab, context, batch, str(about["device"]), str(about["dtype"]))


def serve(stage: Stage, scenario: Scenario, host: str, port: int, queue: int) -> dict[str, Any]:
    """Serve until interrupted; return the engine's state at the end."""
    room_for(2 * queue)
    service = Service(stage, scenario, host, port, queue)

    def ready(port: int) -> None:
        print(f"serving {stage.model.name} on {stage.about['device']} at http://{host}:{port}", flush=True)

    asyncio.run(service.run(ready))
    if service.failure is not None:
        raise service.failure
    return service.last
