"""Shared by both HTTP interfaces: the key of the server, limits on body size, silent clients and slow readers.

A slow, disconnected or invalid client loses its own response. Other clients are not affected.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable, Optional, Protocol, TypeVar

from aiohttp import web
from servesim.calibrate.live.setup import DeviceSession
from servesim.config.scenario import Scenario
from servesim.config.user_code import is_user_class
from servesim.web import BAD_BODY, Refused

from .engine_client import End, EngineClient, GroupEvent, Job, RequestGroup, TooManyRequests
from .tokenizers import CannotEncode, Tokenizer, WordTokenizer

MAX_BODY_BYTES = 1 << 20
BODY_SECONDS = 30.0  # maximum time to send the body
STALL_SECONDS = 60.0  # maximum time of one write to a client that does not read
HEAD_SECONDS = 30.0  # maximum time to send a request head on a new or idle connection
PING_INTERVAL_S = 600.0  # a stream without tokens gets a comment after this time
PING = b": You can't see this ping\n\n"
EVENT_STREAM = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
CHECK_INTERVAL_S = 2.0  # between two checks for idle connections
OPEN_PATHS = ("/health", "/ping")  # probes of a cluster have no key
T = TypeVar("T")


def refused(status: int, message: str) -> Refused:
    """Return a rejection that clients of both interfaces understand."""
    kind = "invalid_request_error" if status < 500 else "server_busy"
    return Refused(status, {"detail": message, "error": {"message": message, "type": kind}})


@dataclass(frozen=True)
class ServerOptions:
    """What the server shows to its clients."""

    max_open: int = 4096  # open requests
    api_key: Optional[str] = None
    names: tuple[str, ...] = ()  # of the model; default: its own name
    usual_output: int = 256  # tokens of an answer if the client sets no limit
    tokenizer: Optional[Tokenizer] = None  # of prompts; default: one word is one token


class HttpFrontEnd:
    """What the handlers of both interfaces share: the engine client, the served model, and the open streams."""

    def __init__(
        self, engine: EngineClient, session: DeviceSession, scenario: Scenario, options: ServerOptions
    ) -> None:
        model, policy = session.model, scenario.make_policy()
        slots = getattr(policy, "decode_batch", None)  # of llm-serving
        self.engine = engine
        self.model = model.name
        self.names = options.names or (model.name,)  # for clients; responses have the first one
        self.vocab = model.vocab
        self.tokenizer = options.tokenizer or WordTokenizer(model.vocab)  # of prompts
        self.context = scenario.engine.max_model_len or model.context  # maximum prompt + output tokens
        # That the policy accepts: llm-serving rejects prompt + limit = context.
        self.max_length = self.context if slots is None else self.context - 1
        self.capacity = engine.state["total_blocks"] * scenario.engine.block_size  # tokens in all KV blocks
        self.usual_output = options.usual_output  # tokens of an answer without a limit
        self.batch: int = getattr(policy, "max_num_seqs", 0) if slots is None else slots  # maximum running requests
        # Whether the policy sorts requests by their priority. One of the user may read it: that is not known.
        sorts = "priority" in (policy.order, getattr(policy, "policy", None))
        self.has_priorities = sorts or is_user_class(type(policy))
        self.device, self.dtype = str(session.about["device"]), str(session.about["dtype"])
        self.streams: set[Stream] = set()  # open responses
        self.busy: set[web.RequestHandler] = set()  # connections with a request
        self.idle_since: dict[web.RequestHandler, float] = {}  # the other connections

    async def json_body(self, request: web.Request, invalid: Callable[[str, int], Refused]) -> dict[str, Any]:
        """Return the body of a request, which must be a JSON object."""
        try:
            raw = await asyncio.wait_for(request.read(), BODY_SECONDS)
        except asyncio.TimeoutError:
            raise refused(408, f"the body did not arrive within {BODY_SECONDS:g} s") from None
        except BAD_BODY as error:
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
        """Return what a function returns that encodes prompts. A text that has no tokens is a 400."""
        try:
            return await asyncio.to_thread(read) if self.tokenizer.in_thread else read()
        except CannotEncode as error:
            raise refused(400, str(error)) from None

    @contextlib.asynccontextmanager
    async def requests(self, jobs: Sequence[Job]) -> AsyncIterator[RequestGroup]:
        """Submit requests: all of them, or none with a 503. Abort those that have not ended when the response does."""
        if len(jobs) > self.engine.max_open:
            raise refused(400, f"expected at most {self.engine.max_open} answers in a response, got {len(jobs)}")
        try:
            group = self.engine.submit([job._replace(tokens=self._model_ids(job.tokens)) for job in jobs])
        except TooManyRequests as error:
            raise refused(503, str(error)) from None
        try:
            yield group
        finally:
            for handle in group.handles:
                if not handle.finished:
                    self.engine.abort(handle)

    def _model_ids(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return ids that the model has. Its vocabulary may be smaller than that of the tokenizer."""
        if self.tokenizer.size <= self.vocab:
            return tokens
        return [token if token < self.vocab else token % (self.vocab - 1) + 1 for token in tokens]

    async def stream(
        self, request: web.Request, headers: Mapping[str, str], group: RequestGroup, lines: StreamLines,
        events: Sequence[GroupEvent] = (),
    ) -> web.StreamResponse:  # fmt: skip
        """Stream the answers of a group, from which some events were read before.

        `close_idle_connections` aborts the response if its client stops reading.
        """
        stream = Stream(request, headers)
        self.streams.add(stream)
        try:
            await stream.response.prepare(request)
            await stream.send(group, lines, events)
        finally:
            self.streams.discard(stream)
        return stream.response


class StreamLines(Protocol):
    """What an interface writes into a stream."""

    def token_line(self, index: int, token: int) -> bytes: ...  # of the next token of a request
    def last_lines(self) -> bytes: ...  # when every answer is complete
    def error_lines(self, end: End) -> bytes: ...  # after a request that was rejected or failed


class Stream:
    """A streamed response."""

    def __init__(self, request: web.Request, headers: Mapping[str, str]) -> None:
        self.response = web.StreamResponse(headers=headers)
        self.transport = request.transport
        self.write_started: Optional[float] = None  # None while no write is pending

    async def send(self, group: RequestGroup, lines: StreamLines, events: Optional[Sequence[GroupEvent]]) -> None:
        """Send the tokens as they arrive, then the end. Ping the client while there are none."""
        left = len(group.handles)
        while True:
            data = PING if events is None else b""
            for index, event in events or ():
                if not isinstance(event, End):
                    data += lines.token_line(index, event)
                elif event.outcome == "finished":
                    left -= 1
                else:
                    await self.write(data + lines.error_lines(event))
                    return
            if not left:
                await self.write(data + lines.last_lines())
                return
            if data:
                await self.write(data)
            events = await group.next(PING_INTERVAL_S)

    async def write(self, data: bytes) -> None:
        """Send a chunk of the response."""
        self.write_started = time.monotonic()
        await self.response.write(data)
        self.write_started = None


def is_local(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def require_key(key: str) -> Any:
    """Return the middleware that rejects requests without the key."""

    @web.middleware
    async def check(request: web.Request, handler: Any) -> web.StreamResponse:
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        matches = hmac.compare_digest(given.strip().encode(errors="surrogateescape"), key.encode())
        if request.path not in OPEN_PATHS and not (matches and scheme.lower() == "bearer"):
            message = "expected the header Authorization: Bearer KEY with the key of this server"
            error = {"message": message, "type": "invalid_request_error", "param": None, "code": "invalid_api_key"}
            raise Refused(401, {"detail": message, "error": error})
        response: web.StreamResponse = await handler(request)
        return response

    return check


def mark_busy(front_end: HttpFrontEnd) -> Any:
    """Return the middleware that records the connections with a request."""

    @web.middleware
    async def mark(request: web.Request, handler: Any) -> web.StreamResponse:
        front_end.busy.add(request.protocol)
        front_end.idle_since.pop(request.protocol, None)
        try:
            response: web.StreamResponse = await handler(request)
            return response
        finally:
            front_end.busy.discard(request.protocol)

    return mark


async def close_idle_connections(runner: web.AppRunner, front_end: HttpFrontEnd) -> None:
    """Close connections whose client sends or reads nothing for too long: aiohttp would wait forever."""
    idle_since = front_end.idle_since
    while True:
        await asyncio.sleep(CHECK_INTERVAL_S)
        now = time.monotonic()
        idle = set(() if runner.server is None else runner.server.connections) - front_end.busy
        for connection in idle_since.keys() - idle:  # closed by its client
            del idle_since[connection]
        for connection in idle:
            if now - idle_since.setdefault(connection, now) > HEAD_SECONDS:
                connection.force_close()
        for stream in list(front_end.streams):
            stalled = stream.write_started is not None and now - stream.write_started > STALL_SECONDS
            if stalled and stream.transport is not None:
                stream.transport.abort()
