"""Synthetic workloads: every kind of arrival and length compared with theory; independent random streams."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from servesim.traces.describe import dispersion, gap_variation
from servesim.traces.make.arrivals import ARRIVAL_KINDS
from servesim.traces.make.lengths import DISTRIBUTION_KINDS, PAIR_KINDS
from servesim.traces.make.synth import synthesise
from servesim.traces.trace import Trace

FIXED = {"kind": "fixed", "prompt": 100, "output": 10}
EXAMPLES: dict[str, dict[str, Any]] = {
    "constant": {"rate": 4},
    "poisson": {"rate": 4},
    "gamma": {"rate": 4, "burstiness": 0.25},
    "vllm": {"rate": 4, "burstiness": 0.25},
    "contest": {"X": 4},
    "on-off": {"on_rate": 8, "off_rate": 1, "on_seconds": 20, "off_seconds": 20},
    "mmpp": {"rates": [1, 4, 9], "seconds": [10, 20, 5]},
    "diurnal": {"rate": 4, "amplitude": 0.9, "period": 500, "peak": 125},
    "stages": {"stages": [{"rate": 4, "seconds": 600}, {"rate": 0, "seconds": 50}, {"rate": 8, "seconds": 4000}]},
    "burst": {},
    "closed": {"users": 8, "think_time": 2.0},
}


def generate(arrivals: dict[str, Any], lengths: dict[str, Any] = FIXED, seed: int = 0, **rest: Any) -> Trace:
    return synthesise(
        {"requests": rest.pop("requests", 20_000), "arrivals": arrivals, "lengths": lengths, **rest}, seed
    )


def example(kind: str, **changes: Any) -> dict[str, Any]:
    return {"kind": kind, **EXAMPLES[kind], **changes}


def test_there_is_an_example_of_every_kind_of_arrival() -> None:
    assert set(EXAMPLES) == set(ARRIVAL_KINDS)


@pytest.mark.parametrize("kind", EXAMPLES)
def test_the_seed_determines_the_arrivals(kind: str) -> None:
    one, same, other = (generate(example(kind), seed=seed, requests=500).arrivals for seed in (1, 1, 2))
    assert (one == same).all()
    assert (np.diff(one) >= 0).all()
    assert (one != other).any() or kind in ("constant", "burst", "closed")


@pytest.mark.parametrize("kind", EXAMPLES)
def test_lengths_do_not_change_arrivals_and_arrivals_do_not_change_lengths(kind: str) -> None:
    random_lengths = {"kind": "lognormal", "prompt": {"mean": 100, "sd": 50}, "output": {"mean": 30, "sd": 9}}
    fixed, lognormal = (generate(example(kind), requests=500), generate(example(kind), random_lengths, requests=500))
    assert (fixed.arrivals == lognormal.arrivals).all()
    assert (lognormal.prompts == generate({"kind": "burst"}, random_lengths, requests=500).prompts).all()
    longer = generate(example(kind), {**random_lengths, "prompt": {"mean": 900, "sd": 50}}, requests=500)
    assert (lognormal.outputs == longer.outputs).all()


def test_a_constant_rate_has_equal_gaps_from_0() -> None:
    assert generate({"kind": "constant", "rate": 4}).arrivals[:4].tolist() == [0.0, 0.25, 0.5, 0.75]


def test_poisson_arrivals_have_a_variation_and_a_dispersion_of_one() -> None:
    times = generate(example("poisson")).arrivals
    assert 20_000 / times[-1] == pytest.approx(4, rel=0.03)
    assert gap_variation(times) == pytest.approx(1, rel=0.03)
    assert dispersion(times, 1) == pytest.approx(1, rel=0.1)
    assert dispersion(times, 10) == pytest.approx(1, rel=0.2)


def test_burstiness_is_one_over_the_squared_variation() -> None:
    assert gap_variation(generate(example("gamma")).arrivals) == pytest.approx(2, rel=0.06)
    assert (generate(example("gamma")).arrivals == generate({"kind": "gamma", "rate": 4, "cv": 2}).arrivals).all()
    assert gap_variation(generate({"kind": "gamma", "rate": 4, "burstiness": 16}).arrivals) == pytest.approx(
        0.25, rel=0.03
    )


def test_vllms_gaps_end_at_exactly_count_over_rate() -> None:
    for seed in range(3):
        times = generate(example("vllm"), seed=seed).arrivals
        assert times[-1] == pytest.approx(20_000 / 4, rel=1e-12)
        assert gap_variation(times) == pytest.approx(2, rel=0.06)
    # The gaps are numpy's gamma samples of that seed, scaled.
    expected = np.cumsum(np.random.RandomState(7).gamma(0.25, 1.0, 50))
    times = synthesise({"requests": 50, "arrivals": example("vllm"), "lengths": FIXED}, 7).arrivals
    assert times == pytest.approx(expected * (50 / 4 / expected[-1]))


def test_on_and_off_phases_alternate_with_their_rates() -> None:
    times = generate(example("on-off")).arrivals
    assert 20_000 / times[-1] == pytest.approx(4.5, rel=0.2)
    # Two-state MMPP: 1 + 2 (difference of rates)^2 p q / (mean rate * (1/on + 1/off)) in the long run.
    limit = 1 + 2 * (8 - 1) ** 2 * 0.25 / (4.5 * (1 / 20 + 1 / 20))
    assert dispersion(times, 200) == pytest.approx(limit, rel=0.6)


def test_the_off_rate_may_be_zero() -> None:
    times = generate(example("on-off", off_rate=0)).arrivals
    assert np.diff(times).max() > 20


def test_the_mean_of_jumping_rates_is_weighted_by_time() -> None:
    mean = (1 * 10 + 4 * 20 + 9 * 5) / 35
    assert 20_000 / generate(example("mmpp")).arrivals[-1] == pytest.approx(mean, rel=0.15)


def test_the_daily_peak_is_at_its_set_time() -> None:
    times = generate(example("diurnal")).arrivals
    time_of_day = times % 500
    peak, trough = ((time_of_day > 75) & (time_of_day < 175)).sum(), ((time_of_day > 325) & (time_of_day < 425)).sum()
    # The rate is 4 (1 + 0.9 cos): about 1.84 of the mean around the peak, 0.16 around the trough.
    amplitude = 0.9 * np.sin(2 * np.pi * 50 / 500) / (2 * np.pi * 50 / 500)
    assert peak / trough == pytest.approx((1 + amplitude) / (1 - amplitude), rel=0.15)
    assert 20_000 / times[-1] == pytest.approx(4, rel=0.05)


def test_in_a_closed_loop_each_user_waits_for_the_previous_response() -> None:
    trace = synthesise(
        {"requests": 7, "arrivals": {"kind": "closed", "users": 3, "think_time": 2.5}, "lengths": FIXED}, 0
    )
    assert [(r.id, r.follows, r.think_time, r.session) for r in sorted(trace.requests, key=lambda r: int(r.id))] == [
        (0, None, 0.0, "user-0"),
        (1, None, 0.0, "user-1"),
        (2, None, 0.0, "user-2"),
        (3, 0, 2.5, "user-0"),
        (4, 1, 2.5, "user-1"),
        (5, 2, 2.5, "user-2"),
        (6, 3, 2.5, "user-0"),
    ]


def test_users_start_during_the_ramp_and_think_times_may_be_exponential() -> None:
    arrivals = {"kind": "closed", "users": 4, "think_time": 2.0, "pauses": "exponential", "ramp": 8}
    trace = generate(arrivals)
    assert [r.arrival for r in trace.requests if r.follows is None] == [0.0, 2.0, 4.0, 6.0]
    pauses = np.array([r.think_time for r in trace.requests if r.follows is not None])
    assert pauses.mean() == pytest.approx(2, rel=0.03)
    assert pauses.std() == pytest.approx(2, rel=0.05)


@pytest.mark.parametrize("kind", sorted(set(EXAMPLES) - {"burst", "closed"}))
def test_a_duration_selects_the_arrivals_before_its_end(kind: str) -> None:
    trace = synthesise({"duration": 1500, "arrivals": example(kind), "lengths": FIXED}, 3)
    complete = generate(example(kind), seed=3).arrivals
    assert trace.requests[-1].arrival <= 1500
    if kind != "vllm":  # which scales its gaps to the total
        assert (trace.arrivals == complete[complete < 1500]).all()


def test_there_is_an_example_of_every_kind_of_length() -> None:
    assert set(DISTRIBUTION_KINDS) == {"fixed", "uniform", "lognormal", "quantiles"}
    assert set(PAIR_KINDS) == {"trace", "contest"}


def test_uniform_lengths_reach_both_ends_equally_often() -> None:
    trace = generate({"kind": "burst"}, {"prompt": [3, 7], "output": {"kind": "uniform", "low": 1, "high": 2}})
    counts = np.bincount(trace.prompts)[3:8] / 20_000
    assert counts == pytest.approx(0.2, abs=0.012)
    assert trace.outputs.mean() == pytest.approx(1.5, abs=0.02)


def test_lognormal_lengths_have_the_set_mean_and_deviation() -> None:
    sides = {"prompt": {"mean": 265, "sd": 300}, "output": {"median": 200, "sigma": 0.5, "max": 1000}}
    trace = generate({"kind": "burst"}, {"kind": "lognormal", **sides})
    assert trace.prompts.mean() == pytest.approx(265, rel=0.03)
    assert trace.prompts.std() == pytest.approx(300, rel=0.1)
    assert np.median(trace.outputs) == pytest.approx(200, rel=0.03)
    assert trace.outputs.max() <= 1000


def test_lengths_have_the_set_quantiles() -> None:
    table = {"at": [0, 0.5, 0.9, 1], "tokens": [10, 100, 1000, 4000]}
    trace = generate({"kind": "burst"}, {"kind": "quantiles", "prompt": table, "output": table})
    assert [(trace.prompts <= tokens).mean() for tokens in (55, 100, 1000, 2500)] == pytest.approx(
        [0.25, 0.5, 0.9, 0.95], abs=0.015
    )
    assert (trace.prompts.min(), trace.prompts.max()) == (10, pytest.approx(4000, rel=0.01))


def test_prompts_and_outputs_can_be_correlated() -> None:
    side = {"mean": 100, "sd": 50}
    trace = generate({"kind": "burst"}, {"kind": "lognormal", "prompt": side, "output": side, "correlation": 0.8})
    logs = np.log(trace.prompts), np.log(trace.outputs)
    assert np.corrcoef(*logs)[0, 1] == pytest.approx(0.8, abs=0.02)
    apart = generate({"kind": "burst"}, {"kind": "lognormal", "prompt": side, "output": side})
    assert np.corrcoef(np.log(apart.prompts), np.log(apart.outputs))[0, 1] == pytest.approx(0, abs=0.03)


def test_lengths_and_limits_are_resampled_together_from_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("prompt_tokens,output_tokens,generated_tokens\n1,10,9\n2,20,20\n3,30,29\n")
    trace = generate({"kind": "poisson", "rate": 4}, {"kind": "trace", "path": str(path)})
    pairs = {(r.prompt, r.output, r.limit) for r in trace.requests}
    assert pairs == {(1, 9, 10), (2, 20, 20), (3, 29, 30)}
    assert np.bincount(trace.prompts)[1:] / 20_000 == pytest.approx(1 / 3, abs=0.02)
    ordered = generate({"kind": "poisson", "rate": 4}, {"kind": "trace", "path": str(path), "draw": "in-order"})
    assert ordered.prompts[:5].tolist() == [1, 2, 3, 1, 2]


def test_a_limit_bounds_outputs_and_is_the_limit_of_each_request() -> None:
    trace = generate({"kind": "burst"}, {"prompt": 5, "output": [1, 100]}, limit=50)
    assert trace.outputs.max() == 50
    assert {r.limit for r in trace.requests} == {50}


def test_priorities_have_the_set_fractions() -> None:
    trace = generate({"kind": "burst"}, priorities={0: 3, 5: 1})
    assert sum(r.priority == 5 for r in trace.requests) / 20_000 == pytest.approx(0.25, abs=0.02)


def test_a_contest_workload_equals_the_contest_generator() -> None:
    trace = synthesise({"contest": {"X": 2, "T": 750}}, 4)
    assert (len(trace), trace.format) == (1500, "contest")


def test_a_mix_merges_its_workloads_each_with_separate_random_streams() -> None:
    workload = {"requests": 100, "arrivals": {"kind": "poisson", "rate": 1}, "lengths": FIXED}
    trace = synthesise({"mix": [workload, {**workload, "lengths": {"prompt": 7, "output": 7}}]}, 0)
    times = [[r.arrival for r in trace.requests if r.prompt == prompt] for prompt in (100, 7)]
    assert [len(arrivals) for arrivals in times] == [100, 100]
    assert times[0] != times[1]
    assert [r.id for r in trace.requests] == list(range(200))


WRONG: Any = [
    {"arrivals": {}, "lengths": {}},
    {"requests": 1, "durations": 2},
    {"requests": 0, "arrivals": {}},
    {"requests": True},
    {"requests": 1},
    {"requests": 1, "arrivals": 5},
    {"requests": 1, "arrivals": {"kind": "erlang"}},
    {"requests": 1, "arrivals": {"kind": ["poisson"]}},
    {"requests": 1, "arrivals": {"kind": "poisson"}},
    {"requests": 1, "arrivals": {"kind": "poisson", "rate": "8"}},
    {"requests": 1, "arrivals": {"kind": "poisson", "rate": float("nan")}},
    {"requests": 1, "arrivals": {"kind": "poisson", "rat": 8}},
    {"requests": 1, "arrivals": {"kind": "mmpp", "rates": [1], "seconds": [1]}},
    {"requests": 1, "arrivals": example("diurnal", amplitude=1.5)},
    {"duration": 9, "arrivals": {"kind": "burst"}},
    {"contest": {"X": 2, "T": 3, "U": 4}},
    {"contest": {"X": 2, "T": 3}, "requests": 4},
    {"mix": []},
    {"mix": [{"requests": 0}]},
]


def test_the_error_for_a_wrong_workload_is_one_line_with_the_key(expected_errors: Callable[..., None]) -> None:
    expected_errors("workloads", lambda workload: synthesise(workload, 0), WRONG)


WRONG_LENGTHS: Any = [
    {"kind": "zipf"},
    {"prompt": 5},
    {"prompt": 0, "output": 5},
    {"prompt": [9, 3], "output": 5},
    {"prompt": {"kind": "lognormal", "mean": 5}, "output": 5},
    {"prompt": {"kind": "quantiles", "at": [0, 0.5], "tokens": [1, 2]}, "output": 5},
    {"prompt": 5, "output": 5, "correlation": 2},
    {"kind": "trace"},
    {"kind": "trace", "path": "/nowhere"},
]


def test_the_error_for_wrong_lengths_is_one_line_with_the_key(expected_errors: Callable[..., None]) -> None:
    expected_errors(
        "lengths",
        lambda lengths: synthesise({"requests": 3, "arrivals": {"kind": "burst"}, "lengths": lengths}, 0),
        WRONG_LENGTHS,
    )
