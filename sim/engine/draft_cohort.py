"""The decoding requests of a server with speculative decoding that verify all their drafts in every step.

How it works. A step adds 1 + drafts tokens to a member when it is launched, and takes the rejected ones back when it
returns. Between two decisions both happen once: a step is launched, and this one or the one before it returns. So one
pass over the members adds 1 + accepted tokens (`draw_rows`). Members have their counters themselves (`steps` stays 0).
The pass also gives a member the blocks of its next step, at once (`Request._grown`): they count as its own from the
launch of that step on, which takes them from the pool (`take_blocks`). A member that leaves before gives them back.

A member that gets its last token ends at once (`_end`): nothing needs its row in flight. One that may get fewer drafts
in the next step leaves; so do all members if a plan has a chunk of one of them. What a request has in flight then is a
row of its own (`Step.verified`). `join` takes it back.

Why it is exact. Rows of members and rows of their own change a request in the same way; tests compare both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Optional

from servesim.core import FOREVER, Request

from .acceptance import INCREMENT, LARGEST, MULTIPLIER, first_luck
from .cohort import Cohort
from .drafts import UNKNOWN, Drafts
from .kv_cache import KvCache
from .step import NO_REQUESTS, NO_ROWS, Step, Verified

if TYPE_CHECKING:
    from mypy_extensions import i64  # of a number that is never larger: faster in compiled code

NO_BOUNDS: Final = [0, 0, 0]  # of a function that says how many drafts are accepted


class DraftCohort(Cohort):
    """The members of one server."""

    __slots__ = (
        "ahead", "cache", "drafts", "drawn", "enabled", "leaving", "max_model_len", "members", "need", "overlaps",
        "takes",
    )  # fmt: skip

    def __init__(self, block_size: int, drafts: Drafts, lookahead: int) -> None:
        super().__init__(block_size)
        self.drafts = drafts
        self.width = 1 + drafts.tokens
        self.ahead = self.width + lookahead  # a step needs blocks for this number of tokens after the cached ones
        self.overlaps = False  # two steps in flight
        self.enabled = True  # False: no request joins
        self.max_model_len = FOREVER
        self.cache: Optional[KvCache] = None
        self.members: list[Request] = []  # those that joined last are at the end
        self.need: i64 = 0  # new blocks of the next step, which the members count as theirs (Request._grown)
        self.takes: i64 = 1  # number of the next step that takes blocks
        self.drawn = UNKNOWN  # accepted drafts of the next step that returns, if they are drawn
        self.leaving = NO_ROWS  # rows of this step whose requests leave

    @property
    def longest(self) -> int:
        longest: i64 = 0
        for request in self.members if self.tracks_longest else NO_REQUESTS:
            if request._cached > longest:
                longest = request._cached
        return longest

    def join(self, request: Request) -> None:
        """Add a request with all its drafts, unless its next steps may differ from those of the others."""
        if not self.enabled or self.drafts.offer is not None:
            return
        in_flight = self.width if self.overlaps else 0
        most = min(self.max_model_len - request.prompt - self.ahead, request.stop_at - 1 + in_flight)
        if self.overlaps:  # otherwise its end is foreseen
            most = min(most, request.max_tokens - 2 + in_flight)
        if request._written + in_flight - request._in_flight > most:
            return
        request._cohort, request._finish_step, request._joined_step = self, most, 0
        request._joined_busy_s = self.busy
        if request.luck < 0 and self.drafts.model is not None:
            request.luck = first_luck(self.drafts.model.start, request.id)
        self.members.append(request)
        self.new_members.append(request)
        self.size += 1
        self.context += request._cached
        self.max_length += request.prompt + request.max_tokens
        request._grown = request._grown_at = 0
        self._cover(request)

    def _cover(self, request: Request) -> None:
        """Count the blocks of the next step of a member as its own, and set how long it needs no more."""
        size: i64 = self.block_size
        most: i64 = request._blocks * size - request._cached + request._written - self.ahead
        grown: i64 = 0
        while request._written > most:
            most += size
            grown += 1
        if grown:
            request._blocks += grown
            self.need += grown
            if request._grown_at == self.takes:
                grown += request._grown
            request._grown, request._grown_at = grown, self.takes
        request._covered = min(most, request._finish_step)

    def _uncover(self, request: Request) -> None:
        """Take the blocks of the next step back from a member."""
        new = self._new_blocks(request)
        request._blocks -= new
        self.need -= new
        request._grown = 0

    def _new_blocks(self, request: Request) -> i64:
        """Return how many blocks of a member are those of the next step."""
        return request._grown if request._grown_at == self.takes else 0

    def blocks(self, request: Request) -> int:
        return request._blocks - self._new_blocks(request)

    def blocks_needed(self, ahead: int = 0) -> int:
        return self.need

    def take_blocks(self) -> int:
        """Let the members keep the blocks of a step. Return how many are new."""
        need, self.need = self.need, 0
        self.takes += 1
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
        for request in self.members[:]:
            self.leave(request)

    def _remove(self, request: Request) -> bool:
        """Remove a member from the sums. Return whether no step of the cohort has had it."""
        self._uncover(request)
        take_out(self.members, request)
        request._cohort, request._finish_step = None, 0
        self.size -= 1
        self.context -= request._cached
        self.max_length -= request.prompt + request.max_tokens
        if not self.new_members or request not in self.new_members:
            return False
        self.new_members.remove(request)
        return True

    def _part(self, request: Request, joined: list[Request]) -> None:
        """Store the times of a request that leaves. `joined`: those of which no step has returned."""
        if joined and request in joined:
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
        self.count_all(1, self.context)
        if not self.new_members:
            return
        step.joined, self.new_members = self.new_members, []
        if self.overlaps:  # the others get these tokens when the step before returns
            for request in step.joined:
                launch_row(request, self.width)
                self.context += self.width

    def count_all(self, steps: int, contexts: int) -> None:
        """Count the rows of all members in some steps, with the sum of their contexts."""
        rows = self.size * steps
        drafts, pairs = self.drafts_of(rows, contexts)
        self.count_rows(rows, contexts + rows, drafts, pairs, steps)

    def drafts_of(self, rows: int, context: int) -> tuple[int, int]:
        """Return the drafts of rows, and the pairs of one of them and a token that it attends to."""
        drafts = self.width - 1
        return rows * drafts, drafts * context + rows * (drafts * (drafts + 3) // 2)

    def count_rows(self, rows: int, pairs: int, drafts: int, draft_pairs: int, steps: int) -> None:
        """Count decoding rows and their drafts."""
        self.rows_run += rows
        self.pairs_run += pairs
        self.drafts_run += drafts
        self.draft_pairs_run += draft_pairs
        self.steps_run += steps

    def deliver(self, step: Step) -> int:
        """Add the tokens of a step that has returned to its rows. Return how many drafts were accepted."""
        self.in_flight -= 1
        flight = self.flight
        if self.drawn == UNKNOWN:
            if self.overlaps and flight is step:  # no step follows
                self.leave_all()
            rows = len(self.members) - len(self.new_members)
            if flight is not None and flight is not step:
                rows -= len(flight.joined)
            self.drawn = self.draw_rows(rows)
        accepted, self.drawn = self.drawn, UNKNOWN
        if self.leaving:
            for row in self.leaving:
                excess = self._tokens_after_end(row)
                if excess < 0:
                    self._return_alone(step, row)
                else:
                    self._end(step, row, excess)
                    accepted += row.accepted - excess
            self.leaving = NO_ROWS
        return accepted

    def draw_rows(self, rows: int) -> int:
        """Add the tokens of a step to the first members, unless they leave. Return how many drafts were accepted."""
        drafts, model = self.drafts, self.drafts.model
        first: i64 = 0
        second: i64 = 0
        third: i64 = 0
        is_equal = False  # whether all requests have the same bounds
        if model is not None and not model.by_request:
            is_equal, first, second, third = True, model.first, model.second, model.third
        bounds = NO_BOUNDS if model is None else model.bounds
        tokens: i64 = drafts.tokens
        total: i64 = 0
        at_second: i64 = 0  # of these, those at the second position
        at_third: i64 = 0
        further: i64 = 0
        has_more = tokens > 3
        for request in self.members if rows == len(self.members) else self.members[:rows]:
            if not is_equal:
                accepted: i64 = drafts.draw(request, drafts.tokens) if tokens else 0
            else:
                luck: i64 = request.luck
                request.luck = (luck * MULTIPLIER + INCREMENT) & LARGEST
                accepted = luck < first
                accepted += luck < second  # without a branch, this is faster
                accepted += luck < third
                while has_more and 2 < accepted < tokens and luck < bounds[accepted]:
                    accepted += 1
            written: i64 = request._written + 1 + accepted
            is_covered = written <= request._covered
            if not is_covered and written > request._finish_step:
                self._note_leaving(request, accepted)
                continue
            request._written = written
            request._cached += 1 + accepted
            if not is_covered:
                self._cover(request)
            request.drafted += tokens
            request.accepted += accepted
            total += accepted
            at_second += accepted > 1
            at_third += accepted > 2
            if has_more and accepted > 3:
                further += drafts.count_further(accepted)
        returned = rows - len(self.leaving)
        if tokens:
            drafts.count_rows(returned, returned * tokens, total - at_second - at_third - further, at_second, at_third)
        self.context += returned + total
        return total

    def _note_leaving(self, request: Request, accepted: int) -> None:
        """Note that a member leaves when its row returns."""
        if not self.leaving:
            self.leaving = []
        self.leaving.append(Verified(request, self.drafts.tokens, accepted, True))

    def _tokens_after_end(self, row: Verified) -> int:
        """Return how many tokens of a row come after the last one of its request; below 0: it has not ended."""
        request = row.request
        return request._written - request._in_flight + 1 + row.accepted - request.stop_at

    def _return_alone(self, step: Step, row: Verified) -> None:
        """Remove a member whose row returns now, and which goes on. What it has in flight are rows of its own."""
        request, flight = row.request, self.flight
        self._remove(request)
        launch_row(request, self.width)
        self._part(request, step.joined)
        self._add_row(step, row)
        if flight is not None and flight is not step:
            self._add_row(flight, Verified(request, row.drafts, UNKNOWN, True))

    def _end(self, step: Step, row: Verified, excess: int) -> None:
        """End a member whose row returns now, with `excess` tokens after its last one. Its next row is thrown away."""
        request, next_step, drafts = row.request, self.flight, self.drafts
        self._remove(request)
        request._written, request._in_flight = request.stop_at, 0
        request._cached += 1 + row.accepted - excess
        request.decoding += self.busy - request._joined_busy_s
        request.decoding += step.end - step.start
        drafts.returned(row)
        drafts.lost += max(0, excess - 1)
        if next_step is not None and next_step is not step:
            next_step.rows -= 1
            drafts.lost += row.drafts
        if self.overlaps and self.cache is not None and not self.cache.shares:
            self.cache.note_known(request)
        step.note_end(request)

    def awaits_end(self, request: Request) -> bool:
        """Whether a request ends with its row in flight, even if all its drafts are rejected."""
        return request._in_flight > 0 and request._written + 1 - request._in_flight >= request.max_tokens

    def settle(self, request: Request, rejected: int) -> None:
        """Note that a row of its own has returned of a member."""
        self.context -= rejected
        if request._written > request._finish_step:
            self.leave(request)
        else:
            self._uncover(request)  # no step since it joined
            self._cover(request)


def take_out(requests: list[Request], request: Request) -> None:
    """Remove a request from a list that has it. Compiled, this is faster than `remove`, which compares by value."""
    place = 0
    while requests[place] is not request:
        place += 1
    del requests[place]


def launch_row(request: Request, tokens: int) -> None:
    """Count the tokens of a row, all of whose drafts count as accepted until it returns."""
    request._written += tokens
    request._cached += tokens
    request._in_flight += tokens
