"""Constraints: one syntax for files and options, relative violations."""

from __future__ import annotations

import math
from typing import Any

import pytest
from servesim.core import BadInput
from servesim.statistics.constraints import Bound, describe_miss, parse_bounds
from servesim.study.ranking import Row


def test_a_bound_is_read_with_and_without_spaces() -> None:
    bounds = parse_bounds(["p99_ttft_ms<=2000", " attainment >= 9.9e-1 ", "p99_ttft_ms <= 2e3"])
    assert bounds == (Bound("p99_ttft_ms", "<=", 2000.0), Bound("attainment", ">=", 0.99))
    assert parse_bounds("failed <= 0") == (Bound("failed", "<=", 0.0),)
    assert [str(bound) for bound in bounds] == ["p99_ttft_ms <= 2000", "attainment >= 0.99"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("p99_ttft_ms < 5", "subject_to: expected METRIC <= VALUE or METRIC >= VALUE"),
        ("p99_ttft_ms <= fast", "got 'p99_ttft_ms <= fast'"),
        ("p99_ttft_ms <= inf", "expected METRIC <= VALUE"),
        ("p99_ttft_ms <= nan", "expected METRIC <= VALUE"),
        ("p99_tft_ms <= 5", "no metric 'p99_tft_ms'; did you mean p99_ttft_ms?"),
        ({"p99_ttft_ms": 5}, "expected METRIC <= VALUE"),
        (7, "got 7"),
    ],
)
def test_a_wrong_bound_is_one_line(spec: Any, message: str) -> None:
    with pytest.raises(BadInput) as error:
        parse_bounds(spec)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_violations_are_fractions_of_the_bound() -> None:
    upper, lower, zero = Bound("p99_ttft_ms", "<=", 2000), Bound("attainment", ">=", 0.5), Bound("failed", "<=", 0)
    assert (upper.violation(2341), upper.violation(2000)) == (pytest.approx(0.1705), 0.0)
    assert (lower.violation(0.4), lower.violation(0.6)) == (pytest.approx(0.2), 0.0)
    assert (zero.violation(3.0), upper.violation(math.nan)) == (3.0, math.inf)
    run = {"replication": 0, "metrics": {"p99_ttft_ms": 2500, "attainment": 0.9}}
    assert Row(0, {}, "", [run]).find_missed([upper, lower, zero]) == {upper: 0.25, zero: math.inf}
    assert describe_miss(upper, 2341) == "misses p99_ttft_ms <= 2000 (2,341 ms)"
