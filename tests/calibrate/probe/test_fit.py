"""Fitting a probe's samples: recovered costs, held-out error, measured range."""

from __future__ import annotations

import csv
import random
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from servesim.calibrate.probe.fit import fit_samples
from servesim.calibrate.probe.fit_errors import held_out_errors
from servesim.calibrate.probe.fitted_profile import fit_profile
from servesim.calibrate.probe.grid import grid
from servesim.calibrate.probe.measure import COLUMNS
from servesim.calibrate.probe.sample_set import Samples
from servesim.calibrate.probe.samples import read_samples
from servesim.calibrate.probe.solver import nonneg_least_squares
from servesim.config.scenario import scenario_from
from servesim.core import Shape, StepCost
from servesim.costs.derived import NoisyCost
from servesim.costs.device_profile import Profile, load_profile, write_profile
from servesim.costs.linear import LinearCost
from servesim.runs.simulate import simulate

KNOWN = LinearCost(
    base=2e-3, prefill_token=3e-5, prefill_square=1e-9, prefill_cross=2e-9, prefill_row=1e-4, decode_step=4e-3,
    decode_row=2e-4, context=1e-7, swap_block=1e-4,
)  # fmt: skip
ABOUT = {"device": "a device", "kernels": "reference", "model": {"name": "tiny"}}
Device = Callable[[Shape], float]


def shape_of(point: Any) -> Shape:
    tokens, live = point.rows * point.tokens, point.decoding
    squares, cross = point.rows * point.tokens**2, tokens * point.cached
    return Shape(point.rows, tokens, tokens, squares, cross, live, live, live * point.context, point.blocks)


def samples(folder: Path, device: Device, noise: float = 0.0, buckets: tuple[int, ...] = (1, 4, 8, 16, 32)) -> Path:
    """Write the samples of a simulated device, five per point."""
    rng = random.Random(0)
    rows: list[dict[str, Any]] = []
    for index, point in enumerate(grid(32, 1024, 1024, 64, buckets)):
        shape = shape_of(point)
        for repeat in range(5):
            seconds = device(shape) * (1 + rng.uniform(-noise, noise))
            sample = {
                "kind": point.kind,
                "point": index,
                "round": repeat,
                "seconds": seconds,
                "flagged": "",
                "failed": "",
            }
            rows.append({**shape._asdict(), **sample})
    return write_rows(folder / "samples.csv", rows)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        writer.writerows(rows)
    return path


def max_error(cost: StepCost, device: Device, seed: int = 1) -> float:
    """Return the largest error at random shapes between the measured ones."""
    rng = random.Random(seed)
    errors = []
    for _ in range(200):
        tokens, rows = rng.randint(8, 1000), rng.randint(1, 32)
        prompt = Shape(1, tokens, tokens, tokens**2, 0)
        decode = Shape(decode_rows=rows, decode_live=rows, context=rows * rng.randint(16, 900))
        errors += [abs(cost.seconds(shape) / device(shape) - 1) for shape in (prompt, decode)]
    return max(errors)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    """The fit of exact samples."""
    return fit_profile(samples(tmp_path_factory.mktemp("exact"), KNOWN.seconds), ABOUT, "mine")


def test_the_fit_recovers_exactly_measured_costs(fitted: Profile) -> None:
    assert max_error(fitted.cost, KNOWN.seconds) < 0.02
    assert all(error["mean"] < 0.015 for error in fitted.error.values())
    assert set(fitted.error) == {"prefill", "decode", "mixed", "swap"}


def test_noise_is_kept_and_does_not_change_the_fit(tmp_path: Path) -> None:
    profile = fit_profile(samples(tmp_path, KNOWN.seconds, noise=0.05), ABOUT)
    assert max_error(profile.cost, KNOWN.seconds) < 0.04
    low, high = profile.about["noise"]["decode"][0], profile.about["noise"]["decode"][-1]
    assert 0.93 < low < 0.96
    assert 1.04 < high < 1.07


def test_a_term_that_no_sample_measures_is_zero() -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        design = rng.uniform(0, 1, (40, 8))
        empty = rng.permutation(8)[:3]
        design[:, empty] = 0
        solution = nonneg_least_squares(design, rng.uniform(0.9, 1.1, 40))
        assert solution[empty].tolist() == [0, 0, 0]
        assert np.abs(solution).max() < 10


def test_the_fit_uses_the_padding_buckets_of_the_device(tmp_path: Path) -> None:
    row_buckets, token_buckets = [1, 4, 8, 16, 32], [16, 64, 256, 1024]

    def device(shape: Shape) -> float:
        rows = row_buckets[bisect_left(row_buckets, shape.decode_rows)] if shape.decode_rows else 0
        if not shape.prefill_rows:
            return 4e-3 + 2e-4 * rows + 1e-7 * shape.context + 1e-4 * shape.swapped
        tokens = shape.prefill_tokens + shape.decode_rows
        padded = token_buckets[bisect_left(token_buckets, tokens)] if tokens <= 1024 else tokens
        return 3e-3 + 2e-5 * padded + 1e-7 * shape.context

    about = {**ABOUT, "row_buckets": row_buckets, "token_buckets": token_buckets}
    cost = fit_samples(
        Samples.from_rows(read_samples(samples(tmp_path, device, buckets=tuple(row_buckets)))), about
    ).cost
    decode = Shape(decode_rows=9, decode_live=9, context=900)
    assert cost.seconds(decode) == pytest.approx(device(decode), rel=0.02)
    prompt = Shape(1, 70, 70, 4900)
    assert cost.seconds(prompt) == pytest.approx(device(prompt), rel=0.02)


def test_outliers_and_failed_points_are_excluded(tmp_path: Path) -> None:
    path = samples(tmp_path, KNOWN.seconds)
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    extra = [dict(rows[0], seconds="9", flagged="outlier"), dict(rows[0], seconds="", failed="out of memory")]
    write_rows(path, [*rows, *extra])
    profile = fit_profile(path, ABOUT)
    assert max_error(profile.cost, KNOWN.seconds) < 0.02
    assert "2 left out" in profile.about["how"]


def test_a_fitted_profile_is_written_and_read_back(fitted: Profile, tmp_path: Path) -> None:
    write_profile(tmp_path, fitted.about, fitted.cost)
    again = load_profile(tmp_path)
    shape = Shape(2, 100, 100, 5000, 0, 8, 8, 4000)
    assert again.name == "mine"
    assert again.cost.seconds(shape) == pytest.approx(fitted.cost.seconds(shape), rel=1e-4)
    assert again.about["model"] == "tiny"


def test_noisy_runs_vary_with_the_seed_and_repeat_with_it() -> None:
    profile = Profile("noisy", KNOWN, {"noise": {"decode": [0.8, 1.0, 1.2], "prefill": [1.0, 1.0]}})
    workload = {"requests": 20, "arrivals": {"kind": "poisson", "rate": 50},
                "lengths": {"kind": "fixed", "prompt": 20, "output": 20}}  # fmt: skip
    base = {"workload": workload, "policy": {"decode_batch": 4}, "noise": True}
    spans = [
        simulate(scenario_from({**base, "seed": seed}), profile=profile, hold=hold).measures.makespan
        for seed, hold in ((1, True), (1, False), (2, True))
    ]
    noiseless = simulate(scenario_from({**base, "seed": 1, "noise": False}), profile=profile).measures.makespan
    assert spans[0] == spans[1]
    assert spans[0] != spans[2]
    assert spans[0] == pytest.approx(noiseless, rel=0.05)


def test_noise_factors_have_the_given_quantiles_and_the_mean_one() -> None:
    cost = NoisyCost(LinearCost(base=1.0), {"decode": [0.5, 1.0, 3.0]}, 7)
    factors = np.array([cost.decode(1, 1, 0) for _ in range(20_000)])
    assert factors.mean() == pytest.approx(1.0, rel=0.01)
    assert np.quantile(factors, [0.25, 0.5, 0.75]) * 1.375 == pytest.approx([0.75, 1.0, 2.0], rel=0.06)
    assert cost.seconds(Shape(1, 1)) == 1.0


def test_host_time_is_fitted_separately(tmp_path: Path) -> None:
    data = Samples.from_rows(read_samples(samples(tmp_path, KNOWN.seconds)))
    rows = data.column("prefill_rows") + data.column("decode_live")
    cost = fit_samples(replace(data, host=1e-3 + 1e-4 * rows), ABOUT).cost
    assert (cost.host.step, cost.host.row) == pytest.approx((1e-3, 1e-4))
    shape = Shape(decode_rows=8, decode_live=8, context=800)
    assert cost.seconds(shape) == pytest.approx(KNOWN.seconds(shape) + 1e-3 + 8e-4, rel=0.01)


def test_held_out_points_are_not_part_of_the_fit() -> None:
    """Times jump between buckets: a fit with a point is exact, one without it interpolates and is far off."""
    buckets = [16 * 2**k for k in range(10)]
    prompts = [Shape(1, tokens, tokens) for tokens in buckets]
    decodes = [Shape(decode_rows=rows, decode_live=rows, context=20 * rows) for rows in range(1, 11)]
    seconds = [1e-4 * tokens * (1.3 if k % 2 else 0.7) for k, tokens in enumerate(buckets)]
    data = Samples.from_shapes(prompts + decodes, seconds + [0.01] * 10, range(20))
    about = {"token_buckets": buckets}
    cost = fit_samples(data, about).cost
    assert [cost.seconds(shape) for shape in prompts] == pytest.approx(seconds, rel=1e-3)
    assert held_out_errors(data, about).by_kind()["prefill"]["median"] > 0.1
