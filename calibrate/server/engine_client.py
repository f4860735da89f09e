"""The other end of the desk's socket, inside the HTTP server: requests over, tokens back, one ticket each."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Optional, Union


class End(NamedTuple):
    """The last thing a ticket hears."""

    outcome: str
    reason: Optional[str] = None


class Busy(RuntimeError):
    """As many requests are open as may be."""


class Ticket:
    """A request that was handed over: its tokens as they come, then an End."""

    def __init__(self, id: int, prompt: int, limit: int) -> None:
        self.id = id
        self.prompt = prompt
        self.limit = limit
        self._news: list[Union[int, End]] = []
        self._bell = asyncio.Event()
        self.over = False

    async def next(self, patience: Optional[float] = None) -> Optional[list[Union[int, End]]]:
        """Return what came since the last time, waiting for something; None when nothing came for so long."""
        if not self._news:
            self._bell.clear()
            try:
                await (self._bell.wait() if patience is None else asyncio.wait_for(self._bell.wait(), patience))
            except asyncio.TimeoutError:
                return None
        news, self._news = self._news, []
        return news

    def hear(self, news: Union[int, End]) -> None:
        self.over = isinstance(news, End)
        self._news.append(news)
        self._bell.set()


class Counter:
    """Tickets on one side, the desk's socket on the other."""

    def __init__(self, most: int) -> None:
        self.most = most  # open requests
        self.tickets: dict[int, Ticket] = {}
        self.state: Mapping[str, Any] = {}
        self.served = 0
        self.closed = False
        self._serial = 0
        self._writer: Optional[asyncio.StreamWriter] = None
        self.ready = asyncio.Event()
        self.gone = asyncio.Event()

    async def attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Speak with the desk until it is gone."""
        self._writer = writer
        try:
            async for line in reader:
                self._hear(json.loads(line))
        except (OSError, ValueError, asyncio.IncompleteReadError):
            pass
        finally:
            self.closed = True
            for ticket in list(self.tickets.values()):
                self._end(ticket, End("failed", "the engine is gone"))
            writer.close()
            self.gone.set()

    def _hear(self, message: Mapping[str, Any]) -> None:
        self.state = message["state"]
        self.ready.set()  # the desk says how it stands before anything else
        for id, token in message["tokens"]:
            if id in self.tickets:
                self.tickets[id].hear(token)
        for id, outcome, reason in message["over"]:
            if id in self.tickets:
                self._end(self.tickets[id], End(outcome, reason))

    def _end(self, ticket: Ticket, end: End) -> None:
        self.served += end.outcome == "finished"
        self.tickets.pop(ticket.id, None)
        ticket.hear(end)

    def post(self, tokens: Sequence[int], limit: int) -> Ticket:
        """Hand a request over; Busy when too many are open."""
        if len(self.tickets) >= self.most:
            raise Busy(f"{self.most} requests are open already")
        if self.closed or self._writer is None:
            raise Busy("the engine is not there")
        self._serial += 1
        ticket = self.tickets[self._serial] = Ticket(self._serial, len(tokens), limit)
        self._say({"post": [ticket.id, list(tokens), limit]})
        return ticket

    def drop(self, ticket: Ticket) -> None:
        """Forget a request whose client is gone."""
        if self.tickets.pop(ticket.id, None) is not None and not self.closed:
            self._say({"drop": ticket.id})

    def stop(self) -> None:
        if not self.closed and self._writer is not None:
            self._say({"stop": True})

    def _say(self, message: Mapping[str, Any]) -> None:
        assert self._writer is not None
        self._writer.write((json.dumps(message) + "\n").encode())
