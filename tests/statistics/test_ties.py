"""Ties: equal within the threshold, not decided, or worse; what breaks them; how many runs would decide."""

from __future__ import annotations

import math
import random
from typing import Optional

import pytest
from servesim.statistics.intervals import Interval, interval, replications_for
from servesim.statistics.ties import break_ties, relate


@pytest.mark.parametrize(
    ("mean", "half_width", "outcome"),
    [
        (0.0, 0.0, "equal"),
        (0.2, 0.2, "equal"),
        (-0.2, 0.2, "equal"),
        (0.2, 0.4, "undecided"),  # within the margin of 0.5, but the interval allows 0.6
        (0.4, 0.2, "undecided"),  # significant, but it may be within the margin or above it
        (3.0, 4.0, "undecided"),  # large, but not significant
        (3.0, 2.9, "worse"),
        (0.6, 0.2, "worse"),
        (0.4, None, "equal"),  # one run each
        (0.6, None, "worse"),
    ],
)
def test_a_difference_is_compared_with_the_margin(mean: float, half_width: Optional[float], outcome: str) -> None:
    assert relate(Interval(mean, half_width, 5), 0.5).outcome == outcome


def test_the_estimated_replications_decide() -> None:
    """With the estimated number (and a margin for the estimate itself), the outcome is decided in most samples."""
    rng = random.Random(1)
    few = [1.0 + rng.gauss(0, 2) for _ in range(8)]
    relation = relate(interval(few), 0.05)
    assert relation.outcome == "undecided" and relation.replications is not None and relation.replications > 8
    many = [*few, *(1.0 + rng.gauss(0, 2) for _ in range(2 * relation.replications))]
    assert relate(interval(many), 0.05).outcome == "worse"


def test_more_replications_do_not_reduce_the_uncertainty_of_the_cost_model() -> None:
    sampling, total = Interval(1.0, 0.5, 10), Interval(1.0, 1.5, 10)  # draws: about 1.41, more than the mean
    assert relate(total, 0.1, sampling) == ("undecided", total, None)
    wide, sampled = Interval(1.0, 1.2, 10), Interval(1.0, 1.1, 10)
    left = math.sqrt(1 - (1.2**2 - 1.1**2))  # for the replications
    assert relate(wide, 0.1, sampled).replications == replications_for(left, sampled) > 10


def test_ties_are_broken_by_the_next_objective_and_then_by_the_fewest_changes() -> None:
    items = [("a", 10.0, 5.0, 2), ("b", 10.1, 5.01, 1), ("c", 10.2, 9.0, 0)]
    scores = [lambda item: item[1], lambda item: item[2]]

    def tied(item: tuple[str, float, float, int], best: tuple[str, float, float, int], number: int) -> bool:
        return abs(item[1 + number] - best[1 + number]) <= 0.1

    winner, decided_by = break_ties(items, scores, tied, lambda item: item[3])
    assert winner[0] == "b" and decided_by == [1, None]
    assert break_ties(items[:1], scores, tied, lambda item: item[3]) == (items[0], [])
    assert break_ties(items, scores[:1], tied, lambda item: item[3]) == (items[2], [None])
