"""Measured steps as arrays: selections, outliers, and groups of samples with the same shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import compress
from pathlib import Path
from typing import Any, Optional

import numpy as np
import numpy.typing as npt
from servesim.core import Shape
from servesim.files.step_table import KINDS, MeasuredStep, number_shapes, write_steps

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
MIN_REPEATS = 4  # samples of one shape from which the median tells an outlier
OUTLIER_RATIO = 3.0  # a sample above this multiple of the median of its shape, or below the inverse, is left out


@dataclass(frozen=True)
class Samples:
    """Measured steps."""

    kinds: Sequence[str]
    shapes: Sequence[Shape]
    seconds: Array  # of the device, or of the whole step if the host is not measured separately
    points: Ints  # number of the shape; samples of one point share a shape and are left out together
    excluded: int = 0  # number of outliers and failed samples, which are not included
    host: Optional[Array] = None  # seconds of the host in each step, in addition to `seconds`
    errors: Optional[Array] = None  # standard error of `seconds`, relative; None: the scatter of repeats tells it

    @classmethod
    def from_rows(cls, rows: Sequence[MeasuredStep]) -> Samples:
        """Return the good rows as samples; the other rows are only counted."""
        good = [row for row in rows if row.good]
        seconds = np.array([row.seconds for row in good], dtype=float)
        points = np.array([row.point for row in good], dtype=np.int64)
        host = [row.host for row in good]
        return cls(
            [row.kind for row in good], [row.shape for row in good], seconds, points, len(rows) - len(good),
            np.array(host, dtype=float) if good and None not in host else None,
        )  # fmt: skip

    @classmethod
    def from_shapes(
        cls, shapes: Sequence[Shape], seconds: Sequence[float], points: Optional[Sequence[int]] = None
    ) -> Samples:
        """Return samples; the shape decides the kind. Without `points`, equal shapes are one point."""
        points = number_shapes(shapes) if points is None else points
        kinds = [shape.kind for shape in shapes]
        return cls(kinds, list(shapes), np.array(seconds, dtype=float), np.array(points, dtype=np.int64))

    @cached_property
    def table(self) -> Array:
        """The shapes as rows, one column per field of `Shape`."""
        return np.array(self.shapes, dtype=float).reshape(len(self.shapes), len(Shape._fields))

    @cached_property
    def kind_numbers(self) -> Array:
        """The kinds as positions in `KINDS`."""
        number = {kind: float(k) for k, kind in enumerate(KINDS)}
        return np.array([number[kind] for kind in self.kinds])

    def select(self, mask: Mask) -> Samples:
        """Return the samples where the mask is true."""
        kinds, shapes = list(compress(self.kinds, mask)), list(compress(self.shapes, mask))
        host = None if self.host is None else self.host[mask]
        errors = None if self.errors is None else self.errors[mask]
        chosen = Samples(kinds, shapes, self.seconds[mask], self.points[mask], self.excluded, host, errors)
        chosen.__dict__.update(table=self.table[mask], kind_numbers=self.kind_numbers[mask])  # faster than from shapes
        return chosen

    def of_kind(self, *names: str) -> Samples:
        """Return the samples of these kinds."""
        return self.select(np.isin(self.kind_numbers, [KINDS.index(name) for name in names]))

    def column(self, name: str) -> Array:
        """Return one field of all shapes as an array."""
        return self.table[:, Shape._fields.index(name)]

    def __len__(self) -> int:
        return len(self.kinds)


@dataclass(frozen=True)
class Groups:
    """Samples of one kind and shape as one row each."""

    kinds: npt.NDArray[np.str_]
    table: Array  # one column per field of `Shape`
    seconds: Array  # mean of the samples
    counts: Array  # number of samples
    points: Ints  # of the first sample
    errors: Array  # standard error of the mean, as a fraction of it

    def select(self, mask: Mask) -> Groups:
        """Return the groups where the mask is true."""
        return Groups(*(getattr(self, column.name)[mask] for column in fields(self)))

    def of_kind(self, *names: str) -> Groups:
        """Return the groups of these kinds."""
        return self.select(np.isin(self.kinds, names))

    def column(self, name: str) -> Array:
        """Return one field of all shapes as an array."""
        return self.table[:, Shape._fields.index(name)]

    def __len__(self) -> int:
        return len(self.seconds)


def group_index(samples: Samples, by_point: bool = False) -> Ints:
    """Return the number of the group of every sample: one per kind and shape, and per point if asked for."""
    columns = [*samples.table.T, samples.kind_numbers, samples.points.astype(float)][: None if by_point else -1]
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
    kinds = np.array(KINDS)[samples.kind_numbers[first].astype(int)]
    return Groups(kinds, samples.table[first], means, counts, samples.points[first], errors)


def write_samples(path: Path, samples: Samples, overwrite: bool = True, **columns: Sequence[Any]) -> None:
    """Write samples.csv: one row per sample, with further columns."""
    times = (f"{seconds:.9g}" for seconds in samples.seconds.tolist())
    steps = zip(samples.kinds, samples.points.tolist(), times, samples.shapes, zip(*columns.values(), strict=True),
                strict=True)  # fmt: skip
    rows = ((kind, point, seconds, *shape, *further) for kind, point, seconds, shape, further in steps)
    write_steps(path, ("kind", "point", "seconds", *Shape._fields, *columns), rows, overwrite)
