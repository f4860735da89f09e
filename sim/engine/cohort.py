"""The decoding requests of a server. One decode step of all of them is O(1).

How it works. Every member generates one token per step. So its counters are those at joining plus the steps since then.
The cohort keeps the sum of contexts and a heap of finish steps. `block_offsets[i]` is the number of members with
(cached - steps) % block_size == i.

Why it is exact. Let a member have c cached tokens when the cohort has run t steps. It needs a new block in the step at
which (c - t) + steps is a multiple of block_size. c - t does not change while it decodes. So one count per residue
gives the new blocks of any later step. Members with reserved blocks never need a new one and are not counted.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Optional

from servesim.core import FOREVER, Request


class Cohort:
    """The decoding requests of one server."""

    __slots__ = ("_finishes", "_reserved", "block_offsets", "block_size", "busy", "context", "last_end", "new_members",
                 "next_finish", "size", "steps")  # fmt: skip

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size  # tokens per block
        self.steps = 0  # decode steps of all members so far
        self.size = 0
        self.context = 0  # sum of the members' cached tokens
        self.busy = 0.0  # seconds of steps in which they decoded
        self.last_end: Optional[float] = None  # when the last step ended
        self.new_members: list[Request] = []  # joined since that step
        self.next_finish = FOREVER  # a lower bound of the next finish step: that member may have left
        self._finishes: list[tuple[int, int, Request]] = []
        self.block_offsets = [0] * block_size  # members by (cached - steps) modulo block_size
        self._reserved: dict[Request, int] = {}  # members that hold more blocks than their tokens need, and how many

    def join(self, request: Request) -> None:
        """Add a request whose prompt is complete."""
        cached, steps, block_size = request._cached, self.steps, self.block_size
        remaining = request.stop_at - request._written
        if request.fails_at_token is not None:
            remaining = min(remaining, request.fails_at_token - request._written)
        request._cohort = self
        request._joined_step = steps
        request._joined_busy_s = self.busy
        request._finish_step = finish = steps + (remaining if remaining > 1 else 1)
        self.size += 1
        self.context += cached
        heappush(self._finishes, (finish, request.serial, request))
        if finish < self.next_finish:
            self.next_finish = finish
        if request._blocks * block_size - cached < block_size:
            self.block_offsets[(cached - steps) % block_size] += 1
        else:
            self._reserved[request] = request._blocks
            assert request._blocks * block_size >= cached + remaining, f"{request}: Chunk.blocks is too small"
        self.new_members.append(request)

    def leave(self, request: Request) -> None:
        """Remove a member and store its counters in the request."""
        steps = self.steps - request._joined_step
        request._written += steps
        request._cached = cached = request._cached + steps
        request.decoding += self.busy - request._joined_busy_s
        request._cohort = None
        self.size -= 1
        self.context -= cached
        if steps:
            request.last_token = self.last_end
        elif request in self.new_members:
            self.new_members.remove(request)
        if self._reserved and request in self._reserved:
            request._blocks = self._reserved.pop(request)
        else:
            request._blocks = -(-cached // self.block_size)
            self.block_offsets[(cached - self.steps) % self.block_size] -= 1

    def blocks(self, request: Request) -> int:
        """Return the device blocks that a member holds."""
        if self._reserved and request in self._reserved:
            return self._reserved[request]
        return -(-(request._cached + self.steps - request._joined_step) // self.block_size)

    def blocks_needed(self, ahead: int = 0) -> int:
        """Return the new blocks of the next step, or of the step `ahead` steps after it."""
        return self.block_offsets[-(self.steps + ahead) % self.block_size]

    def advance(self, steps: int, end: float, busy: float) -> list[Request]:
        """Count `steps` decode steps of all members. The last one ended at `end`, and they took `busy` seconds.

        Return the members that finish. They have left the cohort.
        """
        self.steps += steps
        self.context += self.size * steps
        self.busy += busy
        self.last_end = end
        if self.new_members:
            self.new_members.clear()
        finished: list[Request] = []
        heap = self._finishes
        while self.next_finish <= self.steps:
            step, _, request = heappop(heap)
            if request._cohort is self and request._finish_step == step:  # otherwise it left, or joined again later
                self.leave(request)
                finished.append(request)
            self.next_finish = heap[0][0] if heap else FOREVER
        return finished
