"""Speculative decoding: how many drafted tokens the model accepts, and what the engine counts.

A request with d drafts computes 1 + d tokens in a step, and the step returns the accepted ones and one more. While the
step is in flight, all drafts count as accepted (`Request.written`, `cached`, `in_flight`), as in the real scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Callable, Final, Optional

from servesim.core import Chunk, Request

from .acceptance import Acceptance, Proposals
from .step import Verified

if TYPE_CHECKING:
    from mypy_extensions import i64  # of a number that is never larger: faster in compiled code

Accept = Callable[[Request, int], int]  # of the next row of a request with drafts: how many the model accepts
UNKNOWN: Final = -1  # accepted drafts of a row that has not returned


class Drafts:
    """The drafts of one server."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens  # drafts per step
        self._accept: Accept = accept_none
        self.model: Optional[Acceptance] = None  # of the function, if it has one
        self.offer: Optional[Callable[[Request], int]] = None  # drafts after a step; None: always all
        self.rows: i64 = 0  # with drafts that have returned
        self.drafted = 0
        self._first: i64 = 0  # accepted ones at these positions: faster than a list
        self._second: i64 = 0
        self._third: i64 = 0
        self._further = [0] * (tokens - 3)  # and at those behind them
        self.lost = 0  # drafts behind the end of an answer: accepted ones, and those of rows that are thrown away

    @property
    def accepted_at(self) -> list[int]:
        """Accepted drafts by position."""
        return [self._first, self._second, self._third][: self.tokens] + self._further

    @accepted_at.setter
    def accepted_at(self, accepted: list[int]) -> None:
        self._first, self._second, self._third = [*accepted, 0, 0][:3]
        self._further = accepted[3:]

    @property
    def accepted(self) -> int:
        return sum(self.accepted_at)

    def draw(self, request: Request, drafts: int) -> int:
        """Return how many drafts of a row that returns are accepted."""
        if self.model is not None:  # compiled, the method is faster than the function
            return self.model.accept(request, drafts)
        return min(self._accept(request, drafts), drafts)

    @property
    def accept(self) -> Accept:
        return self._accept

    @accept.setter
    def accept(self, accept: Accept) -> None:
        self._accept, self.model = accept, None

    def use(self, model: Acceptance) -> None:
        """Accept as many drafts as this model says."""
        self._accept, self.model = model.accept, model

    def connect(
        self, key: int, rate: Optional[float], rates: Sequence[float], proposals_key: int, proposals: float
    ) -> None:
        """Accept drafts by chance, and offer them by chance."""
        self.use(Acceptance(key, rate, rates, self.tokens))
        if proposals < 1:
            self.offer = Proposals(proposals_key, proposals, self.tokens).offer

    def launch(self, chunk: Chunk, overlaps: bool, decodes: bool) -> Verified:
        """Count the drafts of a chunk as accepted. Return what the step will return."""
        request, drafts = chunk.request, chunk.drafts
        is_known = not drafts or drafts > request.drafts  # padded rows draw no number
        request._written += 1 + drafts
        request._in_flight += 1 + drafts
        request.drafts = self.tokens if overlaps else 0
        return Verified(request, drafts, 0 if is_known else UNKNOWN, decodes)

    def count_rows(self, rows: i64, drafts: i64, first: i64, second: i64, third: i64) -> None:
        """Count rows with drafts that have returned, and the accepted ones at the first positions."""
        self.rows += rows
        self.drafted += drafts
        self._first += first
        self._second += second
        self._third += third

    def count_further(self, accepted: int) -> int:
        """Count the accepted drafts of a row behind the third position. Return their number."""
        for index in range(accepted - 3):
            self._further[index] += 1
        return max(0, accepted - 3)

    def offered(self, request: Request) -> int:
        """Return how many tokens the drafter guesses for the next step of a request."""
        return self.tokens if self.offer is None else self.offer(request)

    def returned(self, row: Verified) -> int:
        """Count a row that has returned. Return how many drafts were accepted."""
        if row.accepted == UNKNOWN:
            row.accepted = self.draw(row.request, row.drafts)
        if row.drafts:
            accepted = row.accepted
            self.count_rows(1, row.drafts, accepted > 0, accepted > 1, accepted > 2)
            self.count_further(accepted)
            row.request.drafted += row.drafts
            row.request.accepted += row.accepted
        return row.accepted


def draft_metrics(servers: Sequence[Drafts]) -> dict[str, float]:
    """Return the metrics of all servers; empty without a row that had drafts."""
    rows, drafted, accepted = (
        sum([drafts.rows for drafts in servers]),
        sum([drafts.drafted for drafts in servers]),
        sum([drafts.accepted for drafts in servers]),
    )
    if not rows:
        return {}
    return {
        "accepted_tokens_per_step": 1 + accepted / rows,
        "draft_acceptance_rate": accepted / drafted,
        "wasted_tokens": drafted - accepted + sum([drafts.lost for drafts in servers]),
    }


def accept_none(request: Request, drafts: int) -> int:
    return 0
