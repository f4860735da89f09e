"""Measured steps as arrays: selections, predicted times, outliers, and groups of samples with the same shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Optional, TypeVar

import numpy as np
import numpy.typing as npt
from servesim.core import Shape, StepCost
from servesim.files.step_table import KINDS, MeasuredStep, number_shapes, write_steps

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Own = TypeVar("Own", bound="Steps")
MIN_REPEATS = 4  # samples of one shape from which the median tells an outlier
OUTLIER_RATIO = 3.0  # a sample above this multiple of the median of its shape, or below the inverse, is left out


@dataclass(frozen=True)
class Steps:
    """Measured steps, one array per property."""

    kinds: npt.NDArray[np.str_]
    table: Array  # the shapes: one column per field of `Shape`
    seconds: Array  # of the device, or of the whole step if the host is not measured separately
    points: Ints  # number of the shape; samples of one point share a shape and are left out together

    def select(self: Own, mask: Mask) -> Own:
        """Return the steps where the mask is true."""
        arrays = {name: value[mask] for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        return replace(self, **arrays)

    def of_kind(self: Own, *names: str) -> Own:
        """Return the steps of these kinds."""
        return self.select(np.isin(self.kinds, names))

    def column(self, name: str) -> Array:
        """Return one field of all shapes as an array."""
        return self.table[:, Shape._fields.index(name)]

    @property
    def shapes(self) -> list[Shape]:
        """The shapes of the steps."""
        return shapes_of(self.table)

    @property
    def show_all_costs(self) -> bool:
        """Whether a cost model can be fitted to them: there are decodes and steps with prompts."""
        return "decode" in self.kinds and bool(np.isin(self.kinds, ("prefill", "mixed")).any())

    def __len__(self) -> int:
        return len(self.seconds)


@dataclass(frozen=True)
class Samples(Steps):
    """Single samples."""

    excluded: int = 0  # number of outliers and failed samples, which are not included
    host: Optional[Array] = None  # seconds of the host in each step, in addition to `seconds`
    errors: Optional[Array] = None  # standard error of `seconds`, relative; None: the scatter of repeats tells it
    in_flight: bool = False  # steps started before the end of the one before: their single times are not exact

    @classmethod
    def from_rows(cls, rows: Sequence[MeasuredStep]) -> Samples:
        """Return the good rows as samples; the other rows are only counted."""
        good = [row for row in rows if row.good]
        samples = cls.from_shapes(
            [row.shape for row in good], [row.seconds for row in good], [row.point for row in good]
        )
        kinds, host = np.array([row.kind for row in good], dtype=np.str_), [row.host for row in good]
        known = np.array(host, dtype=float) if good and None not in host else None
        return replace(samples, kinds=kinds, excluded=len(rows) - len(good), host=known)

    @classmethod
    def from_shapes(
        cls, shapes: Sequence[Shape], seconds: Sequence[Any] | Array, points: Optional[Sequence[Any] | Ints] = None
    ) -> Samples:
        """Return samples; the shape decides the kind. Without `points`, equal shapes are one point."""
        points = number_shapes(shapes) if points is None else points
        kinds = np.array([shape.kind for shape in shapes], dtype=np.str_)
        table = np.array(shapes, dtype=float).reshape(len(shapes), len(Shape._fields))
        return cls(kinds, table, np.array(seconds, dtype=float), np.array(points, dtype=np.int64))


@dataclass(frozen=True)
class Groups(Steps):
    """Samples of one kind and shape as one row each: the mean of their seconds, and the point of the first one."""

    counts: Array  # number of samples
    errors: Array  # standard error of the mean, as a fraction of it


def shapes_of(table: Array) -> list[Shape]:
    """Return the rows of a table of shapes."""
    return [Shape(*row) for row in table.astype(np.int64).tolist()]


def predict(cost: StepCost, table: Array) -> Array:
    """Return the seconds of every row of a table of shapes."""
    return np.array([cost.seconds(shape) for shape in shapes_of(table)], dtype=float)


def group_index(samples: Samples, by_point: bool = False) -> Ints:
    """Return the number of the group of every sample: one per kind and shape, and per point if asked for."""
    kind_numbers = np.select([samples.kinds == kind for kind in KINDS], range(len(KINDS)))
    columns = [*samples.table.T, kind_numbers, samples.points][: None if by_point else -1]
    order = np.lexsort(columns)
    changes = np.zeros(len(order), dtype=bool)
    for column in columns:
        ordered = column[order]
        changes[1:] |= ordered[1:] != ordered[:-1]
    index = np.empty(len(order), dtype=np.int64)
    index[order] = np.cumsum(changes)
    return index


def without_outliers(samples: Samples) -> Samples:
    """Return the samples without those that are far from the median of their shape."""
    index = group_index(samples)
    order = np.lexsort((samples.seconds, index))
    counts = np.bincount(index)
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    medians = samples.seconds[order][starts + counts // 2]
    ratio = samples.seconds / medians[index]
    far = (counts[index] >= MIN_REPEATS) & ((ratio > OUTLIER_RATIO) | (ratio < 1 / OUTLIER_RATIO))
    return samples.select(~far)


def grouped(samples: Samples, by_point: bool = False) -> Groups:
    """Return the samples of one kind and shape as one row each, or those of one point."""
    index = group_index(samples, by_point)
    first = np.unique(index, return_index=True)[1]
    counts = np.bincount(index).astype(float)
    means = np.bincount(index, samples.seconds) / counts
    if samples.errors is None:
        deviations = (samples.seconds / means[index] - 1) ** 2
        free = counts.sum() - len(counts)
        scatter = np.sqrt(deviations.sum() / free) if free >= MIN_REPEATS else 0.0
        errors = scatter / np.sqrt(counts)
    else:
        errors = np.sqrt(np.bincount(index, samples.errors**2)) / counts
    return Groups(samples.kinds[first], samples.table[first], means, samples.points[first], counts, errors)


def write_samples(path: Path, samples: Samples, overwrite: bool = True, **columns: Sequence[Any]) -> None:
    """Write samples.csv: one row per sample, with further columns."""
    times = (f"{seconds:.9g}" for seconds in samples.seconds.tolist())
    steps = zip(samples.kinds, samples.points.tolist(), times, samples.shapes, zip(*columns.values(), strict=True),
                strict=True)  # fmt: skip
    rows = ((kind, point, seconds, *shape, *further) for kind, point, seconds, shape, further in steps)
    write_steps(path, ("kind", "point", "seconds", *Shape._fields, *columns), rows, overwrite)
