"""Errors of a fit: held-out errors, total times, and whether times are finite and rise. A bad fit is not written.

Each fold of the shapes is predicted by a fit to the other folds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Union

import numpy as np
import numpy.typing as npt
from servesim.core import BadInput, Shape, StepCost
from servesim.costs.profile_verdict import MAX_TOTAL_ERROR
from servesim.files.step_table import STEP_KINDS

from .fit import fit_cost
from .sample_set import Array, Groups, Mask, Samples, Steps, group_index, grouped, predict

FOLDS = 5
RANGE_FIELDS = ("prefill_tokens", "prefill_rows", "decode_rows", "context", "swapped")
IN_RANGE = ("prefill_tokens", "decode_rows", "context", "swapped")  # a held-out shape must be inside these ranges
ROW_EDGES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LENGTH_EDGES = (0, 64, 256, 1024, 4096, 16384)
MIN_SAMPLES = 20  # the total time of fewer samples is not checked: one stalled step can dominate it
FAR = 32.0  # the grid goes to this multiple of the largest measured values
STEPS = 12
Sizes = Union[float, Array]


@dataclass(frozen=True)
class HeldOut:
    """The held-out error of every shape that is inside the range of the other folds."""

    groups: Groups
    errors: Array  # predicted / measured - 1

    def by_kind(self) -> dict[str, dict[str, float]]:
        """Return the error of every kind of step."""
        kinds = self.groups.kinds
        return {kind: summary(self.errors[kinds == kind]) for kind in STEP_KINDS if kind in kinds}

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


def held_out_errors(samples: Samples, about: Mapping[str, Any]) -> HeldOut:
    """Predict each fold from the others. Points outside the range of the others are not counted."""
    points = grouped(samples, by_point=True)
    fold_of_point = assign_folds(points)
    fold_of_sample = fold_of_point[group_index(samples, by_point=True)]
    errors = np.full(len(points), np.nan)
    for fold in range(FOLDS):
        train = grouped(samples.select(fold_of_sample != fold))
        if not train.show_all_costs:
            continue
        test = np.flatnonzero(fold_of_point == fold)
        test = test[in_measured_range(points.table[test], measured_range(train))]
        cost = fit_cost(train, about)
        errors[test] = predict(cost, points.table[test]) / points.seconds[test] - 1
    counted = np.isfinite(errors)
    return HeldOut(points.select(counted), errors[counted])


def assign_folds(points: Groups) -> npt.NDArray[np.int64]:
    """Return the fold of every group: at random, and evenly per kind of step. A point is in one fold."""
    rng = np.random.default_rng(0)
    folds = np.zeros(len(points), dtype=np.int64)
    for kind in np.unique(points.kinds):
        own = np.flatnonzero(points.kinds == kind)
        number: dict[int, int] = {}  # of a point, in the order of the groups
        numbers = np.array([number.setdefault(int(point), len(number)) for point in points.points[own]])
        fold_of_number = np.zeros(len(number), dtype=np.int64)
        fold_of_number[rng.permutation(len(number))] = np.arange(len(number)) % FOLDS
        folds[own] = fold_of_number[numbers]
    return folds


def measured_range(samples: Steps) -> dict[str, list[float]]:
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


def check_fit(cost: StepCost, groups: Groups, where: str) -> None:
    """Raise BadInput if a fit is not finite, positive and rising, or does not reproduce the total times.

    With drafts, whose time one term cannot always explain, the verdict on the profile says that error instead.
    """
    check_shape_of_cost(cost, groups, where)
    if groups.of_kind("decode").column("drafts").any():
        return
    for kind, error in total_errors(cost, groups).items():
        if abs(error) > MAX_TOTAL_ERROR and groups.counts[groups.kinds == kind].sum() >= MIN_SAMPLES:
            raise BadInput(
                f"{where}: the total time of the fitted {kind} steps differs by {error:+.1%} from the measured one, "
                f"expected at most {MAX_TOTAL_ERROR:.0%}: these step times do not follow from their shapes"
            )


def total_errors(cost: StepCost, groups: Groups) -> dict[str, float]:
    """Return predicted / measured - 1 of the total time of each kind of step."""
    predicted = predict(cost, groups.table)
    errors = {}
    for kind in np.unique(groups.kinds):
        own = groups.kinds == kind
        measured = float((groups.counts * groups.seconds)[own].sum())
        errors[str(kind)] = float((groups.counts * predicted)[own].sum()) / measured - 1
    return errors


def check_shape_of_cost(cost: StepCost, groups: Groups, where: str) -> None:
    """Raise BadInput if a step time far beyond the samples is not finite and positive, or falls with more work."""
    for name, tables in growing_steps(groups).items():
        for table in tables:
            seconds = predict(cost, table)
            if not (np.isfinite(seconds).all() and (seconds > 0).all()):
                bad = table[int(np.argmin(np.where(np.isfinite(seconds), seconds, -np.inf)))]
                raise BadInput(f"{where}: the fitted time of {describe(bad)} is not finite and positive")
            falling = np.flatnonzero(np.diff(seconds) < -1e-9 * seconds[:-1])
            if len(falling):
                bad = table[falling[0] + 1]
                raise BadInput(f"{where}: the fitted time falls with more {name} at {describe(bad)}")


def describe(row: Array) -> str:
    """Return a shape as text."""
    return ", ".join(f"{name} {value:g}" for name, value in zip(Shape._fields, row, strict=True) if value)


def growing_steps(groups: Groups) -> dict[str, list[Array]]:
    """Return series of steps in which one size grows from the smallest to far beyond the measured values."""
    names = ("prefill_tokens", "prefill_rows", "decode_rows", "context")
    tokens, prompts, rows, context = (
        np.unique(np.round(np.geomspace(1, FAR * max(float(groups.column(name).max()), 1.0), STEPS))) for name in names
    )
    series: dict[str, list[Array]] = {"prompt tokens": [], "prompt rows": [], "decode rows": [], "context": []}
    for decoding in (0.0, 1.0, float(rows[-1])):
        decodes = {"decode_rows": decoding, "context": 100 * decoding}
        series["prompt tokens"].append(steps(prefill_rows=1.0, tokens=tokens, **decodes))
        series["prompt rows"].append(steps(prefill_rows=prompts, tokens=prompts * 16, **decodes))
    for length in (0.0, 1.0, float(tokens[-1])):
        chunk = {"prefill_rows": float(length > 0), "tokens": length}
        series["decode rows"].append(steps(decode_rows=rows, context=float(context[-1]), **chunk))
        series["decode rows"].append(steps(decode_rows=rows, context=rows * 100, **chunk))
        series["context"].append(steps(decode_rows=1.0, context=context, **chunk))
    return series


def steps(prefill_rows: Sizes = 0.0, tokens: Sizes = 0.0, decode_rows: Sizes = 0.0, context: Sizes = 0.0) -> Array:
    """Return a table of shapes: equal prompts, each after as many cached tokens as it has; one row has all context."""
    prompts, total, rows, cached = np.broadcast_arrays(prefill_rows, tokens, decode_rows, context)
    squares = total**2 / np.maximum(prompts, 1)
    zero = np.zeros(len(total))
    return np.column_stack([prompts, total, total, squares, squares, rows, rows, cached, zero, cached, zero])
