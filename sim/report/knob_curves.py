"""Curves of the parameters of a sweep: the best result with each value, and single changes of the winner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

from servesim.statistics.intervals import Interval
from servesim.study.experiment import format_value
from servesim.study.knob_table import RowSearch
from servesim.study.ranking import Row, Summary


class CurvePoint(NamedTuple):
    """A value of a parameter and its result; the half-width is that of the paired difference from the winner."""

    value: Any
    result: Interval
    row: Row


@dataclass(frozen=True)
class Knob:
    """The first objective as a function of one parameter."""

    key: str
    metric: str
    best: Sequence[CurvePoint]  # the best configuration with each value
    single_change: Sequence[CurvePoint]  # the winner with only this parameter changed, if the sweep has it
    baseline: float

    @property
    def numeric(self) -> bool:
        """Whether all values are numbers."""
        return all(type(point.value) in (int, float) for point in self.best)

    @property
    def name(self) -> str:
        """The parameter's short name."""
        return self.key.removeprefix("policy.")


def knobs(summary: Summary) -> list[Knob]:
    """Return the curve of each parameter, in the order of the sweep file."""
    experiment = summary.experiment
    metric = experiment.objectives[0].metric
    level = summary.baseline.means[metric].mean
    curves, search = [], RowSearch(summary, experiment.objectives[0])
    for key, values in experiment.knobs.items() if summary.winner is not None else ():
        values = sorted(values) if all(type(value) in (int, float) for value in values) else values
        best = [point for value in values if (point := best_point(search, key, value, metric))]
        if len(best) > 1:
            curves.append(Knob(key, metric, best, single_changes(summary, key, values, metric), level))
    return curves


def best_point(search: RowSearch, key: str, value: Any, metric: str) -> Optional[CurvePoint]:
    """Return the best eligible configuration with one value of a parameter."""
    row = search.best({key: value})
    return curve_point(search.summary, value, row, metric) if row is not None and row.eligible else None


def single_changes(summary: Summary, key: str, values: Sequence[Any], metric: str) -> list[CurvePoint]:
    """Return the eligible configurations that differ from the winner in one parameter only."""
    winner = summary.winner
    assert winner is not None
    rows = {row.config: row for row in summary.rows if row.eligible}
    configs = [(value, summary.experiment.find_config({**winner.assignment, key: value})) for value in values]
    return [curve_point(summary, value, rows[config], metric) for value, config in configs if config in rows]


def curve_point(summary: Summary, value: Any, row: Row, metric: str) -> CurvePoint:
    """Return a row's point. If its bar reaches the winner's level, the difference is not significant."""
    assert summary.winner is not None
    difference = summary.difference(row, summary.winner, metric)
    return CurvePoint(value, Interval(row.means[metric].mean, difference.half_width, difference.n), row)


def single_change_costs(summary: Summary, curves: Sequence[Knob]) -> list[tuple[str, str, Interval]]:
    """Return (parameter, other value, paired difference from the winner) of each single change, worst first."""
    winner, metric = summary.winner, summary.experiment.objectives[0].metric
    sign = summary.experiment.objectives[0].sign
    costs = []
    for knob in curves:
        for point in knob.single_change:
            if point.row is not winner and winner is not None:
                costs.append((knob.name, format_value(point.value), summary.difference(point.row, winner, metric)))
    return sorted(costs, key=lambda item: -sign * item[2].mean)
