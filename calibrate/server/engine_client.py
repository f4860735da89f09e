"""HTTP-server side of the engine's socket: sends requests and distributes tokens, one handle per request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Optional, Union


class End(NamedTuple):
    """The last event of a request."""

    outcome: str
    reason: Optional[str] = None


EngineEvent = Union[int, End]  # a token id, or the end


class TooManyRequests(RuntimeError):
    """The server accepts no further request now."""


class RequestHandle:
    """A submitted request: its tokens as they arrive, then an End."""

    def __init__(self, id: int, prompt: int, limit: int) -> None:
        self.id = id
        self.prompt = prompt
        self.limit = limit
        self.finished = False
        self._events: list[EngineEvent] = []
        self._arrived = asyncio.Event()

    async def next(self, timeout: Optional[float] = None) -> Optional[list[EngineEvent]]:
        """Return the events since the last call; wait for at least one. None after `timeout` seconds."""
        if not self._events:
            self._arrived.clear()
            try:
                await (self._arrived.wait() if timeout is None else asyncio.wait_for(self._arrived.wait(), timeout))
            except asyncio.TimeoutError:
                return None
        events, self._events = self._events, []
        return events

    def add(self, event: EngineEvent) -> None:
        self.finished = isinstance(event, End)
        self._events.append(event)
        self._arrived.set()


class EngineClient:
    """Submits requests to the engine and passes its tokens to their handles."""

    def __init__(self, max_open: int) -> None:
        self.max_open = max_open
        self.handles: dict[int, RequestHandle] = {}  # open requests by id
        self.state: Mapping[str, Any] = {}
        self.served = 0
        self.closed = False
        self._last_id = 0
        self._writer: Optional[asyncio.StreamWriter] = None
        self.ready = asyncio.Event()
        self.disconnected = asyncio.Event()

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Process messages of the engine until it disconnects."""
        self._writer = writer
        try:
            async for line in reader:
                self._on_message(json.loads(line))
        except (OSError, ValueError, asyncio.IncompleteReadError):
            pass
        finally:
            self.closed = True
            for handle in list(self.handles.values()):
                self._finish(handle, End("failed", "the engine stopped"))
            writer.close()
            self.disconnected.set()

    def _on_message(self, message: Mapping[str, Any]) -> None:
        self.state = message["state"]
        self.ready.set()  # the first message has only the state
        for id, token in message["tokens"]:
            if id in self.handles:
                self.handles[id].add(token)
        for id, outcome, reason in message["finished"]:
            if id in self.handles:
                self._finish(self.handles[id], End(outcome, reason))

    def _finish(self, handle: RequestHandle, end: End) -> None:
        self.served += end.outcome == "finished"
        self.handles.pop(handle.id, None)
        handle.add(end)

    def submit(self, tokens: Sequence[int], limit: int) -> RequestHandle:
        """Send a request to the engine. Raises TooManyRequests."""
        if len(self.handles) >= self.max_open:
            raise TooManyRequests(f"{self.max_open} requests are open already")
        if self.closed or self._writer is None:
            raise TooManyRequests("the engine is not running")
        self._last_id += 1
        handle = self.handles[self._last_id] = RequestHandle(self._last_id, len(tokens), limit)
        self._send({"submit": [handle.id, list(tokens), limit]})
        return handle

    def abort(self, handle: RequestHandle) -> None:
        """Abort a request whose client disconnected."""
        if self.handles.pop(handle.id, None) is not None and not self.closed:
            self._send({"abort": handle.id})

    def stop(self) -> None:
        if not self.closed and self._writer is not None:
            self._send({"stop": True})

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._writer is not None
        self._writer.write((json.dumps(message) + "\n").encode())
