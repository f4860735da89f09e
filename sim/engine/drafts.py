"""Speculative decoding: how many drafted tokens the model accepts, and what the engine counts.

A request with d drafts computes 1 + d tokens in a step, and the step returns the accepted ones and one more. While the
step is in flight, all drafts count as accepted (`Request.written`, `cached`, `in_flight`), as in the real scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Callable, Final, Optional

from servesim.core import Chunk, Request

from .acceptance import Acceptance, Proposals
from .step import Verified

Accept = Callable[[Request, int], int]  # of the next row of a request with drafts: how many the model accepts
UNKNOWN: Final = -1  # accepted drafts of a row that has not returned


class Drafts:
    """The drafts of one server."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens  # drafts per step
        self._accept: Accept = accept_none
        self.model: Optional[Acceptance] = None  # of the function, if it has one
        self.offer: Optional[Callable[[Request], int]] = None  # drafts after a step; None: always all
        self.drafted = 0
        self._counts = [0] * (tokens + 1)  # rows by accepted drafts
        self.newest = [0] * (tokens + 1)  # the same of the newest ones: small numbers are faster to count
        self.lost = 0  # drafts behind the end of an answer: accepted ones, and those of rows that are thrown away

    @property
    def counts(self) -> list[int]:
        """Rows with drafts that have returned, by accepted drafts."""
        for accepted, rows in enumerate(self.newest):
            self._counts[accepted] += rows
            self.newest[accepted] = 0
        return self._counts

    @counts.setter
    def counts(self, counts: list[int]) -> None:
        self._counts, self.newest = counts, [0] * len(counts)

    @property
    def rows(self) -> int:
        """Rows with drafts that have returned."""
        return sum(self.counts)

    @property
    def accepted(self) -> int:
        return sum([accepted * rows for accepted, rows in enumerate(self.counts)])

    @property
    def accepted_at(self) -> list[int]:
        """Accepted drafts by position."""
        counts = self.counts
        return [sum(counts[position + 1 :]) for position in range(self.tokens)]

    def draw(self, request: Request, drafts: int) -> int:
        """Return how many drafts of a row that returns are accepted."""
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

    def offered(self, request: Request) -> int:
        """Return how many tokens the drafter guesses for the next step of a request."""
        return self.tokens if self.offer is None else self.offer(request)

    def returned(self, row: Verified) -> int:
        """Count a row that has returned. Return how many drafts were accepted."""
        if row.accepted == UNKNOWN:
            row.accepted = self.draw(row.request, row.drafts)
        if row.drafts:
            self.drafted += row.drafts
            self.newest[row.accepted] += 1
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
