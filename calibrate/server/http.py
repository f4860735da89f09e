"""Shared by both HTTP interfaces: limits on body size, silent clients and slow readers.

A slow, disconnected or invalid client loses its own response. Other clients are not affected.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Callable, Optional, Protocol, TypeVar

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from .connection import ClientConnection
from .engine_client import End, EngineClient, RequestHandle, TooManyRequests

MAX_BODY_BYTES = 1 << 20
BODY_SECONDS = 30.0  # maximum time to send the body
STALL_SECONDS = 60.0  # maximum time of one write to a client that does not read
HEAD_SECONDS = 30.0  # maximum time to send a request head on a new or idle connection
PING_INTERVAL_S = 600.0  # a stream without tokens gets a comment after this time
PING = b": You can't see this ping\n\n"
CHECK_INTERVAL_S = 2.0  # between two checks for idle connections
T = TypeVar("T")


class EventSource(Protocol[T]):
    """A request or a group of requests."""

    async def next(self, timeout: Optional[float] = None) -> Optional[list[T]]:
        """Return the events since the last call; None after `timeout` seconds without one."""


class PromptTokenizer(Protocol):
    """Translates between the text of a prompt and token ids. Answers always consist of common words."""

    @property
    def size(self) -> int:
        """The size of the vocabulary: ids are smaller."""

    @property
    def in_thread(self) -> bool:
        """Whether `encode` takes so long that it must not run in the thread that sends the tokens of all streams."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids."""


class Refused(Exception):
    """Reject a request with this status and body."""

    def __init__(self, status: int, body: Any) -> None:
        self.status = status
        self.body = body
        super().__init__(f"{status} {body}")


def refused(status: int, message: str) -> Refused:
    """Return a rejection that clients of both interfaces understand."""
    kind = "invalid_request_error" if status < 500 else "server_busy"
    return Refused(status, {"detail": message, "error": {"message": message, "type": kind}})


@dataclass(frozen=True)
class HttpFrontEnd:
    """The engine client, the served model, and the open streams."""

    engine: EngineClient
    model: str
    names: tuple[str, ...]  # of the model, for clients; responses have the first one
    vocab: int  # of the model
    tokenizer: PromptTokenizer
    context: int  # maximum prompt + output tokens
    max_length: int  # prompt + output tokens that the policy accepts
    capacity: int  # tokens in all KV blocks
    usual_output: int  # tokens of an answer without a limit
    batch: int  # maximum running requests
    device: str
    dtype: str
    streams: set[Stream] = field(default_factory=set)  # open responses

    async def json_body(self, request: web.Request, invalid: Callable[[str, int], Refused]) -> dict[str, Any]:
        """Return the body of a request, which must be a JSON object."""
        try:
            raw = await asyncio.wait_for(request.read(), BODY_SECONDS)
        except asyncio.TimeoutError:
            raise refused(408, f"the body did not arrive within {BODY_SECONDS:g} s") from None
        except (HttpProcessingError, web.RequestPayloadError) as error:
            raise refused(400, f"the body cannot be decoded: {' '.join(str(error).split())}") from None
        try:
            body = json.loads(raw)
            if not raw.isascii() or b"\\u" in raw:
                json.dumps(body, ensure_ascii=False).encode()  # a lone surrogate is no text
        except json.JSONDecodeError as error:
            raise invalid(error.msg, error.pos) from None
        except (ValueError, RecursionError) as error:  # not UTF-8, a lone surrogate, a huge integer, deep nesting
            raise refused(400, f"the body cannot be parsed: {str(error).partition(';')[0]}") from None
        if not isinstance(body, dict):
            raise invalid("expected an object", 0)
        return body

    async def encoded(self, read: Callable[[], T]) -> T:
        """Return what a function returns that encodes prompts."""
        return await asyncio.to_thread(read) if self.tokenizer.in_thread else read()

    def submit(self, tokens: Sequence[int], limit: int) -> RequestHandle:
        """Submit a request to the engine; reject it with 503 while too many are open."""
        try:
            return self.engine.submit(self._model_ids(tokens), max(1, min(limit, self.context - len(tokens))))
        except TooManyRequests as busy:
            raise refused(503, str(busy)) from None

    def submit_all(self, jobs: Sequence[tuple[Sequence[int], int, str]]) -> list[RequestHandle]:
        """Submit requests, each with its tokens, output length and finish reason: all of them, or none with a 503."""
        if len(jobs) > self.engine.max_open:
            raise refused(400, f"expected at most {self.engine.max_open} answers in a response, got {len(jobs)}")
        try:
            self.engine.require_room(len(jobs))
        except TooManyRequests as busy:
            raise refused(503, str(busy)) from None
        return [self.engine.submit(self._model_ids(tokens), limit, reason) for tokens, limit, reason in jobs]

    def _model_ids(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return ids that the model has. Its vocabulary may be smaller than that of the tokenizer."""
        if self.tokenizer.size <= self.vocab:
            return tokens
        return [token if token < self.vocab else token % (self.vocab - 1) + 1 for token in tokens]

    @contextlib.asynccontextmanager
    async def abort_on_exit(self, *handles: RequestHandle) -> AsyncIterator[None]:
        """Abort the requests that have not ended when the response does."""
        try:
            yield
        finally:
            for handle in handles:
                if not handle.finished:
                    self.engine.abort(handle)

    @contextlib.asynccontextmanager
    async def stream(self, request: web.Request, headers: Mapping[str, str]) -> AsyncIterator[Stream]:
        """Open a streamed response. `close_idle_connections` aborts it if its client stops reading."""
        stream = Stream(request, headers)
        self.streams.add(stream)
        try:
            await stream.response.prepare(request)
            if isinstance(request.protocol, ClientConnection):
                request.protocol.probe = stream.ping
            yield stream
        finally:
            self.streams.discard(stream)


class Stream:
    """A streamed response."""

    def __init__(self, request: web.Request, headers: Mapping[str, str]) -> None:
        self.response = web.StreamResponse(headers=headers)
        self.transport = request.transport
        self.write_started: Optional[float] = None  # None while no write is pending

    async def next_events(self, source: EventSource[T]) -> list[T]:
        """Return the next events; ping the client while there are none."""
        while True:
            events = await source.next(PING_INTERVAL_S)
            if events is not None:
                return events
            await self.write(PING)

    async def ping(self) -> None:
        """Send a comment, unless a write is pending."""
        if self.write_started is None:
            await self.write(PING)

    async def write(self, data: bytes) -> None:
        """Send a chunk of the response."""
        self.write_started = time.monotonic()
        await self.response.write(data)
        self.write_started = None


async def collect(handle: RequestHandle) -> tuple[list[int], End]:
    """Wait for the end of a request; return all its tokens and the end."""
    tokens: list[int] = []
    while True:
        for event in await handle.next() or ():
            if isinstance(event, End):
                return tokens, event
            tokens.append(event)


@web.middleware
async def json_errors(request: web.Request, handler: Any) -> web.StreamResponse:
    """Return rejections and errors as JSON."""
    try:
        response: web.StreamResponse = await handler(request)
        return response
    except Refused as refused:
        return web.json_response(refused.body, status=refused.status)
    except ConnectionError:  # the client disconnected: not an error of the server
        return web.Response(status=400)
    except web.HTTPException as error:
        headers = {key: value for key, value in error.headers.items() if key.lower() == "allow"}
        return web.json_response({"detail": error.reason}, status=error.status, headers=headers)


async def close_idle_connections(runner: web.AppRunner, front_end: HttpFrontEnd) -> None:
    """Close connections whose client sends or reads nothing for too long: aiohttp would wait forever."""
    idle_since: dict[Any, float] = {}  # by connection
    while True:
        await asyncio.sleep(CHECK_INTERVAL_S)
        now = time.monotonic()
        connections = [] if runner.server is None else runner.server.connections
        idle = [connection for connection in connections if getattr(connection, "_current_request", None) is None]
        idle_since = {connection: idle_since.get(connection, now) for connection in idle}
        for connection, start in idle_since.items():
            if now - start > HEAD_SECONDS:
                connection.force_close()
                transport: Optional[asyncio.Transport] = getattr(connection, "transport", None)
                if transport is not None:
                    transport.close()
        for stream in list(front_end.streams):
            stalled = stream.write_started is not None and now - stream.write_started > STALL_SECONDS
            if stalled and stream.transport is not None:
                stream.transport.abort()
