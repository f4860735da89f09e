"""A sweep as text: the printed table, and notes on how to read it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Optional, TypeVar

from servesim.files.terminal import PLAIN, Screen
from servesim.runs.metric_table import title_inside
from servesim.runs.notes import LABEL_MEANINGS
from servesim.runs.request_rate import format_rate
from servesim.runs.run_warnings import source_notes
from servesim.statistics.constraints import describe_bounds
from servesim.statistics.number_format import format_percentage

from .columns import Column, table_lines
from .experiment import Experiment
from .ranking import Summary
from .rate_summary import RateSummary, Result
from .table import (
    capacity_columns,
    changed_settings,
    describe_window,
    format_count,
    is_outside_profile,
    point_columns,
    printed_label,
    sweep_columns,
)
from .verdict import join_rates, verdict_of

R = TypeVar("R")
NOT_TESTED = "not tested against the error of the cost model; --intervals does it"
CAPACITY_ERROR = "the capacities are not tested against the error of the cost model: leave a margin"
UPPER_BOUND = "the runs have too few requests for this rate, so the true capacity may be lower; use a longer trace"


def format_result(result: Result, top: int = 10, screen: Screen = PLAIN) -> str:
    """Return the printed table of a sweep; over rates, that of the capacities, or of each rate without constraints."""
    if isinstance(result, Summary):
        return "\n".join([*ranking_lines(result, top, screen), *table_notes(result)])
    notes = rate_notes(result)
    if not result.experiment.subject_to:
        return format_tables(result, top, screen, notes)
    columns, rows = capacity_rows(result, top)
    if result.is_single:
        return "\n".join([*table_lines(columns, rows, screen), *notes])
    colour = lambda row: meaning(row is result.winner, row.is_baseline, row.outcome == "cannot win")  # noqa: E731
    lines = table_lines(columns, rows, screen, colour)
    verdicts = [(rate, verdict_of(part).text) for rate, part in result.by_rate.items()]
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


def capacity_rows(result: RateSummary, top: int) -> tuple[list[Column], list[Any]]:
    """Return the columns and rows of the printed table: capacities, or the rates of a single configuration."""
    if result.is_single:
        return point_columns(result), list(result.baseline.points)
    return capacity_columns(result), top_rows(result.curves, result.baseline, top)


def ranking_lines(summary: Summary, top: int, screen: Screen) -> list[str]:
    """Return the best configurations and the baseline, one line each."""
    rows = top_rows(summary.rows, summary.baseline, top)
    colour = lambda row: meaning(row is summary.winner, row is summary.baseline, not row.eligible)  # noqa: E731
    return table_lines(sweep_columns(summary), rows, screen, colour)


def top_rows(rows: Sequence[R], baseline: R, top: int) -> list[R]:
    """Return the best configurations and the baseline."""
    return [*rows[:top], *([] if baseline in rows[:top] else [baseline])]


def meaning(is_winner: bool, is_baseline: bool, cannot_win: bool) -> str:
    """Return the meaning of a row, which selects its colour."""
    return "winner" if is_winner else "cannot win" if cannot_win else "baseline" if is_baseline else ""


def table_notes(summary: Summary, hint: bool = True) -> list[str]:
    """Return the lines below the table; `hint`: also how many replications would decide."""
    experiment = summary.experiment
    runs = f"{format_count(len(summary.rows), 'configuration')}, {format_count(summary.run_count, 'run')}"
    method = f"common random numbers, {100 * experiment.confidence:g} % t intervals"
    notes = [f"{runs}; {describe_window(experiment)}; {method}"]
    notes += [*describe_draws(summary), *describe_precision(summary), *describe_confirmation(summary)]
    notes += [*describe_ties(summary, hint), *describe_constraints(summary)]
    if not experiment.is_random:
        notes.append("no randomness: one run per configuration, no confidence intervals")
    elif all(len(row.runs) <= 1 for row in summary.rows):
        notes.append("one replication: differences are not tested; set `replications` to at least 3")
    counts = {name: sum(name in row.labels for row in summary.rows) for name in LABEL_MEANINGS}
    for name, count in counts.items():
        if count:
            number = "all" if count == len(summary.rows) else count
            notes.append(f"{printed_label(name)}: {number} ({LABEL_MEANINGS[name]})")
    notes += describe_refused(summary)
    if (failed := summary.baseline.mean("failed")) > 0:
        notes.append(f"the baseline leaves {failed:,.10g} requests unserved: its metrics are those of the served ones")
    notes += profile_notes(experiment)
    return notes + [f"failed: configuration {run['config']}: {run['error']}" for run in summary.failures[:3]]


def describe_refused(summary: Summary) -> list[str]:
    """Return why the real engine does not start with some configurations; these did not run."""
    texts: dict[str, list[str]] = {}
    for row in summary.rows:
        if row.refused:
            texts.setdefault("; ".join(row.refused), []).append(changed_settings(row, summary))
    return [f"does not start: {', '.join(names)}: {reasons}" for reasons, names in texts.items()]


def profile_notes(experiment: Experiment) -> list[str]:
    """Return what to know about the profiles of a sweep."""
    notes = source_notes([experiment.profile, *(config.get("profile") for config in experiment.configs)])
    return [note.text for note in notes]


def describe_ties(summary: Summary, hint: bool = True) -> list[str]:
    """Return how many configurations equal the best one, and how many more runs would decide the others."""
    experiment = summary.experiment
    metric, margin = experiment.objectives[0].metric, f"{100 * experiment.indifference:g} %"
    equal = sum(row.relation.outcome == "equal" for row in summary.rows)
    open_rows = [row.relation for row in summary.rows if row.relation.outcome == "undecided"]
    notes = (
        [f"=: {format_count(equal, 'configuration')} equal to the best in {metric} within {margin}"] if equal else []
    )
    if open_rows:
        number = format_count(len(open_rows), "configuration")
        text = f"?: {number} not decided: the interval of the difference from the best in {metric} is too wide"
        needed = f"; {describe_needed([relation.replications for relation in open_rows])}" if hint else ""
        notes.append(f"{text}{needed}")
    return notes


def describe_needed_of(summaries: Iterable[Summary]) -> list[str]:
    """Return how many replications would decide what is open in several tables, in one line."""
    relations = [row.relation for summary in summaries for row in summary.rows]
    needed = [relation.replications for relation in relations if relation.outcome == "undecided"]
    return [f"?: {describe_needed(needed)}"] if needed else []


def describe_needed(needed: Sequence[Optional[int]]) -> str:
    """Return how many replications would decide; None is a difference that no number would decide."""
    known = sorted(count for count in needed if count is not None)
    texts = []
    if known:
        half, most = known[(len(known) - 1) // 2], known[-1]
        parts = f" half of them, {most:,} all" if half < most else ""
        texts.append(f"about {format_count(half, 'replication')} would decide{parts}")
    if None in needed:
        number = "it" if len(needed) == 1 else needed.count(None)
        texts.append(f"the uncertainty of the cost model leaves {number} open")
    return ", ".join(texts)


def describe_constraints(summary: Summary) -> list[str]:
    """Return how many configurations meet the constraints."""
    bounds = summary.experiment.subject_to
    if not bounds:
        return []
    met = sum(row.feasible for row in summary.rows)
    count = f"{met} of {format_count(len(summary.rows), 'configuration')}"
    others = "" if met == len(summary.rows) else "; the others cannot win"
    meet = "meets" if met == 1 else "meet"
    return [f"{count} {meet} {describe_bounds(bounds)} by the mean of the replications{others}"]


def describe_draws(summary: Summary) -> list[str]:
    """Return how often the winner stays the winner with random cost models, or that this was not tested."""
    winner, draws = summary.winner, summary.draw_count
    if winner is not None and not summary.experiment.intervals:
        return [f"the winner is {NOT_TESTED}"]
    if winner is None or not draws:
        return []
    metric = summary.experiment.objectives[0].metric
    return [
        f"winner in {winner.draws_won} of {draws} draws of the cost model, by {metric}; intervals include this "
        "uncertainty of the calibration"
    ]


def describe_precision(summary: Summary) -> list[str]:
    """Return whether all configurations reached the half-width of `ci`."""
    ci, metric = summary.experiment.ci, summary.experiment.objectives[0].metric
    if ci is None:
        return []
    level = abs(summary.baseline.means[metric].mean)
    too_wide = 0
    for row in summary.rows:
        mean, change = summary.without_draws(row, metric)
        too_wide += (mean.half_width or 0) > ci * abs(mean.mean) or (change.half_width or 0) > ci * level
    replications = max(len(row.runs) for row in summary.rows)
    text = f"half-widths of {metric} within {100 * ci:g} % after at most {replications} replications"
    return [text if not too_wide else f"{text}, except for {format_count(too_wide, 'configuration')}"]


def describe_confirmation(summary: Summary) -> list[str]:
    """Return the winner's difference on the confirming replications."""
    metric = summary.experiment.objectives[0].metric
    change = summary.confirm_difference(metric)
    if not change.n:
        return []
    percentage = format_percentage(change.relative_to(summary.confirm_baseline_mean(metric)))
    text = f"winner vs. baseline on {change.n} new replications (not used to choose it)"
    return [f"{text}: {title_inside(metric)} {percentage}"]


def rate_notes(result: RateSummary) -> list[str]:
    """Return the lines below the last table; without constraints, those that are the same at all rates."""
    if result.experiment.subject_to:
        return capacity_notes(result)
    first, *others = [table_notes(summary, hint=False) for summary in result.by_rate.values()]
    common = [note for note in first if all(note in notes for notes in others)]
    return [*common, *describe_needed_of(result.by_rate.values())]


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
    notes += describe_length(result)
    points = [point for curve in result.curves for point in curve.points]
    if saturated := sum("saturated" in point.problems for point in points):
        tested = format_count(len(points), "tested rate")
        notes.append(f"saturated: {saturated} of {tested} ({LABEL_MEANINGS['saturated']})")
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
