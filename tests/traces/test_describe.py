"""Statistics of traces: compared with hand-worked cases, theory and published numbers."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from servesim.core import Request
from servesim.traces.describe import (
    correlation,
    dispersion,
    format_statistics,
    gap_variation,
    ranks,
    statistics,
)
from servesim.traces.make.synth import synthesise
from servesim.traces.read.formats import load
from servesim.traces.trace import Trace


def test_variation_and_dispersion_of_a_hand_worked_case() -> None:
    arrivals = np.array([0.0, 1.0, 2.0, 5.0])  # gaps 1, 1, 3: mean 5/3, variance 8/9
    assert gap_variation(arrivals) == pytest.approx((8 / 9) ** 0.5 / (5 / 3))
    # Whole windows of 2 s: [0, 2) holds two, [2, 4) one: mean 1.5, variance 0.25.
    assert dispersion(arrivals, 2) == pytest.approx(0.25 / 1.5)
    assert dispersion(arrivals, 3) is None


def test_equal_values_get_mean_ranks_and_ranks_of_rising_values_correlate() -> None:
    assert ranks(np.array([30, 10, 20, 20])).tolist() == [4.0, 1.0, 2.5, 2.5]
    rising = np.arange(1, 50)
    assert correlation(ranks(rising), ranks(rising**5)) == pytest.approx(1.0)
    assert correlation(rising, np.ones(49)) is None


def test_statistics_of_a_small_trace() -> None:
    requests = [
        Request(0, 0.0, 10, 1, session="a"),
        Request(1, 2.0, 20, 2, session="a", follows=0, think_time=2.0),
        Request(2, 4.0, 30, 3, limit=9, priority=1),
    ]
    metrics = statistics(Trace(requests, "t", "synth", dropped={"no output tokens": 2}))
    assert (metrics["requests"], metrics["chained"], metrics["dropped"]) == (3, 1, {"no output tokens": 2})
    assert (metrics["span_s"], metrics["rate"], metrics["own_limits"]) == (4.0, 0.25, 1)
    assert (metrics["prompt"]["mean"], metrics["prompt"]["p50"], metrics["prompt"]["total"]) == (20.0, 20.0, 60)
    assert metrics["correlation"] == pytest.approx(1.0)
    assert metrics["sessions"] == {"count": 1, "mean_turns": 2.0, "most_turns": 2}
    assert metrics["priorities"] == {0: 2, 1: 1}
    text = format_statistics(metrics)
    assert "skipped                    2: no output tokens" in text
    assert "sessions                   1, 2 turns on average, at most 2" in text


@pytest.mark.parametrize(
    "workload",
    [
        {
            "requests": 200,
            "arrivals": {"kind": "poisson", "rate": 5},
            "lengths": {"prompt": [5, 4000], "output": [1, 9]},
        },
        {"requests": 1, "arrivals": {"kind": "burst"}, "lengths": {"prompt": 5, "output": 9}},
        {"requests": 9, "arrivals": {"kind": "closed", "users": 3}, "lengths": {"prompt": [5, 50], "output": 9}},
        {"requests": 2, "arrivals": {"kind": "constant", "rate": 1e-5}, "lengths": {"prompt": 1, "output": [1, 99]}},
    ],
)
def test_any_trace_can_be_described(workload: dict[str, Any]) -> None:
    trace = synthesise(workload, 0)
    assert f"requests                   {len(trace)}" in format_statistics(statistics(trace))


def test_real_traces_have_the_published_statistics(shared: Path) -> None:
    data = shared / "data"
    check_mooncake(statistics(load(data / "traces" / "mooncake_conversation.csv.gz"), block_size=512))
    for name, cv, rate in (("X0.5_T3000", 0.022, 0.5), ("X2_T750", 0.045, 2.0), ("X150_T10", 0.316, 100.0)):
        check_contest(statistics(load(data / "contest" / f"contest_{name}.csv.gz")), cv, rate)
    check_bench(statistics(load(data / "bench" / "workload_10k.csv.gz")))
    for name, rate in (("deepseek-r1_20min_5rps", 5), ("m-large_20min_10rps", 10)):
        check_servegen(statistics(load(data / "traces" / f"servegen_{name}.csv.gz")), rate)


def check_mooncake(metrics: dict[str, Any]) -> None:
    """Assert that its rounded time stamps distort the variation of gaps but not the dispersion."""
    assert metrics["gap_cv"] == pytest.approx(3.03, abs=0.01)
    assert metrics["dispersion"]["60"] == pytest.approx(2.9, abs=0.05)
    assert metrics["prefix"]["hit_rate"] == pytest.approx(0.373, abs=0.0005)


def check_contest(metrics: dict[str, Any], cv: float, rate: float) -> None:
    """Assert the published rate of a contest table."""
    assert metrics["gap_cv"] == pytest.approx(cv, rel=0.05)
    assert metrics["rate"] == pytest.approx(rate, rel=0.01)
    assert (metrics["output"]["total"], metrics["own_limits"]) == (97_570, 8)  # 8 outputs are shorter than their limit


def check_bench(metrics: dict[str, Any]) -> None:
    """Assert that the bench file is Poisson with the published means."""
    assert metrics["requests"] == 10_000
    assert metrics["rate"] == pytest.approx(8.2, rel=0.02)
    assert metrics["gap_cv"] == pytest.approx(1.0, rel=0.03)
    assert metrics["prompt"]["mean"] == pytest.approx(265, rel=0.02)
    assert metrics["output"]["mean"] == pytest.approx(255, rel=0.02)


def check_servegen(metrics: dict[str, Any], rate: float) -> None:
    """Assert that a sample of ServeGen has the rate in its name."""
    assert metrics["rate"] == pytest.approx(rate, rel=0.03)
    assert metrics["span_s"] == pytest.approx(1200, rel=0.01)


def test_rounded_time_stamps_distort_the_variation_of_gaps_but_not_the_dispersion() -> None:
    """Time stamps rounded down to 3 s: most gaps are 0. In windows of 60 s the dispersion stays 1, as for Poisson."""
    exact = np.cumsum(np.random.default_rng(1).exponential(0.3, 20_000))
    rounded = np.floor(exact / 3) * 3
    assert gap_variation(exact) == pytest.approx(1.0, rel=0.03)
    assert gap_variation(rounded) == pytest.approx(3.0, rel=0.05)  # a tenth of the gaps are 3 s, the others 0
    assert dispersion(exact, 60) == pytest.approx(1.0, rel=0.25)
    assert dispersion(rounded, 60) == pytest.approx(dispersion(exact, 60), rel=0.15)


def write_rows(path: Path, rows: int) -> Path:
    """Write a trace with this many requests."""
    rng = np.random.default_rng(2)
    arrivals, prompts, outputs = rng.exponential(0.1, rows).cumsum(), *rng.integers(1, 2000, (2, rows))
    lines = (f"{arrival:.6f},{prompt},{output}\n" for arrival, prompt, output in zip(arrivals, prompts, outputs))
    path.write_text("arrival_s,prompt_tokens,output_tokens\n" + "".join(lines))
    return path


def test_a_row_of_a_trace_is_read_in_a_few_calls(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "trace.csv", 2000)
    load(path)  # imports what it needs
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    load(path)
    sys.setprofile(None)
    assert calls < 6 * 2000  # today 3 of each row


@pytest.mark.live
def test_a_trace_loads_in_a_small_multiple_of_the_time_to_create_its_requests(tmp_path: Path) -> None:
    check_speed(write_rows(tmp_path / "trace.csv", 50_000))


def check_speed(path: Path) -> None:
    """Assert that a trace loads in 40 times the CPU time of creating its requests; it takes at most 7 times that.

    Both are measured at the same moment, because other work slows both down. Creating 100,000 requests takes 0.16 s.
    """
    rows = len(load(path))
    ratios = []
    for _ in range(3):
        bare = cpu_seconds(lambda: [Request(k, 0.0, 1, 1) for k in range(20_000)]) * rows / 20_000
        ratios.append(cpu_seconds(lambda: load(path)) / bare)
    assert min(ratios) < 40, path.name


def cpu_seconds(work: Callable[[], object]) -> float:
    """Return the CPU seconds of a call."""
    start = time.process_time()
    work()
    return time.process_time() - start
