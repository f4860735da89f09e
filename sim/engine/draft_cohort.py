"""The decoding requests of a server with speculative decoding that verify all their drafts in every step.

How it works. A step adds 1 + drafts tokens to a member when it is launched, and takes the rejected ones back when it
returns. Between two decisions both happen once: a step is launched, and this one or the one before it returns. So a
step that returns adds 1 + accepted tokens to every member that has a row in it.

The accepted drafts of the next rows of a member are drawn when it joins, and added to sums by step: tokens, and blocks
that they need. So a step that returns is O(1): it adds its sums. The walk of a member ends with the row after which it
leaves, or after MAX_ROWS; then the next walk begins. In between its own counters are old. `gained` draws the same
numbers once more, for those who read them. `returned` counts the steps that have returned; `_joined_step` of a member
is the newest one that its counters have, and `_finish_step` the one with which its walk ends.

A request that ends, or that may get fewer drafts in the next step, leaves; so do all members if a plan has a chunk of
one of them. Then the rest of its walk is taken back from the sums. What it has in flight is a row of its own
(`Step.verified`). `join` takes it back.

Why it is exact. A request has random numbers of its own, of which its newest one gives the next (acceptance.py). So
the numbers do not depend on when they are drawn, and can be drawn again. All sums are whole numbers. A function without
such numbers (a recorded or a real server) is asked when the step returns: then every walk is one row. Rows of members
and rows of their own change a request in the same way; tests compare both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Optional

from servesim.core import FOREVER, Request

from .acceptance import MODULUS, MULTIPLIER, first_luck
from .cohort import Cohort
from .drafts import COUNT_BITS, PACKED, UNKNOWN, Drafts
from .kv_cache import KvCache
from .step import NO_REQUESTS, Step, Verified

if TYPE_CHECKING:
    from mypy_extensions import i64  # the type of a number that is never larger: faster in compiled code

MAX_ROWS: Final = 63  # of a walk; the sums of a step are at its number modulo PLACES
PLACES: Final = MAX_ROWS + 1
NO_BOUNDS: Final = [0, 0, 0]
# The next rows of a member: its number, the request and its counters after them (luck, written, cached), its blocks
# before the last one returns, the accepted drafts of that one, and whether it leaves: then the counters are without it.
Walk = tuple[int, Request, int, int, int, int, int, bool]


class DraftCohort(Cohort):
    """The members of one server."""

    __slots__ = (
        "_ends", "_gains", "_joins", "_needs", "_settled", "_walks", "ahead", "cache", "drafts", "enabled",
        "max_model_len", "members", "need", "overlaps", "returned",
    )  # fmt: skip

    def __init__(self, block_size: int, drafts: Drafts, lookahead: int) -> None:
        super().__init__(block_size)
        self.drafts = drafts
        self.width = 1 + drafts.tokens
        self.ahead = self.width + lookahead  # a step needs blocks for this number of tokens after the cached ones
        self.overlaps = False  # two steps in flight
        self.enabled = True  # False: nobody joins
        self.max_model_len = FOREVER
        self.cache: Optional[KvCache] = None
        self.members: dict[Request, int] = {}  # with a number, by which they are in the order of joining
        self._joins = 0
        self.returned = 0  # steps of members
        self._settled = 0  # members without a row of their own in flight
        self.need = 0  # new blocks of the next step
        self._gains = [0] * PLACES  # accepted drafts of the rows of a step that returns
        self._needs = [0] * PLACES  # new blocks of the step after that
        self._walks: list[list[Walk]] = [[] for _ in range(PLACES)]  # that end with this step
        self._ends = [0] * PLACES  # of these, those after which a member leaves

    @property
    def longest(self) -> int:
        return max([request.cached for request in self.members]) if self.tracks_longest and self.members else 0

    def join(self, request: Request) -> None:
        """Add a request with all its drafts, unless its next steps may differ from those of the others."""
        if not self.enabled or self.drafts.offer is not None:
            return
        in_flight = self.width if self.overlaps else 0
        if request._written + in_flight - request._in_flight > self._most(request):
            return
        request._cohort, request._finish_step, request._joined_step = self, 0, self.returned
        request._joined_busy_s = self.busy
        self._joins += 1
        self.members[request] = self._joins
        self.new_members.append(request)
        self.size += 1
        self.context += request._cached
        self.max_length += request.prompt + request.max_tokens
        self.need += self._growth(request)
        if not self.overlaps:
            self._start_walks(request)

    def _most(self, request: Request) -> int:
        """Return the most tokens with which a member stays; with two steps in flight, all drafts of one are in them."""
        stop = request.stop_at - 1
        if self.overlaps:  # otherwise its end is foreseen
            stop = min(stop, request.max_tokens - 2) + self.width
        return min(self.max_model_len - request.prompt - self.ahead, stop)

    def _growth(self, request: Request) -> int:
        """Return the new blocks that a request needs in the next step."""
        return max(0, -(-(request._cached + self.ahead) // self.block_size) - request._blocks)

    def _start_walks(self, request: Request) -> None:
        """Draw the next rows of a member that has no row of its own in flight any more."""
        self._settled += 1
        request._finish_step = FOREVER
        if self.drafts.model is not None:
            self._walk(request, MAX_ROWS, 1)

    def _walk(self, request: Request, rows: i64, sign: i64) -> None:
        """Add the next rows of a member to the sums, or take them back if the sign is -1."""
        model, gains, needs = self.drafts.model, self._gains, self._needs
        bounds = NO_BOUNDS if model is None else model.bounds_of(request)
        luck: i64 = 0 if model is None else request.luck or first_luck(model.start, request.id)
        tokens: i64 = self.drafts.tokens
        first: i64 = bounds[0]
        second: i64 = bounds[1]
        third: i64 = bounds[2]
        written: i64 = request._written
        cached: i64 = request._cached
        most: i64 = self._most(request)
        limit: i64 = (
            request._blocks + self._growth(request)
        ) * self.block_size - self.ahead  # cached tokens that have blocks
        covered: i64 = limit  # before the last row returns
        accepted: i64 = 0
        counts: i64 = 0  # rows by accepted drafts, as in Drafts.count_walk; one by one is slower
        one: i64 = 1
        step: i64 = self.returned
        is_last = False
        for _ in range(rows):
            step += 1
            covered = limit
            if model is None:
                accepted = self.drafts.draw(request, self.drafts.tokens)
            else:
                luck = luck * MULTIPLIER % MODULUS
                accepted = luck < first  # without a branch, this is faster
                accepted += luck < second
                accepted += luck < third
                while 2 < accepted < tokens and luck < bounds[accepted]:
                    accepted += 1
            if written + accepted >= most:
                is_last = True
                break
            written += 1 + accepted
            cached += 1 + accepted
            gains[step & MAX_ROWS] = gains[step & MAX_ROWS] + sign * accepted
            if accepted < PACKED:
                counts += one << (COUNT_BITS * accepted)
            else:
                self.drafts.counts[accepted] += sign
            while cached > limit:
                needs[step & MAX_ROWS] = needs[step & MAX_ROWS] + sign
                limit += self.block_size
        self.drafts.count_walk(counts, sign)
        luck = request.luck if model is None else luck
        number, blocks = self.members[request], (covered + self.ahead) // self.block_size
        self._note_walk((number, request, luck, written, cached, blocks, accepted, is_last), step, sign)

    def _note_walk(self, walk: Walk, step: int, sign: int) -> None:
        """Note that a walk ends with a step, or take it back."""
        request, place = walk[1], step & MAX_ROWS
        self._ends[place] += sign * walk[-1]
        if sign > 0:
            request._finish_step = step
            self._walks[place].append(walk)
        else:
            self._walks[place] = [other for other in self._walks[place] if other[1] is not request]

    def gained(self, request: Request) -> int:
        """Set the counters of a member: draw its rows that have returned once more. Return 0."""
        steps, request._joined_step = self.returned - request._joined_step, self.returned
        if request._finish_step:
            for _ in range(steps):
                request._blocks += self._growth(request)
                accepted = self.drafts.draw(request, self.drafts.tokens)
                request._written += 1 + accepted
                request._cached += 1 + accepted
                request.drafted += self.drafts.tokens
                request.accepted += accepted
            if not self.need:
                request._blocks += self._growth(request)
        return 0

    def blocks(self, request: Request) -> int:
        return self.gained(request) + request._blocks

    def blocks_needed(self, ahead: int = 0) -> int:
        return self.need

    def take_blocks(self) -> int:
        """Give the members the blocks of a step. Return how many are new."""
        for request in self.new_members:
            request._blocks += self._growth(request)
        need, self.need = self.need, 0
        return need

    def leave(self, request: Request, in_flight: bool = False) -> None:
        """Remove a member; a step of it that is in flight gets a row of its own."""
        if self._remove(request):
            return
        flight = self.flight
        if not self.overlaps or flight is None:
            self._part(request, NO_REQUESTS)
            return
        if self.cache is not None:
            self.cache.note_known(request)
        self._part(request, flight.joined)
        self._add_row(flight, Verified(request, self.drafts.tokens, UNKNOWN, True))

    def leave_all(self) -> None:
        for request in list(self.members):
            self.leave(request)

    def _remove(self, request: Request) -> bool:
        """Remove a member from the sums. Return whether no step of the cohort has had it."""
        self.gained(request)
        is_new, rows = request in self.new_members, request._finish_step - self.returned
        if self.need and (is_new or request._finish_step):
            self.need -= self._growth(request)
        if request._finish_step:
            self._settled -= 1
            if self.drafts.model is not None:
                self._walk(request, rows, -1)
        del self.members[request]
        request._cohort, request._finish_step, request._joined_step = None, 0, 0
        self.size -= 1
        self.context -= request._cached
        self.max_length -= request.prompt + request.max_tokens
        if is_new:
            self.new_members.remove(request)
        return is_new

    def _part(self, request: Request, joined: list[Request]) -> None:
        """Store the times of a request that leaves. `joined`: those of which no step has returned."""
        if request in joined:
            joined.remove(request)
        else:
            request.last_token = self.last_end
        request.decoding += self.busy - request._joined_busy_s

    def _add_row(self, step: Step, row: Verified) -> None:
        step.note_row(row)
        step.rows -= 1

    def launch(self, step: Step) -> None:
        """Count a step of all members."""
        self.flight = step
        self.in_flight += 1
        self.count_step()
        if not self.new_members:
            return
        step.joined, self.new_members = self.new_members, []
        if self.overlaps:  # the others get these tokens when the step before returns
            for request in step.joined:
                launch_row(request, self.width)
                self.context += self.width

    def count_step(self) -> None:
        """Count the rows of all members."""
        drafts, pairs = self.drafts_of(self.size, self.context)
        self.count_rows(self.size, self.context + self.size, drafts, pairs, True)

    def drafts_of(self, rows: int, context: int) -> tuple[int, int]:
        """Return the drafts of rows, and the pairs of one of them and a token that it attends to."""
        drafts = self.width - 1
        return rows * drafts, drafts * context + rows * (drafts * (drafts + 3) // 2)

    def count_rows(self, rows: int, pairs: int, drafts: int, draft_pairs: int, is_step: bool) -> None:
        """Count decoding rows and their drafts."""
        self.rows_run += rows
        self.pairs_run += pairs
        self.drafts_run += drafts
        self.draft_pairs_run += draft_pairs
        self.steps_run += is_step

    def deliver(self, step: Step) -> int:
        """Add the tokens of a step that has returned to its rows. Return how many drafts were accepted."""
        self.in_flight -= 1
        if self.overlaps and self.flight is step:  # no step follows
            self.leave_all()
        return self.return_rows(step)

    @property
    def next_ends(self) -> bool:
        """Whether a member leaves when the next step returns, as far as that is known."""
        return self.drafts.model is None or self._ends[(self.returned + 1) & MAX_ROWS] > 0

    def return_rows(self, step: Step) -> int:
        """Add the tokens of a step to its rows, and remove those that leave. Return how many drafts were accepted."""
        if self.drafts.model is None:
            for request in self.members:
                if request._finish_step:
                    self._walk(request, 1, 1)
        self.returned += 1
        place = self.returned & MAX_ROWS
        accepted, rows, walks = self._gains[place], self._settled, self._walks[place]
        self.need += self._needs[place]
        self._gains[place] = self._needs[place] = self._ends[place] = 0
        if walks:
            self._walks[place] = []
            rows -= self._end_walks(step, walks)
        self.context += rows + accepted
        self.drafts.note_rows(rows, accepted)
        return accepted

    def _end_walks(self, step: Step, walks: list[Walk]) -> int:
        """Start the next walks of members, or remove them. Return how many were removed."""
        left, tokens = 0, self.drafts.tokens
        walks.sort()  # in the order of joining
        for _, request, luck, written, cached, blocks, accepted, is_last in walks:
            rows = self.returned - request._joined_step - is_last
            request.drafted += rows * tokens
            request.accepted += written - request._written - rows
            request.luck, request._written, request._cached, request._blocks = luck, written, cached, blocks
            request._joined_step, request._finish_step = self.returned, 0
            self._settled -= 1
            left += is_last
            if is_last:
                self._return_alone(step, Verified(request, tokens, accepted, True))
            else:
                self._start_walks(request)
        return left

    def _return_alone(self, step: Step, row: Verified) -> None:
        """Remove a member whose row returns now. What it has in flight are rows of its own."""
        request, flight = row.request, self.flight
        self._remove(request)
        launch_row(request, self.width)
        self._part(request, step.joined)
        self._add_row(step, row)
        if flight is not None and flight is not step:
            self._add_row(flight, Verified(request, row.drafts, UNKNOWN, True))

    def awaits_end(self, request: Request) -> bool:
        """Whether a request ends with its row in flight, even if all its drafts are rejected."""
        return request._in_flight > 0 and request._written + 1 - request._in_flight >= request.max_tokens

    def settle(self, request: Request, rejected: int) -> None:
        """Note that a row of its own has returned of a member."""
        self.context -= rejected
        if request._written > self._most(request):
            self.leave(request)
        else:
            request._joined_step = self.returned
            self.need += self._growth(request)
            self._start_walks(request)


def launch_row(request: Request, tokens: int) -> None:
    """Count the tokens of a row, all of whose drafts count as accepted until it returns."""
    request._written += tokens
    request._cached += tokens
    request._in_flight += tokens
