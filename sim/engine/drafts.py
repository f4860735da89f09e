"""Speculative decoding: how many drafted tokens the model accepts, and what the engine counts.

A request with d drafts computes 1 + d tokens in a step, and the step returns the accepted ones and one more. While the
step is in flight, all drafts count as accepted (`Request.written`, `cached`, `in_flight`), as in the real scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Callable, Optional

from servesim.core import Chunk, Request

from .step import Verified

Accept = Callable[[Request, int], int]  # of the next row of a request with drafts: how many the model accepts


class Drafts:
    """The drafts of one server."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens  # drafts per step
        self.accept: Accept = accept_none
        self.offer: Optional[Callable[[Request], int]] = None  # drafts after a step; None: always all
        self.rows = 0
        self.drafted = 0
        self.accepted = 0
        self.lost = 0  # drafts behind the end of an answer: accepted ones, and those of rows that are thrown away
        self.accepted_at = [0] * tokens  # by position

    def launch(self, chunk: Chunk, overlaps: bool) -> Verified:
        """Count the drafts of a chunk as accepted. Return what the step will return."""
        request, drafts = chunk.request, chunk.drafts
        padded = drafts > request.drafts
        accepted = min(self.accept(request, drafts), drafts) if drafts and not padded else 0
        request._written += 1 + drafts
        request._in_flight += 1 + drafts
        request.drafts = self.tokens if overlaps else 0
        return Verified(request, drafts, accepted)

    def offered(self, request: Request) -> int:
        """Return how many tokens the drafter guesses for the next step of a request."""
        return self.tokens if self.offer is None else self.offer(request)

    def count(self, row: Verified) -> None:
        """Count a row that has returned."""
        if row.drafts:
            self.rows += 1
            self.drafted += row.drafts
            self.accepted += row.accepted
            for position in range(row.accepted):
                self.accepted_at[position] += 1


def draft_metrics(servers: Sequence[Drafts]) -> dict[str, float]:
    """Return the metrics of all servers, as vLLM defines them; empty without a row that had drafts."""
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
