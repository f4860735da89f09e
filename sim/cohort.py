"""The requests that decode together: a decode of them all costs O(1), whatever their number.

Each member writes one token a tick, so nobody has to be touched: a member's counters are its own at joining
plus the ticks since. Kept beside: the sum of contexts, a heap of ends keyed by the tick they fall on, and how
many members stand at each position inside their last block, which says how many blocks the next tick takes.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Optional

from .core import FOREVER, Request


class Cohort:
    """The decoding requests of one server."""

    __slots__ = ("_ends", "phases", "_reserved", "block", "busy", "context", "fresh", "last", "size", "ticks")

    def __init__(self, block: int) -> None:
        self.block = block  # tokens a block
        self.ticks = 0  # decodes of all members so far
        self.size = 0
        self.context = 0  # sum of the members' cached tokens
        self.busy = 0.0  # seconds of steps in which they decoded
        self.last: Optional[float] = None  # when the last tick ended
        self.fresh: list[Request] = []  # joined since that tick
        self._ends: list[tuple[int, int, Request]] = []
        self.phases = [0] * block  # members by (cached - ticks) modulo block
        self._reserved: dict[Request, int] = {}  # members that own more blocks than their tokens need, and how many

    def join(self, request: Request) -> None:
        """Take in a request whose prompt is complete."""
        cached = request._cached
        request._cohort = self
        request._joined = self.ticks
        request._busy = self.busy
        last = request.end if request.fails is None else min(request.end, request.fails)
        request._due = self.ticks + max(1, last - request._written)
        self.size += 1
        self.context += cached
        heappush(self._ends, (request._due, request.serial, request))
        if request._held * self.block > cached and request._held > -(-cached // self.block):
            self._reserved[request] = request._held
            assert request._held * self.block >= cached + last - request._written, "a reservation lasts to the end"
        else:
            self.phases[(cached - self.ticks) % self.block] += 1
        self.fresh.append(request)

    def leave(self, request: Request) -> None:
        """Let go of a member; its counters are its own again."""
        ticks = self.ticks - request._joined
        request._held = self.blocks(request)
        request._written += ticks
        request._cached = cached = request._cached + ticks
        request.decoding += self.busy - request._busy
        if ticks:
            request.last_token = self.last
        elif request in self.fresh:
            self.fresh.remove(request)
        if not self._reserved or self._reserved.pop(request, None) is None:
            self.phases[(cached - self.ticks) % self.block] -= 1
        self.size -= 1
        self.context -= cached
        request._cohort = None

    def blocks(self, request: Request) -> int:
        """Device blocks a member holds."""
        if self._reserved and request in self._reserved:
            return self._reserved[request]
        return -(-(request._cached + self.ticks - request._joined) // self.block)

    def need(self, ahead: int = 0) -> int:
        """Blocks that the next tick takes, or the one so many ticks after it."""
        return self.phases[-(self.ticks + ahead) % self.block]

    def first_end(self) -> int:
        """Ticks until the first member ends."""
        ends = self._ends
        while ends and (ends[0][2]._cohort is not self or ends[0][2]._due != ends[0][0]):
            heappop(ends)  # it left early, or came back with another end
        return ends[0][0] - self.ticks if ends else FOREVER

    def tick(self, count: int, end: float, busy: float) -> None:
        """Every member has written `count` tokens, the last at `end`, in so many seconds of steps."""
        self.ticks += count
        self.context += self.size * count
        self.busy += busy
        self.last = end
        if self.fresh:
            self.fresh.clear()

    def ended(self) -> list[Request]:
        """Return the members that end with this tick, and let them go."""
        over: list[Request] = []
        ends, ticks = self._ends, self.ticks
        while ends and ends[0][0] <= ticks:
            due, _, request = heappop(ends)
            if request._cohort is self and request._due == due:
                self.leave(request)
                over.append(request)
        return over
