"""The printed table of a sweep: the best configurations, and notes on how to read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

from servesim.files.terminal import PLAIN, Screen, align_columns
from servesim.runs.run_warnings import backend_notes
from servesim.statistics.constraints import describe_bounds
from servesim.statistics.intervals import Interval
from servesim.statistics.number_format import format_mean, format_percentage

from .experiment import Experiment, format_value
from .ranking import Row, Summary

UTILISATION = ("mfu", "mbu")  # in every table; energy only as an objective
TEXT_COLUMNS = ("changed settings", "labels")  # wrapped first on a narrow terminal
TIE_MARKS = {"equal": "=", "undecided": "?"}  # before the rank
PRINTED_LABELS = {"serves fewer": "more unserved"}  # label in summary.csv -> label in tables and in the report
LABEL_MEANINGS = {
    "stuck": "the engine can never run again (deadlock or livelock); cannot win",
    "serves fewer": "leaves more requests unserved than the baseline; cannot win",
    "saturated": "the backlog grows until the last arrival; latencies depend on the length of the run",
    "outside profile": "some steps are larger than the measured range of the profile",
}


def describe_window(experiment: Experiment) -> str:
    """Return which requests the metrics include; also a column of summary.csv."""
    if experiment.steady_window is None:
        return "terminating: all requests"
    warm_up, drain = experiment.steady_window
    return f"steady state: without the first {warm_up:.0%} and the last {drain:.0%} of arrivals"


def format_difference(row: Row, metric: str) -> str:
    """Return the relative difference of a row from the baseline."""
    change = row.differences[metric]
    if change.mean == 0:
        return "no difference"
    return format_percentage(change.relative_to(row.means[metric].mean - change.mean))


def format_table(summary: Summary, top: int = 10, screen: Screen = PLAIN) -> str:
    """Return the best configurations, the baseline and the notes as text."""
    return "\n".join([*table_lines(summary, top, screen), *table_notes(summary)])


def table_lines(summary: Summary, top: int = 10, screen: Screen = PLAIN) -> list[str]:
    """Return the best configurations and the baseline, one line each."""
    lines, meanings = table_cells(summary, top)
    return align_columns(lines, screen, TEXT_COLUMNS, meanings)


def table_cells(summary: Summary, top: int) -> tuple[list[list[str]], dict[int, str]]:
    """Return the cells of the table, the first line is its head, and the meanings of its lines."""
    rows = summary.rows[:top]
    if summary.baseline not in rows:
        rows = [*rows, summary.baseline]
    names = [objective.metric for objective in summary.experiment.objectives]
    common_labels = set.intersection(*(set(row.labels) for row in summary.rows)) if len(summary.rows) > 1 else set()
    draws = summary.draw_count
    extra = utilisation_columns(summary)
    lines = [["rank", *names, "vs. baseline", *extra, *(["draws won"] if draws else []), "changed settings", "labels"]]
    meanings: dict[int, str] = {}
    for number, row in enumerate(rows, 1):
        meanings[number] = meaning(row is summary.winner, row is summary.baseline, not row.eligible)
        difference = "" if row is summary.baseline else format_difference(row, names[0])
        means = [format_mean(row.means[name], name) for name in names]
        labels = ", ".join(printed_label(name) for name in row.labels if name not in common_labels)
        rank = " ".join([*TIE_MARKS.get(row.relation.outcome, ""), str(row.rank)])
        won = [f"{row.draws_won} of {draws}" if row.draws else ""] if draws else []
        more = [format_mean(Interval(row.mean(name), None, 0), name) for name in extra]
        lines.append([rank, *means, difference, *more, *won, changed_settings(row, summary), labels])
    return lines, meanings


def meaning(is_winner: bool, is_baseline: bool, cannot_win: bool) -> str:
    """Return the meaning of a row, which selects its colour."""
    return "winner" if is_winner else "cannot win" if cannot_win else "baseline" if is_baseline else ""


def utilisation_columns(summary: Summary) -> list[str]:
    """Return the metrics of utilisation that tables show besides the objectives: those that the runs have."""
    names = [objective.metric for objective in summary.experiment.objectives]
    return [name for name in UTILISATION if name not in names and any(row.values(name) for row in summary.rows)]


def printed_label(name: str) -> str:
    """Return a label as tables and the report print it."""
    return PRINTED_LABELS.get(name, name)


def changed_settings(row: Row, summary: Summary) -> str:
    """Return the settings that differ from the baseline, as short text."""
    keys = [] if row is summary.baseline else summary.experiment.changed_keys(row.config)
    set_here = [f"{short_key(key)}={format_value(row.assignment[key])}" for key in keys if key in row.assignment]
    of_base = []
    for key in (key for key in keys if key not in row.assignment):  # of the baseline or of another grid
        value = summary.experiment.value(row.config, key)
        if value is not None:
            of_base.append(f"{short_key(key)}={format_value(value)}")
        elif not ("policy.name" in keys and key.startswith("policy.")):  # another policy has its own settings
            of_base.append(f"no {short_key(key)}")
    return " ".join([*set_here, *of_base]) or row.label


def short_key(key: str) -> str:
    """Return a parameter as tables print it."""
    return key.removeprefix("policy.")


def table_notes(summary: Summary) -> list[str]:
    """Return the lines below the table."""
    experiment = summary.experiment
    runs = f"{format_count(len(summary.rows), 'configuration')}, {format_count(summary.run_count, 'run')}"
    method = f"common random numbers, {100 * experiment.confidence:g} % t intervals"
    notes = [f"{runs}; {describe_window(experiment)}; {method}"]
    notes += [*describe_draws(summary), *describe_precision(summary), *describe_confirmation(summary)]
    notes += [*describe_ties(summary), *describe_constraints(summary)]
    if not experiment.is_random:
        notes.append("no randomness: one run per configuration, no confidence intervals")
    elif all(len(row.runs) <= 1 for row in summary.rows):
        notes.append("one replication: differences are not tested; set `replications` to at least 3")
    counts = {name: sum(name in row.labels for row in summary.rows) for name in LABEL_MEANINGS}
    for name, count in counts.items():
        if count:
            number = "all" if count == len(summary.rows) else count
            notes.append(f"{printed_label(name)}: {number} ({LABEL_MEANINGS[name]})")
    notes += [*describe_unserved(summary), *profile_notes(experiment)]
    return notes + [f"failed: configuration {run['config']}: {run['error']}" for run in summary.failures[:3]]


def describe_unserved(summary: Summary) -> list[str]:
    """Return how many requests the baseline leaves unserved: then its times are those of fewer requests."""
    failed = summary.baseline.mean("failed")
    if not failed > 0:
        return []
    return [f"the baseline leaves {failed:,.10g} requests unserved: its metrics are those of the served ones"]


def profile_notes(experiment: Experiment) -> list[str]:
    """Return what to know about the profiles of a sweep."""
    return backend_notes([experiment.profile, *(config.get("profile") for config in experiment.configs)])


def describe_ties(summary: Summary) -> list[str]:
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
        notes.append(f"{text}; {describe_needed([relation.replications for relation in open_rows])}")
    return notes


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


def format_count(count: int, noun: str) -> str:
    """Return `1 run` or `2 runs`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def describe_draws(summary: Summary) -> list[str]:
    """Return how often the winner stays the winner with random cost models."""
    winner, draws = summary.winner, summary.draw_count
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
    return [f"winner vs. baseline on {change.n} new replications (not used to choose it): {metric} {percentage}"]
