"""Fit a cost model with few terms to a probe's samples, and compute its held-out error.

Prefill and mixed steps: a piecewise-linear curve over tokens, plus terms for rows and attention. Decode steps: a curve
over the context for each padding bucket (gear). All fits minimise the relative error, so short steps count like long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import numpy as np
import numpy.typing as npt
from servesim.core import BadInput, Shape
from servesim.costs.device_profile import Profile
from servesim.costs.table import NEAR_TOKENS, TableCost

from .samples import Sample, read_samples

Array = npt.NDArray[np.float64]
FOLDS = 5
QUANTILES = 21
TOKEN_KNOTS = (1, 16, 64, 256, 1024, 4096, 16384)  # for devices without token buckets
ROW_KNOTS = (1, 8, 32, 128, 512)  # for devices without row buckets
CONTEXT_KNOTS = (float(NEAR_TOKENS),)  # cached tokens per row
KINDS = ("prefill", "decode", "mixed", "swap")


@dataclass(frozen=True)
class Samples:
    """Measured steps."""

    kinds: list[str]
    shapes: list[Shape]
    seconds: Array
    points: npt.NDArray[np.int64]  # grid point of each sample; samples of one point share a shape
    excluded: int = 0  # number of outliers and failed samples, which are not included

    @classmethod
    def from_rows(cls, rows: Sequence[Sample]) -> Samples:
        """Return the good rows as samples; the other rows are only counted."""
        good = [row for row in rows if row.good]
        seconds = np.array([row.seconds for row in good], dtype=float)
        points = np.array([row.point for row in good], dtype=np.int64)
        return cls([row.kind for row in good], [row.shape for row in good], seconds, points, len(rows) - len(good))

    def select(self, mask: npt.NDArray[np.bool_]) -> Samples:
        """Return the samples where the mask is true."""
        indices = np.flatnonzero(mask)
        kinds, shapes = [self.kinds[i] for i in indices], [self.shapes[i] for i in indices]
        return Samples(kinds, shapes, self.seconds[indices], self.points[indices])

    def of_kind(self, *names: str) -> Samples:
        """Return the samples of these kinds."""
        return self.select(np.array([kind in names for kind in self.kinds], dtype=bool))

    def column(self, name: str) -> Array:
        """Return one field of all shapes as an array."""
        return np.array([getattr(shape, name) for shape in self.shapes], dtype=float)

    def __len__(self) -> int:
        return len(self.kinds)


def fit_cost(samples: Samples, about: Mapping[str, Any]) -> TableCost:
    """Fit a cost model to the samples. `about` may hold the padding buckets: `gears` (rows) and `token_gears`."""
    row_buckets, token_buckets = about.get("gears") or (), about.get("token_gears") or ()
    prompts = fit_prompts(samples.of_kind("prefill", "mixed"), token_buckets)
    decodes = samples.of_kind("decode")
    curves, live = fit_decode_buckets(decodes, row_buckets) if row_buckets else ([], 0.0)
    return TableCost(
        decode_gears=() if row_buckets else fit_decode_rows(decodes),
        decode_curves=curves,
        decode_live=live,
        token_gears=list(token_buckets),
        **prompts,
        **fit_swap(samples.of_kind("swap")),
    )


def fit_prompts(samples: Samples, token_buckets: Sequence[int]) -> dict[str, Any]:
    """Fit the curve over tokens, and the terms for rows, attention and decodes in the same step."""
    tokens = round_up_to_bucket(samples.column("prefill_tokens") + samples.column("decode_rows"), token_buckets)
    knots = knots_for(tokens, token_buckets)
    mixed = (samples.column("decode_rows") > 0).astype(float)
    terms = {
        "prefill_row": samples.column("prefill_rows") - 1,
        "prefill_square": samples.column("squares"),
        "prefill_cross": samples.column("cross"),
        "prefill_depth": (samples.column("cross") + samples.column("squares") / 2) / samples.column("prefill_live"),
        "mixed": mixed,
        "mixed_row": samples.column("decode_rows"),
        "mixed_context": samples.column("context"),
        "mixed_near": np.minimum(samples.column("context"), NEAR_TOKENS * samples.column("decode_rows")),
        "mixed_token": mixed * np.minimum(tokens, max(token_buckets, default=np.inf)),
    }
    design = np.column_stack([piecewise_linear_basis(tokens, knots), *terms.values()])
    solution = nonneg_least_squares(design, samples.seconds, len(knots))
    curve, rest = solution[: len(knots)], dict(zip(terms, solution[len(knots) :], strict=True))
    curve = np.maximum.accumulate(np.maximum(curve - rest["prefill_row"], 0.0))  # it includes the first row of a step
    return {"prefill": [(float(x), float(y)) for x, y in zip(knots, curve, strict=True)],
            **{name: float(value) for name, value in rest.items()}}  # fmt: skip


def fit_decode_rows(samples: Samples) -> list[tuple[float, float, float, float]]:
    """Fit decodes of a device without padding buckets: a curve over rows, and one slope over the context."""
    rows, context = samples.column("decode_rows"), samples.column("context")
    knots = knots_for(rows, (), ROW_KNOTS)
    design = np.column_stack([piecewise_linear_basis(rows, knots), context])
    solution = nonneg_least_squares(design, samples.seconds)
    return [(x, float(y), 0.0, float(solution[-1])) for x, y in zip(knots, solution, strict=False)]


def fit_decode_buckets(
    samples: Samples, row_buckets: Sequence[int]
) -> tuple[list[tuple[float, list[tuple[float, float]]]], float]:
    """Fit a curve over the context for each padding bucket, and the extra time of a live row.

    Curves, not lines: kernels split the attention over short and long contexts differently.
    """
    padded, context = round_up_to_bucket(samples.column("decode_rows"), row_buckets), samples.column("context")
    knots_of = {bucket: context_knots(bucket, context[padded == bucket]) for bucket in sorted(set(padded))}
    columns = [piecewise_linear_basis(context, knots) * (padded == b)[:, None] for b, knots in knots_of.items()]
    solution = nonneg_least_squares(np.column_stack([*columns, samples.column("decode_live")]), samples.seconds)
    values = iter(solution.tolist())
    curves = [(float(bucket), [(x, next(values)) for x in knots]) for bucket, knots in knots_of.items()]
    return curves, float(solution[-1])


def context_knots(bucket: float, context: Array) -> list[float]:
    """Return the knots of a padding bucket's curve."""
    low, high = float(context.min()), float(context.max())
    knots = [low, *(bucket * depth for depth in CONTEXT_KNOTS if low < bucket * depth < high), high]
    return [x for x, following in zip(knots, [*knots[1:], np.inf], strict=True) if following > 1.2 * x]


def fit_swap(samples: Samples) -> dict[str, Any]:
    """Fit the time of a copy of blocks: a constant and a slope per block."""
    if not len(samples):
        return {}
    blocks = samples.column("swapped")
    base, slope = nonneg_least_squares(np.column_stack([np.ones(len(blocks)), blocks]), samples.seconds)
    return {"swap": float(base), "swap_block": float(slope)}


def round_up_to_bucket(values: Array, buckets: Sequence[int]) -> Array:
    """Round values up to the next padding bucket. Values above the last bucket stay."""
    if not buckets:
        return values
    edges = np.array(sorted(buckets), dtype=float)
    indices = np.searchsorted(edges, values)
    return np.where(indices < len(edges), edges[np.minimum(indices, len(edges) - 1)], values)


def knots_for(values: Array, buckets: Sequence[int], default: Sequence[int] = TOKEN_KNOTS) -> list[float]:
    """Return the knots of a curve: the measured buckets, and fixed knots above the last one."""
    top = float(values.max())
    measured = [float(bucket) for bucket in buckets if np.any(values == bucket)]
    last = measured[-1] if measured else 0.0
    # Above the last bucket a device runs unpadded, often without graphs: another curve starts there.
    candidates = (last + 1, 768, 1024, 1536, 2048, 3072, 4096, 8192) if measured else default
    above = [float(x) for x in candidates if last < x < top]
    low = [] if measured else [float(values.min())]
    return sorted({*low, *measured, *[x for x in above if x > values.min()], top})


def piecewise_linear_basis(values: Array, knots: Sequence[float]) -> Array:
    """Return one column per knot: 1 at its knot, 0 at the others, linear in between."""
    identity = np.eye(len(knots))
    return np.column_stack([np.interp(values, knots, row) for row in identity])


def nonneg_least_squares(design: Array, seconds: Array, free: int = 0) -> Array:
    """Solve for non-negative terms by least squares on the relative error. The first `free` terms may be negative."""
    weighted, ones = design / seconds[:, None], np.ones(len(seconds))
    # A column of zeros influences no sample: its term stays 0. The solver would return a rounding error for it.
    active = np.flatnonzero(np.abs(design).max(axis=0)).tolist()
    while True:
        scale = np.abs(weighted[:, active]).max(axis=0)
        solved = np.linalg.lstsq(weighted[:, active] / scale, ones, rcond=None)[0] / scale
        worst = min(
            (index for index in range(len(active)) if active[index] >= free), key=lambda i: solved[i], default=None
        )
        if worst is None or solved[worst] >= 0:
            break
        del active[worst]
    solution = np.zeros(design.shape[1])
    solution[active] = solved
    return solution


def predict(cost: TableCost, samples: Samples) -> Array:
    """Return the seconds that the model predicts for every sample."""
    return np.array([cost.seconds(shape) for shape in samples.shapes])


def cross_validate(samples: Samples, about: Mapping[str, Any], seed: int = 0) -> dict[str, dict[str, float]]:
    """Return the held-out error per kind of step (cross-validation): each fold is predicted from the other folds.

    The error of a point is that of its mean time. Points outside the range of the other folds are not counted, because
    a profile is not valid outside its measured range.
    """
    fold_of = assign_folds(samples, seed)
    errors: dict[str, list[float]] = {}
    for fold in range(FOLDS):
        train, test = samples.select(fold_of != fold), samples.select(fold_of == fold)
        try:
            cost = fit_cost(train, about)
        except (ValueError, np.linalg.LinAlgError):
            continue
        predicted, measured = predict(cost, test), measured_range(train)
        for point in np.unique(test.points):
            indices = np.flatnonzero(test.points == point)
            shape = test.shapes[indices[0]]
            if not in_measured_range(shape, measured):
                continue
            error = float(predicted[indices].mean() / test.seconds[indices].mean() - 1)
            errors.setdefault(test.kinds[indices[0]], []).append(abs(error))
    return {
        kind: {"mean": float(np.mean(values)), "median": float(np.median(values)),
               "p90": float(np.quantile(values, 0.9)), "points": len(values)}
        for kind, values in errors.items()
    }  # fmt: skip


def assign_folds(samples: Samples, seed: int) -> npt.NDArray[np.int64]:
    """Return the fold of every sample. Points are assigned at random, and evenly per kind of step."""
    kind_of = dict(zip(samples.points.tolist(), samples.kinds, strict=True))
    fold_of, assigned = {}, dict.fromkeys(samples.kinds, 0)
    for point in np.random.default_rng(seed).permutation(sorted(kind_of)).tolist():
        fold_of[point] = assigned[kind_of[point]] % FOLDS
        assigned[kind_of[point]] += 1
    return np.array([fold_of[point] for point in samples.points.tolist()], dtype=np.int64)


def in_measured_range(shape: Shape, measured: Mapping[str, Sequence[float]]) -> bool:
    """Return whether a shape is inside the result of `measured_range`."""
    for name in ("prefill_tokens", "decode_rows", "context", "swapped"):
        value = getattr(shape, name)
        if value and not (name in measured and measured[name][0] <= value <= measured[name][1]):
            return False
    return True


def noise_quantiles(cost: TableCost, samples: Samples) -> dict[str, list[float]]:
    """Return the quantiles of measured over predicted time, per kind of step."""
    ratios = samples.seconds / predict(cost, samples)
    kinds = np.array(samples.kinds)
    levels = np.linspace(0, 1, QUANTILES)
    return {
        kind: [round(float(q), 5) for q in np.quantile(ratios[kinds == kind], levels)]
        for kind in KINDS
        if (kinds == kind).any()
    }


def busy_host_factor(cost: TableCost, samples: Samples) -> Optional[float]:
    """Return decode time with a busy front end over decode time without, or None if not measured."""
    busy = samples.of_kind("busy")
    return float(np.median(busy.seconds / predict(cost, busy))) if len(busy) else None


def measured_range(samples: Samples) -> dict[str, list[float]]:
    """Return the smallest and largest measured value of each shape field."""
    names = ("prefill_tokens", "prefill_rows", "decode_rows", "context", "swapped")
    columns = {name: samples.column(name) for name in names}
    return {name: [float(c[c > 0].min()), float(c.max())] for name, c in columns.items() if (c > 0).any()}


def fit_profile(path: Path, about: Mapping[str, Any], name: Optional[str] = None) -> Profile:
    """Fit the samples of a probe; return the profile with its held-out error and noise."""
    all_samples = Samples.from_rows(read_samples(path))
    if not len(all_samples):
        raise BadInput(f"{path}: expected at least one sample, got none")
    samples = all_samples.of_kind(*KINDS)
    for kind in ("prefill", "decode"):
        if kind not in samples.kinds:
            raise BadInput(
                f"{path}: expected samples of {kind} steps, got none; measure them with `sim calibrate probe`"
            )
    cost = fit_cost(samples, about)
    model = about.get("model")
    about_profile = {
        "name": name or f"{str(about.get('device', 'device')).lower().replace(' ', '-')}",
        **{key: value for key, value in about.items() if key not in ("model", "name")},
        "model": model["name"] if isinstance(model, Mapping) else model,
        "how": f"probe: {len(samples)} samples of {len(np.unique(samples.points))} points, "
        f"{all_samples.excluded} left out",
        "error": cross_validate(samples, about),
        "busy": busy_host_factor(cost, all_samples),
        "grid": measured_range(samples),
        "noise": noise_quantiles(cost, samples),
    }
    return Profile(str(about_profile["name"]), cost, about_profile, path.parent)
