"""Ties: configurations whose difference from the best one is too small to matter, or not significant.

A difference matters if it is larger than the margin, a fraction of the best value (`indifference`).

    equal       the whole interval of the difference is within the margin
    undecided   the difference is within the margin or not significant, but its interval also allows a larger one
    worse       the difference is significant and larger than the margin
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Optional, TypeVar

from .intervals import Interval, replications_for

R = TypeVar("R")


class Relation(NamedTuple):
    """How a configuration compares with the best one by the first objective."""

    outcome: str  # best | equal | undecided | worse | cannot win
    change: Interval = Interval(math.nan, None, 0)  # from the best one, in the unit of the metric
    replications: Optional[int] = None  # undecided: the estimated number that would decide; None: no number would

    @property
    def tied(self) -> bool:
        """Whether another configuration is neither better nor worse than the best one."""
        return self.outcome in ("equal", "undecided")


def relate(change: Interval, margin: float, sampling: Optional[Interval] = None, confidence: float = 0.95) -> Relation:
    """Compare a difference from the best configuration with the margin.

    `sampling` is the same difference with the interval of the replications only: more replications make only this
    part of an interval smaller, not the uncertainty of the cost model.
    """
    size, half_width = abs(change.mean), change.half_width or 0.0
    if math.isnan(size):
        return Relation("worse", change)
    if size + half_width <= margin:
        return Relation("equal", change)
    if size > margin and size > half_width:
        return Relation("worse", change)
    sampling, target = sampling or change, margin - size if size <= margin else size
    left = target**2 - max(0.0, half_width**2 - (sampling.half_width or 0.0) ** 2)  # without that of the draws
    needed = replications_for(math.sqrt(left), sampling, confidence) if left > 0 else None
    return Relation("undecided", change, needed)


def break_ties(
    tied: Sequence[R],
    scores: Sequence[Callable[[R], float]],
    is_tied: Callable[[R, R, int], bool],
    changes: Callable[[R], int],
) -> tuple[R, list[Optional[int]]]:
    """Return the best of the tied configurations, and the numbers of the objectives that decide.

    `scores` (smaller is better) are those of all objectives; `tied` are tied by the first one. Each next objective
    removes the configurations that are worse than its best one; a difference that is a tie removes nothing. Then the
    fewest changes from the baseline decide (None), then the mean of the first objective.
    """
    left, decided_by = list(tied), []
    for number in range(1, len(scores)):
        best = min(left, key=scores[number])
        kept = [item for item in left if item is best or is_tied(item, best, number)]
        decided_by += [number] if len(kept) < len(left) else []
        left = kept
    winner = min(left, key=lambda item: (changes(item), scores[0](item)))
    return winner, [*decided_by, *([None] if len(left) > 1 else [])]
