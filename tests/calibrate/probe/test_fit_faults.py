"""Faults that a fit must not have: each test is a set of samples with which an earlier fit failed."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from servesim.calibrate.probe.fit import fit_samples
from servesim.calibrate.probe.fit_errors import check_fit, held_out_errors, total_errors
from servesim.calibrate.probe.fitted_profile import profile_from
from servesim.calibrate.probe.parts_fit import model_ratios
from servesim.calibrate.probe.sample_set import Samples, grouped, predict
from servesim.calibrate.probe.solver import nonneg_least_squares
from servesim.core import BadInput, Shape, StepCost
from servesim.costs.linear import LinearCost
from servesim.costs.parts import DecodePart, PartsCost, PrefillPart

from .step_samples import DECODES, LENGTHS, both, decodes, measured, prompts

KNOWN = LinearCost(
    base=2e-3, prefill=3e-3, prefill_row=2e-4, prefill_token=2e-5, prefill_square=4e-10, prefill_cross=9e-10,
    decode_step=8e-3, decode_row=6e-5, context=1.3e-7,
)  # fmt: skip
MIXED = [
    both(prompts(*tokens, cached=cached), decodes(rows, context))
    for tokens in ((16,), (200,), (700,), (64, 64, 64), (400, 300))
    for cached in (0, 600)
    for rows, context in ((2, 100), (12, 900), (30, 300))
]


def error(cost: StepCost, shape: Shape) -> float:
    return cost.seconds(shape) / KNOWN.seconds(shape) - 1


@pytest.mark.parametrize("scatter", [0.0, 0.03])
def test_batches_are_predicted_from_single_prompts(scatter: float) -> None:
    """No sample separates rows, tokens and attention: the split comes from the sizes of the model, and is reported."""
    fitted = fit_samples(measured([prompts(n) for n in LENGTHS] + DECODES, KNOWN.seconds, scatter, repeats=3), {})
    for shape in (prompts(256, 256, 256, 256), prompts(2048, 2048), prompts(16), prompts(512, cached=1000)):
        assert abs(error(fitted.cost, shape)) < 0.06
    assert {"prefill.row", "prefill.square", "prefill.cross", "mixed.context"} <= set(fitted.tied)


def test_longer_prompts_take_longer_if_all_prompts_have_one_length() -> None:
    fitted = fit_samples(measured([prompts(512)] * 5 + DECODES, KNOWN.seconds, 0.01), {})
    assert error(fitted.cost, prompts(512)) == pytest.approx(0, abs=0.02)
    assert fitted.cost.seconds(prompts(1024)) == pytest.approx(1.5 * fitted.cost.seconds(prompts(512)), rel=0.1)
    assert "prefill.tokens" in fitted.tied


def test_a_single_mixed_step_does_not_distort_the_prompts() -> None:
    """Steps of a server at an endpoint. Two parts that overlap would fit the mixed step exactly, and no prompt."""
    server = LinearCost(base=0.015, prefill_token=0.0002, decode_live=0.0015, context=0.00001)
    steps = [prompts(16), prompts(64), prompts(256), prompts(64, 64, 64)]
    mixed = both(prompts(64), decodes(1, 66))
    shapes = [*steps, mixed, *(decodes(rows, context) for rows, context in ((1, 20), (1, 260), (2, 70), (6, 70)))]
    seconds = {shape: server.seconds(shape) for shape in shapes}
    seconds[mixed] *= 1.015  # a late packet
    fitted = fit_samples(Samples.from_shapes(shapes, list(seconds.values())), {})
    for shape in (*steps, mixed):
        assert fitted.cost.seconds(shape) == pytest.approx(server.seconds(shape), rel=0.02)


@pytest.mark.parametrize("repeats", [1, 20])
def test_assumptions_are_used_if_the_first_solution_already_predicts_the_samples(repeats: int) -> None:
    """One shape of decodes: the context takes the time of its bytes. Other numbers of rows take the same time."""
    fitted = fit_samples(
        measured([prompts(n) for n in LENGTHS] + [decodes(8, 100)], KNOWN.seconds, repeats=repeats), {}
    )
    one_row = fitted.cost.decodes.rows[0][1]
    assert fitted.cost.decodes.context == pytest.approx(model_ratios({}).context_per_step * one_row, rel=0.1)
    assert fitted.cost.seconds(decodes(8, 100)) == pytest.approx(KNOWN.seconds(decodes(8, 100)), rel=1e-3)
    assert {"decode.rows", "decode.context"} <= set(fitted.tied)


def test_mixed_steps_that_were_not_measured_are_one_pass_and_the_profile_says_so() -> None:
    """A decode row takes as much more than a prompt token as in decode steps: sampling, block tables."""
    samples = measured([prompts(*[n] * rows) for n in LENGTHS for rows in (1, 3)] + DECODES, KNOWN.seconds, 0.01, 3)
    profile = profile_from(samples, {}, "probe")
    tied = profile.about["tied"]
    assert tied["mixed.step"] == "0: prompts and decodes of a step are one model call"
    assert tied["mixed.row"] == "as much more than a prompt token as in decode steps"
    assert tied["mixed.context"] == "as in decode steps"
    assert isinstance(profile.cost, PartsCost)
    alone = profile.cost.seconds(prompts(900))
    added = [profile.cost.seconds(both(prompts(900), decodes(rows, 500))) - alone for rows in (4, 8, 16, 32)]
    true = [6e-5 * rows + 1.3e-7 * rows * 500 for rows in (4, 8, 16, 32)]  # without the fixed time of a decode step
    assert added == pytest.approx(true, rel=0.35)
    for rows in (1, 8, 32):  # more work than the decodes alone
        step = both(prompts(16), decodes(rows, 500))
        assert profile.cost.seconds(step) >= profile.cost.seconds(decodes(rows, 500))


@pytest.mark.parametrize("kind", ["tokens", "rows"])
def test_a_flat_end_of_a_curve_does_not_continue_above_the_measured_range(kind: str) -> None:
    """The largest measured steps are fast by chance, or padded: twice the work still takes more time."""
    device = LinearCost(base=0.02, prefill_token=2e-5, decode_row=1e-4)
    flat = 768 if kind == "tokens" else 21

    def flat_at_the_end(shape: Shape) -> float:
        sizes = shape._replace(prefill_tokens=min(shape.prefill_tokens, flat)) if kind == "tokens" else shape
        return device.seconds(sizes._replace(decode_rows=min(shape.decode_rows, flat)) if kind == "rows" else sizes)

    steps = [prompts(n) for n in range(64, 1025, 64)] + [decodes(rows, 64) for rows in range(1, 29)]
    cost = fit_samples(measured(steps, flat_at_the_end, repeats=3), {}).cost
    largest, further = (prompts(n) for n in (1024, 2048)) if kind == "tokens" else (decodes(n, 64) for n in (28, 56))
    assert cost.seconds(largest) == pytest.approx(flat_at_the_end(largest), rel=0.02)
    added = device.seconds(further) - device.seconds(largest)
    assert cost.seconds(further) - cost.seconds(largest) == pytest.approx(added, rel=0.3)


def test_terms_that_the_samples_separate_are_not_assumed() -> None:
    """Attention is ten times slower than its FLOPs: many rows of different lengths show it."""
    slow = LinearCost(base=5e-3, prefill_token=2e-5, prefill_square=4e-9, prefill_cross=9e-9, decode_step=8e-3)
    steps = [prompts(*[n] * rows, cached=cached) for n in LENGTHS for rows in (1, 2, 4, 8) for cached in (0, 300, 1500)]
    fitted = fit_samples(measured(steps + DECODES, slow.seconds, 0.02), {})
    assert "prefill.square" not in fitted.tied
    for shape in (prompts(2048), prompts(*[256] * 8), prompts(700, cached=1200)):
        assert fitted.cost.seconds(shape) == pytest.approx(slow.seconds(shape), rel=0.04)


def test_scatter_does_not_bias_the_fit() -> None:
    """The totals are those of the samples, and on average those of the device."""
    steps = [prompts(*[n] * rows) for n in LENGTHS for rows in (1, 3)] + DECODES + MIXED
    ratios: dict[str, list[float]] = {"prefill": [], "decode": [], "mixed": []}
    for seed in range(6):
        samples = measured(steps, KNOWN.seconds, scatter=0.2, repeats=40, seed=seed)
        fitted = fit_samples(samples, {})
        assert all(abs(value) < 0.01 for value in total_errors(fitted.cost, fitted.groups).values())
        true = np.array([KNOWN.seconds(shape) for shape in samples.shapes])
        predicted = predict(fitted.cost, samples.table)
        for kind, found in ratios.items():
            own = np.array(samples.kinds) == kind
            found.append(predicted[own].sum() / true[own].sum())
    assert [float(np.mean(found)) for found in ratios.values()] == pytest.approx([1.0, 1.0, 1.0], abs=0.007)


@pytest.mark.parametrize("noisy", [0, 4, 8])
def test_one_noisy_point_neither_raises_nor_flattens_the_curve(noisy: int) -> None:
    def device(shape: Shape) -> float:
        return KNOWN.seconds(shape) * (2.0 if shape.prefill_tokens == LENGTHS[noisy] else 1.0)

    cost = fit_samples(measured([prompts(n) for n in LENGTHS] + DECODES, device, 0.01, repeats=3), {}).cost
    for place, tokens in enumerate(LENGTHS):
        assert abs(place - noisy) < 2 or abs(error(cost, prompts(tokens))) < 0.05


@pytest.mark.parametrize("seed", range(3))
def test_one_pass_is_kept_if_two_parts_are_not_clearly_better(seed: int) -> None:
    """The device runs one model call for prompts and decodes; scatter of 10 % does not make it two parts."""

    def device(shape: Shape) -> float:
        tokens = shape.prefill_tokens + (shape.decode_rows if shape.prefill_rows else 0)
        return 8e-3 + 2e-5 * tokens + 6e-5 * shape.decode_rows + 1.3e-7 * shape.context

    samples = measured([prompts(n) for n in LENGTHS] + DECODES + MIXED, device, 0.1, repeats=3, seed=seed)
    cost = fit_samples(samples, {}).cost
    assert cost.mixed.one_pass
    assert np.mean([abs(cost.seconds(shape) / device(shape) - 1) for shape in MIXED]) < 0.05


def test_prefill_times_come_from_mixed_steps_if_no_prompt_ran_alone() -> None:
    samples = measured(MIXED + DECODES, KNOWN.seconds, 0.01, repeats=4)
    profile = profile_from(samples, {}, "log")
    for shape in (*MIXED[::5], both(prompts(300), decodes(8, 200))):
        assert abs(error(profile.cost, shape)) < 0.03
    assert "prefill" not in profile.error
    assert profile.cost.seconds(prompts(700)) < KNOWN.seconds(both(prompts(700), decodes(2, 100)))


@pytest.mark.parametrize("overlap", [0.3, 0.9])
def test_two_parts_that_overlap_are_recognised(overlap: float) -> None:
    def device(shape: Shape) -> float:
        prefill = KNOWN.seconds(shape._replace(decode_rows=0)) if shape.prefill_rows else 0.0
        decode = KNOWN.seconds(shape._replace(prefill_rows=0)) if shape.decode_rows else 0.0
        return prefill + decode - overlap * min(prefill, decode)

    steps = [prompts(*[n] * rows, cached=c) for n in LENGTHS for rows in (1, 3) for c in (0, 500)] + DECODES + MIXED
    cost = fit_samples(measured(steps, device, 0.01, repeats=2), {}).cost
    assert not cost.mixed.one_pass
    assert cost.mixed.overlap == pytest.approx(overlap, abs=0.05)
    assert max(abs(cost.seconds(shape) / device(shape) - 1) for shape in MIXED) < 0.05


def test_stalls_are_left_out_and_counted() -> None:
    samples = measured([prompts(n) for n in LENGTHS] + DECODES + MIXED, KNOWN.seconds, 0.02, repeats=3)
    samples.seconds[[5, 60, 150]] *= 20.0
    fitted = fit_samples(samples, {})
    assert fitted.excluded == 3
    assert max(abs(error(fitted.cost, shape)) for shape in MIXED + DECODES) < 0.05


def test_a_log_with_many_slow_mixed_steps_and_one_slow_prefill_keeps_its_totals() -> None:
    """As in a real engine that compiles on new shapes: a quarter of the mixed steps takes 0.15 s longer."""
    rng = np.random.default_rng(3)
    steps = [
        both(prompts(int(n)), decodes(int(r), 300))
        for n, r in zip(rng.integers(20, 1000, 100), rng.integers(1, 28, 100))
    ]
    samples = measured([*steps, *DECODES * 10, prompts(331)], KNOWN.seconds, 0.02)
    slow = np.flatnonzero(samples.column("prefill_rows") > 0)[::4]
    samples.seconds[slow] += 0.15
    profile = profile_from(samples, {}, "log")
    assert profile.about["total_error"]["mixed"] == pytest.approx(0, abs=0.02)
    assert max(abs(error(profile.cost, shape)) for shape in DECODES) < 0.05
    growing = [profile.cost.seconds(both(prompts(n), decodes(8, 300))) for n in (20, 100, 400, 1000)]
    assert 0.01 < growing[0] <= growing[1] <= growing[2] <= growing[3] < 0.2


def test_the_solver_is_never_worse_than_a_coordinate_search() -> None:
    """Residuals on random problems: no single term can be changed to reduce them."""
    rng = np.random.default_rng(1)
    for _ in range(50):
        design, target = rng.normal(size=(30, 8)), rng.normal(size=30)
        solution = nonneg_least_squares(design, target)
        gradient = design.T @ (design @ solution - target)
        assert (gradient[solution == 0] > -1e-8).all()
        assert np.abs(gradient[solution > 0]).max(initial=0.0) < 1e-8


@pytest.fixture(scope="module")
def rtx4090(shared: Path) -> Samples:
    """Steps from the layer times of a published profile: 32 layers, one prompt chunk and equal decodes."""
    folder = shared / "data" / "bench" / "vllm-rtx4090" / "profile" / "tp1"
    tables: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for name, size in (("dense", "tokens"), ("per_sequence", "sequences")):
        for row in read(folder / f"{name}.csv"):
            point = (float(row[size]), 1e-6 * float(row["time_us"]))
            tables.setdefault(name, {}).setdefault(row["layer"], []).append(point)

    def total(name: str, size: float, once: tuple[str, ...]) -> float:
        return sum(
            (1 if layer in once else 32) * float(np.interp(size, *zip(*points, strict=True)))
            for layer, points in tables[name].items()
        )

    shapes, seconds = [], []
    for row in read(folder / "attention.csv"):
        chunk, before, rows, context = (int(row[k]) for k in ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode"))
        prompt = prompts(chunk, cached=before) if chunk else Shape()
        shapes.append(both(prompt, decodes(rows, context)))
        dense = total("dense", chunk + rows, ("embedding", "final_layernorm"))
        sequences = total("per_sequence", rows + (chunk > 0), ("lm_head", "sampler"))
        seconds.append(dense + sequences + 32e-6 * float(row["time_us"]))
    return Samples.from_shapes(shapes, seconds, range(len(shapes)))


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def longest(samples: Samples) -> Any:
    """Return the longest context of every step."""
    before = samples.column("cross") / np.maximum(samples.column("prefill_live"), 1)
    return np.maximum(before, samples.column("context") / np.maximum(samples.column("decode_rows"), 1))


@pytest.mark.slow
def test_short_contexts_of_a_real_gpu_predict_longer_ones(rtx4090: Samples) -> None:
    lengths = longest(rtx4090)
    profile = profile_from(rtx4090.select(lengths <= 1024), {}, "rtx4090")
    assert profile.about["total_error"]["mixed"] == pytest.approx(0, abs=0.02)
    assert profile.error["decode"]["mean"] < 0.02
    assert profile.error["mixed"]["mean"] < 0.04
    longer = rtx4090.select((lengths > 1024) & (lengths <= 4096))
    errors = predict(profile.cost, longer.table) / longer.seconds - 1
    kinds = np.array(longer.kinds)
    assert np.abs(errors[kinds == "decode"]).max() < 0.05
    assert np.abs(errors[kinds == "mixed"]).mean() < 0.1


def test_check_stops_a_fit_that_falls_or_is_far_from_the_totals() -> None:
    samples = measured([prompts(n) for n in LENGTHS] + DECODES, KNOWN.seconds)
    groups = grouped(samples)
    cost = fit_samples(samples, {}).cost
    check_fit(cost, groups, "here")
    slow = PartsCost(cost.prefill, DecodePart(cost.decodes.rows, 0.0, 2 * cost.decodes.context), cost.mixed)
    with pytest.raises(BadInput, match=r"^here: the total time of the fitted decode steps differs by \+.* at most 2%"):
        check_fit(slow, groups, "here")
    falling = PartsCost(PrefillPart(((1.0, 0.1), (64.0, 0.01), (128.0, 0.02))), cost.decodes)
    with pytest.raises(BadInput, match=r"^here: the fitted time falls with more prompt tokens at prefill_rows 1"):
        check_fit(falling, groups, "here")
    infinite = PartsCost(PrefillPart(((1.0, float("inf")),)), cost.decodes)
    with pytest.raises(BadInput, match=r"is not finite and positive"):
        check_fit(infinite, groups, "here")


def test_held_out_errors_are_given_by_rows_and_length() -> None:
    """The device is 30 % slower with many rows, between the knots of the fit: the ranges show it."""
    steps = [decodes(rows, context) for rows in range(1, 33) for context in (16, 128, 512)] + [
        prompts(n) for n in LENGTHS
    ]
    samples = measured(steps, lambda shape: KNOWN.seconds(shape) * (1.3 if shape.decode_rows % 7 == 3 else 1.0))
    table = held_out_errors(samples, {}).by_range()["decode"]
    assert {"rows 1 to 2", "rows 16 to 32", "length 0 to 64", "length 256 to 1024"} <= set(table)
    assert sum(row["points"] for name, row in table.items() if name.startswith("rows")) <= len(steps)
    assert table["rows 8 to 16"]["mean"] > table["rows 1 to 2"]["mean"]


def test_fifteen_thousand_samples_are_fitted_as_groups() -> None:
    """The time of a fit depends on the number of shapes and stays far below a minute."""
    rng = np.random.default_rng(0)
    steps = [prompts(*rng.integers(8, 900, rng.integers(1, 6)).tolist()) for _ in range(5000)]
    steps += [decodes(int(rng.integers(1, 64)), int(rng.integers(16, 2000))) for _ in range(5000)]
    steps += [both(steps[k], steps[5000 + k]) for k in range(5000)]
    samples = measured(steps, KNOWN.seconds, 0.05)
    fitted = fit_samples(samples, {})
    assert all(abs(value) < 0.02 for value in total_errors(fitted.cost, fitted.groups).values())
