"""What the HTTP servers of `sim explore` and `sim serve` share: sockets, signals, one-line logs, rejections as JSON."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from servesim.core import BadInput

BACKLOG = 4096  # connections that wait to be accepted
MAX_LOG_CHARACTERS = 200  # of the reason of a malformed request
BAD_BODY = (HttpProcessingError, web.RequestPayloadError)  # what reading a malformed body raises


class Refused(Exception):
    """Reject a request with this status and body."""

    def __init__(self, status: int, body: Any) -> None:
        self.status = status
        self.body = body
        super().__init__(f"{status} {body}")


@web.middleware
async def json_errors(request: web.Request, handler: Any) -> web.StreamResponse:
    """Return rejections and errors as JSON."""
    try:
        response: web.StreamResponse = await handler(request)
        return response
    except Refused as refused:
        return web.json_response(refused.body, status=refused.status)
    except BadInput as bad:
        return web.json_response({"detail": str(bad)}, status=400)
    except ConnectionError:  # the client disconnected: not an error of the server
        return web.Response(status=400)
    except web.HTTPException as error:
        headers = {key: value for key, value in error.headers.items() if key.lower() == "allow"}
        return web.json_response({"detail": error.reason}, status=error.status, headers=headers)


@contextlib.contextmanager
def bound(host: str, port: int) -> Iterator[list[socket.socket]]:
    """Bind a socket to every address of a host until the end; port 0 chooses a free one.

    A port in use is known before the model is loaded. Clients cannot connect until the server listens.
    """
    sockets: list[socket.socket] = []
    with contextlib.ExitStack() as stack, cannot_listen(host, port):
        addresses = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(addresses):
            each = stack.enter_context(socket.socket(family, kind, protocol))
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                each.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # an IPv4 address has its own socket
            each.bind((address[0], sockets[0].getsockname()[1] if sockets else port))
            sockets.append(each)
        stack = stack.pop_all()
    with stack:
        yield sockets


@contextlib.contextmanager
def cannot_listen(host: str, port: int) -> Iterator[None]:
    """Report an error of the network in one line."""
    try:
        yield
    except (OSError, ValueError) as error:  # a name that no DNS can have is a ValueError
        number = getattr(error, "errno", None) or 0
        reason = os.strerror(number) if number > 0 else getattr(error, "strerror", None) or str(error)
        raise BadInput(f"--port {port}: cannot listen on {host or 'this machine'}: {reason}") from None


@contextlib.asynccontextmanager
async def listening(
    app: web.Application, sockets: Sequence[socket.socket], **options: Any
) -> AsyncIterator[web.AppRunner]:
    """Serve an application on bound sockets until the block ends. A handler is cancelled if its client disconnects."""
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, logger=request_logger(), **options)
    await runner.setup()
    try:
        with cannot_listen(*sockets[0].getsockname()[:2]):
            for each in sockets:
                await web.SockSite(runner, each, backlog=BACKLOG).start()
        yield runner
    finally:
        await runner.cleanup()


def stop_event() -> tuple[asyncio.Event, Callable[[], None]]:
    """Return an event that SIGINT and SIGTERM set, and a function that sets it from any thread."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):  # not in the main thread
            loop.add_signal_handler(number, stop.set)

    def set_event() -> None:
        with contextlib.suppress(RuntimeError):  # the server has ended by itself
            loop.call_soon_threadsafe(stop.set)

    return stop, set_event


def request_logger() -> logging.Logger:
    """Return a logger for aiohttp: it logs a malformed request in one line, without a traceback."""
    logger = logging.getLogger(__name__)
    logger.addFilter(shorten)
    return logger


def shorten(record: logging.LogRecord) -> bool:
    """Replace the traceback of a malformed request with its reason."""
    error = None if not record.exc_info else record.exc_info[1]
    if isinstance(error, BAD_BODY):
        reason = " ".join(str(getattr(error, "message", error)).split())[:MAX_LOG_CHARACTERS]
        reason = "".join(character if character.isprintable() else "?" for character in reason)
        record.msg, record.args, record.exc_info = "malformed request: %s", (reason,), None
    return True
