"""Confidence: quantiles against published ones, coverage against its claim, the Pareto front against its definition."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from servesim.study.intervals import interval, paired, replications_for, t_quantile
from servesim.study.ranking import dominates, pareto_front
from servesim.study.single_run import Task, run_tasks, setup_of


@pytest.mark.parametrize(
    ("confidence", "freedom", "published"),
    [  # the usual two-sided table of Student's t
        (0.95, 1, 12.706), (0.95, 2, 4.303), (0.95, 3, 3.182), (0.95, 4, 2.776), (0.95, 9, 2.262), (0.95, 10, 2.228),
        (0.95, 29, 2.045), (0.95, 30, 2.042), (0.95, 120, 1.980), (0.95, 100_000, 1.960), (0.99, 1, 63.657),
        (0.99, 5, 4.032), (0.99, 60, 2.660), (0.90, 7, 1.895), (0.90, 12, 1.782), (0.999, 8, 5.041),
    ],
)  # fmt: skip
def test_t_quantiles_are_those_of_the_table(confidence: float, freedom: int, published: float) -> None:
    assert t_quantile(confidence, freedom) == pytest.approx(published, abs=6e-4)


def test_an_interval_of_known_numbers() -> None:
    found = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found.mean == 3.0
    assert found.half == pytest.approx(2.776445 * math.sqrt(2.5 / 5), rel=1e-6)
    assert interval([7.0]).half is None and interval([7.0, 7.0]) == (7.0, 0.0, 2)


def test_equal_pairs_differ_by_exactly_zero() -> None:
    values = [0.1, 0.2, 0.7, 1e9 / 3]
    assert paired(values, list(values)) == (0.0, 0.0, 4)


def test_pairing_takes_out_what_is_common() -> None:
    chance = random.Random(1)
    common = [chance.gauss(100, 10) for _ in range(8)]
    apart = paired([value + 1 + chance.gauss(0, 0.1) for value in common], common)
    assert apart.certain and apart.half is not None and apart.half < 0.2
    assert not interval([value + 1 for value in common]).over(1).half < 1  # type: ignore[operator]


@pytest.mark.parametrize(("confidence", "pairs"), [(0.95, 3), (0.95, 10), (0.8, 5)])
def test_paired_intervals_cover_the_truth_as_often_as_they_claim(confidence: float, pairs: int) -> None:
    chance, tries, truth, covered = random.Random(pairs), 4000, 2.5, 0
    for _ in range(tries):
        common = [chance.gauss(50, 20) for _ in range(pairs)]
        found = paired([c + truth + chance.gauss(0, 3) for c in common], common, confidence)
        covered += abs(found.mean - truth) <= (found.half or 0.0)
    spread = math.sqrt(confidence * (1 - confidence) / tries)
    assert abs(covered / tries - confidence) < 4 * spread


def test_paired_intervals_of_simulated_runs_cover_the_long_run_difference() -> None:
    lengths = {"kind": "lognormal", "prompt": {"mean": 20, "sd": 10}, "output": {"mean": 8, "sd": 4}}
    workload = {"requests": 25, "arrivals": {"kind": "poisson", "rate": 20}, "lengths": lengths}
    base = {"workload": workload, "profile": {"kind": "linear", "prefill": 0.01, "decode_step": 0.01}}
    count, pairs = 240, 4
    first, second = (
        [run_tasks(setup_of(base), [Task(0, r, {"policy.decode_batch": batch})])[0] for r in range(count)]
        for batch in (2, 3)
    )
    values = [[run["figures"]["mean_e2el_ms"] for run in runs] for runs in (first, second)]
    truth = paired(values[1], values[0]).mean
    groups = [paired(values[1][k : k + pairs], values[0][k : k + pairs]) for k in range(0, count, pairs)]
    covered = sum(abs(one.mean - truth) <= (one.half or 0.0) for one in groups)
    assert truth < 0
    assert covered / len(groups) >= 0.86  # 60 groups at 95 %: three standard errors below


def test_replications_for_a_half_width_grow_with_its_square() -> None:
    found = interval([1.0, 2.0, 3.0, 4.0])
    assert found.half is not None
    assert replications_for(found.half, found) == 4
    assert replications_for(found.half / 2, found) == 16


points = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=30)


@given(points)
def test_the_front_is_exactly_what_nothing_dominates(found: list[tuple[int, int, int]]) -> None:
    kept = pareto_front(found)
    by_definition = [i for i, p in enumerate(found) if not any(dominates(q, p) for q in found)]
    assert kept == by_definition
    assert not any(dominates(found[a], found[b]) for a, b in itertools.permutations(kept, 2))
