"""The files of a sweep: summary.csv, pareto.csv, best.yaml."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

from servesim.config.old_keys import OLD, rename_keys, rename_path, rename_settings
from servesim.config.paths import relative_paths
from servesim.files.write import comment, csv_writer, open_text, write_yaml
from servesim.statistics.number_format import format_mean

from .experiment import Experiment
from .ranking import Row, Summary
from .table import UTILISATION, describe_window, format_difference

CSV_METRICS = (
    "makespan", "request_throughput", "request_goodput", "output_throughput", "mean_ttft_ms", "p99_ttft_ms",
    "mean_tpot_ms", "p99_tpot_ms", "mean_e2el_ms", "p99_e2el_ms", "evictions", "completed", "failed",
    *UTILISATION, "energy",
)  # fmt: skip


def write_summary(summary: Summary, folder: Path) -> None:
    """Write the tables and the winner."""
    write_rows(folder / "summary.csv", [(summary, summary.rows)])
    write_rows(folder / "pareto.csv", [(summary, [row for row in summary.rows if row.on_pareto_front])])
    if summary.winner is not None:
        write_best(folder / "best.yaml", summary, summary.winner)


def parameter_keys(rows: Sequence[Row]) -> list[str]:
    """Return the parameters of all configurations, in the order of first use."""
    return list(dict.fromkeys(key for row in sorted(rows, key=lambda row: row.config) for key in row.assignment))


def write_rows(path: Path, tables: Sequence[tuple[Summary, Sequence[Row]]]) -> None:
    """Write one line per configuration, best first; an experiment with loads has one table per load."""
    first = tables[0][0]
    keys, experiment = parameter_keys(first.rows), first.experiment
    objectives, others = metric_names(experiment)
    heads = [f"{name}{suffix}" for name in objectives for suffix in ("", "_half", "_diff", "_diff_half")]
    with open_text(path) as file:
        writer = csv_writer(file)
        writer.writerow([*id_columns(experiment), *(rename_path(key, OLD)[0] for key in keys), *heads, *others])
        for summary, rows in tables:
            for row in rows:
                cells = id_cells(row, summary.experiment)
                writer.writerow([*cells, *setting_cells(row, keys), *metric_cells(row, objectives, others)])


def metric_names(experiment: Experiment) -> tuple[list[str], list[str]]:
    """Return the objectives, and the other metrics of a table."""
    objectives = [objective.metric for objective in experiment.objectives]
    others = [name for name in CSV_METRICS if name not in objectives]
    others += [bound.metric for bound in experiment.subject_to if bound.metric not in (*objectives, *others)]
    return objectives, others


def id_columns(experiment: Experiment) -> list[str]:
    """Return the names of the first columns; some are present only if their feature is used."""
    names = ["rank", "config", "labels", "on_front", "tied_with_best", "replications", "counted", "relation"]
    names += ["draws_won"] if experiment.intervals else []
    names += ["feasible", "violation"] if experiment.subject_to else []
    return [*(["load"] if experiment.load is not None else []), *names]


def id_cells(row: Row, experiment: Experiment) -> list[Any]:
    """Return the first cells of a configuration."""
    cells = [row.rank, row.config, "; ".join(row.labels), int(row.on_pareto_front), int(row.not_significant)]
    cells += [len(row.runs), describe_window(experiment), row.relation.outcome]
    cells += [row.draws_won] if experiment.intervals else []
    cells += [int(row.feasible), row.violation] if experiment.subject_to else []
    return [*([experiment.load] if experiment.load is not None else []), *cells]


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


def write_best(path: Path, summary: Summary, winner: Row) -> None:
    """Write the winner as a scenario for `sim run` and `sim replay`."""
    experiment = summary.experiment
    metric = experiment.objectives[0].metric
    with_old_names = replace(experiment, configs=[rename_settings(config, OLD) for config in experiment.configs])
    label, change = with_old_names.label(winner.config), format_difference(winner, metric)
    comments = comment(f"The best of {len(summary.rows)} configurations of {experiment.name}: {label}")
    comments += comment(f"{metric} {format_mean(winner.means[metric], metric)}; to the baseline: {change}")
    scenario = relative_paths(experiment.tree(winner.config), path.parent)
    write_yaml(path, rename_keys(scenario, OLD), comments)
