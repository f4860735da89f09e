"""The files and the text of a sweep's result: summary.csv, pareto.csv, best.yaml, and a table for people."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

from servesim.files.write import open_text

from .experiment import Experiment, shown
from .number_format import columns, percentage, spread
from .ranking import Row, Summary

FIGURES = (
    "makespan", "request_throughput", "request_goodput", "output_throughput", "mean_ttft_ms", "p99_ttft_ms",
    "mean_tpot_ms", "p99_tpot_ms", "mean_e2el_ms", "p99_e2el_ms", "evictions", "completed", "failed",
)  # fmt: skip


def write_summary(summary: Summary, folder: Path) -> None:
    """Write the tables and the winner."""
    write_rows(folder / "summary.csv", summary, summary.rows)
    write_rows(folder / "pareto.csv", summary, [row for row in summary.rows if row.front])
    if summary.winner is not None:
        write_best(folder / "best.yaml", summary, summary.winner)


def keys_of(rows: Sequence[Row]) -> list[str]:
    """Return the parameters that configurations set, in the order they come up."""
    return list(dict.fromkeys(key for row in sorted(rows, key=lambda row: row.config) for key in row.assignment))


def write_rows(path: Path, summary: Summary, rows: Sequence[Row]) -> None:
    """Write one line a configuration, the best first."""
    keys = keys_of(summary.rows)
    objectives = [one.metric for one in summary.experiment.objectives]
    others = [name for name in FIGURES if name not in objectives]
    heads = [f"{name}{tail}" for name in objectives for tail in ("", "_half", "_diff", "_diff_half")]
    fixed = ["rank", "config", "labels", "on_front", "tied_with_best", "replications", "counted"]
    with open_text(path) as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*fixed, *keys, *heads, *others])
        for row in rows:
            labels, part = "; ".join(row.labels), counted(summary.experiment)
            facts = [row.rank, row.config, labels, int(row.front), int(row.tied), len(row.runs), part]
            writer.writerow([*facts, *settings(row, keys), *marks(row, objectives, others)])


def settings(row: Row, keys: Sequence[str]) -> list[Any]:
    """Return what a configuration sets, empty where it leaves the base alone."""
    values = [row.assignment.get(key, "") for key in keys]
    return [json.dumps(value) if isinstance(value, (dict, list)) else value for value in values]


def marks(row: Row, objectives: Sequence[str], others: Sequence[str]) -> list[Any]:
    """Return the figures of a line."""
    values: list[Optional[float]] = []
    for name in objectives:
        values += [row.found[name].mean, row.found[name].half, row.change[name].mean, row.change[name].half]
    values += [row.mean(name) for name in others]
    return ["" if value is None or math.isnan(value) else repr(float(value)) for value in values]


def counted(experiment: Experiment) -> str:
    """Say which part of the runs the figures are of."""
    if experiment.cut is None:
        return "terminating: all requests"
    warm_up, drain = experiment.cut
    return f"steady state: without the first {warm_up:.0%} and the last {drain:.0%} of arrivals"


def write_best(path: Path, summary: Summary, winner: Row) -> None:
    """Write the winner as a scenario that `sim run` and `sim replay` take as it is."""
    import yaml

    metric = summary.experiment.objectives[0].metric
    with open_text(path) as file:
        file.write(f"# The best of {len(summary.rows)} configurations of {summary.experiment.name}: {winner.label}\n")
        file.write(f"# {metric} {spread(winner.found[metric], metric)}; to the baseline: {against(winner, metric)}\n")
        yaml.safe_dump(summary.experiment.tree(winner.config), file, sort_keys=False, allow_unicode=True)


def against(row: Row, metric: str) -> str:
    """Say how a row differs from the baseline."""
    change = row.change[metric]
    return "no difference" if change.mean == 0 else percentage(change.over(row.found[metric].mean - change.mean))


def table(summary: Summary, top: int = 10) -> str:
    """Return the best configurations and the baseline as text."""
    rows = summary.rows[:top]
    if summary.baseline not in rows:
        rows = [*rows, summary.baseline]
    names = [one.metric for one in summary.experiment.objectives]
    everywhere = set.intersection(*(set(row.labels) for row in summary.rows)) if len(summary.rows) > 1 else set()
    lines = [["rank", *names, "against the baseline", "changed settings", "labels"]]
    for row in rows:
        difference = "" if row is summary.baseline else against(row, names[0])
        figures = [spread(row.found[name], name) for name in names]
        labels = [name for name in row.labels if name not in everywhere]
        lines.append([f"{'= ' * row.tied}{row.rank}", *figures, difference, changed(row, summary), ", ".join(labels)])
    return "\n".join([*columns(lines), *notes(summary)])


def changed(row: Row, summary: Summary) -> str:
    """Return what a configuration sets otherwise than the baseline, in short."""
    base = summary.baseline.assignment
    if row is summary.baseline:
        return row.label
    apart = [key for key in summary.experiment.knobs if key in row.assignment and row.assignment[key] != base.get(key)]
    gone = [key for key in summary.experiment.knobs if key in base and key not in row.assignment]
    parts = [f"{key.removeprefix('policy.')}={shown(row.assignment[key])}" for key in apart]
    return " ".join([*parts, *(f"no {key.removeprefix('policy.')}" for key in gone)]) or row.label


def notes(summary: Summary) -> list[str]:
    """Return what a reader of the table must know."""
    experiment = summary.experiment
    runs = f"{count(len(summary.rows), 'configuration')}, {count(summary.runs, 'run')}"
    found = [f"{runs}; {counted(experiment)}; common random numbers, {100 * experiment.confidence:g} % t intervals"]
    found += [*precision(summary), *confirmation(summary)]
    tied = sum(row.tied for row in summary.rows)
    if tied:
        found.append(f"= {tied} cannot be told from the best by {experiment.objectives[0].metric}")
    if not experiment.varies:
        found.append("nothing is random here: one run says all, and there is no interval")
    counts = {name: sum(name in row.labels for row in summary.rows) for name in MEANINGS}
    told = {name: "all" if many == len(summary.rows) else str(many) for name, many in counts.items() if many}
    found += [f"{name}: {many} ({MEANINGS[name]})" for name, many in told.items()]
    found += [f"failed: configuration {run['config']}: {run['error']}" for run in summary.failures[:3]]
    return found


def count(many: int, what: str) -> str:
    """Return how many of something there are."""
    return f"{many:,} {what}{'' if many == 1 else 's'}"


def precision(summary: Summary) -> list[str]:
    """Say whether the half-width that was asked for was reached."""
    ci, metric = summary.experiment.ci, summary.experiment.objectives[0].metric
    if ci is None:
        return []
    level = abs(summary.baseline.found[metric].mean)
    wide = 0
    for row in summary.rows:
        found, change = row.found[metric], row.change[metric]
        wide += (found.half or 0) > ci * abs(found.mean) or (change.half or 0) > ci * level
    most = max(len(row.runs) for row in summary.rows)
    text = f"half-widths of {metric} within {100 * ci:g} % after {most} replications at most"
    return [text if not wide else f"{text}, but for {wide} configurations"]


def confirmation(summary: Summary) -> list[str]:
    """Say what fresh replications make of the winner."""
    metric = summary.experiment.objectives[0].metric
    fresh = summary.confirmed(metric)
    if not fresh.size:
        return []
    part = percentage(fresh.over(summary.fresh_level(metric)))
    return [f"confirmed on {fresh.size} fresh replications that had no part in the choice: {metric} {part}"]


MEANINGS = {
    "stuck": "the engine livelocks, as the real one does",
    "serves fewer": "more requests unserved than under the baseline; cannot win",
    "saturated": "the backlog grows through the run: latencies depend on its length",
    "outside profile": "steps beyond the profile's measured grid",
}
