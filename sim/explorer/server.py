"""The server of `sim explore`: only this machine reaches it, and only with the token in the address.

It treats the page as any other client: it checks sizes, JSON and keys, and executes no code that the page names.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import re
import secrets
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Optional

from aiohttp import web
from servesim.config.user_code import use_access
from servesim.core import BadInput
from servesim.core.errors import WorkerLost
from servesim.report.page import TEMPLATES, plotly_script, render
from servesim.runs.metric_table import metric_title, metrics_in
from servesim.runs.simulate import load_trace
from servesim.study.executor import process_count
from servesim.study.study_keys import INDIFFERENCE
from servesim.web import BAD_BODY, bound, json_errors, listening, stop_event

from .answer import Answer
from .controls import WHOLE_CHOICES, controls_of
from .results import COLOURS, NAMES
from .runner import Job, Runner
from .state import Origin, PageState, error_json, read_state

HOST = "127.0.0.1"
LOCAL = re.compile(r"(127\.0\.0\.1|localhost)(:[0-9]{1,5})?")  # Host of a request; SSH may forward another port
PAGE = Path(__file__).with_name("page")
MAX_BODY_BYTES = 1 << 18
MAX_PAGES = 64  # open pages that are known
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'self'; connect-src 'self'; img-src data: blob:"
HEADERS = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff"}


class ExploreServer:
    """The page of one origin, and the jobs of its open copies."""

    def __init__(self, origin: Origin, first: PageState, port: int = 0, jobs: Optional[int] = None) -> None:
        self.origin, self.first = origin, first
        self.port, self.workers = port, process_count(jobs)
        self.token = secrets.token_urlsafe(24)
        self._jobs: dict[str, Job] = {}  # the last job of each page
        self._ending: set[asyncio.Task[None]] = set()
        self._runner: Optional[Runner] = None
        self._stop: Callable[[], None] = lambda: None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}/{self.token}/"

    @property
    def runner(self) -> Runner:
        assert self._runner is not None, "the server has not started"
        return self._runner

    def application(self) -> web.Application:
        """Return the web application; every path starts with the token."""
        app = web.Application(middlewares=[self._check_client, json_errors], client_max_size=MAX_BODY_BYTES)
        app.add_routes([
            web.get(f"/{self.token}/", self._page),
            web.get(f"/{self.token}/{{name:plotly|charts|results|explore}}.js", send_script),
            web.get(f"/{self.token}/saved.html", self._saved),
            web.post(f"/{self.token}/scenario", self._scenario),
            web.post(f"/{self.token}/copy", self._copy),
            web.post(f"/{self.token}/run", self._run),
        ])  # fmt: skip
        return app

    @web.middleware
    async def _check_client(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Refuse requests without the token, and those that a foreign page sends under a name of this machine."""
        given = request.path[1 : 1 + len(self.token)].encode(errors="replace")
        if not LOCAL.fullmatch(request.host) or not hmac.compare_digest(given, self.token.encode()):
            return web.json_response({"detail": "expected the address that sim explore printed"}, status=403)
        response: web.StreamResponse = await handler(request)
        return response

    async def _page(self, request: web.Request) -> web.Response:
        first = {
            "state": self.first.model_dump(), "file": self.origin.file,
            "metrics": {name: metric_title(name) for name in metrics_in("summary")},
            "indifference": INDIFFERENCE, "names": NAMES, "colours": COLOURS, "whole": WHOLE_CHOICES,
        }  # fmt: skip
        text = json.dumps(first).replace("<", "\\u003c")
        page = render("index.html", PAGE, title=self.origin.file or "sim explore", first=text)
        return web.Response(text=page, content_type="text/html", headers={**HEADERS, "Content-Security-Policy": POLICY})

    async def _saved(self, request: web.Request) -> web.Response:
        """Return the page that works without the server; the page that saves it adds its results."""
        scripts = {name: read_script(name) for name in ("plotly", "charts", "results")}
        page = render("saved.html", PAGE, title=self.origin.file or "sim explore", **scripts)
        return web.Response(text=page, content_type="text/html", headers=HEADERS)

    async def _scenario(self, request: web.Request) -> web.Response:
        """Return the controls of a state, after one of the choices that change several settings."""
        body = await read_body(request)
        state = read_state(body.get("state"))
        choose = body.get("choose")
        if isinstance(choose, dict):
            state = self.origin.choose(state, str(choose.get("key")), str(choose.get("value")))
        usable, bad = self.origin.usable(state)
        controls = [control.as_json() for control in controls_of(self.origin, usable)]
        for control in controls:  # a wrong text stays where it can be corrected
            if control["key"] not in usable.settings:
                control["text"] = state.settings.get(control["key"], control["text"])
        error = bad and error_json(bad, self.origin.where(state), state.settings)
        changed = [*self.origin.changes(state, self.first)]
        answer = {"state": state.model_dump(), "controls": controls, "changed": changed, "error": error}
        return web.json_response(answer, headers=HEADERS)

    async def _copy(self, request: web.Request) -> web.Response:
        state = read_state((await read_body(request)).get("state"))
        return web.json_response(self.origin.copies(state), headers=HEADERS)

    async def _run(self, request: web.Request) -> web.StreamResponse:
        """Send the answer to a state as JSON lines. A newer state of the same page, or a closed connection, ends it."""
        body = await read_body(request)
        state, page = read_state(body.get("state")), str(body.get("page"))[:64]
        change, last = body.get("change"), self._jobs.get(page)
        if isinstance(change, int) and last is not None and change < last.change:
            return web.Response(headers=HEADERS)  # requests of two connections may come in another order
        response = web.StreamResponse(headers={**HEADERS, "Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        job = self.runner.start_job()
        job.change = change if isinstance(change, int) else 0
        self._cancel(self._jobs.pop(page, None))
        self._jobs[page] = job
        while len(self._jobs) > MAX_PAGES:
            self._cancel(self._jobs.pop(next(iter(self._jobs))))

        async def send(message: dict[str, Any]) -> None:
            if not job.cancelled:
                await response.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")

        labels = [self.origin.label(choice, self.first) for choice in (state, *state.pins)]
        try:
            await send({"kind": "labels", "labels": labels})
            await Answer(self.origin, self.runner, job, state, send).run()
        except BadInput as bad:
            await send({"kind": "error", **error_json(bad, self.origin.where(state), state.settings)})
        except WorkerLost as lost:
            await send({"kind": "error", "key": "", "text": str(lost)})
        except asyncio.CancelledError:
            if not job.cancelled:  # the page has gone
                raise
        finally:
            self._cancel(job)
        with contextlib.suppress(ConnectionError):
            await response.write_eof()
        return response

    def _cancel(self, job: Optional[Job]) -> None:
        """End the runs of a job in the background: the page does not wait for it."""
        if job is not None and not job.cancelled:
            task = asyncio.get_running_loop().create_task(self.runner.cancel(job))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def serve(self, ready: Callable[[], object]) -> None:
        """Serve until SIGINT, SIGTERM or `stop`. Calls `ready` when it listens."""
        stop, self._stop = stop_event()
        with bound(HOST, self.port) as sockets, contextlib.closing(Runner(self.workers)) as self._runner:
            self.port = sockets[0].getsockname()[1]
            async with listening(self.application(), sockets, shutdown_timeout=0.5):
                ready()
                await stop.wait()
                for job in self._jobs.values():
                    self._cancel(job)

    def run(self, ready: Callable[[], object]) -> None:
        """Serve in this thread."""
        with use_access(None):  # a request gets the permission of the command only for the file that it named
            asyncio.run(self.serve(ready))

    def start(self) -> ExploreServer:
        """Serve in another thread, for notebooks; return when it listens."""
        ready = threading.Event()
        failure: list[BaseException] = []

        def serve() -> None:
            try:
                asyncio.run(self.serve(ready.set))
            except BaseException as error:
                failure.append(error)
                ready.set()

        self._thread = threading.Thread(target=serve, name="sim explore", daemon=True)
        self._thread.start()
        ready.wait()
        if failure:
            raise failure[0]
        return self

    def stop(self) -> None:
        """End the server and its workers."""
        self._stop()
        thread = getattr(self, "_thread", None)
        if thread is not None:
            thread.join()


def open_page(
    file: Optional[str], preset: Optional[str], settings: Mapping[str, str], port: int = 0, jobs: Optional[int] = None
) -> ExploreServer:
    """Return the server of a scenario file or a preset, after a check of the scenario and its requests."""
    origin = Origin(file)
    first = origin.first_state(preset, settings)
    load_trace(origin.scenario(first)[1])
    return ExploreServer(origin, first, port, jobs)


async def send_script(request: web.Request) -> web.Response:
    """Return a script of the page; the browser keeps that of Plotly, which is large."""
    name = request.match_info["name"]
    headers = {**HEADERS, "Cache-Control": "private, max-age=3600"} if name == "plotly" else HEADERS
    return web.Response(text=read_script(name), content_type="text/javascript", headers=headers)


def read_script(name: str) -> str:
    """Return the text of a script."""
    if name == "plotly":
        return plotly_script()
    return ((TEMPLATES if name == "charts" else PAGE) / f"{name}.js").read_text("utf-8")


async def read_body(request: web.Request) -> dict[str, Any]:
    """Return the JSON object of a request."""
    try:
        body = json.loads(await request.read())
    except (ValueError, RecursionError, *BAD_BODY):
        raise BadInput("page: expected JSON") from None
    if not isinstance(body, dict):
        raise BadInput("page: expected a JSON object")
    return body
