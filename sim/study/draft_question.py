"""Speculative decoding in `sim recommend`: what is compared, and from which load on drafts cost more than they gain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

from servesim.core import BadInput
from servesim.runs.request_rate import format_rate

from .grid import Assignment
from .rate_summary import RateSummary

TOKENS = "speculative.tokens"
ASYNC = "policy.async_scheduling"
COUNTS = (1, 3, 5)  # drafts per step that are compared with none
LOADS = (0.1, 0.25, 0.5, 0.75, 0.9, 1.05)  # / throughput with all requests at once
DRAFT_METRIC = "mean_e2el_ms"


def parse_drafts(text: str) -> dict[str, Any]:
    """Return the section `speculative` of METHOD:ACCEPTANCE, with drafts off."""
    method, _, rate = text.partition(":")
    try:
        return {"method": method, "acceptance": float(rate), "tokens": 0}
    except ValueError:
        raise BadInput(f"--speculative: expected METHOD:ACCEPTANCE such as eagle:0.7, got {text!r}") from None


def with_drafts(grids: Sequence[Mapping[str, Sequence[Any]]], method: str) -> list[Mapping[str, Sequence[Any]]]:
    """Return grids of settings without drafts, and with them.

    N-gram drafts run without asynchronous scheduling. So do runs with 0 of them, which show what only the drafts gain.
    """
    drafts = {ASYNC: (False,), TOKENS: (0, *COUNTS)} if method == "ngram" else {TOKENS: COUNTS}
    return [*grids, *({**grid, **drafts} for grid in grids)]


def without_drafts(best: Assignment, drafted: Assignment) -> Assignment:
    """Return the best settings without drafts, with the scheduling of those that have them."""
    scheduling = {key: value for key, value in drafted.items() if key == ASYNC}
    return {key: value for key, value in best.items() if key != TOKENS} | scheduling


@dataclass(frozen=True)
class DraftLoads:
    """What drafts change at several loads, with the recommended settings."""

    method: str
    tokens: int
    is_on: bool  # recommended at the rate of the question
    changes: Mapping[float, float]  # requests per second -> latency with drafts / without - 1, in rising order

    @property
    def costs_from(self) -> Optional[float]:
        """The lowest tested rate from which on drafts cost more than they gain; None if they gain at the highest."""
        found = None
        for rate, change in reversed(list(self.changes.items())):
            if change <= 0:
                break
            found = rate
        return found

    @property
    def text(self) -> str:
        """The answer in one line."""
        loads = ", ".join(f"{100 * change:+.0f} % at {rate:.3g}" for rate, change in self.changes.items())
        crossing, lowest = self.costs_from, next(iter(self.changes), None)
        verdict = "they gain at all tested loads"
        if crossing is not None:
            more = "cost more than they gain"
            verdict = f"they {more} at all tested loads"
            verdict = verdict if crossing == lowest else f"from about {format_rate(crossing)} on they {more}"
        choice = f"{self.tokens} per step ({self.method})"
        return f"Drafts: {'on' if self.is_on else 'off'}. With {choice}, {verdict}: mean latency {loads} req/s."


def draft_loads(method: str, tokens: int, is_on: bool, loads: RateSummary) -> DraftLoads:
    """Return what drafts change, from a sweep over rates whose baseline has none."""
    means = {curve.is_baseline: {p.rate: value for p, value in curve.values(DRAFT_METRIC)} for curve in loads.curves}
    changes = {rate: means[False][rate] / value - 1 for rate, value in means[True].items() if rate in means[False]}
    return DraftLoads(method, tokens, is_on, changes)
