"""`sim serve`: the live driver as a server, with llm-serving's and OpenAI's paths, and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, Optional

from aiohttp import web
from servesim.calibrate.client.load_generator import raise_file_limit
from servesim.calibrate.device.worker_client import WorkerFailed
from servesim.calibrate.live.setup import DeviceSession, server_arguments
from servesim.config.scenario import Scenario
from servesim.config.user_code import code_access
from servesim.core import PolicyError
from servesim.core.errors import DeviceFailed
from servesim.files.scratch import ScratchFolder
from servesim.version import __version__
from servesim.web import json_errors, listening, stop_event

from .engine_client import EngineClient
from .http import MAX_BODY_BYTES, HttpFrontEnd, ServerOptions, close_idle_connections, mark_busy, require_key
from .llm_serving_api import ServingApi
from .metrics import CONTENT_TYPE, ServerMetrics
from .openai_api import OpenAIApi

CLOSE_TIMEOUT_S = 5.0  # for the engine's socket
MAX_MESSAGE_BYTES = 1 << 26  # of one message from the engine
DRAIN_TIMEOUT_S = 60.0  # for open responses, when the server stops
STOP_TIMEOUT_S = 10.0  # for the engine to stop after them; then the worker is killed
KEEP_ALIVE_S = 30.0  # for a connection between two requests
TOKENIZER_THREADS = 8


def application(front_end: HttpFrontEnd, api_key: Optional[str] = None) -> web.Application:
    """Return the web application with all paths."""
    engine = front_end.engine

    async def state(request: web.Request) -> web.Response:
        return web.json_response({**engine.state, "open": len(engine.handles), "served": engine.served})

    async def health(request: web.Request) -> web.Response:
        return web.Response(status=503 if engine.closed else 200)

    async def version(request: web.Request) -> web.Response:
        return web.json_response({"version": __version__})

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(body=engine.metrics.text(engine.state), headers={"Content-Type": CONTENT_TYPE})

    middlewares = [mark_busy(front_end), json_errors, *([] if api_key is None else [require_key(api_key)])]
    app = web.Application(middlewares=middlewares, client_max_size=MAX_BODY_BYTES)
    app.add_routes(ServingApi(front_end).routes())
    app.add_routes(OpenAIApi(front_end).routes())
    app.add_routes([web.get("/health", health), web.route("*", "/ping", health), web.get("/version", version)])
    app.add_routes([web.get("/serving/state", state), web.get("/metrics", metrics)])
    return app


class Service:
    """An HTTP server for a loaded model."""

    def __init__(
        self, session: DeviceSession, scenario: Scenario, sockets: Sequence[socket.socket], options: ServerOptions
    ) -> None:
        self.session = session
        self.scenario = scenario
        self.sockets = sockets  # bound, not listening yet
        self.port: int = sockets[0].getsockname()[1]
        self.options = options
        self.names = options.names or (session.model.name,)
        self.final_state: dict[str, Any] = {}  # of the engine
        self.failure: Optional[RuntimeError] = None  # of the engine, while it served
        self.code = code_access()  # threads do not inherit it
        self.stop: Callable[[], None] = lambda: None  # stops the service; callable from any thread

    @property
    def url(self) -> str:
        host = self.sockets[0].getsockname()[0]
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    async def run(self, ready: Optional[Callable[[int], None]] = None, stop: Optional[asyncio.Event] = None) -> None:
        """Serve until `stop` (default: SIGINT or SIGTERM), or until the engine stops. `ready(port)`: it listens."""
        if stop is None:
            stop, self.stop = stop_event()
        client = EngineClient(self.options.max_open, ServerMetrics(self.names[0]))
        async with self._start_engine(client) as engine:
            front_end = HttpFrontEnd(client, self.session, self.scenario, self.options)
            app = application(front_end, self.options.api_key)
            async with listening(
                app, self.sockets, keepalive_timeout=KEEP_ALIVE_S, shutdown_timeout=DRAIN_TIMEOUT_S
            ) as runner:
                closer = asyncio.create_task(close_idle_connections(runner, front_end))
                if ready is not None:
                    ready(self.port)
                stopped: asyncio.Future[Any] = asyncio.create_task(stop.wait())
                await asyncio.wait([stopped, engine], return_when=asyncio.FIRST_COMPLETED)
                stopped.cancel()
                closer.cancel()
            await self._stop_engine(client, engine)

    async def _stop_engine(self, client: EngineClient, engine: asyncio.Future[dict[str, Any]]) -> None:
        """Stop the engine and keep its final state, or why it failed. Kill a worker that does not answer."""
        client.stop()
        _, running = await asyncio.wait([engine], timeout=STOP_TIMEOUT_S)
        if running:
            self.session.worker.kill()
        try:
            self.final_state = await engine
        except (DeviceFailed, PolicyError) as error:
            late = f"{self.session.backend} worker: did not stop within {STOP_TIMEOUT_S:g} s; it was killed"
            self.failure = WorkerFailed(late) if running else error

    @contextlib.asynccontextmanager
    async def _start_engine(self, client: EngineClient) -> AsyncIterator[asyncio.Future[dict[str, Any]]]:
        """Start the engine in the worker and connect it through a private socket."""
        with ScratchFolder() as folder:
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
                client.stop()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(client.disconnected.wait(), CLOSE_TIMEOUT_S)
                server.close()

    def _run_engine(self, path: str) -> dict[str, Any]:
        """Run the engine in the worker until it stops; return its final state."""
        settings = server_arguments(self.scenario)
        state: dict[str, Any] = self.session.worker.call(
            "serve", None, None, **settings, code=self.code, socket=path, pace=self.session.fake_cost
        )  # fmt: skip
        return state


def serve(services: Sequence[Service]) -> list[dict[str, Any]]:
    """Serve until interrupted; return the final state of each engine."""
    raise_file_limit(2 * sum(service.options.max_open for service in services))
    asyncio.run(run_together(services))
    for service in services:
        if service.failure is not None:
            raise service.failure
    return [service.final_state for service in services]


async def run_together(services: Sequence[Service]) -> None:
    """Run servers until SIGINT or SIGTERM, or until one of them ends. Print their addresses when all of them listen.

    The engines are processes of their own. One thread waits for each of them.
    """
    stop, _ = stop_event()
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(len(services) + TOKENIZER_THREADS))
    ports: list[int] = []

    def ready(port: int) -> None:
        ports.append(port)
        for service in services if len(ports) == len(services) else ():
            model, device = service.session.model.name, service.session.about["device"]
            print(f"serving model {model} on device {device} at {service.url}", flush=True)

    async def run(service: Service) -> None:
        try:
            await service.run(ready, stop)
        finally:
            stop.set()

    for error in await asyncio.gather(*map(run, services), return_exceptions=True):
        if error is not None:
            raise error
