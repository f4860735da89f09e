"""Intervals: published t quantiles, measured coverage; and the Pareto front by its definition."""

from __future__ import annotations

import itertools
import math
import operator
import random
from collections.abc import Sequence
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from servesim.statistics.intervals import interval, paired_difference, replications_for, t_quantile
from servesim.study import ranking
from servesim.study.ranking import pareto_front
from servesim.study.single_run import Task, context_json, run_tasks


@pytest.mark.parametrize(
    ("confidence", "degrees_of_freedom", "published"),
    [  # the usual two-sided table of Student's t
        (0.95, 1, 12.706), (0.95, 2, 4.303), (0.95, 3, 3.182), (0.95, 4, 2.776), (0.95, 9, 2.262), (0.95, 10, 2.228),
        (0.95, 29, 2.045), (0.95, 30, 2.042), (0.95, 120, 1.980), (0.95, 100_000, 1.960), (0.99, 1, 63.657),
        (0.99, 5, 4.032), (0.99, 60, 2.660), (0.90, 7, 1.895), (0.90, 12, 1.782), (0.999, 8, 5.041),
    ],
)  # fmt: skip
def test_t_quantiles_match_the_published_table(confidence: float, degrees_of_freedom: int, published: float) -> None:
    assert t_quantile(confidence, degrees_of_freedom) == pytest.approx(published, abs=6e-4)


def test_an_interval_of_known_numbers() -> None:
    result = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert result.mean == 3.0
    assert result.half_width == pytest.approx(2.776445 * math.sqrt(2.5 / 5), rel=1e-6)
    assert interval([7.0]).half_width is None and interval([7.0, 7.0]) == (7.0, 0.0, 2)


def test_equal_pairs_differ_by_exactly_zero() -> None:
    values = [0.1, 0.2, 0.7, 1e9 / 3]
    assert paired_difference(values, list(values)) == (0.0, 0.0, 4)


def test_pairing_removes_the_common_variation() -> None:
    rng = random.Random(1)
    common = [rng.gauss(100, 10) for _ in range(8)]
    difference = paired_difference([value + 1 + rng.gauss(0, 0.1) for value in common], common)
    assert difference.excludes_zero and difference.half_width is not None and difference.half_width < 0.2
    assert not interval([value + 1 for value in common]).relative_to(1).half_width < 1  # type: ignore[operator]


@pytest.mark.parametrize(("confidence", "pairs"), [(0.95, 3), (0.95, 10), (0.8, 5)])
def test_paired_intervals_have_the_stated_coverage(confidence: float, pairs: int) -> None:
    rng, tries, truth, covered = random.Random(pairs), 4000, 2.5, 0
    for _ in range(tries):
        common = [rng.gauss(50, 20) for _ in range(pairs)]
        result = paired_difference([c + truth + rng.gauss(0, 3) for c in common], common, confidence)
        covered += abs(result.mean - truth) <= (result.half_width or 0.0)
    deviation = math.sqrt(confidence * (1 - confidence) / tries)
    assert abs(covered / tries - confidence) < 4 * deviation


def test_paired_intervals_of_simulated_runs_cover_the_long_run_difference() -> None:
    lengths = {"kind": "lognormal", "prompt": {"mean": 20, "sd": 10}, "output": {"mean": 8, "sd": 4}}
    workload = {"requests": 25, "arrivals": {"kind": "poisson", "rate": 20}, "lengths": lengths}
    base = {"workload": workload, "profile": {"kind": "linear", "prefill": 0.01, "decode_step": 0.01}}
    count, pairs = 240, 4
    first, second = (
        [run_tasks(context_json(base), [Task(0, r, {"policy.decode_batch": batch})])[0] for r in range(count)]
        for batch in (2, 3)
    )
    values = [[run["metrics"]["mean_e2el_ms"] for run in runs] for runs in (first, second)]
    truth = paired_difference(values[1], values[0]).mean
    groups = [paired_difference(values[1][k : k + pairs], values[0][k : k + pairs]) for k in range(0, count, pairs)]
    covered = sum(abs(one.mean - truth) <= (one.half_width or 0.0) for one in groups)
    assert truth < 0
    assert covered / len(groups) >= 0.86  # 60 groups at 95 %: three standard errors below


@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.99])
@pytest.mark.parametrize("count", [2, 3, 5, 40])
@pytest.mark.parametrize("factor", [1.0, 1.01, 2.0, 7.5, 300.0])
def test_the_estimated_replications_are_the_smallest_number_with_the_half_width(
    confidence: float, count: int, factor: float
) -> None:
    """With the same standard deviation: t quantile * deviation / sqrt(number) <= half-width."""
    result = interval([(-1.0) ** k for k in range(count)], confidence)
    assert result.half_width is not None
    target = result.half_width / factor
    number = replications_for(target, result, confidence)
    deviation = result.half_width * math.sqrt(count) / t_quantile(confidence, count - 1)

    def half_width(n: int) -> float:
        return t_quantile(confidence, n - 1) * deviation / math.sqrt(n)

    assert half_width(number) <= target * (1 + 1e-12)
    assert number == count or half_width(number - 1) > target
    assert number <= math.ceil(count * factor**2)  # a constant t quantile needs more


def test_many_replications_need_four_times_as_many_for_half_the_half_width() -> None:
    result = interval([float(k % 7) for k in range(700)])
    assert result.half_width is not None
    assert replications_for(result.half_width / 2, result) == pytest.approx(2800, rel=0.01)


some_points = st.integers(1, 5).flatmap(
    lambda count: st.lists(st.tuples(*[st.sampled_from([-math.inf, -1.5, 0, 1, 2, 3, math.inf])] * count), max_size=30)
)


def dominates(point: Sequence[float], other: Sequence[float]) -> bool:
    """Whether a point is better than another in one objective and not worse in any."""
    return all(a <= b for a, b in zip(point, other)) and any(a < b for a, b in zip(point, other))


@given(some_points)
def test_the_front_has_exactly_the_points_that_no_other_dominates(points: list[tuple[float, ...]]) -> None:
    kept = pareto_front(points)
    by_definition = [i for i, p in enumerate(points) if not any(dominates(q, p) for q in points)]
    assert kept == by_definition
    assert not any(dominates(points[a], points[b]) for a, b in itertools.permutations(kept, 2))


def test_the_front_of_two_objectives_compares_each_point_with_one_other(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = Mock(side_effect=operator.le)
    monkeypatch.setattr(ranking, "le", compared)
    count = 2000
    assert len(pareto_front([(x, -x) for x in range(count)])) == count
    assert len(pareto_front([(x, x) for x in range(count)])) == 1
    assert compared.call_count < 4 * count
