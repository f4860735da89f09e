"""The decoding requests of a server. One decode step of all of them is O(1).

How it works. Every member generates one token per step. So its counters are those at joining plus the steps since then.
The cohort keeps the sum of contexts, and the members in the order of their ends. `block_offsets[i]` is the number of
members with (cached - steps) % block_size == i.

Why it is exact. Let a member have c cached tokens when the cohort has run t steps. It needs a new block in the step at
which (c - t) + steps is a multiple of block_size. c - t does not change while it decodes. So one count per residue
gives the new blocks of any later step. Members with reserved blocks never need a new one and are not counted. For the
same reason the longest context is steps + the largest c - t: a heap has these numbers, and one that no member has any
more is removed when it is at the top. Only a cost model that needs it (`tracks_longest`) makes joining cost more.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Set as AbstractSet
from heapq import heappop, heappush
from typing import Final, Optional

from servesim.core import FOREVER, DecodeCohort, Request

from .groups import group_of
from .step import Step

NO_MEMBERS: Final[AbstractSet[Request]] = frozenset()


class Cohort(DecodeCohort):
    """The decoding requests of one server."""

    __slots__ = (
        "_end_steps", "_ends", "_longest", "_members_at", "_reserved", "block_offsets", "block_size", "busy",
        "draft_pairs_run", "drafts_run", "flight", "known", "last_end", "new_members", "next_finish", "pairs_run",
        "rows_run", "steps_run", "tracks_longest",
    )  # fmt: skip

    def __init__(self, block_size: int) -> None:
        super().__init__()
        self.block_size = block_size  # tokens per block
        self.busy = 0.0  # seconds of steps in which they decoded
        self.steps_run = 0  # with drafts: steps so far, which `steps` does not count
        self.rows_run = 0  # rows of all steps so far
        self.pairs_run = 0  # sum of their context tokens in all steps so far, with the new token itself
        self.drafts_run = 0  # drafts of these rows
        self.draft_pairs_run = 0  # the same of their drafts
        self.last_end = math.nan  # when the last step ended
        self.new_members: list[Request] = []  # joined since that step
        self.next_finish = FOREVER  # a lower bound of the next finish step: that member may have left
        # Members and the steps at which they finish, negative; the last one finishes next. Some may have left.
        self._ends: list[Request] = []
        self._end_steps: list[int] = []
        self.block_offsets = [0] * block_size  # members by (cached - steps) modulo block_size
        self._reserved: dict[Request, int] = {}  # members that hold more blocks than their tokens need, and how many
        self.tracks_longest = False  # whether `longest` is known
        self._members_at: dict[int, int] = {}  # members by (cached - steps)
        self._longest: list[int] = []  # heap of the keys of _members_at, negative
        self.flight: Optional[Step] = None  # the newest step that was in flight
        self.known: AbstractSet[Request] = NO_MEMBERS  # members all of whose tokens were known at its decision

    def join(self, request: Request) -> None:
        """Add a request whose prompt is complete."""
        cached, steps, block_size = request._cached, self.steps, self.block_size
        remaining = request.stop_at - request._written
        if request.fails_at_token is not None:
            remaining = min(remaining, request.fails_at_token - request._written)
        request._cohort = self
        request._joined_step = steps
        request._joined_busy_s = self.busy
        self.max_length += request.prompt + request.max_tokens
        if self.tracks_longest:
            self._note_context(cached - steps)
        if request.sampling is not None:
            self._join_group(request)
            return
        request._finish_step = finish = steps + (remaining if remaining > 1 else 1)
        self.size += 1
        self.context += cached
        self._note_finish(request, finish)
        if request._blocks * block_size - cached < block_size:
            offset = (cached - steps) % block_size
            self.block_offsets[offset] = self.block_offsets[offset] + 1  # compiled, this is faster than +=
        else:
            self._reserved[request] = request._blocks
            assert request._blocks * block_size >= cached + remaining, f"{request}: Chunk.blocks is too small"
        self.new_members.append(request)

    def _note_finish(self, request: Request, finish: int) -> None:
        ends, steps = self._ends, self._end_steps
        place = bisect_left(steps, -finish)
        while place < len(steps) and steps[place] == -finish and ends[place].serial > request.serial:
            place += 1
        ends.insert(place, request)
        steps.insert(place, -finish)
        if finish < self.next_finish:
            self.next_finish = finish

    def _note_context(self, offset: int) -> None:
        members = self._members_at.get(offset, -1)
        if members < 0:
            heappush(self._longest, -offset)
        self._members_at[offset] = members + 1 if members > 0 else 1

    @property
    def longest(self) -> int:
        """The cached tokens of the member that has most of them; 0 if nothing tracks it."""
        heap = self._longest
        while heap and not self._members_at[-heap[0]]:
            del self._members_at[-heappop(heap)]
        return self.steps - heap[0] if heap else 0

    def _join_group(self, request: Request) -> None:
        self.groups.append(request)
        self.new_members.append(request)
        self.size += request.sequences
        self.context += request.sequences * request._cached

    def leave(self, request: Request, in_flight: bool = False) -> None:
        """Remove a member and store its counters in the request. `in_flight`: its newest token has not returned."""
        steps = self.steps - request._joined_step
        request._written += steps
        request._cached = cached = request._cached + steps
        request._cohort = None
        request._joined_step = request._finish_step = 0  # frees three numbers: 90 MB for a million finished requests
        self.max_length -= request.prompt + request.max_tokens
        self.size -= request.sequences
        self.context -= request.sequences * cached
        if self.tracks_longest:
            self._members_at[cached - self.steps] -= 1
        if steps and not request._in_flight:  # otherwise the step that completes its prompt has not returned either
            request.decoding += self.busy - request._joined_busy_s
        elif not steps and request in self.new_members:
            self.new_members.remove(request)
        request._joined_busy_s = 0.0
        if in_flight and steps:
            assert self.flight is not None
            self.flight.note_left(request)
            request._in_flight += 1
            request._joined_busy_s = self.busy
        elif steps:
            request.last_token = self.last_end
        if request.sampling is not None:
            self.groups.remove(request)
            request._blocks = group_of(request).blocks
        elif self._reserved and request in self._reserved:
            request._blocks = self._reserved.pop(request)
        else:
            request._blocks = -(-cached // self.block_size)
            offset = (cached - self.steps) % self.block_size
            self.block_offsets[offset] = self.block_offsets[offset] - 1

    def blocks(self, request: Request) -> int:
        if self._reserved and request in self._reserved:
            return self._reserved[request]
        if request.sampling is not None:
            return group_of(request).blocks
        return -(-(request._cached + self.steps - request._joined_step) // self.block_size)

    def blocks_needed(self, ahead: int = 0) -> int:
        blocks = self.block_offsets[-(self.steps + ahead) % self.block_size]
        if self.groups:  # they decide step by step
            blocks += sum([group_of(request).new_blocks(request.length) for request in self.groups])
        return blocks

    def unknown_tokens(self, request: Request) -> int:
        """Return how many cached tokens of a running request, 0 or 1, had no known value when its step was decided."""
        if not self.in_flight or self.flight is None or request in self.known:
            return 0
        return int(self.steps > request._joined_step if request._cohort is not None else request in self.flight.left)

    def count_step(self) -> None:
        """Count a decode step of all members."""
        self.steps += 1
        self.context += self.size
        self.rows_run += self.size
        self.pairs_run += self.context

    def pop_finishing(self) -> list[Request]:
        """Return the members that get their last token in the newest step. Call it if `next_finish` is reached."""
        finishing: list[Request] = []
        ends, steps = self._ends, self._end_steps
        while self.next_finish <= self.steps:
            request, step = ends.pop(), -steps.pop()
            self.next_finish = -steps[-1] if steps else FOREVER
            if request._cohort is self and request._finish_step == step:  # otherwise it left, or joined again later
                request._finish_step = 0  # it is in the list twice if it left and joined again for the same step
                finishing.append(request)
        return finishing

    def advance_groups(self) -> list[Request]:
        """Record the newest token of the groups. Return those that end or fail with it."""
        ended = []
        for request in self.groups:
            group, cached = group_of(request), request.cached
            before = group.sequences
            goes_on = group.record_token(request.written, cached)
            self.size += group.sequences - before
            self.context += (group.sequences - before) * cached
            if not goes_on or request.fails_at_token == request.written:
                ended.append(request)
        return ended
