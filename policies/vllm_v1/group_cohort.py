"""The decoding requests of a vLLM V1 server with KV cache groups: one pass over all of them is a step.

How it works. As in draft_cohort.py; without drafts, a step has one token of each member. The cache has the blocks. A
member changes them in few of its steps: if it needs a block, fills one, or leaves one behind a window. The cache knows
who may do that in the next step (`due`), and the decision of that step makes their changes, in the order of the running
requests. So steps without such a member need no decision.
"""

from __future__ import annotations

from typing import Final

from servesim.core import FOREVER, Request
from servesim.engine.draft_cohort import DraftCohort, take_out
from servesim.engine.step import Step, Verified

from .group_cache import GroupCache

DUE: Final = -1  # as `Request._covered`: fewer than any request has written


class GroupCohort(DraftCohort):
    """The members of one server."""

    __slots__ = ("tables",)

    tables: GroupCache  # the server has it later

    def join(self, request: Request) -> None:
        request._covered = 0
        super().join(request)
        if request._cohort is self:  # the step that computes its prompt may still be in flight
            self._note_due(request)

    def _note_due(self, request: Request) -> None:
        if request._covered != DUE:
            request._covered = DUE
            self.tables.due.append(request)
        self.need = FOREVER

    def _cover(self, request: Request) -> None:
        """Set how long a member changes nothing, or note that it may in the next step."""
        cache = self.tables
        most = cache.unchanged_up_to(request, self.ahead, self.width if self.overlaps else 0) + 1 - request.prompt
        if request._written > most:
            self._note_due(request)
        else:
            request._covered = min(most, request._finish_step)

    def _uncover(self, request: Request) -> None:
        if request._covered == DUE:
            due = self.tables.due
            take_out(due, request)
            request._covered = 0
            self.need = FOREVER if due else 0

    def take_blocks(self) -> int:
        """Return 0: the cache has taken the blocks."""
        cache = self.tables
        for request in cache.due:
            has_blocks = cache.tables[request].length * self.block_size >= request._cached + self.ahead
            assert has_blocks, f"request {request.id} decodes without blocks for its next tokens"
            request._covered = 0
        cache.due.clear()
        self.need = 0
        self.takes += 1
        return 0

    def _add_row(self, step: Step, row: Verified) -> None:
        super()._add_row(step, row)
        if step is self.flight and self.tables.in_step:
            self.tables.newest[row.request] = self.width
