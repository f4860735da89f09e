"""The selection of tokens in the cost model: another variant changes every step by the difference of measured times."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import pytest
import yaml
from servesim.config.scenario import Scenario, scenario_from
from servesim.core import BadInput, Shape, StepCost
from servesim.costs.derived import SampledCost, SamplingTerm
from servesim.costs.device_profile import Profile, load_profile, write_profile
from servesim.costs.linear import LinearCost
from servesim.costs.mapping import cost_from, cost_mapping
from servesim.costs.parts import DecodePart, PartsCost, PrefillPart
from servesim.runs.intervals import intervals_of, simulate_draws
from servesim.runs.simulate import Run, simulate

LINEAR = LinearCost(base=3e-3, prefill_token=3e-5, decode_row=1e-4, context=1e-7, swap_block=1e-4)
CURVED = PartsCost(PrefillPart(((1.0, 0.01), (256.0, 0.02))), DecodePart(((1.0, 0.01), (8.0, 0.02)), context_root=1e-5))
TERMS = {"host": {"step": 1e-3, "row": 1e-4}, "ops": {"step": 4e-4, "row": 1e-5}}
SLOWER = SamplingTerm(6e-4, 9e-5)


def profile(used: str = "ops", cost: StepCost = LINEAR, **about: Any) -> Profile:
    return Profile("known", cost, {"sampling": {"used": used, "terms": TERMS}, **about})


def scenario(sampling: Optional[str], **keys: Any) -> Scenario:
    engine = {"num_blocks": 60, "host_blocks": 60, **keys.pop("engine", {})}
    lengths = {"prompt": [10, 60], "output": [5, 60]}
    tree = {
        "workload": {"requests": 40, "arrivals": {"kind": "poisson", "rate": 20}, "lengths": lengths},
        "policy": {"name": "vllm", "preemption_mode": "swap", "max_num_seqs": 8},
        "engine": engine if sampling is None else {**engine, "sampling": sampling},
        **keys,
    }
    return scenario_from(tree)


@pytest.mark.parametrize("cost", [LINEAR, CURVED], ids=["linear", "curved"])
def test_every_row_that_a_step_computes_adds_its_time(cost: StepCost) -> None:
    sampled = SampledCost(cost, SLOWER)
    mixed = Shape(prefill_rows=2, prefill_tokens=64, prefill_live=60, decode_rows=8, decode_live=5, context=900)
    assert sampled.seconds(mixed) == pytest.approx(cost.seconds(mixed) + 6e-4 + 10 * 9e-5)
    assert sampled.decode(8, 5, 900) == pytest.approx(cost.decode(8, 5, 900) + 6e-4 + 8 * 9e-5)
    decode = Shape(decode_rows=8, decode_live=5, context=900)
    assert sampled.seconds(decode) == pytest.approx(sampled.decode(8, 5, 900))


def test_a_step_without_rows_selects_nothing() -> None:
    swap = Shape(swapped=7)
    assert SampledCost(LINEAR, SLOWER).seconds(swap) == LINEAR.seconds(swap)


def test_a_step_never_takes_less_than_nothing() -> None:
    sampled = SampledCost(LINEAR, SamplingTerm(-1.0, -1.0))
    assert sampled.decode(4, 4, 100) == sampled.seconds(Shape(prefill_rows=1, prefill_tokens=5)) == 0.0
    assert sampled.linear_in_context(4, 4) is None
    assert SampledCost(LINEAR, SamplingTerm(-1e-3, 0.0)).linear_in_context(4, 4) is not None


def test_hold_gives_the_same_run_bit_by_bit() -> None:
    for cost in (LINEAR, CURVED):
        runs = [simulate(scenario("host"), hold=fast, profile=profile(cost=cost)) for fast in (True, False)]
        times = [[(r.first_token, r.last_token, r.finish) for r in run.requests] for run in runs]
        assert times[0] == times[1]


def test_a_sampled_cost_can_be_written_and_read() -> None:
    sampled = SampledCost(LINEAR, SamplingTerm(-2e-4, 1e-6))
    again = cost_from(cost_mapping(sampled), "cost")
    assert again.seconds(Shape(1, 50, 50, 2500)) == sampled.seconds(Shape(1, 50, 50, 2500))
    assert again.decode(4, 4, 100) == sampled.decode(4, 4, 100)
    for value in ("x", [1], [1, "x"], [float("nan"), 0], None):
        with pytest.raises(BadInput, match=r"^cost.selection: expected .* got "):
            cost_from({"base": 1.0, "selection": value}, "cost")


def test_a_variant_changes_a_run_by_the_difference_of_its_steps() -> None:
    plain, same, host = (simulate(scenario(name), profile=profile()) for name in (None, "ops", "host"))
    assert {**same.result(), "sampling": None} == {**plain.result(), "sampling": None}
    assert "sampling" not in plain.result()
    assert host.result()["sampling"] == "host"
    assert host.result()["mean_tpot_ms"] > plain.result()["mean_tpot_ms"]


def test_each_step_of_a_lone_request_takes_the_difference_longer() -> None:
    alone = {"requests": 1, "arrivals": {"kind": "poisson", "rate": 1}, "lengths": {"prompt": 20, "output": 30}}
    ops, host = (simulate(scenario(name, workload=alone), profile=profile()) for name in ("ops", "host"))
    assert ops.calls == host.calls == 30
    assert host.busy_seconds == pytest.approx(ops.busy_seconds + 30 * (6e-4 + 9e-5))
    faster = simulate(scenario("ops", workload=alone), profile=profile("host"))
    measured = simulate(scenario(None, workload=alone), profile=profile("host"))
    assert measured.busy_seconds == pytest.approx(faster.busy_seconds + 30 * (6e-4 + 9e-5))


def test_selecting_a_variant_again_changes_nothing() -> None:
    once = profile().for_run("host")
    assert once.sampling_used == "host"
    assert once.for_run("host") is once
    back = once.for_run("ops")
    assert back.cost.decode(4, 4, 50) == pytest.approx(LINEAR.decode(4, 4, 50))


def makespan(run: Run) -> float:
    return float(run.result()["makespan"])


def test_noise_multiplies_the_whole_step() -> None:
    noisy = profile(noise={"prefill": [2.0, 2.0], "decode": [2.0, 2.0]})  # factors have the mean 1
    assert makespan(simulate(scenario("host", noise=True), profile=noisy)) == pytest.approx(
        makespan(simulate(scenario("host"), profile=profile()))
    )
    spread = profile(noise={"prefill": [0.5, 1.5], "decode": [0.5, 1.5]})
    runs = [makespan(simulate(scenario(name, noise=True), profile=spread)) for name in ("host", "ops")]
    assert runs[0] > runs[1]


def test_new_shapes_and_a_cold_start_add_their_time_too() -> None:
    known = profile(first_use={"tokens": 16, "seconds": 0.5}, cold={"prefill": 1.0, "decode": 2.0})
    warm, cold = (simulate(scenario("host", engine={"start": start}), profile=known) for start in ("warm", "cold"))
    plain = simulate(scenario("host", engine={"start": "warm"}), profile=profile())
    assert makespan(warm) == makespan(plain)
    assert makespan(cold) > makespan(warm) + 2.5


def test_intervals_have_the_time_of_the_variant() -> None:
    known = profile(cost=CURVED, noise={"prefill": [0.9, 1.1], "decode": [0.9, 1.1]})
    run = simulate(scenario("host"), profile=known)
    draws = simulate_draws(scenario("host"), known, 8)
    low, high = intervals_of(run, draws, known)["metrics"]["mean_tpot_ms"]
    other = simulate(scenario("ops"), profile=known).result()["mean_tpot_ms"]
    assert other < low < run.result()["mean_tpot_ms"] < high


def test_profiles_with_and_without_the_section_load(tmp_path: Path) -> None:
    write_profile(tmp_path, {"name": "new", "sampling": {"used": "host", "terms": TERMS}}, LINEAR)
    read = load_profile(tmp_path)
    assert (read.sampling_used, read.sampling["ops"]) == ("host", SamplingTerm(4e-4, 1e-5))
    write_profile(tmp_path, {"name": "old"}, LINEAR)
    old = load_profile(tmp_path)
    assert (old.sampling_used, old.sampling) == (None, {})
    assert old.for_run(None) is old


def written(folder: Path, section: Any) -> Path:
    tree = {"name": "x", "cost": {"base": 1.0}, "sampling": section}
    (folder / "profile.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    return folder


WRONG_SAMPLING: Any = [
    "host",
    {"terms": TERMS},
    {"used": "host", "terms": {"host": {"step": -1.0, "row": 0.0}}},
    {"used": "host", "terms": {"host": {"step": 1.0}}},
    {"used": "host", "terms": {"host": {"step": "x", "row": 0.0}}},
    {"used": "host", "terms": [1]},
]


def test_error_for_a_damaged_section(tmp_path: Path, expected_errors: Callable[..., None]) -> None:
    expected_errors("sampling", lambda section: load_profile(written(tmp_path, section)), WRONG_SAMPLING)
