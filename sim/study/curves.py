"""Curves of a configuration over the load, and its capacity: the highest request rate that meets the constraints.

Whether a rate meets them is decided by the means of the replications. A rate at which a run fails, gets stuck or leaves
more requests unserved than the baseline at the lowest load does not meet them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Optional

from servesim.execution.single_run import Record, RunKey
from servesim.runs.request_rate import format_rate
from servesim.statistics.constraints import Bound, missed_bounds

from .experiment import Experiment
from .grid import Assignment
from .ranking import CANNOT_WIN, CONFIRM_REPLICATION_OFFSET, Row

COARSE = 1.1  # tested rates that differ by a larger factor: print the estimate between them too


class LoadPoint(NamedTuple):
    """A configuration at one load."""

    load: float  # requests per second
    row: Row
    problem: str  # why it does not meet the constraints; empty if it does

    @property
    def good(self) -> bool:
        """Whether it meets the constraints."""
        return not self.problem


class Capacity(NamedTuple):
    """The highest request rate that meets the constraints."""

    rate: float  # the highest tested rate below all that miss them; 0 if the lowest one misses them
    estimate: float  # interpolated between this rate and the next one
    missed_at: Optional[float] = None  # the lowest tested rate that misses them
    reason: str = ""  # why it misses them

    @property
    def text(self) -> str:
        """The rate with its estimate, or its limit if no tested rate misses or meets the constraints."""
        if self.missed_at is None:
            return f"at least {format_rate(self.rate)}"
        if not self.rate:
            return f"below {format_rate(self.missed_at)}"
        coarse = self.missed_at > COARSE * self.rate
        return f"{format_rate(self.rate)}{f' (about {self.estimate:.3g})' if coarse else ''}"


@dataclass
class Curve:
    """The results of a configuration over the load."""

    config: int
    assignment: Assignment
    label: str
    points: Sequence[LoadPoint]  # in rising order of the load
    bounds: Sequence[Bound]
    outcome: str = CANNOT_WIN.outcome  # by the capacity: best | equal | worse | cannot win
    rank: int = 0

    @property
    def is_baseline(self) -> bool:
        return self.config == 0

    @cached_property
    def capacity(self) -> Optional[Capacity]:
        """The capacity, None without constraints."""
        if not self.bounds or not self.points:
            return None
        missed = next((index for index, point in enumerate(self.points) if not point.good), None)
        if missed is None:
            return Capacity(self.points[-1].load, self.points[-1].load)
        bad = self.points[missed]
        if missed == 0:
            return Capacity(0.0, 0.0, bad.load, bad.problem)
        good = self.points[missed - 1]
        return Capacity(good.load, interpolate(good, bad), bad.load, bad.problem)


def interpolate(good: LoadPoint, bad: LoadPoint) -> float:
    """Return the load between two points at which the first constraint is missed, on a straight line.

    Latencies rise ever faster with the load, so the line is above the curve and the estimate is too low.
    """
    crossings = []
    for bound in bad.row.missed:
        low, high = good.row.mean(bound.metric), bad.row.mean(bound.metric)
        part = (bound.value - low) / (high - low) if high != low else 0.0
        crossings.append(min(1.0, max(0.0, part)) if math.isfinite(part) else 0.0)
    return good.load + (bad.load - good.load) * min(crossings, default=0.0)


def build_curves(experiment: Experiment, records: Mapping[RunKey, Record]) -> list[Curve]:
    """Return the curve of every configuration from the records of all loads."""
    runs: dict[int, dict[float, list[Record]]] = {}
    for record in records.values():
        if record.get("draw") is None and record["replication"] < CONFIRM_REPLICATION_OFFSET:
            runs.setdefault(record["config"], {}).setdefault(record["load"], []).append(record)
    lightest = min(runs.get(0, {}), default=None)
    baseline = [] if lightest is None else runs[0][lightest]
    failed = [run["figures"].get("failed", math.inf) for run in baseline if "figures" in run and not run.get("stuck")]
    unserved = math.fsum(failed) / len(failed) if failed else math.inf
    curves = []
    for config, assignment in enumerate(experiment.configs):
        label, points = experiment.label(config), []
        for load, group in sorted(runs.get(config, {}).items()):
            row = Row(config, assignment, label, sorted(group, key=lambda run: int(run["replication"])))
            row.missed = missed_bounds(
                experiment.subject_to, {bound.metric: row.mean(bound.metric) for bound in experiment.subject_to}
            )
            points.append(LoadPoint(load, row, describe_problem(row, unserved)))
        curves.append(Curve(config, assignment, label, points, experiment.subject_to))
    return curves


def describe_problem(row: Row, unserved: float) -> str:
    """Return why a configuration does not meet the constraints at one load; empty if it does."""
    error = next((run["error"] for run in row.runs if "error" in run), None)
    if error is not None:
        return f"a run failed: {error}"
    if any(run.get("stuck") for run in row.runs):
        return "the engine gets stuck"
    if row.mean("failed") > unserved:
        return f"leaves {row.mean('failed'):g} requests unserved"
    return ", ".join(row.misses)
