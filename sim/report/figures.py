"""The figures of a sweep's report as data, whoever draws them: knobs, trade-offs, where the time went, the queues."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

from servesim.core import BadInput
from servesim.runs.queue_log import QueueLog
from servesim.runs.simulate import simulate
from servesim.study.experiment import shown
from servesim.study.intervals import Interval
from servesim.study.ranking import Row, Summary
from servesim.study.single_run import Bench

LONGEST = 5000  # requests of the runs that are made again for the queues, step by step


class Mark(NamedTuple):
    """A value of a knob and what is reached with it; its half-width is that of the paired difference to the winner."""

    value: Any
    found: Interval
    row: Row


@dataclass(frozen=True)
class Knob:
    """What a knob does to the first objective."""

    key: str
    metric: str
    best: Sequence[Mark]  # the best configuration with each value, the other knobs free
    alone: Sequence[Mark]  # the winner with this knob alone changed, where the grid has it
    baseline: float

    @property
    def numeric(self) -> bool:
        """Whether the values lie on a scale."""
        return all(type(mark.value) in (int, float) for mark in self.best)

    @property
    def name(self) -> str:
        """The knob's short name."""
        return self.key.removeprefix("policy.")


def knobs(summary: Summary) -> list[Knob]:
    """Return a figure for each knob, in the order of the sweep file."""
    experiment = summary.experiment
    metric = experiment.objectives[0].metric
    level = summary.baseline.found[metric].mean
    found = []
    for key, values in experiment.knobs.items() if summary.winner is not None else ():
        values = sorted(values) if all(type(value) in (int, float) for value in values) else values
        best = [mark for value in values if (mark := best_with(summary, key, value, metric))]
        if len(best) > 1:
            found.append(Knob(key, metric, best, alone(summary, key, values, metric), level))
    return found


def best_with(summary: Summary, key: str, value: Any, metric: str) -> Optional[Mark]:
    """Return the best that is reached with one value of a knob."""
    for row in summary.rows:  # the best come first
        if row.eligible and key in row.assignment and row.assignment[key] == value:
            return marked(summary, value, row, metric)
    return None


def alone(summary: Summary, key: str, values: Sequence[Any], metric: str) -> list[Mark]:
    """Return the winner's neighbours along one knob; those that may not win are left out."""
    winner = summary.winner
    assert winner is not None
    rows = {row.config: row for row in summary.rows if row.eligible}
    places = [(value, summary.experiment.place({**winner.assignment, key: value})) for value in values]
    return [marked(summary, value, rows[place], metric) for value, place in places if place in rows]


def marked(summary: Summary, value: Any, row: Row, metric: str) -> Mark:
    """Return a row's mark: by its paired half-width, what reaches the winner's level cannot be told from it."""
    assert summary.winner is not None
    apart = summary.difference(row, summary.winner, metric)
    return Mark(value, Interval(row.found[metric].mean, apart.half, apart.size), row)


def reasons(summary: Summary) -> list[tuple[str, str, Interval]]:
    """Return what changing one knob would cost the winner: (knob, other value, paired difference), dearest first."""
    winner, metric = summary.winner, summary.experiment.objectives[0].metric
    sign = summary.experiment.objectives[0].sign
    found = []
    for knob in knobs(summary):
        for mark in knob.alone:
            if mark.row is not winner and winner is not None:
                found.append((knob.name, shown(mark.value), summary.difference(mark.row, winner, metric)))
    return sorted(found, key=lambda item: -sign * item[2].mean)


@dataclass(frozen=True)
class Story:
    """The queues of one configuration's first replication over time."""

    row: Row
    log: QueueLog
    requests: int


def stories(summary: Summary) -> list[Story]:
    """Run the winner and the baseline once more, watched; empty where their requests are out of reach."""
    given = [row for row in (summary.winner, summary.baseline) if row is not None]
    rows = [row for row in given if "failed" not in row.labels]
    if len(rows) == 2 and rows[0] is rows[1]:
        rows = rows[:1]
    try:
        return [story(summary, row) for row in rows]
    except BadInput:
        return []


def story(summary: Summary, row: Row) -> Story:
    """Run one configuration, watched."""
    bench = Bench(summary.experiment.base)
    task = summary.experiment.task(row.config, 0)._replace(requests=LONGEST)
    scenario = bench.scenario(task)
    trace = bench.trace(scenario, task)
    log = QueueLog()
    simulate(scenario, trace, [log], profile=bench.profile(scenario))
    return Story(row, log, len(trace))
