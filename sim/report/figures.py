"""The data of the report's charts: parameter curves, single changes of the winner, and queues over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

from servesim.core import BadInput
from servesim.runs.queue_log import QueueLog
from servesim.runs.simulate import simulate
from servesim.study.experiment import format_value
from servesim.study.intervals import Interval
from servesim.study.ranking import Row, Summary
from servesim.study.single_run import RunContext

MAX_TIMELINE_REQUESTS = 5000  # a run for the queue charts uses only the first requests


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
    curves = []
    for key, values in experiment.knobs.items() if summary.winner is not None else ():
        values = sorted(values) if all(type(value) in (int, float) for value in values) else values
        best = [point for value in values if (point := best_point(summary, key, value, metric))]
        if len(best) > 1:
            curves.append(Knob(key, metric, best, single_changes(summary, key, values, metric), level))
    return curves


def best_point(summary: Summary, key: str, value: Any, metric: str) -> Optional[CurvePoint]:
    """Return the best eligible configuration with one value of a parameter."""
    for row in summary.rows:  # best first
        if row.eligible and key in row.assignment and row.assignment[key] == value:
            return curve_point(summary, value, row, metric)
    return None


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


def single_change_costs(summary: Summary) -> list[tuple[str, str, Interval]]:
    """Return (parameter, other value, paired difference from the winner) of each single change, worst first."""
    winner, metric = summary.winner, summary.experiment.objectives[0].metric
    sign = summary.experiment.objectives[0].sign
    costs = []
    for knob in knobs(summary):
        for point in knob.single_change:
            if point.row is not winner and winner is not None:
                costs.append((knob.name, format_value(point.value), summary.difference(point.row, winner, metric)))
    return sorted(costs, key=lambda item: -sign * item[2].mean)


@dataclass(frozen=True)
class QueueTimeline:
    """The queues over time in the first replication of one configuration."""

    row: Row
    log: QueueLog
    requests: int


def record_queues(summary: Summary) -> list[QueueTimeline]:
    """Run the winner and the baseline again with a queue log; empty if their requests cannot be loaded."""
    rows = [row for row in (summary.winner, summary.baseline) if row is not None and "failed" not in row.labels]
    if len(rows) == 2 and rows[0] is rows[1]:
        rows = rows[:1]
    try:
        return [record_queue(summary, row) for row in rows]
    except BadInput:
        return []


def record_queue(summary: Summary, row: Row) -> QueueTimeline:
    """Run one configuration with a queue log."""
    context = RunContext(summary.experiment.base)
    task = summary.experiment.task(row.config, 0)._replace(max_requests=MAX_TIMELINE_REQUESTS)
    scenario = context.scenario(task)
    trace = context.trace(scenario, task)
    log = QueueLog()
    simulate(scenario, trace, [log], profile=context.profile(scenario))
    return QueueTimeline(row, log, len(trace))
