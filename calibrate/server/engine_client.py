"""HTTP-server side of the engine's socket: sends requests and distributes their tokens."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Optional, Union

from .metrics import RequestTimes, ServerMetrics


class End(NamedTuple):
    """The last event of a request."""

    outcome: str
    reason: Optional[str] = None
    queued: Optional[float] = None  # seconds from the arrival to the first model call; None without a call


class Job(NamedTuple):
    """A request for the engine."""

    tokens: Sequence[int]  # of the prompt
    limit: int  # tokens of the answer
    finish_reason: str  # at the limit
    priority: int = 0


EngineEvent = Union[int, End]  # a token id, or the end
GroupEvent = tuple[int, EngineEvent]  # of a group, with the index of its request


class TooManyRequests(RuntimeError):
    """The server accepts no further request now."""


class RequestHandle:
    """A request of the engine: its tokens as they arrive, then an End."""

    def __init__(self, id: int, index: int, job: Job, events: asyncio.Queue[GroupEvent]) -> None:
        self.id = id
        self.index = index  # in its group
        self.prompt = len(job.tokens)
        self.limit = job.limit
        self.finish_reason = job.finish_reason
        self.finished = False
        self.times = RequestTimes(self.prompt)
        self._events = events

    def add(self, event: EngineEvent) -> None:
        self.finished = isinstance(event, End)
        self._events.put_nowait((self.index, event))


class RequestGroup:
    """The engine requests of one HTTP request: several prompts, or several answers to one."""

    def __init__(self, handles: Sequence[RequestHandle], events: asyncio.Queue[GroupEvent]) -> None:
        self.handles = handles
        self._events = events

    async def next(self, timeout: Optional[float] = None) -> Optional[list[GroupEvent]]:
        """Return the events since the last call, each with the index of its request; wait for at least one.

        Return None after `timeout` seconds without one.
        """
        try:
            events = [await asyncio.wait_for(self._events.get(), timeout)]
        except asyncio.TimeoutError:
            return None
        while not self._events.empty():
            events.append(self._events.get_nowait())
        return events

    async def collect(self) -> list[tuple[list[int], End]]:
        """Wait for the end of all requests; return the tokens and the end of each."""
        tokens: list[list[int]] = [[] for _ in self.handles]
        ends: dict[int, End] = {}
        while len(ends) < len(tokens):
            for index, event in await self.next() or ():
                if isinstance(event, End):
                    ends[index] = event
                else:
                    tokens[index].append(event)
        return [(tokens[index], ends[index]) for index in range(len(tokens))]


class EngineClient:
    """Submits requests to the engine and passes its tokens to their handles."""

    def __init__(self, max_open: int, metrics: ServerMetrics) -> None:
        self.max_open = max_open
        self.metrics = metrics
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
        now = time.monotonic()
        for id, token in message["tokens"]:
            handle = self.handles.get(id)
            if handle is not None:
                handle.add(token)
                self.metrics.on_token(handle.times, now)
        for id, *end in message["finished"]:
            if id in self.handles:
                self._finish(self.handles[id], End(*end))

    def _finish(self, handle: RequestHandle, end: End) -> None:
        self.served += end.outcome == "finished"
        self.handles.pop(handle.id, None)
        handle.add(end)
        reason = handle.finish_reason if end.outcome == "finished" else "error"
        self.metrics.on_end(handle.times, reason, end.queued)

    def submit(self, jobs: Sequence[Job]) -> RequestGroup:
        """Send requests to the engine. Raises TooManyRequests."""
        if len(self.handles) + len(jobs) > self.max_open:
            raise TooManyRequests(f"{len(self.handles)} requests are open already; the maximum is {self.max_open}")
        if self.closed or self._writer is None:
            raise TooManyRequests("the engine is not running")
        events, handles = asyncio.Queue[GroupEvent](), []
        for index, job in enumerate(jobs):
            self._last_id += 1
            handles.append(RequestHandle(self._last_id, index, job, events))
            self.handles[self._last_id] = handles[-1]
            self._send({"submit": [self._last_id, list(job.tokens), job.limit, job.priority]})
        return RequestGroup(handles, events)

    def abort(self, handle: RequestHandle) -> None:
        """Abort a request whose client disconnected."""
        if self.handles.pop(handle.id, None) is not None and not self.closed:
            self._send({"abort": handle.id})
            self.metrics.on_end(handle.times, "abort")

    def stop(self) -> None:
        if not self.closed and self._writer is not None:
            self._send({"stop": True})

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._writer is not None
        self._writer.write((json.dumps(message) + "\n").encode())
