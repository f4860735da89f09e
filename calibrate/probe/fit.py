"""Fit a cost model in parts to measured steps.

Prefill and mixed steps: a rising curve over tokens, plus terms for rows and attention. Decode steps: a rising curve
over rows, plus a term per cached token. All terms are at least 0, so more work never takes less time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Optional, Union

import numpy as np
from servesim.core import BadInput
from servesim.costs.parts import HostPart, PartsCost
from servesim.costs.uncertainty import parameters, with_parameters

from .host_overhead import fit_overhead, host_sample
from .parts_fit import DecodeModel, LinearModel, ModelRatios, PrefillModel, SwapModel, model_ratios
from .sample_set import (
    MIN_REPEATS,
    OUTLIER_RATIO,
    Array,
    Groups,
    Mask,
    Samples,
    group_index,
    grouped,
    predict,
    shapes_of,
    without_outliers,
)
from .solver import Solution, solve

OVERLAP_ROUNDS, OVERLAP_CHANGE = 15, 0.005
OVERLAP_GAIN = 0.9  # an overlap of two parts must reduce the error of mixed steps to this fraction of one pass
WIDTHS = (64, 128, 256, 384, 512, 768, 1024)  # tokens that may fill the device
WIDTH_GAIN = 0.8  # such a width must reduce the error of prompts after cached tokens to this fraction
WIDTH_POWERS, POWER_GAIN = (0.97, 0.95, 0.93, 0.9, 0.87, 0.83), 0.9  # and its power to this fraction of that
FLOOR_EXCESS = 0.01  # decodes as a lower bound of mixed steps may raise their mean time by this fraction
CLEAR = 5.0  # standard errors of a term that is used only if the samples show it
DRAWS = 24  # fits to resampled data that are stored
MAX_STALLS = 0.05  # of the steps of one kind


@dataclass(frozen=True)
class Fit:
    """A fitted cost model."""

    cost: PartsCost
    kept: Samples  # the samples of the fit
    groups: Groups  # the same, one row per shape
    excluded: int  # samples left out as outliers
    tied: Sequence[str]  # terms that the samples do not determine
    draws: Sequence[Sequence[float]]  # `parameters` of equally likely cost models


class PartFit(NamedTuple):
    """The solution of one part."""

    model: LinearModel
    solution: Solution

    def tied_terms(self) -> list[str]:
        """Return the names of the terms that the samples do not determine."""
        single = [self.model.curve_name] if len(self.model.knots) == 1 else []
        return [name if "." in name else f"{self.model.part}.{name}" for name in [*single, *self.solution.tied_terms()]]


def fit_samples(samples: Samples, about: Mapping[str, Any], where: str = "fit") -> Fit:
    """Fit a cost model with its uncertainty. Steps far from all others are left out. `where` names their source.

    `about` may hold the padding buckets (`row_buckets`, `token_buckets`) and the sizes of the `model`.
    """
    check_samples(samples, where)
    kept = without_outliers(samples)
    groups = grouped(kept)
    parts = fit_parts(groups, about)
    stalled = stalled_steps(kept, cost_of(parts))
    if stalled.any():
        kept = kept.select(~stalled)
        groups = grouped(kept)
        parts = fit_parts(groups, about)
    cost, tied = cost_of(parts), [name for part in parts for name in part.tied_terms()]
    excluded = samples.excluded + len(samples) - len(kept)
    return with_host(Fit(cost, kept, groups, excluded, tied, bootstrap(parts)), samples)


def stalled_steps(samples: Samples, cost: PartsCost) -> Mask:
    """Return which steps of rare shapes are far from the fit, if they are few of their kind of step.

    Repeats of a shape confirm its time. A kind of step with many slow steps is slow on average: all of them count.
    """
    index = group_index(samples)
    ratio = samples.seconds / np.maximum(predict(cost, samples.table), 1e-300)
    stalled: Mask = (np.bincount(index)[index] < MIN_REPEATS) & (np.abs(np.log(ratio)) > np.log(OUTLIER_RATIO))
    for kind in np.unique(samples.kinds):
        own = samples.kinds == kind
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


def fit_cost(groups: Groups, about: Mapping[str, Any]) -> PartsCost:
    """Fit a cost model without its uncertainty."""
    return cost_of(fit_parts(groups, about))


def fit_parts(groups: Groups, about: Mapping[str, Any]) -> list[PartFit]:
    """Fit all parts: decodes first, because mixed steps contain them."""
    ratios = model_ratios(about)
    rows, context_step = tuple(about.get("row_buckets") or ()), int(about.get("context_step") or 0)
    parts = [fit_decodes(groups.of_kind("decode"), rows, ratios, context_step)]
    prompts, buckets = groups.of_kind("prefill", "mixed"), tuple(about.get("token_buckets") or ())
    parts.append(fit_prompts(prompts, buckets, ratios, cost_of(parts)))
    if "swap" in groups.kinds:
        swaps = SwapModel()
        parts.append(PartFit(swaps, solve(swaps.problem(groups.of_kind("swap")))))
    return parts


def cost_of(parts: Sequence[PartFit], values: Optional[Sequence[Array]] = None) -> PartsCost:
    """Return the cost model of fitted parts, with their solutions or with other values."""
    cost = PartsCost()
    for k, part in enumerate(parts):
        cost = part.model.apply(cost, part.solution.values if values is None else values[k])
    return cost


def fit_decodes(groups: Groups, buckets: Sequence[int], ratios: ModelRatios, context_step: int = 0) -> PartFit:
    """Fit the decode part. Steps that are linear in the context simulate faster: a further term needs clear evidence.

    That is the longest context if the samples have it, or the root of the context.
    """
    for term in (*(["longest"] if groups.column("longest").any() else []), "context_root", ""):
        model = DecodeModel(groups, buckets, ratios, term, context_step)
        solution = solve(model.problem(groups))
        if not term or solution.values[-1] > CLEAR * solution.standard_errors()[-1]:
            break
    return PartFit(model, solution)


def fit_prompts(groups: Groups, buckets: Sequence[int], ratios: ModelRatios, cost: PartsCost) -> PartFit:
    """Fit the prefill part with mixed steps as one pass, or as two parts that overlap if that is clearly better."""
    model = PrefillModel(groups, buckets, ratios, cost.decodes)
    fit_width(model, groups)
    solution = solve(model.problem(groups))
    mixed = groups.kinds == "mixed"
    if mixed.any():
        alone = groups.table.copy()
        alone[:, :5] = alone[:, 8] = 0  # without prompts and copies
        decode = np.array([cost.duration(shape) if any(shape) else 0.0 for shape in shapes_of(alone)])
        # Some devices run mixed steps with faster kernels than decodes: then decodes are no lower bound.
        model.floor = float((np.maximum(solution.predicted, decode) / groups.seconds)[mixed].mean()) < 1 + FLOOR_EXCESS
        two_parts = PrefillModel(groups, buckets, ratios, cost.decodes, one_pass=False)
        two_parts.floor, two_parts.width, two_parts.width_power = model.floor, model.width, model.width_power
        other = fit_overlap(two_parts, groups, decode)
        better = error_of(other, groups, mixed) < OVERLAP_GAIN * error_of(solution, groups, mixed)
        if better and error_of(other, groups) < error_of(solution, groups):  # few mixed steps could distort the prompts
            return PartFit(two_parts, other)
    return PartFit(model, solution)


def fit_width(model: PrefillModel, groups: Groups) -> None:
    """Set the tokens that fill the device when they read cached tokens, and the power; each if it is clearly better."""
    after = groups.column("cross") > 0
    if after.sum() < MIN_REPEATS:
        return

    def error(width: int, power: Optional[float]) -> float:
        model.width, model.width_power = width, power
        return error_of(solve(model.problem(groups)), groups, after)

    errors = {width: error(width, None) for width in (0, *WIDTHS)}
    width = min(errors, key=lambda width: errors[width])
    if errors[width] >= WIDTH_GAIN * errors[0]:
        width = 0
    powers = {power: error(width, power) for power in WIDTH_POWERS} if width else {}
    power = min(powers, key=lambda power: powers[power], default=None)
    clear = power is not None and powers[power] < POWER_GAIN * errors[width]
    model.width, model.width_power = width, power if clear else None


def error_of(solution: Solution, groups: Groups, mask: Union[Mask, slice] = slice(None)) -> float:
    """Return the mean relative error of a solution, of all steps or of some."""
    return float(np.mean(np.abs(solution.predicted / groups.seconds - 1)[mask]))


def fit_overlap(model: PrefillModel, groups: Groups, decode: Array) -> Solution:
    """Fit prefill times and the overlap with decodes in turn. Steps without decodes have no overlap."""
    problem = model.problem(groups)
    design = problem.design
    prefill, overlap = np.maximum(groups.seconds - 0.5 * decode, 0.5 * groups.seconds), 0.5
    for _ in range(OVERLAP_ROUNDS):
        shorter = (prefill < decode) & (decode > 0)
        problem.design = design * np.where(shorter, 1 - overlap, 1.0)[:, None]
        problem.offset = np.where(shorter, decode, (1 - overlap) * decode)
        solution = solve(problem)
        prefill = design @ solution.values
        before, overlap = overlap, best_overlap(groups.seconds, prefill, decode)
        if abs(overlap - before) < OVERLAP_CHANGE:
            break
    model.overlap = overlap
    return replace(solution, predicted=prefill + decode - overlap * np.minimum(prefill, decode))


def best_overlap(seconds: Array, prefill: Array, decode: Array) -> float:
    """Return the overlap with the smallest relative error of the mixed steps."""
    mixed = decode > 0
    hidden = np.minimum(prefill, decode)[mixed] / seconds[mixed]
    excess = (prefill + decode - seconds)[mixed] / seconds[mixed]
    return float(np.clip(hidden @ excess / max(float(hidden @ hidden), 1e-12), 0.0, 1.0))


def bootstrap(parts: Sequence[PartFit]) -> list[list[float]]:
    """Return the parameters of fits to resampled data; the seed is fixed, so a fit can be repeated."""
    rng = np.random.default_rng(0)
    solutions = [part.solution.resampled(DRAWS, rng) for part in parts]
    drawn = (cost_of(parts, values) for values in zip(*solutions, strict=True))
    return [[float(f"{value:.4g}") for value in parameters(cost)] for cost in drawn]


def with_host(fitted: Fit, samples: Samples) -> Fit:
    """Return the fit with the host time, if the samples have it."""
    if samples.host is None:
        return fitted
    host = fit_overhead([host_sample(*step) for step in zip(samples.host.tolist(), samples.shapes, strict=True)])
    draws = draws_with_host(fitted.cost, fitted.draws, host)
    return replace(fitted, cost=replace(fitted.cost, host=host), draws=draws)


def draws_with_host(cost: PartsCost, draws: Sequence[Sequence[float]], host: HostPart) -> list[list[float]]:
    """Return the stored draws of a cost model with another host time, the same one in all of them."""
    drawn = (with_parameters(cost, draw) for draw in draws)
    return [parameters(replace(other, host=host)) for other in drawn if isinstance(other, PartsCost)]
