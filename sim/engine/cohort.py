"""The decoding requests of a server. One decode step of all of them is O(1).

How it works. Every member generates one token per step, so nothing is stored per member and step: a member's counters
are its own at joining plus the steps since. Kept besides: the sum of contexts, a heap of the steps at which members
finish, and the number of members at each position inside their last block (`phases`).

Why it is exact. A member whose cached tokens are c after t steps needs a new block in the step at which (c - t) + steps
is a multiple of the block size. c - t does not change while it decodes, so one count per residue gives the blocks of
any later step. Members with reserved blocks never need one and are not counted.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Optional

from servesim.core import FOREVER, Request


class Cohort:
    """The decoding requests of one server."""

    __slots__ = ("_ends", "phases", "_reserved", "block", "busy", "context", "fresh", "last", "next_end",
                 "size", "ticks")  # fmt: skip

    def __init__(self, block: int) -> None:
        self.block = block  # tokens a block
        self.ticks = 0  # decodes of all members so far
        self.size = 0
        self.context = 0  # sum of the members' cached tokens
        self.busy = 0.0  # seconds of steps in which they decoded
        self.last: Optional[float] = None  # when the last tick ended
        self.fresh: list[Request] = []  # joined since that tick
        self.next_end = FOREVER  # the tick at which a member ends, none before; a member that left may still count
        self._ends: list[tuple[int, int, Request]] = []
        self.phases = [0] * block  # members by (cached - ticks) modulo block
        self._reserved: dict[Request, int] = {}  # members that own more blocks than their tokens need, and how many

    def join(self, request: Request) -> None:
        """Take in a request whose prompt is complete."""
        cached, ticks, block = request._cached, self.ticks, self.block
        left = request.end - request._written
        if request.fails is not None:
            left = min(left, request.fails - request._written)
        request._cohort = self
        request._joined = ticks
        request._busy = self.busy
        request._due = due = ticks + (left if left > 1 else 1)
        self.size += 1
        self.context += cached
        heappush(self._ends, (due, request.serial, request))
        if due < self.next_end:
            self.next_end = due
        if request._held * block - cached < block:
            self.phases[(cached - ticks) % block] += 1
        else:
            self._reserved[request] = request._held
            assert request._held * block >= cached + left, "a reservation lasts to the end"
        self.fresh.append(request)

    def leave(self, request: Request) -> None:
        """Let go of a member; its counters are its own again."""
        ticks = self.ticks - request._joined
        request._written += ticks
        request._cached = cached = request._cached + ticks
        request.decoding += self.busy - request._busy
        request._cohort = None
        self.size -= 1
        self.context -= cached
        if ticks:
            request.last_token = self.last
        elif request in self.fresh:
            self.fresh.remove(request)
        if self._reserved and request in self._reserved:
            request._held = self._reserved.pop(request)
        else:
            request._held = -(-cached // self.block)
            self.phases[(cached - self.ticks) % self.block] -= 1

    def blocks(self, request: Request) -> int:
        """Device blocks a member holds."""
        if self._reserved and request in self._reserved:
            return self._reserved[request]
        return -(-(request._cached + self.ticks - request._joined) // self.block)

    def need(self, ahead: int = 0) -> int:
        """Blocks that the next tick takes, or the one so many ticks after it."""
        return self.phases[-(self.ticks + ahead) % self.block]

    def tick(self, count: int, end: float, busy: float) -> list[Request]:
        """Every member has written `count` tokens, the last at `end`, in so many seconds of steps.

        Return the members that end with that, let go already.
        """
        self.ticks += count
        self.context += self.size * count
        self.busy += busy
        self.last = end
        if self.fresh:
            self.fresh.clear()
        over: list[Request] = []
        ends = self._ends
        while self.next_end <= self.ticks:
            due, _, request = heappop(ends)
            if request._cohort is self and request._due == due:  # it neither left early nor came back with another end
                self.leave(request)
                over.append(request)
            self.next_end = ends[0][0] if ends else FOREVER
        return over
