"""The files and the printed table of a sweep: summary.csv, pareto.csv, best.yaml."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

from servesim.config.old_keys import OLD, rename_keys, rename_path, rename_settings
from servesim.files.write import csv_writer, open_text, write_yaml

from .experiment import Experiment, format_value
from .intervals import Interval
from .number_format import align_columns, format_mean, format_percentage
from .ranking import Row, Summary

UTILISATION = ("mfu", "mbu")  # in every table; energy only as an objective
CSV_METRICS = (
    "makespan", "request_throughput", "request_goodput", "output_throughput", "mean_ttft_ms", "p99_ttft_ms",
    "mean_tpot_ms", "p99_tpot_ms", "mean_e2el_ms", "p99_e2el_ms", "evictions", "completed", "failed",
    *UTILISATION, "energy",
)  # fmt: skip
PRINTED_LABELS = {"serves fewer": "more unserved"}  # label in summary.csv -> label in tables and in the report
LABEL_MEANINGS = {
    "stuck": "the engine can never run again (deadlock or livelock); cannot win",
    "serves fewer": "leaves more requests unserved than the baseline; cannot win",
    "saturated": "the backlog grows until the last arrival; latencies depend on the length of the run",
    "outside profile": "some steps are larger than the measured range of the profile",
}


def write_summary(summary: Summary, folder: Path) -> None:
    """Write the tables and the winner."""
    write_rows(folder / "summary.csv", summary, summary.rows)
    write_rows(folder / "pareto.csv", summary, [row for row in summary.rows if row.on_pareto_front])
    if summary.winner is not None:
        write_best(folder / "best.yaml", summary, summary.winner)


def parameter_keys(rows: Sequence[Row]) -> list[str]:
    """Return the parameters of all configurations, in the order of first use."""
    return list(dict.fromkeys(key for row in sorted(rows, key=lambda row: row.config) for key in row.assignment))


def write_rows(path: Path, summary: Summary, rows: Sequence[Row]) -> None:
    """Write one line per configuration, best first."""
    keys = parameter_keys(summary.rows)
    objectives = [objective.metric for objective in summary.experiment.objectives]
    others = [name for name in CSV_METRICS if name not in objectives]
    heads = [f"{name}{suffix}" for name in objectives for suffix in ("", "_half", "_diff", "_diff_half")]
    fixed = ["rank", "config", "labels", "on_front", "tied_with_best", "replications", "counted"]
    draws = summary.experiment.intervals > 0
    fixed += ["draws_won"] if draws else []
    window = describe_window(summary.experiment)
    with open_text(path) as file:
        writer = csv_writer(file)
        writer.writerow([*fixed, *(rename_path(key, OLD)[0] for key in keys), *heads, *others])
        for row in rows:
            flags = [int(row.on_pareto_front), int(row.not_significant)]
            id_cells = [row.rank, row.config, "; ".join(row.labels), *flags, len(row.runs), window]
            id_cells += [row.draws_won] if draws else []
            writer.writerow([*id_cells, *setting_cells(row, keys), *metric_cells(row, objectives, others)])


def setting_cells(row: Row, keys: Sequence[str]) -> list[Any]:
    """Return the parameter values of a configuration; an empty cell means the base scenario's value."""
    values = [rename_keys(row.assignment.get(key, ""), rename_path(key, OLD)[1]) for key in keys]
    return [json.dumps(value) if isinstance(value, (dict, list)) else value for value in values]


def metric_cells(row: Row, objectives: Sequence[str], others: Sequence[str]) -> list[Any]:
    """Return the metrics of a configuration."""
    values: list[Optional[float]] = []
    for name in objectives:
        mean, difference = row.means[name], row.differences[name]
        values += [mean.mean, mean.half_width, difference.mean, difference.half_width]
    values += [row.mean(name) for name in others]
    return ["" if value is None or math.isnan(value) else repr(float(value)) for value in values]


def describe_window(experiment: Experiment) -> str:
    """Return which requests the metrics include; also a column of summary.csv."""
    if experiment.steady_window is None:
        return "terminating: all requests"
    warm_up, drain = experiment.steady_window
    return f"steady state: without the first {warm_up:.0%} and the last {drain:.0%} of arrivals"


def write_best(path: Path, summary: Summary, winner: Row) -> None:
    """Write the winner as a scenario for `sim run` and `sim replay`."""
    experiment = summary.experiment
    metric = experiment.objectives[0].metric
    with_old_names = replace(experiment, configs=[rename_settings(config, OLD) for config in experiment.configs])
    label, change = with_old_names.label(winner.config), format_difference(winner, metric)
    comments = comment(f"The best of {len(summary.rows)} configurations of {experiment.name}: {label}")
    comments += comment(f"{metric} {format_mean(winner.means[metric], metric)}; to the baseline: {change}")
    write_yaml(path, rename_keys(experiment.tree(winner.config), OLD), comments)


def comment(text: str) -> str:
    """Return a text as one comment line of YAML. Names and values of settings can contain line breaks."""
    return f"# {' '.join(''.join(letter if letter.isprintable() else ' ' for letter in text).split())}\n"


def format_difference(row: Row, metric: str) -> str:
    """Return the relative difference of a row from the baseline."""
    change = row.differences[metric]
    if change.mean == 0:
        return "no difference"
    return format_percentage(change.relative_to(row.means[metric].mean - change.mean))


def format_table(summary: Summary, top: int = 10) -> str:
    """Return the best configurations and the baseline as text."""
    rows = summary.rows[:top]
    if summary.baseline not in rows:
        rows = [*rows, summary.baseline]
    names = [objective.metric for objective in summary.experiment.objectives]
    common_labels = set.intersection(*(set(row.labels) for row in summary.rows)) if len(summary.rows) > 1 else set()
    draws = summary.draw_count
    extra = utilisation_columns(summary)
    lines = [["rank", *names, "vs. baseline", *extra, *(["draws won"] if draws else []), "changed settings", "labels"]]
    for row in rows:
        difference = "" if row is summary.baseline else format_difference(row, names[0])
        means = [format_mean(row.means[name], name) for name in names]
        labels = ", ".join(printed_label(name) for name in row.labels if name not in common_labels)
        rank = f"{'= ' * row.not_significant}{row.rank}"
        won = [f"{row.draws_won} of {draws}" if row.draws else ""] if draws else []
        more = [format_mean(Interval(row.mean(name), None, 0), name) for name in extra]
        lines.append([rank, *means, difference, *more, *won, changed_settings(row, summary), labels])
    return "\n".join([*align_columns(lines), *table_notes(summary)])


def utilisation_columns(summary: Summary) -> list[str]:
    """Return the metrics of utilisation that tables show besides the objectives: those that the runs have."""
    names = [objective.metric for objective in summary.experiment.objectives]
    return [name for name in UTILISATION if name not in names and any(row.values(name) for row in summary.rows)]


def printed_label(name: str) -> str:
    """Return a label as tables and the report print it."""
    return PRINTED_LABELS.get(name, name)


def changed_settings(row: Row, summary: Summary) -> str:
    """Return the settings that differ from the baseline, as short text."""
    base, knobs = summary.baseline.assignment, summary.experiment.knobs
    if row is summary.baseline:
        return row.label
    changed = [key for key in knobs if key in row.assignment and row.assignment[key] != base.get(key)]
    removed = [key for key in knobs if key in base and key not in row.assignment]
    texts = [f"{key.removeprefix('policy.')}={format_value(row.assignment[key])}" for key in changed]
    return " ".join([*texts, *(f"no {key.removeprefix('policy.')}" for key in removed)]) or row.label


def table_notes(summary: Summary) -> list[str]:
    """Return the lines below the table."""
    experiment = summary.experiment
    runs = f"{format_count(len(summary.rows), 'configuration')}, {format_count(summary.run_count, 'run')}"
    method = f"common random numbers, {100 * experiment.confidence:g} % t intervals"
    notes = [f"{runs}; {describe_window(experiment)}; {method}"]
    notes += [*describe_draws(summary), *describe_precision(summary), *describe_confirmation(summary)]
    tied = sum(row.not_significant for row in summary.rows)
    if tied:
        metric = experiment.objectives[0].metric
        notes.append(f"=: {format_count(tied, 'configuration')} not significantly different from the best by {metric}")
    if not experiment.is_random:
        notes.append("no randomness: one run per configuration, no confidence intervals")
    counts = {name: sum(name in row.labels for row in summary.rows) for name in LABEL_MEANINGS}
    for name, count in counts.items():
        if count:
            number = "all" if count == len(summary.rows) else count
            notes.append(f"{printed_label(name)}: {number} ({LABEL_MEANINGS[name]})")
    return notes + [f"failed: configuration {run['config']}: {run['error']}" for run in summary.failures[:3]]


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
