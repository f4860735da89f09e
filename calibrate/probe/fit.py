"""Fit a cost model to a probe's samples: few terms, each with a meaning, and what it is off by where it was not led.

Prompts, alone or with decodes, are a curve over the step's tokens plus terms for rows and attention; decodes are a line
in the context for each gear. Everything is least squares on relative error, so that short steps count as much as long.
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
from servesim.costs.table import NEAR, TableCost

from .samples import Sample, read_samples

Array = npt.NDArray[np.float64]
FOLDS = 5
QUANTILES = 21
KNOTS = (1, 16, 64, 256, 1024, 4096, 16384)  # tokens, where the device has no gears of its own
ROWS = (1, 8, 32, 128, 512)
DEPTHS = (float(NEAR),)  # cached tokens a row, between which a gear's time is a straight line
KINDS = ("prefill", "decode", "mixed", "swap")


@dataclass(frozen=True)
class Samples:
    """Measured steps."""

    kinds: list[str]
    shapes: list[Shape]
    seconds: Array
    points: npt.NDArray[np.int64]  # samples of one point share its shape
    left_out: int = 0  # flagged as outliers, or failed

    @classmethod
    def from_rows(cls, rows: Sequence[Sample]) -> Samples:
        """Return the good ones of the rows, the others counted."""
        good = [row for row in rows if row.good]
        seconds = np.array([row.seconds for row in good], dtype=float)
        points = np.array([row.point for row in good], dtype=np.int64)
        return cls([row.kind for row in good], [row.shape for row in good], seconds, points, len(rows) - len(good))

    def of(self, chosen: npt.NDArray[np.bool_]) -> Samples:
        """Return some of them."""
        places = np.flatnonzero(chosen)
        kinds, shapes = [self.kinds[p] for p in places], [self.shapes[p] for p in places]
        return Samples(kinds, shapes, self.seconds[places], self.points[places])

    def kind(self, *names: str) -> Samples:
        """Return those of some kinds."""
        return self.of(np.array([kind in names for kind in self.kinds], dtype=bool))

    def column(self, name: str) -> Array:
        """Return one field of all shapes."""
        return np.array([getattr(shape, name) for shape in self.shapes], dtype=float)

    def __len__(self) -> int:
        return len(self.kinds)


def fit(samples: Samples, about: Mapping[str, Any]) -> TableCost:
    """Return the cost model that a device's samples lead to."""
    gears, token_gears = about.get("gears") or (), about.get("token_gears") or ()
    prompts = prompt_terms(samples.kind("prefill", "mixed"), token_gears)
    decodes = samples.kind("decode")
    curves, live = decode_curves(decodes, gears) if gears else ([], 0.0)
    return TableCost(
        decode_gears=() if gears else decode_lines(decodes),
        decode_curves=curves,
        decode_live=live,
        token_gears=list(token_gears),
        **prompts,
        **swap_terms(samples.kind("swap")),
    )


def prompt_terms(samples: Samples, token_gears: Sequence[int]) -> dict[str, Any]:
    """Fit the curve over tokens, and what rows, attention and decodes in the same step add."""
    tokens = rounded(samples.column("prefill_tokens") + samples.column("decode_rows"), token_gears)
    knots = knots_for(tokens, token_gears)
    mixed = (samples.column("decode_rows") > 0).astype(float)
    terms = {
        "prefill_row": samples.column("prefill_rows") - 1,
        "prefill_square": samples.column("squares"),
        "prefill_cross": samples.column("cross"),
        "prefill_depth": (samples.column("cross") + samples.column("squares") / 2) / samples.column("prefill_live"),
        "mixed": mixed,
        "mixed_row": samples.column("decode_rows"),
        "mixed_context": samples.column("context"),
        "mixed_near": np.minimum(samples.column("context"), NEAR * samples.column("decode_rows")),
        "mixed_token": mixed * np.minimum(tokens, max(token_gears, default=np.inf)),
    }
    found = least(np.column_stack([hats(tokens, knots), *terms.values()]), samples.seconds, len(knots))
    curve, rest = found[: len(knots)], dict(zip(terms, found[len(knots) :], strict=True))
    curve = np.maximum.accumulate(curve - rest["prefill_row"])  # the first row of a step is in its curve
    return {"prefill": [(float(x), float(y)) for x, y in zip(knots, curve, strict=True)],
            **{name: float(value) for name, value in rest.items()}}  # fmt: skip


def decode_lines(samples: Samples) -> list[tuple[float, float, float, float]]:
    """Fit decodes where the device has no gears: a curve over rows, and one slope in the context for all."""
    rows, context = samples.column("decode_rows"), samples.column("context")
    knots = knots_for(rows, (), ROWS)
    found = least(np.column_stack([hats(rows, knots), context]), samples.seconds)
    return [(x, float(y), 0.0, float(found[-1])) for x, y in zip(knots, found, strict=False)]


def decode_curves(
    samples: Samples, gears: Sequence[int]
) -> tuple[list[tuple[float, list[tuple[float, float]]]], float]:
    """Fit a curve over the context for each gear, and what a live row adds, which padding does not.

    Attention is split up differently for short contexts and long ones, hence the curves.
    """
    padded, context = rounded(samples.column("decode_rows"), gears), samples.column("context")
    bends = {gear: context_knots(gear, context[padded == gear]) for gear in sorted(set(padded))}
    columns = [hats(context, knots) * (padded == gear)[:, None] for gear, knots in bends.items()]
    found = least(np.column_stack([*columns, samples.column("decode_live")]), samples.seconds)
    values = iter(found.tolist())
    return [(float(gear), [(x, next(values)) for x in knots]) for gear, knots in bends.items()], float(found[-1])


def context_knots(gear: float, context: Array) -> list[float]:
    """Return where a gear's curve bends."""
    low, high = float(context.min()), float(context.max())
    knots = [low, *(gear * depth for depth in DEPTHS if low < gear * depth < high), high]
    return [x for x, further in zip(knots, [*knots[1:], np.inf], strict=True) if further > 1.2 * x]


def swap_terms(samples: Samples) -> dict[str, Any]:
    """Fit a copy of blocks."""
    if not len(samples):
        return {}
    blocks = samples.column("swapped")
    base, slope = least(np.column_stack([np.ones(len(blocks)), blocks]), samples.seconds)
    return {"swap": float(base), "swap_block": float(slope)}


def rounded(values: Array, gears: Sequence[int]) -> Array:
    """Return values padded to the next gear, those beyond the last as they are."""
    if not gears:
        return values
    edges = np.array(sorted(gears), dtype=float)
    places = np.searchsorted(edges, values)
    return np.where(places < len(edges), edges[np.minimum(places, len(edges) - 1)], values)


def knots_for(values: Array, gears: Sequence[int], usual: Sequence[int] = KNOTS) -> list[float]:
    """Return where a curve bends: at gears that were seen, beyond them at every doubling that was."""
    top = float(values.max())
    inside = [float(gear) for gear in gears if np.any(values == gear)]
    last = inside[-1] if inside else 0.0
    # Beyond its last gear a device runs unpadded, often launch by launch: a curve of its own begins there.
    further = (last + 1, 768, 1024, 1536, 2048, 3072, 4096, 8192) if inside else usual
    beyond = [float(x) for x in further if last < x < top]
    low = [] if inside else [float(values.min())]
    return sorted({*low, *inside, *[x for x in beyond if x > values.min()], top})


def hats(values: Array, knots: Sequence[float]) -> Array:
    """Return the piecewise-linear basis: each column is 1 at its knot and 0 at the others."""
    identity = np.eye(len(knots))
    return np.column_stack([np.interp(values, knots, row) for row in identity])


def least(design: Array, seconds: Array, free: int = 0) -> Array:
    """Solve for non-negative terms by least squares on relative error; the first `free` may be anything."""
    weighted, ones = design / seconds[:, None], np.ones(len(seconds))
    active = list(range(design.shape[1]))
    while True:
        scale = np.maximum(np.abs(weighted[:, active]).max(axis=0), 1e-300)
        solved = np.linalg.lstsq(weighted[:, active] / scale, ones, rcond=None)[0] / scale
        worst = min(
            (place for place in range(len(active)) if active[place] >= free), key=lambda p: solved[p], default=None
        )
        if worst is None or solved[worst] >= 0:
            break
        del active[worst]
    found = np.zeros(design.shape[1])
    found[active] = solved
    return found


def predicted(cost: TableCost, samples: Samples) -> Array:
    """Return what the model says of every sample."""
    return np.array([cost.seconds(shape) for shape in samples.shapes])


def held_out(samples: Samples, about: Mapping[str, Any], seed: int = 0) -> dict[str, dict[str, float]]:
    """Return, by kind, the error on points that the fit did not see: each fold's points are predicted from the others.

    A point's error is that of its mean; outer corners stay in the fit, since nothing beyond them is ever claimed.
    """
    mine = folds(samples, seed)
    errors: dict[str, list[float]] = {}
    for fold in range(FOLDS):
        inside, outside = samples.of(mine != fold), samples.of(mine == fold)
        try:
            cost = fit(inside, about)
        except (ValueError, np.linalg.LinAlgError):
            continue
        expected = predicted(cost, outside)
        for point in np.unique(outside.points):
            place = np.flatnonzero(outside.points == point)
            shape = outside.shapes[place[0]]
            if not within(shape, inside):
                continue
            off = float(expected[place].mean() / outside.seconds[place].mean() - 1)
            errors.setdefault(outside.kinds[place[0]], []).append(abs(off))
    return {
        kind: {"mean": float(np.mean(found)), "median": float(np.median(found)), "p90": float(np.quantile(found, 0.9)),
               "points": len(found)}
        for kind, found in errors.items()
    }  # fmt: skip


def folds(samples: Samples, seed: int) -> npt.NDArray[np.int64]:
    """Return the fold of every sample: points dealt out at random, each kind of step evenly."""
    kind_of = dict(zip(samples.points.tolist(), samples.kinds, strict=True))
    fold_of, dealt = {}, dict.fromkeys(samples.kinds, 0)
    for point in np.random.default_rng(seed).permutation(sorted(kind_of)).tolist():
        fold_of[point] = dealt[kind_of[point]] % FOLDS
        dealt[kind_of[point]] += 1
    return np.array([fold_of[point] for point in samples.points.tolist()], dtype=np.int64)


def within(shape: Shape, samples: Samples) -> bool:
    """Whether a shape lies inside what the samples span."""
    for name in ("prefill_tokens", "decode_rows", "context", "swapped"):
        value = getattr(shape, name)
        column = samples.column(name)
        if value and not (column > 0).any():
            return False
        if value and not column[column > 0].min() <= value <= column.max():
            return False
    return True


def noise(cost: TableCost, samples: Samples) -> dict[str, list[float]]:
    """Return, by kind, quantiles of measured over expected time."""
    ratios = samples.seconds / predicted(cost, samples)
    kinds = np.array(samples.kinds)
    spaced = np.linspace(0, 1, QUANTILES)
    return {
        kind: [round(float(q), 5) for q in np.quantile(ratios[kinds == kind], spaced)]
        for kind in KINDS
        if (kinds == kind).any()
    }


def busy(cost: TableCost, samples: Samples) -> Optional[float]:
    """Return how many times as long decodes take while the host's front end is at work, if that was measured."""
    mine = samples.kind("busy")
    return float(np.median(mine.seconds / predicted(cost, mine))) if len(mine) else None


def measured_grid(samples: Samples) -> dict[str, list[float]]:
    """Return the least and the most that was measured of everything."""
    names = ("prefill_tokens", "prefill_rows", "decode_rows", "context", "swapped")
    columns = {name: samples.column(name) for name in names}
    return {name: [float(c[c > 0].min()), float(c.max())] for name, c in columns.items() if (c > 0).any()}


def profile_from(path: Path, about: Mapping[str, Any], name: Optional[str] = None) -> Profile:
    """Fit the samples of a probe and return the profile, its error and noise told."""
    everything = Samples.from_rows(read_samples(path))
    if not len(everything):
        raise BadInput(f"{path}: no samples")
    samples = everything.kind(*KINDS)
    for kind in ("prefill", "decode"):
        if kind not in samples.kinds:
            raise BadInput(f"{path}: no {kind} steps among its samples: nothing to fit")
    cost = fit(samples, about)
    model = about.get("model")
    told = {
        "name": name or f"{str(about.get('device', 'device')).lower().replace(' ', '-')}",
        **{key: value for key, value in about.items() if key not in ("model", "name")},
        "model": model["name"] if isinstance(model, Mapping) else model,
        "how": f"probe: {len(samples)} samples of {len(np.unique(samples.points))} points, "
        f"{everything.left_out} left out",
        "error": held_out(samples, about),
        "busy": busy(cost, everything),
        "grid": measured_grid(samples),
        "noise": noise(cost, samples),
    }
    return Profile(str(told["name"]), cost, told, path.parent)
