"""One connection of an HTTP client: half-closed clients get their answer, malformed requests one line in the log."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import Any, Callable, Optional

from aiohttp import HttpVersion11, web
from aiohttp.http_exceptions import HttpProcessingError

PROBE_SECONDS = 0.5  # from the end of the client's input to the first probe; the time doubles with every probe
MAX_LOG_CHARACTERS = 200  # of the reason of a malformed request


class ClientConnection(web.RequestHandler):
    """A connection that stays open for the answer when its client has finished sending.

    The same happens when a client goes away: only a write shows the difference, because its host then resets the
    connection. So a probe is written now and then until the answer is complete.
    """

    __slots__ = ("_probes", "probe")

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._probes: Optional[asyncio.Task[None]] = None
        self.probe: Callable[[], Awaitable[None]] = self._send_continue  # a stream sets its own

    def eof_received(self) -> Optional[bool]:  # type: ignore[override]
        """Return True if the client still waits for an answer: the transport stays open for it."""
        if not self._messages and self._waiter is not None:  # waits for a request
            return None
        request = self._current_request
        payload = self._messages[-1][1] if self._messages else None if request is None else request.content
        if payload is not None and not payload.is_eof():  # the rest of the body will not come
            return None
        if not self._messages:
            self.close()  # after the current answer; otherwise it would wait for another request
        self._probes = asyncio.get_running_loop().create_task(self._send_probes())
        return True

    def connection_lost(self, exc: Optional[BaseException]) -> None:
        if self._probes is not None:
            self._probes.cancel()
        super().connection_lost(exc)

    async def _send_probes(self) -> None:
        delay = PROBE_SECONDS
        while self.transport is not None and not self.transport.is_closing():
            await asyncio.sleep(delay)
            delay *= 2
            with contextlib.suppress(ConnectionError):
                await self.probe()

    async def _send_continue(self) -> None:
        """Write an interim response, which HTTP/1.1 allows before every answer."""
        request = self._current_request
        if request is not None and request.version >= HttpVersion11 and self.transport is not None:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def log_exception(self, *args: Any, **options: Any) -> None:
        """Log a fault of the server with its traceback, but a malformed request in one line."""
        error = options.get("exc_info")
        if not isinstance(error, (HttpProcessingError, web.RequestPayloadError)):
            super().log_exception(*args, **options)
            return
        reason = " ".join(str(getattr(error, "message", error)).split())[:MAX_LOG_CHARACTERS]
        reason = "".join(character if character.isprintable() else "?" for character in reason)
        peer = None if self.transport is None else self.transport.get_extra_info("peername")
        self.logger.warning("malformed request from %s: %s", peer[0] if peer else "a client", reason)
