"""Metrics by column are the same numbers as the rows of requests.csv and plain statistics; memory per request."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
from servesim.config.scenario import scenario_from
from servesim.engine.step import TokenGaps
from servesim.runs.metric_table import PERCENTILES
from servesim.runs.metrics import (
    Metrics,
    pooled_stats,
    summary,
    weighted_order_statistics,
    weighted_sum,
)
from servesim.runs.request_rows import COLUMNS, STATES, request_rows
from servesim.runs.simulate import Run, load_trace, simulate


def run(**changes: object) -> Run:
    tree = {
        "workload": {"contest": {"X": 20, "T": 10}},
        "policy": {"name": "vllm", "max_num_seqs": 16},
        "engine": {"num_blocks": 60, "host_blocks": 20, "front_end": {"lag": 3, "end_lag": True}},
        **changes,
    }
    return simulate(scenario_from(tree))


@pytest.mark.parametrize("timeout", [None, 10.0])
def test_the_time_breakdown_has_the_means_of_the_columns_of_requests_csv(timeout: float | None) -> None:
    result = run(engine={"num_blocks": 60, "front_end": {"lag": 3, "end_lag": True}, "client_timeout": timeout})
    rows = [row for row in request_rows(result.requests) if row[COLUMNS.index("outcome")] == "finished"]
    assert len(rows) > 20 and (len(rows) < len(result.requests)) == (timeout is not None)
    for name, mean in result.measures.time_breakdown().items():
        values = [cells[COLUMNS.index(name)] for cells in rows]
        assert mean == sum(values) / len(values)
    assert list(result.measures.time_breakdown()) == list(STATES)
    assert result.measures.time_breakdown()["front_end"] > 0


def test_makespan_counts_from_the_first_request_to_the_last_end() -> None:
    result = run()
    ends = [request.client_end for request in result.requests if request.client_end is not None]
    assert result.measures.makespan == max(ends) - min(request.sent for request in result.requests)
    assert Metrics([], TokenGaps()).makespan == 0.0
    assert Metrics([], TokenGaps()).outcomes() == {}


def test_pooled_statistics_weight_every_gap_by_its_count() -> None:
    gaps = TokenGaps()
    random = np.random.default_rng(1)
    single, counts = random.exponential(0.02, 500), random.integers(1, 40, 500)
    for seconds, count in zip(single.tolist(), counts.tolist()):
        gaps.add(seconds, count)
    pooled, plain = pooled_stats(gaps), summary(np.repeat(single, counts))
    assert list(pooled) == list(plain) == ["mean", "median", "std", *(f"p{q}" for q in PERCENTILES)]
    assert pooled == pytest.approx(plain, rel=1e-12)
    assert pooled_stats(TokenGaps()) == {}


@pytest.mark.parametrize("scale", [0.0, 5e-324, 1e-12, 1.0, 1e12])
def test_the_order_of_values_does_not_change_their_sum(scale: float) -> None:
    values = np.random.default_rng(2).lognormal(0, 6, 50_000) * scale
    counts = np.random.default_rng(3).integers(1, 200, len(values)).astype(np.int32)
    total = weighted_sum(values, counts)
    assert total == pytest.approx(math.fsum(values * counts), rel=1e-15)
    for order in (np.argsort(values), np.argsort(counts), np.arange(len(values))[::-1]):
        assert weighted_sum(values[order], counts[order]) == total


def test_order_statistics_are_those_of_the_sorted_repeated_values() -> None:
    random = np.random.default_rng(3)
    for values in (random.lognormal(0, 3, 300), np.zeros(4), np.array([0.0, 1e-300, 2.0, 2.0]), np.array([1e9])):
        counts = random.integers(1, 5, len(values)).astype(np.int32)
        expected = np.sort(np.repeat(values, counts))
        indices = np.arange(len(expected))
        assert (weighted_order_statistics(values, counts, indices) == expected).all()
        for index in indices.tolist():
            assert weighted_order_statistics(values, counts, np.array([index])).tolist() == [expected[index]]


def test_percentiles_have_the_bits_of_numpy() -> None:
    random = np.random.default_rng(2)
    for count in [*range(1, 60), 999, 1000, 1500]:
        values = random.lognormal(3.0, 2.0, count)
        assert [summary(values)[f"p{q}"] for q in PERCENTILES] == np.percentile(values, PERCENTILES).tolist()
    assert np.isnan(summary(np.array([1.0, np.nan, 2.0]))["p50"])


def test_a_run_needs_less_than_a_kilobyte_per_request() -> None:
    """A million requests fit into a gigabyte: the trace is arrays, and the metrics build no rows."""
    count = 4000
    workload = {
        "requests": count,
        "arrivals": {"kind": "poisson", "rate": 8},
        "lengths": {"kind": "fixed", "prompt": 64, "output": 64},
    }
    tree = {
        "policy": {"name": "llm-serving", "decode_batch": 128, "prefill_batch": 8},
        "engine": {"num_blocks": 7424},
        "profile": {"prefill": 0.005, "prefill_token": 6e-5, "decode_step": 0.015, "context": 1.2e-7},
    }
    scenario = scenario_from({**tree, "workload": workload})
    simulate(scenario_from({**tree, "workload": {**workload, "requests": 10}})).result()  # imports modules
    tracemalloc.start()
    try:
        trace = load_trace(scenario)
        trace_bytes = tracemalloc.get_traced_memory()[0]
        simulate(scenario, trace).result()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert trace_bytes < 40 * count
    assert peak < 1000 * count


def test_more_percentiles_are_exact_and_change_no_other_number() -> None:
    result = run()
    before = result.result()
    result.measures.add_percentiles([99.9, 12.5, 50])
    after = result.result()
    added = {key for key in after if key not in before}
    assert added == {f"{name}_{kind}_ms" for name in ("p12.5", "p99.9") for kind in ("ttft", "tpot", "itl", "e2el")}
    assert {key: after[key] for key in before} == before
    for name, values in (
        ("ttft", result.measures.ttft),
        ("tpot", result.measures.tpot),
        ("e2el", result.measures.e2el),
    ):
        expected = np.percentile(values, [12.5, 99.9]) * 1e3
        assert [after[f"p12.5_{name}_ms"], after[f"p99.9_{name}_ms"]] == pytest.approx(expected, rel=1e-12)
    gaps = result.server.token_gaps
    every_gap = np.repeat(gaps.seconds, gaps.counts) * 1e3
    assert [after["p12.5_itl_ms"], after["p99.9_itl_ms"]] == pytest.approx(np.percentile(every_gap, [12.5, 99.9]))
