"""`sim serve`: the live driver as a server, with llm-serving's endpoints and OpenAI's completions."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Callable, Optional

from aiohttp import web
from servesim.calibrate.client.load_generator import raise_file_limit
from servesim.calibrate.device.worker_client import WorkerFailed
from servesim.calibrate.live.setup import DeviceSession
from servesim.config.scenario import Scenario
from servesim.core import BadInput

from .engine_client import EngineClient
from .http import MAX_BODY_BYTES, HttpFrontEnd, close_idle_connections, json_errors
from .llm_serving_api import ServingApi
from .openai_api import OpenAIApi

CLOSE_TIMEOUT_S = 5.0  # for the engine's socket
MAX_MESSAGE_BYTES = 1 << 26  # of one message from the engine


def application(front_end: HttpFrontEnd) -> web.Application:
    """Return the web application with all paths."""
    engine = front_end.engine

    async def state(request: web.Request) -> web.Response:
        return web.json_response({**engine.state, "open": len(engine.handles), "served": engine.served})

    async def health(request: web.Request) -> web.Response:
        return web.Response(status=503 if engine.closed else 200)

    app = web.Application(middlewares=[json_errors], client_max_size=MAX_BODY_BYTES)
    app.add_routes(ServingApi(front_end).routes())
    app.add_routes(OpenAIApi(front_end).routes())
    app.add_routes([web.get("/serving/state", state), web.get("/health", health)])
    return app


class Service:
    """An HTTP server for a loaded model."""

    def __init__(self, session: DeviceSession, scenario: Scenario, host: str, port: int, max_open: int) -> None:
        self.session = session
        self.scenario = scenario
        self.host = host
        self.port = port
        self.max_open = max_open  # open requests
        self.final_state: dict[str, Any] = {}  # of the engine
        self.failure: Optional[WorkerFailed] = None  # of the engine, while it served
        self.stop: Callable[[], object] = lambda: None  # stops the service; callable from any thread

    async def run(self, ready: Optional[Callable[[int], None]] = None) -> None:
        """Serve until SIGINT or SIGTERM, or until the engine stops. Calls `ready(port)` when it listens."""
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        self.stop = lambda: loop.call_soon_threadsafe(stop.set)
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(ValueError, RuntimeError):  # not in the main thread
                loop.add_signal_handler(number, stop.set)
        client = EngineClient(self.max_open)
        async with self._start_engine(client) as engine:
            front_end = self._front_end(client)
            runner = web.AppRunner(application(front_end), handler_cancellation=True, keepalive_timeout=30)
            await runner.setup()
            await self._listen(runner)
            closer = asyncio.create_task(close_idle_connections(runner, front_end))
            if ready is not None:
                ready(self.port)
            stopped: asyncio.Future[Any] = asyncio.create_task(stop.wait())
            await asyncio.wait([stopped, engine], return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            closer.cancel()
            await runner.cleanup()
            client.stop()
            try:
                self.final_state = await engine
            except WorkerFailed as error:
                self.failure = error
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(client.disconnected.wait(), CLOSE_TIMEOUT_S)

    async def _listen(self, runner: web.AppRunner) -> None:
        site = web.TCPSite(runner, self.host, self.port, backlog=4096)
        try:
            await site.start()
        except OSError as error:
            raise BadInput(f"--host {self.host} --port {self.port}: cannot listen: {error.strerror}") from None
        assert runner.addresses
        self.port = runner.addresses[0][1]

    @contextlib.asynccontextmanager
    async def _start_engine(self, client: EngineClient) -> AsyncIterator[asyncio.Future[dict[str, Any]]]:
        """Start the engine in the worker and connect it through a private socket."""
        with tempfile.TemporaryDirectory(prefix="servesim-") as folder:
            path = str(Path(folder) / "engine")
            server = await asyncio.start_unix_server(client.connect, path, limit=MAX_MESSAGE_BYTES)
            engine = asyncio.get_running_loop().run_in_executor(None, self._run_engine, path)
            connected: asyncio.Future[Any] = asyncio.create_task(client.ready.wait())
            await asyncio.wait([connected, engine], return_when=asyncio.FIRST_COMPLETED)
            if engine.done():
                engine.result()
            try:
                yield engine
            finally:
                server.close()

    def _run_engine(self, path: str) -> dict[str, Any]:
        """Run the engine in the worker until it stops; return its final state."""
        engine = self.scenario.engine.model_dump(mode="json")
        state: dict[str, Any] = self.session.worker.call(
            "serve", None, None, policy=self.scenario.policy, engine=engine, socket=path, pace=self.session.fake_cost
        )
        return state

    def _front_end(self, client: EngineClient) -> HttpFrontEnd:
        about, model, policy = self.session.about, self.session.model, self.scenario.make_policy()
        context = self.scenario.engine.max_model_len or model.context
        batch = getattr(policy, "decode_batch", getattr(policy, "max_num_seqs", 0))
        device, dtype = str(about["device"]), str(about["dtype"])
        return HttpFrontEnd(client, model.name, model.vocab, context, batch, device, dtype)


def serve(session: DeviceSession, scenario: Scenario, host: str, port: int, max_open: int) -> dict[str, Any]:
    """Serve until interrupted; return the final state of the engine."""
    raise_file_limit(2 * max_open)
    service = Service(session, scenario, host, port, max_open)

    def ready(port: int) -> None:
        print(
            f"serving model {session.model.name} on device {session.about['device']} at http://{host}:{port}",
            flush=True,
        )

    asyncio.run(service.run(ready))
    if service.failure is not None:
        raise service.failure
    return service.final_state
