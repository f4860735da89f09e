"""The result of a sweep over rates: the ranking at each rate, a curve per configuration, and the winner by capacity.

The winner is the configuration with the highest capacity. If several are tied (within `indifference`, or within the
precision of the bisection), the ranking at the highest rate that all of them meet decides. Without constraints there is
no capacity, and each rate has its own winner. `sim capacity` sweeps one configuration, which has nothing to win.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Optional

from servesim.config.layers import Tree
from servesim.core import BadInput
from servesim.files.terminal import Screen
from servesim.runs.metric_table import format_quantity, title_inside, unit_of
from servesim.runs.notes import LABEL_MEANINGS
from servesim.runs.request_rate import format_rate
from servesim.statistics.constraints import describe_bounds
from servesim.statistics.intervals import Interval, interval

from .columns import EVERYWHERE, Column, inner_columns, metric_column, table_lines, write_csv
from .experiment import Experiment
from .ranking import Summary
from .rates import Curve, RatePoint, RateRecords, build_curves
from .single_run import Record, RunKey
from .table import (
    changed_settings,
    describe_window,
    format_count,
    other_metrics,
    setting_columns,
    write_best,
    write_tables,
)
from .verdict import (
    Verdict,
    deciding_metrics,
    describe_needed_of,
    describe_refused,
    meaning,
    profile_notes,
    ranking_lines,
    table_notes,
    top_rows,
    verdict_of,
)

CAPACITY_ERROR = "the capacities are not tested against the error of the cost model: leave a margin"
UPPER_BOUND = "the runs have too few requests for this rate, so the true capacity may be lower; use a longer trace"


class RateSummary:
    """The result of an experiment with rates. `records` are all its runs."""

    def __init__(self, experiment: Experiment, records: Mapping[RunKey, Record]) -> None:
        self.experiment = experiment
        self.rates = list(experiment.rates)
        self.by_rate = {rate: Summary(experiment.at_rate(rate), RateRecords(records, rate)) for rate in self.rates}
        self.run_count = sum("refused" not in record for record in records.values())
        self.failures = [record for record in records.values() if "error" in record]
        self.winner: Optional[Curve] = None  # by capacity
        self.decided_at: Optional[float] = None  # the rate whose ranking chooses the winner of equal capacities
        self.curves = build_curves(experiment, records)
        self._choose_winner()
        for rank, curve in enumerate(self.curves, 1):
            curve.rank = rank

    @property
    def baseline(self) -> Curve:
        """The curve of the baseline."""
        return next(curve for curve in self.curves if curve.is_baseline)

    @property
    def is_single(self) -> bool:
        """Whether there is only one configuration, as in `sim capacity`."""
        return len(self.curves) == 1

    @property
    def main_metric(self) -> str:
        """The metric that tables and charts show: that of the first constraint, or the first objective."""
        bounds = self.experiment.subject_to
        return bounds[0].metric if bounds else self.experiment.objectives[0].metric

    def settings(self, curve: Curve) -> str:
        """Return the settings of a configuration that differ from the baseline."""
        summary = self.by_rate[self.rates[0]]
        return changed_settings(next(row for row in summary.rows if row.config == curve.config), summary)

    def scenario(self, config: int, rate: float) -> Tree:
        """Return the scenario of a configuration at a rate; BadInput if its workload has no key for the rate."""
        return self.experiment.at_rate(rate).scenario(config)

    def rate_of(self, curve: Curve) -> float:
        """Return the capacity that ranks a configuration; 0 without one."""
        return 0.0 if curve.capacity is None else curve.capacity.rate

    def _choose_winner(self) -> None:
        """Compare the capacities, and sort the curves: the winner first."""
        if not self.experiment.subject_to:
            return
        best = max(map(self.rate_of, self.curves))
        for curve in self.curves:
            rate = self.rate_of(curve)
            curve.outcome = "cannot win" if not rate else "equal" if rate >= best * (1 - self.margin) else "worse"
        tied = [curve for curve in self.curves if curve.outcome == "equal"]
        if tied:
            lowest = min(curve.capacity.rate for curve in tied if curve.capacity is not None)
            rate = max((rate for rate in self.rates if rate <= lowest), default=self.rates[0])
            ranks = {row.config: row.rank for row in self.by_rate[rate].rows}
            self.winner = min(tied, key=lambda curve: ranks[curve.config])
            self.winner.outcome = "best"
            self.decided_at = rate
        self.curves.sort(key=lambda curve: (curve is not self.winner, -self.rate_of(curve), self._violation(curve)))

    def _violation(self, curve: Curve) -> float:
        """Return the violation of the constraints at the lowest rate."""
        return curve.points[0].row.violation if curve.points else 0.0

    @property
    def verdict(self) -> Verdict:
        """The winner by capacity, or the winner at each rate."""
        bounds = describe_bounds(self.experiment.subject_to)
        if not bounds:
            return self._verdict_per_rate()
        if self.winner is None:
            return self._verdict_without_winner()
        capacity = self.winner.capacity
        assert capacity is not None
        if self.is_single:
            misses = "".join(f"; {text}" for text in [capacity.misses] if text)
            return Verdict("capacity", f"Capacity: meets {bounds} up to {capacity.text}{misses}.")
        tied = self.describe_equal()
        tied = f"; {tied}" if tied else ""
        if self.winner.is_baseline:
            text = f"No winner: nothing beats the baseline, which meets {bounds} up to {capacity.text}{tied}."
            return Verdict("baseline", text)
        base = self.baseline.capacity
        reach = "" if base is None else f"up to {base.text}" if base.rate else "at no tested rate"
        reach = "does not start" if self.baseline.refused else reach
        versus = f"; the baseline {reach}" if reach else ""
        text = f"Winner: {self.settings(self.winner)}: meets {bounds} up to {capacity.text}{versus}{tied}."
        return Verdict("winner", text)

    def describe_equal(self) -> str:
        """Return why the winner is the winner, although another capacity is equal, or even higher; empty if none is."""
        others = {curve.config: self.rate_of(curve) for curve in self.curves if curve.outcome == "equal"}
        if not others or self.decided_at is None:
            return ""
        summary = self.by_rate[self.decided_at]
        tied = any(row.relation.tied for row in summary.rows if row.config in others)
        chosen = deciding_metrics(summary) if tied else [title_inside(self.experiment.objectives[0].metric)]
        number = f"{format_count(len(others), 'other')} equal within {100 * self.margin:g} %"
        by = f"chosen by {', then '.join(chosen)} at {format_rate(self.decided_at)}"
        return f"{number} (up to {format_rate(max(others.values()))}), {by}"

    @property
    def margin(self) -> float:
        """Capacities that differ by less, as a fraction, are equal."""
        return max(self.experiment.indifference, self.experiment.precision or 0.0)

    def _verdict_without_winner(self) -> Verdict:
        """Name the configuration that is nearest to the constraints at the lowest rate."""
        rate = self.rates[0]
        bounds = describe_bounds(self.experiment.subject_to)
        if self.is_single:
            misses = "" if self.baseline.capacity is None else self.baseline.capacity.misses
            text = f"No tested rate meets {bounds}: {misses}."
            return Verdict("infeasible", text, self.by_rate[rate].baseline)
        summary = self.by_rate[rate]
        nearest = verdict_of(summary).nearest
        text = f"No winner: no configuration meets {bounds} at a tested rate."
        if nearest is None:
            return Verdict("failed", text)
        name = "the baseline" if nearest is summary.baseline else changed_settings(nearest, summary)
        at = f"at {format_rate(rate)}"
        return Verdict("infeasible", f"{text} Nearest {at}: {name}, {', '.join(nearest.misses)}.", nearest)

    def _verdict_per_rate(self) -> Verdict:
        """Name the winner at each rate."""
        names = []
        for rate, summary in self.by_rate.items():
            verdict = verdict_of(summary)
            settings = "" if summary.winner is None else changed_settings(summary.winner, summary)
            name = {"winner": settings, "baseline": "nothing beats the baseline"}.get(verdict.kind, "no winner")
            names.append((rate, name))
        found = any(summary.winner is not None for summary in self.by_rate.values())
        text = "; ".join(f"{rates}: {name}" for rates, name in join_rates(names))
        return Verdict("rates" if found else "failed", f"Winner per rate: {text}.")


def join_rates(texts: Iterable[tuple[float, str]]) -> list[tuple[str, str]]:
    """Return (rates, text): neighbouring rates with the same text are joined."""
    groups = [(text, [rate for rate, _ in group]) for text, group in groupby(texts, key=itemgetter(1))]
    return [(f"{rates[0]:.10g} to " * (len(rates) > 1) + format_rate(rates[-1]), text) for text, rates in groups]


def write_rate_summary(result: RateSummary, folder: Path) -> None:
    """Write the tables, the curves, the capacities and the winner."""
    write_tables(list(result.by_rate.values()), folder)
    write_csv(folder / "rates.csv", [(point_columns(result), curve.points) for curve in result.curves])
    if result.experiment.subject_to:
        write_csv(folder / "capacity.csv", [(capacity_columns(result), result.curves)])
    if result.winner is not None and result.winner.capacity is not None:
        write_winner(folder / "best.yaml", result, result.winner.config, result.winner.capacity.rate)
    for rate, summary in result.by_rate.items() if not result.experiment.subject_to else ():
        if summary.winner is not None:
            write_winner(folder / f"best-at-{rate:.10g}.yaml", result, summary.winner.config, rate)


def point_columns(result: RateSummary) -> list[Column]:
    """Return the columns of the tested rates: a row is a RatePoint. Tables show those of a single configuration."""
    experiment, summary = result.experiment, result.by_rate[result.rates[0]]
    objectives = [objective.metric for objective in experiment.objectives]

    def mean(metric: str) -> Callable[[RatePoint], Interval]:
        return lambda point: interval(point.row.values(metric), experiment.confidence)

    meets = lambda point: "yes" if point.good else f"no: {', '.join(point.problems)}"  # noqa: E731
    missed = lambda point: f"no: {point.problem}" if point.problem else "yes"  # noqa: E731
    return [
        Column("config", lambda point: point.row.config),
        Column("rate", lambda point: point.rate, lambda point: f"{point.rate:.10g}", "rate (req/s)", EVERYWHERE),
        *inner_columns(setting_columns(summary), lambda point: point.row),
        Column("meets", lambda point: point.good, meets, shown=("data", "terminal")),
        Column("problem", lambda point: point.problem, missed, "meets the constraints", ("data", "page"), wrap=True),
        *(metric_column(name, mean(name), EVERYWHERE, result.baseline.points) for name in objectives),
        *(metric_column(name, mean(name), ("data",)) for name in other_metrics(summary)),
    ]


def capacity_columns(result: RateSummary) -> list[Column]:
    """Return the columns of the configurations over all rates: a row is a Curve."""
    columns = [
        Column("rank", lambda curve: curve.rank, lambda curve: f"{'= ' * (curve.outcome == 'equal')}{curve.rank}",
               shown=EVERYWHERE),
        Column("config", lambda curve: curve.config),
        Column("relation", lambda curve: curve.outcome),
        *setting_columns(result.by_rate[result.rates[0]]),
    ]  # fmt: skip
    if result.experiment.subject_to:
        columns += [
            Column("capacity", capacity_field("rate"), capacity_text, "capacity (req/s)", EVERYWHERE),
            *(Column(name, capacity_field(name)) for name in ("missed_at", "reason", "upper_bound", "missed_below")),
        ]  # fmt: skip
    return [
        *columns,
        Column("rates_tested", lambda curve: len(curve.points)),
        *(level_column(result, rate) for rate in result.rates),
        Column("changed_settings", result.settings, title="changed settings", shown=("terminal",), wrap=True),
        Column("labels", curve_labels, shown=("terminal",), wrap=True),
    ]


def capacity_field(name: str) -> Callable[[Curve], Any]:
    """Return a function that reads a field of the capacity; None for a configuration that has not run yet."""
    return lambda curve: None if curve.capacity is None else getattr(curve.capacity, name)


def capacity_text(curve: Curve) -> str:
    """Return the capacity as tables print it."""
    text = "" if curve.capacity is None else curve.capacity.text
    return "does not start" if curve.refused else text.replace(" req/s", "")


def level_column(result: RateSummary, rate: float) -> Column:
    """Return the main metric at one rate; ! marks a rate that misses a constraint, with the name of another metric."""
    metric = result.main_metric
    values = [point.row.mean(metric) for curve in result.curves for point in curve.points]
    unit = unit_of(metric, values)

    def level(curve: Curve) -> float:
        return next((point.row.mean(metric) for point in curve.points if point.rate == rate), math.nan)

    def text(curve: Curve) -> str:
        point = next((point for point in curve.points if point.rate == rate), None)
        if point is None or point.good or not result.experiment.subject_to:
            return "" if point is None else format_quantity(level(curve), None, unit)
        others = [] if metric in point.problems else list(point.problems)
        return " ".join([format_quantity(level(curve), None, unit), "!", ", ".join(others)]).strip()

    return Column(f"at_{rate:g}", level, text, unit.after(f"at {rate:.6g} req/s"), ("terminal", "page"))


def curve_labels(curve: Curve) -> str:
    """Return the labels of a configuration."""
    names = {"baseline": curve.is_baseline, "outside profile": is_outside_profile(curve)}
    names["does not start"] = bool(curve.refused)
    return ", ".join(name for name, applies in names.items() if applies)


def write_winner(path: Path, result: RateSummary, config: int, rate: float) -> None:
    """Write the scenario of a winner at its rate."""
    experiment = result.experiment
    try:
        tree, note = result.scenario(config, rate), ""
    except BadInput:
        tree, note = experiment.tree(config), "; the workload has no key for its rate"
    write_best(path, experiment.at_rate(rate), config, tree, f"at {format_rate(rate)}{note}")


def format_rate_summary(result: RateSummary, top: int, screen: Screen) -> str:
    """Return the printed table of the capacities, or of each rate without constraints."""
    notes = rate_notes(result)
    if not result.experiment.subject_to:
        return format_tables(result, top, screen, notes)
    columns, rows = capacity_rows(result, top)
    meanings = {} if result.is_single else {n: curve_meaning(result, curve) for n, curve in enumerate(rows, 1)}
    lines = table_lines(columns, rows, screen, meanings)
    verdicts = [] if result.is_single else [(rate, verdict_of(part).text) for rate, part in result.by_rate.items()]
    return "\n".join([*lines, *notes, *(f"at {rates}: {text}" for rates, text in join_rates(verdicts))])


def format_tables(result: RateSummary, top: int, screen: Screen, common: Sequence[str]) -> str:
    """Return the table of each rate; the notes that all of them have are below the last one."""
    tables = []
    for rate, summary in result.by_rate.items():
        own = [note for note in table_notes(summary, hint=False) if note not in common]
        tables.append("\n".join([f"at {format_rate(rate)}", *ranking_lines(summary, top, screen), *own]))
    if len(tables) == 1:
        return "\n".join([*tables, *common])
    return "\n\n".join([*tables, "\n".join(["at each rate", *common])])


def rate_notes(result: RateSummary) -> list[str]:
    """Return the lines below the last table; without constraints, those that are the same at all rates."""
    if result.experiment.subject_to:
        return capacity_notes(result)
    first, *others = [table_notes(summary, hint=False) for summary in result.by_rate.values()]
    common = [note for note in first if all(note in notes for notes in others)]
    return [*common, *describe_needed_of(result.by_rate.values())]


def capacity_rows(result: RateSummary, top: int) -> tuple[list[Column], list[Any]]:
    """Return the columns and rows of the printed table: capacities, or the rates of a single configuration."""
    if result.is_single:
        return point_columns(result), list(result.baseline.points)
    return capacity_columns(result), top_rows(result.curves, result.baseline, top)


def curve_meaning(result: RateSummary, curve: Curve) -> str:
    """Return the meaning of a row, which selects its colour."""
    return meaning(curve is result.winner, curve.is_baseline, curve.outcome == "cannot win")


def capacity_notes(result: RateSummary) -> list[str]:
    """Return the lines below the table of capacities."""
    experiment = result.experiment
    counts = {"configuration": len(experiment.configs), "rate": len(result.rates), "run": result.run_count}
    if result.is_single:
        counts = {"rate": len(result.baseline.points), "run": result.run_count}
    size = ", ".join(format_count(count, noun) for noun, count in counts.items())
    notes = [f"{size}; {describe_window(experiment)}; common random numbers"]
    method = "the highest tested rate below all higher rates that miss a constraint, by the mean of the replications"
    columns = f"; columns: {result.main_metric} at each rate, ! misses a constraint: of this or of the named metric"
    notes.append(f"capacity: {method}{'' if result.is_single else columns}")
    notes += [*describe_length(result), *describe_saturated(result)]
    if experiment.replications > 1 and not experiment.is_random:
        notes.append("no randomness: one run per configuration and rate")
    if experiment.unserved:
        notes.append(f"unserved at every rate: {experiment.unserved:,.10g} requests; the metrics are of the others")
    if experiment.precision is None:
        notes.append("find the capacities more precisely with `precision: 2%`")
    if outside := sum(map(is_outside_profile, result.curves)):
        notes.append(
            f"outside profile: {outside} ({LABEL_MEANINGS['outside profile']}, at a rate that meets the constraints)"
        )
    notes += [*describe_refused(result.by_rate[result.rates[0]]), *profile_notes(experiment), CAPACITY_ERROR]
    return notes + [f"failed: configuration {run['config']}: {run['error']}" for run in result.failures[:3]]


def describe_length(result: RateSummary) -> list[str]:
    """Return how many requests a run has, if they are more than those of the workload, and whether they are enough."""
    notes, length, points = [], result.experiment.length, result.baseline.points
    if length > 1 and points:
        requests = points[0].row.mean("completed") + points[0].row.mean("failed")
        number = f"{requests:,.0f} requests, {length:,} times as many as the workload"
        notes.append(f"length of the runs: {number}: in short runs, a backlog that grows stays small")
    bounds = [curve for curve in result.curves if curve.capacity is not None and curve.capacity.upper_bound]
    if bounds:
        notes.append(f"upper bound: {format_count(len(bounds), 'configuration')} ({UPPER_BOUND})")
    return notes


def describe_saturated(result: RateSummary) -> list[str]:
    """Return at how many tested rates the backlog grows."""
    points = [point for curve in result.curves for point in curve.points]
    count = sum("saturated" in point.problems for point in points)
    if not count:
        return []
    return [f"saturated: {count} of {format_count(len(points), 'tested rate')} ({LABEL_MEANINGS['saturated']})"]


def is_outside_profile(curve: Curve) -> bool:
    """Whether the profile does not cover the steps of a configuration at a rate that meets the constraints."""
    return any(point.row.is_outside_profile for point in curve.points if point.good)
