"""Fit a cost model in parts to measured steps.

Prefill and mixed steps: a rising curve over tokens, plus terms for rows and attention. Decode steps: a rising curve
over rows, plus a term per cached token. All terms are at least 0, so more work never takes less time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Callable, Optional, Union

import numpy as np
from servesim.core import BadInput
from servesim.costs.parts import HostPart, PartsCost
from servesim.costs.uncertainty import parameters, with_parameters

from .host_overhead import fit_overhead
from .parts_fit import (
    DecodeModel,
    LinearModel,
    ModelRatios,
    PrefillModel,
    SwapModel,
    best_overlap,
    model_ratios,
    overlap_round,
)
from .predict import decode_seconds, predict
from .sample_set import (
    MIN_REPEATS,
    OUTLIER_RATIO,
    Array,
    Groups,
    Mask,
    Samples,
    group_index,
    grouped,
    without_outliers,
)
from .solver import Solution, solve

OVERLAP_ROUNDS, OVERLAP_CHANGE = 15, 0.005
OVERLAP_GAIN = 0.9  # an overlap of two parts must reduce the error of mixed steps to this fraction of one pass
FLOOR_EXCESS = 0.01  # decodes as a lower bound of mixed steps may raise their mean time by this fraction
CLEAR = 5.0  # standard errors of a term that is used only if the samples show it
DRAWS = 24  # fits to resampled data that are stored
MAX_STALLS = 0.05  # of the steps of one kind


@dataclass(frozen=True)
class Fit:
    """A fitted cost model."""

    cost: PartsCost
    groups: Groups  # the samples of the fit
    tied: Sequence[str] = ()  # terms that the samples do not determine
    draws: Sequence[Sequence[float]] = ()  # `parameters` of equally likely cost models
    kept: Optional[Samples] = None  # the same as single samples
    excluded: int = 0  # samples left out as outliers


@dataclass(frozen=True)
class PartFit:
    """The solution of one part, and how its values change a cost model."""

    name: str
    model: LinearModel
    solution: Solution
    apply: Callable[[PartsCost, Array], PartsCost]

    def tied_terms(self) -> list[str]:
        """Return the names of the terms that the samples do not determine."""
        single = [self.model.curve_name] if len(self.model.knots) == 1 else []
        return [name if "." in name else f"{self.name}.{name}" for name in [*single, *self.solution.tied_terms()]]


def fit_samples(samples: Samples, about: Mapping[str, Any], where: str = "fit") -> Fit:
    """Fit a cost model with its uncertainty. Steps far from all others are left out. `where` names their source.

    `about` may hold the padding buckets (`row_buckets`, `token_buckets`) and the sizes of the `model`.
    """
    check_samples(samples, where)
    kept = without_outliers(samples)
    fitted = fit_groups(grouped(kept), about)
    stalled = stalled_steps(kept, fitted.cost)
    if stalled.any():
        kept = kept.select(~stalled)
        fitted = fit_groups(grouped(kept), about)
    return replace(with_host(fitted, samples), kept=kept, excluded=samples.excluded + len(samples) - len(kept))


def stalled_steps(samples: Samples, cost: PartsCost) -> Mask:
    """Return which steps of rare shapes are far from the fit, if they are few of their kind of step.

    Repeats of a shape confirm its time. A kind of step with many slow steps is slow on average: all of them count.
    """
    index = group_index(samples)
    ratio = samples.seconds / np.maximum(predict(cost, samples.table), 1e-300)
    stalled: Mask = (np.bincount(index)[index] < MIN_REPEATS) & (np.abs(np.log(ratio)) > np.log(OUTLIER_RATIO))
    for number in np.unique(samples.kind_numbers):
        own = samples.kind_numbers == number
        if stalled[own].mean() > MAX_STALLS:
            stalled[own] = False
    return stalled


def check_samples(samples: Samples, where: str) -> None:
    """Raise BadInput if a needed kind of step is missing, or a time is not positive."""
    kinds = set(samples.kinds)
    for names in (("decode",), ("prefill", "mixed")):
        if not kinds & set(names):
            raise BadInput(
                f"{where}: expected samples of {' or '.join(names)} steps, got none; "
                "measure them with `sim calibrate probe`"
            )
    if not (np.isfinite(samples.seconds).all() and (samples.seconds > 0).all()):
        bad = int(np.argmin(np.where(np.isfinite(samples.seconds), samples.seconds, -np.inf)))
        raise BadInput(f"{where}: sample {bad + 1}: expected more than 0 seconds, got {samples.seconds[bad]:g}")


def fit_groups(groups: Groups, about: Mapping[str, Any], details: bool = True) -> Fit:
    """Fit all parts: decodes first, because mixed steps contain them. `details` adds uncertainty and tied terms."""
    ratios = model_ratios(about)
    parts = [fit_decodes(groups.of_kind("decode"), tuple(about.get("row_buckets") or ()), ratios)]
    cost = parts[0].apply(PartsCost(), parts[0].solution.values)
    parts.append(fit_prompts(groups.of_kind("prefill", "mixed"), tuple(about.get("token_buckets") or ()), ratios, cost))
    if "swap" in groups.kinds:
        parts.append(fit_swaps(groups.of_kind("swap")))
    for part in parts:
        cost = part.apply(cost, part.solution.values)
    if not details:
        return Fit(cost, groups)
    tied = [name for part in parts for name in part.tied_terms()]
    return Fit(cost, groups, tied, bootstrap(cost, parts))


def fit_swaps(groups: Groups) -> PartFit:
    """Fit the swap part."""
    model = SwapModel()

    def apply(cost: PartsCost, values: Array) -> PartsCost:
        return replace(cost, swap=model.part(values))

    return PartFit("swap", model, solve(model.problem(groups)), apply)


def fit_decodes(groups: Groups, buckets: Sequence[int], ratios: ModelRatios) -> PartFit:
    """Fit the decode part. Steps that are linear in the context simulate faster: the root needs clear evidence."""
    model = DecodeModel(groups, buckets, ratios, root=True)
    solution = solve(model.problem(groups))
    if not solution.values[-1] > CLEAR * solution.standard_errors()[-1]:
        model = DecodeModel(groups, buckets, ratios)
        solution = solve(model.problem(groups))

    def apply(cost: PartsCost, values: Array) -> PartsCost:
        return replace(cost, decodes=model.part(values))

    return PartFit("decode", model, solution, apply)


def fit_prompts(groups: Groups, buckets: Sequence[int], ratios: ModelRatios, cost: PartsCost) -> PartFit:
    """Fit the prefill part with mixed steps as one pass, or as two parts that overlap if that is clearly better."""
    chosen = PrefillModel(groups, buckets, ratios, cost.decodes)
    solution, overlap, floor = solve(chosen.problem(groups)), 0.0, True
    mixed = groups.kinds == "mixed"
    if mixed.any():
        decode = decode_seconds(cost, groups.table)
        # Some devices run mixed steps with faster kernels than decodes: then decodes are no lower bound.
        floor = float((np.maximum(solution.predicted, decode) / groups.seconds)[mixed].mean()) < 1 + FLOOR_EXCESS
        two_parts = PrefillModel(groups, buckets, ratios, cost.decodes, one_pass=False)
        other, other_overlap = fit_overlap(two_parts, groups, decode)
        better = error_of(other, groups, mixed) < OVERLAP_GAIN * error_of(solution, groups, mixed)
        if better and error_of(other, groups) < error_of(solution, groups):  # few mixed steps could distort the prompts
            chosen, solution, overlap = two_parts, other, other_overlap

    def apply(cost: PartsCost, values: Array) -> PartsCost:
        prefill, both = chosen.parts(values, overlap, floor)
        return replace(cost, prefill=prefill, mixed=both)

    return PartFit("prefill", chosen, solution, apply)


def error_of(solution: Solution, groups: Groups, mask: Union[Mask, slice] = slice(None)) -> float:
    """Return the mean relative error of a solution, of all steps or of some."""
    return float(np.mean(np.abs(solution.predicted / groups.seconds - 1)[mask]))


def fit_overlap(model: PrefillModel, groups: Groups, decode: Array) -> tuple[Solution, float]:
    """Fit prefill times and the overlap with decodes in turn."""
    problem = model.problem(groups)
    design = problem.design
    prefill, overlap = np.maximum(groups.seconds - 0.5 * decode, 0.5 * groups.seconds), 0.5
    for _ in range(OVERLAP_ROUNDS):
        linear = overlap_round(prefill, decode, overlap)
        problem.design, problem.offset = design * linear.scale[:, None], linear.offset
        solution = solve(problem)
        prefill = design @ solution.values
        before, overlap = overlap, best_overlap(groups.seconds, prefill, decode)
        if abs(overlap - before) < OVERLAP_CHANGE:
            break
    final = prefill + decode - overlap * np.minimum(prefill, decode)
    return replace(solution, predicted=final), overlap


def bootstrap(cost: PartsCost, parts: Sequence[PartFit]) -> list[list[float]]:
    """Return the parameters of fits to resampled data; the seed is fixed, so a fit can be repeated."""
    rng = np.random.default_rng(0)
    solutions = [part.solution.resampled(DRAWS, rng) for part in parts]
    draws = []
    for chosen in zip(*solutions, strict=True):
        drawn = cost
        for part, values in zip(parts, chosen, strict=True):
            drawn = part.apply(drawn, values)
        draws.append([float(f"{value:.4g}") for value in parameters(drawn)])
    return draws


def with_host(fitted: Fit, samples: Samples) -> Fit:
    """Return the fit with the host time, if the samples have it."""
    if samples.host is None:
        return fitted
    prompts, live = samples.column("prefill_rows"), samples.column("decode_live")
    table = np.column_stack([samples.host, prompts + live, prompts, samples.column("prefill_live")])
    host = fit_overhead(table.tolist())
    draws = draws_with_host(fitted.cost, fitted.draws, host)
    return replace(fitted, cost=replace(fitted.cost, host=host), draws=draws)


def draws_with_host(cost: PartsCost, draws: Sequence[Sequence[float]], host: HostPart) -> list[list[float]]:
    """Return the stored draws of a cost model with another host time, the same one in all of them."""
    drawn = (with_parameters(cost, draw) for draw in draws)
    return [parameters(replace(other, host=host)) for other in drawn if isinstance(other, PartsCost)]
