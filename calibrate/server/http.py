"""What both interfaces of the server share: limits on bodies, silence and stalls, so that one client costs no other."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Callable, Optional, Union

from aiohttp import web

from .engine_client import Busy, Counter, End, Ticket

BODY = 1 << 20  # bytes a request may have
BODY_SECONDS = 30.0  # to send them
STALL_SECONDS = 60.0  # a client may leave what was written to it unread
HEAD_SECONDS = 30.0  # to send the head of a request on a new or kept connection
PING = 600.0  # seconds without a token after which a stream hears a comment
WATCH = 2.0  # seconds between two looks at silent connections


class Refused(Exception):
    """A request is answered with this status and body."""

    def __init__(self, status: int, body: Any) -> None:
        self.status = status
        self.body = body
        super().__init__(f"{status} {body}")


@dataclass(frozen=True)
class Front:
    """The desk's counter and what is served there."""

    counter: Counter
    model: str
    vocab: int
    context: int  # longest prompt + answer
    batch: int  # requests that run at once
    device: str
    dtype: str
    streams: set[Stream] = field(default_factory=set)  # answers on their way

    async def json_body(self, request: web.Request, invalid: Callable[[str, int], Refused]) -> dict[str, Any]:
        """Return a request's body, a mapping."""
        try:
            raw = await asyncio.wait_for(request.read(), BODY_SECONDS)
        except asyncio.TimeoutError:
            raise Refused(408, {"detail": f"the body did not come within {BODY_SECONDS:g} s"}) from None
        try:
            body = json.loads(raw)
        except json.JSONDecodeError as error:
            raise invalid(error.msg, error.pos) from None
        except (UnicodeDecodeError, RecursionError) as error:
            raise invalid(type(error).__name__, 0) from None
        if not isinstance(body, dict):
            raise invalid("expected an object", 0)
        return body

    def post(self, tokens: Sequence[int], limit: int) -> Ticket:
        """Hand a request over, or refuse it while too many are open."""
        try:
            return self.counter.post(tokens, max(1, min(limit, self.context - len(tokens))))
        except Busy as busy:
            raise Refused(503, {"detail": str(busy), "error": {"message": str(busy), "type": "server_busy"}}) from None

    @contextlib.asynccontextmanager
    async def following(self, ticket: Optional[Ticket]) -> AsyncIterator[None]:
        """Give the ticket back however the answer ends."""
        try:
            yield
        finally:
            if ticket is not None and not ticket.over:
                self.counter.drop(ticket)

    @contextlib.asynccontextmanager
    async def stream(self, request: web.Request, headers: Mapping[str, str]) -> AsyncIterator[Stream]:
        """Answer bit by bit, watched until the end."""
        stream = Stream(request, headers)
        self.streams.add(stream)
        try:
            await stream.response.prepare(request)
            yield stream
        finally:
            self.streams.discard(stream)


class Stream:
    """An answer on its way to a client, which has to keep reading it."""

    def __init__(self, request: web.Request, headers: Mapping[str, str]) -> None:
        self.response = web.StreamResponse(headers=headers)
        self.transport = request.transport
        self.since: Optional[float] = None  # a write that has not ended yet was begun

    async def news(self, ticket: Ticket) -> list[Union[int, End]]:
        """Return what came, pinging the client while nothing does."""
        while True:
            news = await ticket.next(PING)
            if news is not None:
                return news
            await self.write(b": You can't see this ping\n\n")

    async def write(self, data: bytes) -> None:
        """Send a part of the answer."""
        self.since = time.monotonic()
        await self.response.write(data)
        self.since = None


async def answered(ticket: Ticket) -> tuple[list[int], End]:
    """Return a whole answer."""
    tokens: list[int] = []
    while True:
        for news in await ticket.next() or ():
            if isinstance(news, End):
                return tokens, news
            tokens.append(news)


@web.middleware
async def worded(request: web.Request, handler: Any) -> web.StreamResponse:
    """Word refusals and errors as JSON."""
    try:
        response: web.StreamResponse = await handler(request)
        return response
    except Refused as refused:
        return web.json_response(refused.body, status=refused.status)
    except ConnectionError:  # nobody is there to be told, and nothing is wrong here
        return web.Response(status=400)
    except web.HTTPException as error:
        headers = {key: value for key, value in error.headers.items() if key.lower() == "allow"}
        return web.json_response({"detail": error.reason}, status=error.status, headers=headers)


async def watch(runner: web.AppRunner, front: Front) -> None:
    """Close connections whose client says nothing, or reads nothing, for too long: aiohttp would wait forever."""
    silent: dict[Any, float] = {}  # connections, and since when
    while True:
        await asyncio.sleep(WATCH)
        now = time.monotonic()
        connections = [] if runner.server is None else runner.server.connections
        idle = [one for one in connections if getattr(one, "_current_request", None) is None]
        silent = {one: silent.get(one, now) for one in idle}
        for one, since in silent.items():
            if now - since > HEAD_SECONDS:
                one.force_close()
                transport: Optional[asyncio.Transport] = getattr(one, "transport", None)
                if transport is not None:
                    transport.close()
        for stream in list(front.streams):
            stalled = stream.since is not None and now - stream.since > STALL_SECONDS
            if stalled and stream.transport is not None:
                stream.transport.abort()
