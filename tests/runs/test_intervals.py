"""`sim run --intervals`: representative cost models, what the intervals include, and what is printed and stored."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import servesim
import yaml
from servesim.config.scenario import Scenario, scenario_from
from servesim.core import Plan, View
from servesim.core.limits import DEFAULT_DRAWS
from servesim.costs.device_profile import Profile, load_profile
from servesim.costs.linear import LinearCost
from servesim.costs.uncertainty import OVERLAP_SPREAD, RANGE_SPREAD, SESSION_SPREAD, Uncertainty, parameters
from servesim.policies.papers import Orca
from servesim.runs.intervals import (
    describe_intervals,
    format_interval,
    intervals_of,
    prediction_interval,
    simulate_draws,
)
from servesim.runs.run_folder import read_run
from servesim.runs.saturation import ESTIMATE_ERROR, Load, estimated_load, load_of
from servesim.runs.simulate import simulate
from servesim.runs.text import show_run

COST = LinearCost(prefill=0.02, prefill_token=1e-4, decode_step=0.02, decode_row=5e-4)
LENGTHS = {"kind": "lognormal", "prompt": {"mean": 30, "sd": 20}, "output": {"mean": 20, "sd": 15}}
NOISE = {"prefill": [0.8, 1.0, 1.2], "decode": [0.8, 1.0, 1.2]}


def tree(rate: float = 4.0, **keys: Any) -> dict[str, Any]:
    """Return a scenario with 40 requests."""
    workload = {"requests": 40, "arrivals": {"kind": "poisson", "rate": rate}, "lengths": LENGTHS}
    return {"workload": workload, "policy": {"name": "vllm"}, "profile": "h200-llama2-7b", **keys}


def sim(*words: Any) -> int:
    from servesim.cli import main

    return main([str(word) for word in words])


def scenario_file(folder: Path, **keys: Any) -> Path:
    path = folder / "scenario.yaml"
    path.write_text(yaml.safe_dump(tree(**keys)))
    return path


def limits(scenario: Scenario, profile: Profile, metric: str) -> tuple[float, float]:
    """Return the interval of a metric, relative to its value."""
    run = simulate(scenario, profile=profile)
    result = run.result()
    low, high = intervals_of(run, simulate_draws(scenario, profile), profile)["metrics"][metric]
    return low / result[metric] - 1, high / result[metric] - 1


def test_representatives_have_the_spread_of_sessions_and_use_all_stored_draws() -> None:
    stored = [[value * (1 + k / 10) for value in parameters(COST)] for k in range(3)]
    costs = Uncertainty(stored, 0.02).representatives(COST, 9)
    again = Uncertainty(stored, 0.02).representatives(COST, 9)
    assert [c.decode(4, 4, 0) for c in costs] == [c.decode(4, 4, 0) for c in again]
    factors = [c.decode(4, 4, 0) / COST.decode(4, 4, 0) / (1 + k % 3 / 10) for k, c in enumerate(costs)]
    assert statistics.pstdev(map(math.log, factors)) == pytest.approx(0.02)
    assert statistics.fmean(factors) == pytest.approx(1.0, abs=1e-3)
    assert len(set(factors)) == 9


def test_all_profiles_have_the_same_session_in_one_draw() -> None:
    one, other = (Uncertainty().representatives(cost, 6) for cost in (COST, replace(COST, decode_step=0.5)))
    ratios = [b.decode(1, 1, 0) / a.decode(1, 1, 0) for a, b in zip(one, other)]
    assert ratios == pytest.approx([ratios[0]] * 6)


def test_the_interval_of_known_draws() -> None:
    draws = [math.exp(x) for x in (-1.0, 0.0, 1.0)]
    low, high = prediction_interval(1.0, draws)
    assert (math.log(low), math.log(high)) == pytest.approx((-1.96, 1.96), abs=1e-3)
    assert prediction_interval(20.0, draws)[1] == 20.0  # the simulated value is always inside
    assert prediction_interval(0.0, [0, 0, 0]) == (0, 0)
    assert prediction_interval(1.0, [0, 1, 2])[0] == pytest.approx(1 - 1.96, abs=1e-3)


def test_without_queues_the_interval_is_the_spread_between_sessions() -> None:
    profile = Profile("known", COST)
    low, high = limits(scenario_from(tree(rate=0.001)), profile, "mean_e2el_ms")
    spread = 1.96 * SESSION_SPREAD * math.sqrt(DEFAULT_DRAWS / (DEFAULT_DRAWS - 1))  # of a sample of draws
    centre = -(SESSION_SPREAD**2) / 2  # on a logarithmic scale: the mean factor is 1
    assert (low, high) == pytest.approx((math.expm1(centre - spread), math.expm1(centre + spread)), abs=1e-4)


def test_stored_draws_and_noise_make_intervals_wider() -> None:
    scenario = scenario_from(tree())
    stored = [[value * factor for value in parameters(COST)] for factor in (0.9, 1.0, 1.1)]
    abouts: list[dict[str, Any]] = [{}, {"noise": NOISE}, {"uncertainty": {"draws": stored}}]
    widths = [high - low for low, high in (limits(scenario, Profile("p", COST, a), "mean_tpot_ms") for a in abouts)]
    assert widths[0] < widths[1] < widths[2]


def test_a_profile_of_the_same_session_has_less_spread() -> None:
    profile = load_profile("h200-llama2-7b")
    assert profile.in_same_session().uncertainty.session < profile.uncertainty.session
    assert profile.in_same_session().uncertainty.draws == profile.uncertainty.draws


def test_the_command_prints_and_stores_intervals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = scenario_file(tmp_path)
    assert sim("run", file, "--intervals", 6, "-o", tmp_path / "with") == 0
    text = capsys.readouterr().out
    stored = json.loads((tmp_path / "with/result.json").read_text())
    intervals = stored.pop("intervals")
    value, (low, high) = stored["mean_ttft_ms"], intervals["metrics"]["mean_ttft_ms"]
    assert low < value < high
    assert f"Mean TTFT {format_interval('mean_ttft_ms', value, low, high)}" in " ".join(text.split())
    spread = f"the spread between sessions ({100 * SESSION_SPREAD:g} %)"
    assert f"6 draws of the cost model; calibration uncertainty: the fit, {spread}" in text
    assert read_run(tmp_path / "with").result["intervals"] == intervals
    assert sim("run", file, "-o", tmp_path / "without") == 0
    assert json.loads((tmp_path / "without/result.json").read_text()) == stored
    assert "interval" not in capsys.readouterr().out


@dataclass(frozen=True)
class CountingPolicy(Orca):
    """A policy object with a state."""

    calls: list[float] = field(default_factory=list, init=False)

    def decide(self, view: View) -> Plan:
        self.calls.append(view.now)
        return super().decide(view)


def test_every_draw_has_its_own_policy_object() -> None:
    policy = CountingPolicy()
    base = {key: value for key, value in tree(profile="cpu-tiny-kbk").items() if key != "policy"}
    result = servesim.run(base, policy=policy, intervals=3)
    assert result.metrics["intervals"]["draws"] == 3
    plain = CountingPolicy()
    assert servesim.run(base, policy=plain).metrics["makespan"] == result.metrics["makespan"]
    assert policy.calls == plain.calls


@pytest.mark.parametrize(
    ("value", "low", "high", "text"),
    [(16.02, 14.81, 17.92, "16.0 ms [14.8, 17.9]"), (16.0, 16.0, 16.0, "16.00 ms [16.00, 16.00]"),
     (13950.2, 13211.0, 14785.4, "14.0 s [13.2, 14.8]"), (0.5, 0.4999, 0.5001, "0.50000 ms [0.49990, 0.50010]")],
)  # fmt: skip
def test_numbers_have_the_digits_of_the_width(value: float, low: float, high: float, text: str) -> None:
    assert format_interval("mean_ttft_ms", value, low, high) == text


def queue(rate: float, requests: int) -> Scenario:
    """Return one slot and answers of 10 tokens: it serves 5 requests per second with steps of 20 ms."""
    workload = {
        "requests": requests,
        "arrivals": {"kind": "poisson", "rate": rate},
        "lengths": {"kind": "fixed", "prompt": 16, "output": 10},
    }
    policy = {"name": "vllm-v1", "max_num_seqs": 1, "async_scheduling": False}
    return scenario_from({"workload": workload, "policy": policy})


def profile_of(**about: Any) -> Profile:
    return Profile("steps", LinearCost(base=0.02), about)


@pytest.mark.parametrize(("rate", "near"), [(2.5, False), (4.0, False), (4.9, True), (8.0, False)])
def test_a_run_says_how_far_it_is_from_saturation(rate: float, near: bool) -> None:
    scenario, profile = queue(rate, 2000 if near else 400), profile_of()
    run = simulate(scenario, profile=profile)
    load = load_of(run, profile, 0.01)
    assert load is not None and load.capacity == pytest.approx(5.0, rel=1e-3)
    assert load.is_near == (abs(load.rate / 5.0 - 1) < 0.03) == near
    intervals = intervals_of(run, simulate_draws(scenario, profile, 8), profile)
    text = describe_intervals(intervals, "steps")[1]
    if near:
        assert text == "within 4 % of saturation: TTFT cannot be predicted; capacity 5.00 ± 0.20 req/s"
        assert "mean_e2el_ms" in intervals["metrics"] and "mean_ttft_ms" not in intervals["metrics"]
    else:
        assert text.startswith("load: ") and text.endswith("% of saturation; capacity 5.00 ± 0.20 req/s")
        assert "mean_ttft_ms" in intervals["metrics"]


def test_requests_that_arrive_at_once_or_follow_others_have_no_distance_from_saturation() -> None:
    for workload in ({"arrivals": {"kind": "burst"}}, {"concurrency": 4}):
        lengths = {"kind": "fixed", "prompt": 16, "output": 10}
        scenario = scenario_from({"workload": {"requests": 40, "lengths": lengths, **workload}})
        run = simulate(scenario, profile=profile_of())
        assert load_of(run, profile_of(), 0.01) is None and estimated_load(run) is None


@pytest.mark.parametrize(
    ("policy", "drafts"),
    [
        ({"name": "vllm-v1", "max_num_seqs": 32, "async_scheduling": False}, None),
        ({"name": "vllm-v1", "max_num_seqs": 32}, {"method": "eagle", "tokens": 3, "acceptance": 0.7}),
        ({"name": "sglang"}, None),
        ({"name": "vllm"}, None),
    ],
)
@pytest.mark.parametrize(("rate", "tokens"), [(2.0, 48_000), (12.0, 16_000)])
def test_a_plain_run_estimates_its_load(policy: Any, drafts: Any, rate: float, tokens: int) -> None:
    """Slots or blocks limit the batches; the burst of `load_of` shows the capacity."""
    lengths = {"kind": "lognormal", "prompt": {"mean": 400, "sd": 200}, "output": {"mean": 150, "sd": 80}}
    workload = {"requests": 300, "arrivals": {"kind": "poisson", "rate": rate}, "lengths": lengths}
    engine = {"num_blocks": tokens if policy["name"] == "sglang" else tokens // 16}
    tree = {"workload": workload, "policy": policy, "engine": engine, "profile": "h200-llama2-7b"}
    run = simulate(scenario_from({**tree, **({"speculative": drafts} if drafts else {})}))
    estimate, load = estimated_load(run), load_of(run, run.profile, 0.0)
    assert estimate is not None and load is not None and estimate.rate == load.rate
    assert estimate.capacity == pytest.approx(load.capacity, rel=ESTIMATE_ERROR)
    assert estimate.describe_estimate() in show_run(run)


def test_the_load_is_not_known_if_few_requests_fit_into_the_blocks() -> None:
    lengths = {"kind": "fixed", "prompt": 400, "output": 100}
    workload = {"requests": 30, "arrivals": {"kind": "poisson", "rate": 2.0}, "lengths": lengths}
    for blocks, known in ((100, False), (400, True)):
        run = simulate(
            scenario_from({"workload": workload, "engine": {"num_blocks": blocks}, "policy": {"name": "vllm-v1"}})
        )
        assert (estimated_load(run) is not None) == known == ("% of saturation" in show_run(run))


def test_an_estimate_near_saturation_says_that_ttft_cannot_be_predicted_well() -> None:
    assert Load(4.8, 5.0).describe_estimate() == (
        "load: 4.8 req/s, about 96 % of saturation; near saturation, TTFT cannot be predicted well; "
        "estimated capacity 5 req/s"
    )
    assert Load(2.0, 5.0).describe_estimate() == ("load: 2 req/s, about 40 % of saturation; estimated capacity 5 req/s")


@pytest.mark.parametrize(("measured", "distance"), [(64, 0.0), (32, 0.0), (16, 2.0), (4, 8.0)])
def test_intervals_widen_with_the_distance_from_the_measured_range(measured: int, distance: float) -> None:
    """32 requests run at a time; the half-width is as if the step times had one more spread."""
    lengths = {"kind": "fixed", "prompt": 16, "output": 50}
    workload = {"requests": 32, "arrivals": {"kind": "burst"}, "lengths": lengths}
    scenario = scenario_from({"workload": workload, "policy": {"name": "vllm-v1", "async_scheduling": False}})
    profile = profile_of(grid={"decode_rows": [1, measured]})
    low, high = limits(scenario, profile, "mean_tpot_ms")
    spread = math.hypot(SESSION_SPREAD, RANGE_SPREAD * math.log(distance or 1.0))
    assert math.log((1 + high) / (1 + low)) == pytest.approx(2 * 1.96 * spread, rel=0.05)


def test_intervals_include_the_bias_of_the_fit_on_held_out_steps() -> None:
    ranges = {
        "rows 1 to 8": {"mean": 0.05, "bias": 0.04, "points": 30},
        "rows 9 to 64": {"mean": 0.05, "bias": -0.04, "points": 10},
    }
    profile = profile_of(error_by_range={"decode": ranges})
    assert profile.misfit == pytest.approx(0.04) and profile_of().misfit == 0.0
    lengths = {"kind": "fixed", "prompt": 16, "output": 50}
    workload = {"requests": 32, "arrivals": {"kind": "burst"}, "lengths": lengths}
    low, high = limits(scenario_from({"workload": workload}), profile, "mean_tpot_ms")
    assert math.log((1 + high) / (1 + low)) == pytest.approx(2 * 1.96 * math.hypot(SESSION_SPREAD, 0.04), rel=0.05)


def test_ttft_of_a_profile_without_measured_steps_has_a_spread_of_its_own() -> None:
    """Every time is proportional to the step times here, so the spread of TTFT alone makes the difference."""
    lengths = {"kind": "fixed", "prompt": 16, "output": 50}
    scenario = scenario_from({"workload": {"requests": 32, "arrivals": {"kind": "burst"}, "lengths": lengths}})
    profile = profile_of(uncertainty={"session": 0.05, "ttft": 0.1})
    for metric, spread in (("mean_tpot_ms", 0.05), ("mean_ttft_ms", math.hypot(0.05, 0.1))):
        low, high = limits(scenario, profile, metric)
        assert math.log((1 + high) / (1 + low)) == pytest.approx(2 * 1.96 * spread, rel=0.05)


def test_a_count_of_preemptions_is_random_even_if_all_draws_agree() -> None:
    low, high = prediction_interval(100.0, [100.0] * 5, own=100**-0.5)
    assert (low, high) == (
        pytest.approx(100 * math.exp(-0.196), rel=1e-3),
        pytest.approx(100 * math.exp(0.196), rel=1e-3),
    )
    assert prediction_interval(2.0, [0.0, 2.0, 4.0], own=2**-0.5)[1] > prediction_interval(2.0, [0.0, 2.0, 4.0])[1]


def test_intervals_with_steps_in_flight_include_the_error_of_the_overlap() -> None:
    widths = {}
    for asynchronous in (False, True):
        scenario = scenario_from(tree(policy={"name": "vllm-v1", "async_scheduling": asynchronous}))
        profile = load_profile("h200-llama2-7b")
        run = simulate(scenario, profile=profile)
        found = intervals_of(run, simulate_draws(scenario, profile, 8), profile)
        assert found["overlap"] == (OVERLAP_SPREAD if asynchronous else 0.0)
        low, high = found["metrics"]["mean_tpot_ms"]
        widths[asynchronous] = (high - low) / run.result()["mean_tpot_ms"]
    assert widths[True] > 1.2 * widths[False]


def test_intervals_of_a_cluster_have_the_spread_of_the_profiles_of_its_pools() -> None:
    """The profile of the scenario, which no pool uses, has another spread."""
    pools = [{"name": name, "role": name, "profile": "h200-llama2-7b"} for name in ("prefill", "decode")]
    lengths = {"kind": "fixed", "prompt": 16, "output": 50}
    workload = {"requests": 32, "arrivals": {"kind": "burst"}, "lengths": lengths}
    cluster = {"pools": pools, "transfer": {"token_bytes": 1000, "latency": 0}}
    common = {"workload": workload, "policy": {"name": "vllm-v1", "async_scheduling": False}}
    apart = scenario_from({**common, "profile": {"base": 0.1}, "cluster": cluster})
    used, unused = load_profile("h200-llama2-7b"), profile_of(uncertainty={"session": 0.0})
    run = simulate(apart, profile=unused)
    assert [profile.name for profile in run.profiles] == [used.name]
    draws = simulate_draws(apart, unused)
    assert len({draw["mean_tpot_ms"] for draw in draws}) == len(draws)
    found = intervals_of(run, draws, unused)
    one = scenario_from({**common, "profile": "h200-llama2-7b"})
    alone = intervals_of(simulate(one, profile=used), simulate_draws(one, used), used)
    assert {key: found[key] for key in ("fit", "session", "ttft", "misfit")} == {
        key: alone[key] for key in ("fit", "session", "ttft", "misfit")
    }
    widths = [math.log(high / low) for low, high in (each["metrics"]["mean_tpot_ms"] for each in (found, alone))]
    assert widths[0] == pytest.approx(widths[1], rel=0.2)


def test_intervals_have_noise_only_if_all_profiles_of_a_cluster_have_it() -> None:
    pools = [{"name": "known"}, {"name": "other", "profile": {"decode_step": 0.02}}]
    scenario, profile = scenario_from(tree(cluster={"pools": pools})), load_profile("h200-llama2-7b")
    run = simulate(scenario, profile=profile)
    assert intervals_of(run, simulate_draws(scenario, profile, 4), profile)["noise"] is False
    alone = scenario_from(tree())
    found = intervals_of(simulate(alone, profile=profile), simulate_draws(alone, profile, 4), profile)
    assert found["noise"] is True
