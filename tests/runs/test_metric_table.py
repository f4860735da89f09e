"""Titles of metrics, one unit for several values, and digits that the interval supports."""

from __future__ import annotations

import math
from typing import Optional

import pytest
from servesim.runs.metric_table import TABLE, format_quantity, metric_title, unit_of
from servesim.statistics.intervals import Interval
from servesim.statistics.number_format import format_mean


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("mean_e2el_ms", "Mean end-to-end latency"),
        ("p99_ttft_ms", "P99 TTFT"),
        ("p99.9_itl_ms", "P99.9 ITL"),
        ("std_tpot_ms", "Standard deviation of TPOT"),
        ("p99_ttft_ms[priority=0]", "P99 TTFT, priority 0"),
        ("mean_e2el_ms[session=chat]", "Mean end-to-end latency, session chat"),
        ("output_throughput", "Output throughput"),
        ("request_goodput", "Goodput"),
    ],
)
def test_metrics_have_the_names_that_people_use(name: str, title: str) -> None:
    assert metric_title(name) == title


def test_all_titles_differ_and_are_no_keys() -> None:
    titles = [metric.title for metric in TABLE]
    assert len(set(titles)) == len(titles)
    assert all(title[0].isupper() and "_" not in title for title in titles)


@pytest.mark.parametrize(
    ("metric", "mean", "half_width", "text"),
    [
        ("mean_e2el_ms", 8291.0, 289.2, "8.29 ± 0.29 s"),
        ("p99_ttft_ms", 431.3, 12.4, "431 ± 12 ms"),
        ("p99_ttft_ms", 999.4, None, "999.4 ms"),
        ("mean_tpot_ms", 12.3456, 0.0123, "12.346 ± 0.012 ms"),
        ("makespan", 44.2345, 120.0, "44 ± 120 s"),  # not more digits than the interval has
        ("output_throughput", 8285.2, 289.2, "8,285 ± 289 tok/s"),
        ("mfu", 0.4321, 0.0123, "43.2 ± 1.2 %"),
        ("makespan", 7.0, 1e-12, "7 ± 0 s"),
        ("makespan", math.nan, None, "–"),
    ],
)
def test_a_value_has_the_digits_that_its_interval_supports(
    metric: str, mean: float, half_width: Optional[float], text: str
) -> None:
    assert format_mean(Interval(mean, half_width, 3), metric) == text


def test_several_values_have_one_unit() -> None:
    seconds = unit_of("p99_ttft_ms", [85.0, math.nan, None, 45_000.0, 0.0])
    assert [format_quantity(value, None, seconds) for value in (85.0, 45_000.0)] == ["0.085", "45"]
    assert seconds.after("P99 TTFT") == "P99 TTFT (s)"
    assert unit_of("mean_tpot_ms", [1.5, 45_000.0]).name == "ms"  # 1.5 ms would lose its digits
    assert unit_of("preemptions", [3.0]).after("Preemptions") == "Preemptions"
