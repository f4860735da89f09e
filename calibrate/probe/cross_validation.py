"""Held-out errors: each fold of the shapes is predicted by a fit to the other folds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from servesim.core import Shape

from .fit import fit_groups
from .predictions import predict
from .sample_set import Array, Groups, Mask, Samples, group_index, grouped
from .samples import STEP_KINDS

FOLDS = 5
RANGE_FIELDS = ("prefill_tokens", "prefill_rows", "decode_rows", "context", "swapped")
IN_RANGE = ("prefill_tokens", "decode_rows", "context", "swapped")  # a held-out shape must be inside these ranges
ROW_EDGES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LENGTH_EDGES = (0, 64, 256, 1024, 4096, 16384)


@dataclass(frozen=True)
class HeldOut:
    """The held-out error of every shape that is inside the range of the other folds."""

    groups: Groups
    errors: Array  # predicted / measured - 1

    def by_kind(self) -> dict[str, dict[str, float]]:
        """Return the error of every kind of step."""
        kinds = self.groups.kinds
        return {kind: summary(self.errors[kinds == kind]) for kind in STEP_KINDS if (kinds == kind).any()}

    def by_range(self) -> dict[str, dict[str, dict[str, float]]]:
        """Return the error by kind, for ranges of rows and for ranges of the mean length of a row."""
        rows = self.groups.column("prefill_rows") + self.groups.column("decode_rows")
        tokens = self.groups.column("prefill_tokens") + self.groups.column("context")
        lengths = tokens / np.maximum(rows, 1)
        table = {}
        for kind in ("prefill", "decode", "mixed"):
            own = self.groups.kinds == kind
            table[kind] = {
                **ranges("rows", rows, ROW_EDGES, own, self.errors),
                **ranges("length", lengths, LENGTH_EDGES, own, self.errors),
            }
        return {kind: found for kind, found in table.items() if found}


def summary(errors: Array) -> dict[str, float]:
    """Return the mean, median and 90 % quantile of the size of errors, and their mean with its sign."""
    sizes = np.abs(errors)
    return {"mean": float(sizes.mean()), "median": float(np.median(sizes)), "p90": float(np.quantile(sizes, 0.9)),
            "bias": float(errors.mean()), "points": len(sizes)}  # fmt: skip


def ranges(name: str, values: Array, edges: Sequence[int], own: Mask, errors: Array) -> dict[str, dict[str, float]]:
    """Return the mean error and the bias in each range that has shapes."""
    found = {}
    for low, high in zip(edges, [*edges[1:], np.inf], strict=True):
        mask = own & (values >= low) & (values < high)
        if mask.any():
            label = f"{name} {low} to {high:g}" if np.isfinite(high) else f"{name} from {low}"
            full = summary(errors[mask])
            found[label] = {key: full[key] for key in ("mean", "bias", "points")}
    return found


def held_out_errors(samples: Samples, about: Mapping[str, Any], seed: int = 0) -> HeldOut:
    """Predict each fold from the others. Points outside the range of the others are not counted."""
    points = grouped(samples, by_point=True)
    fold_of_point = assign_folds(points, seed)
    fold_of_sample = fold_of_point[group_index(samples, by_point=True)]
    errors = np.full(len(points), np.nan)
    for fold in range(FOLDS):
        train = grouped(samples.select(fold_of_sample != fold))
        if "decode" not in train.kinds or not np.isin(train.kinds, ("prefill", "mixed")).any():
            continue
        test = np.flatnonzero(fold_of_point == fold)
        test = test[in_measured_range(points.table[test], measured_range(train))]
        cost = fit_groups(train, about, details=False).cost
        errors[test] = predict(cost, points.table[test]) / points.seconds[test] - 1
    counted = np.isfinite(errors)
    return HeldOut(points.select(counted), errors[counted])


def assign_folds(points: Groups, seed: int) -> npt.NDArray[np.int64]:
    """Return the fold of every point: at random, and evenly per kind of step."""
    rng = np.random.default_rng(seed)
    folds = np.zeros(len(points), dtype=np.int64)
    for kind in np.unique(points.kinds):
        own = np.flatnonzero(points.kinds == kind)
        folds[rng.permutation(own)] = np.arange(len(own)) % FOLDS
    return folds


def measured_range(samples: Samples | Groups) -> dict[str, list[float]]:
    """Return the smallest and largest measured value of each field of the shape."""
    columns = {name: samples.column(name) for name in RANGE_FIELDS}
    return {name: [float(c[c > 0].min()), float(c.max())] for name, c in columns.items() if (c > 0).any()}


def in_measured_range(table: Array, measured: Mapping[str, Sequence[float]]) -> Mask:
    """Return which shapes are inside the result of `measured_range`."""
    inside = np.ones(len(table), dtype=bool)
    for name in IN_RANGE:
        values = table[:, Shape._fields.index(name)]
        low, high = measured.get(name, (np.inf, -np.inf))
        inside &= (values == 0) | ((values >= low) & (values <= high))
    return inside
