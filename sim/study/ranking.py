"""What a sweep amounts to: means with intervals, paired differences against the baseline, ranks, labels, a winner.

A configuration can win only if it leaves no more requests unserved than the baseline and never got stuck.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .experiment import Experiment
from .grid import Assignment
from .intervals import Interval, interval, paired
from .single_run import Record

Done = Mapping[tuple[int, int], Record]  # (configuration, replication) -> what came of it
FRESH = 1_000_000  # replications from here on had no part in the choice: they only confirm it


@dataclass
class Row:
    """A configuration and what came of its replications."""

    config: int
    assignment: Assignment
    label: str
    runs: Sequence[Record]  # in order of replication
    found: dict[str, Interval] = field(default_factory=dict)  # objective -> mean
    change: dict[str, Interval] = field(default_factory=dict)  # objective -> paired difference from the baseline
    labels: list[str] = field(default_factory=list)
    eligible: bool = True
    front: bool = False
    tied: bool = False  # cannot be told from the winner
    rank: int = 0

    def values(self, metric: str) -> list[float]:
        """Return a figure of every replication that has it."""
        return [run["figures"][metric] for run in self.runs if metric in run.get("figures", {})]

    def mean(self, metric: str) -> float:
        return interval(self.values(metric)).mean

    def where(self) -> dict[str, float]:
        """Return the mean seconds that a request spent in each state."""
        runs = [run["where"] for run in self.runs if "where" in run]
        return {name: math.fsum(run[name] for run in runs) / len(runs) for name in runs[0]} if runs else {}


class Summary:
    """The rows of an experiment, the best first."""

    def __init__(self, experiment: Experiment, done: Done) -> None:
        self.experiment = experiment
        by_config: dict[int, list[Record]] = {}
        self._fresh: dict[int, list[Record]] = {}
        for (config, replication), record in sorted(done.items(), key=lambda item: item[0]):
            (by_config if replication < FRESH else self._fresh).setdefault(config, []).append(record)
        everything = [self._row(config, by_config.get(config, [])) for config in range(len(experiment.configs))]
        self.baseline = everything[0]
        for row in everything:
            self._measure(row)
            self._label(row)
        self.rows = sorted(everything, key=self._key)
        for rank, row in enumerate(self.rows, 1):
            row.rank = rank
        self._mark_front()
        self._mark_ties()

    @property
    def winner(self) -> Row | None:
        """The best configuration that may win."""
        return self.rows[0] if self.rows and self.rows[0].eligible else None

    def confirmed(self, metric: str) -> Interval:
        """Return the winner's paired difference from the baseline on fresh replications, of size 0 without them.

        The best of many was lucky as well as good; these replications came after the choice, so luck is out of them.
        """
        winner = self.winner
        if winner is None or winner.config not in self._fresh or 0 not in self._fresh:
            return Interval(math.nan, None, 0)
        one, other = (self._row(config, self._fresh[config]) for config in (winner.config, 0))
        return self.difference(one, other, metric)

    def fresh_level(self, metric: str) -> float:
        """Return the baseline's mean on the fresh replications: what their differences are a part of."""
        return self._row(0, self._fresh.get(0, [])).mean(metric)

    @property
    def runs(self) -> int:
        """How many runs it rests on."""
        return sum(len(row.runs) for row in self.rows) + sum(map(len, self._fresh.values()))

    @property
    def failures(self) -> list[Record]:
        """The runs that failed, as against those whose engine got stuck."""
        return [run for row in self.rows for run in row.runs if "error" in run]

    def _row(self, config: int, runs: Sequence[Record]) -> Row:
        return Row(config, self.experiment.configs[config], self.experiment.label(config), runs)

    def _measure(self, row: Row) -> None:
        for metric, _ in self.experiment.objectives:
            row.found[metric] = interval(row.values(metric), self.experiment.confidence)
            row.change[metric] = self.difference(row, self.baseline, metric)

    def difference(self, row: Row, base: Row, metric: str) -> Interval:
        """Return the paired difference of two rows, over the replications that both have."""
        one = {run["replication"]: run["figures"].get(metric) for run in row.runs if "figures" in run}
        other = {run["replication"]: run["figures"].get(metric) for run in base.runs if "figures" in run}
        both = [r for r in one if one[r] is not None and other.get(r) is not None]
        return paired([one[r] for r in both], [other[r] for r in both], self.experiment.confidence)

    def _label(self, row: Row) -> None:
        runs = row.runs
        if row is self.baseline:
            row.labels.append("baseline")
        if any("error" in run for run in runs):
            row.labels.append("failed")
        if any(run.get("stuck") for run in runs):
            row.labels.append("stuck")
        if not math.isnan(row.mean("failed")) and row.mean("failed") > self._unserved:
            row.labels.append("serves fewer")
        if runs and 2 * sum(bool(run.get("saturated")) for run in runs) > len(runs):
            row.labels.append("saturated")
        if any(run.get("outside") for run in runs):
            row.labels.append("outside profile")
        no_value = any(math.isnan(one.mean) for one in row.found.values())
        row.eligible = not no_value and not {"failed", "stuck", "serves fewer"} & set(row.labels)

    @property
    def _unserved(self) -> float:
        """How many requests the baseline leaves unserved: more disqualify."""
        failed = self.baseline.mean("failed")
        stuck = any(run.get("stuck") for run in self.baseline.runs)
        return math.inf if math.isnan(failed) or stuck else failed

    def _key(self, row: Row) -> tuple[Any, ...]:
        """Rank by the paired difference where there is one: means over unequal replications do not compare."""
        marks = []
        for one in self.experiment.objectives:
            value = row.change[one.metric].mean
            value = row.found[one.metric].mean if math.isnan(value) else value
            marks.append(math.inf if math.isnan(value) else one.sign * value)
        return (not row.eligible, *marks, row.config)

    def _mark_front(self) -> None:
        rows = [row for row in self.rows if row.eligible]
        signs = [(one.metric, one.sign) for one in self.experiment.objectives]
        points = [[sign * row.found[metric].mean for metric, sign in signs] for row in rows]
        for place in pareto_front(points):
            rows[place].front = True

    def _mark_ties(self) -> None:
        winner, metric = self.winner, self.experiment.objectives[0].metric
        for row in self.rows:
            if winner is not None and row.eligible and row is not winner:
                apart = self.difference(row, winner, metric)
                row.tied = apart.mean == 0 if apart.half is None else not apart.certain


def pareto_front(points: Sequence[Sequence[float]]) -> list[int]:
    """Return the indices of the points that no other dominates; all objectives are minimised, equal points stay."""
    order = sorted(range(len(points)), key=lambda place: tuple(points[place]))
    kept: list[int] = []
    for place in order:  # a point that dominates another comes before it in this order
        if not any(dominates(points[other], points[place]) for other in kept):
            kept.append(place)
    return sorted(kept)


def dominates(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether one is nowhere worse and somewhere better."""
    return all(a <= b for a, b in zip(one, other)) and any(a < b for a, b in zip(one, other))
