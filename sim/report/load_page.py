"""report.html of a sweep over loads: curves over the request rate, capacities, and the ranking at each load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

from servesim.runs.request_rate import format_rate
from servesim.statistics.constraints import describe_bounds
from servesim.statistics.intervals import Interval
from servesim.statistics.number_format import format_mean
from servesim.statistics.objective import METRICS
from servesim.study.curves import Curve
from servesim.study.experiment import format_value
from servesim.study.load_summary import LoadSummary
from servesim.study.ranking import Summary
from servesim.study.table import format_count
from servesim.study.verdict import verdict_of

from .cards import ResultCard, setting_chips
from .charts import Latencies, latency_charts, queue_charts
from .page import write_page
from .plots import Limit
from .rate_charts import RateCurve, RatePoint, curve_key, rate_charts
from .recorded_runs import record_runs
from .roles import COLOURS, roles_at_load
from .sweep_page import describe_counted, recorded_text
from .tables import MAX_TABLE_ROWS, Cell, Column, Table, TableRow, Tag, number_cell, setting_values
from .trade_offs import slo_of
from .trust import capacity_fact, sweep_facts

TITLES = {
    "winner": "Winner by capacity", "baseline": "No winner: nothing beats the baseline", "loads": "Winner at each load",
    "infeasible": "No winner: no configuration meets the constraints", "failed": "No winner",
}  # fmt: skip


def write_load_report(result: LoadSummary, path: Path) -> None:
    """Write the page."""
    experiment = result.experiment
    shown = shown_load(result)
    summary = result.by_load[shown]
    roles = roles_at_load(result, shown)
    runs = record_runs(summary, roles)
    latencies = [Latencies(run.role, COLOURS[run.role], run.latencies) for run in runs]
    objectives = [objective.metric for objective in experiment.objectives]
    curves = rate_curves(result)
    write_page(
        path, "loads.html", title=f"Sweep over loads: {experiment.name}", about=describe_runs(result),
        trust=sweep_facts(summary, runs, roles, capacity_fact(result)), result=result_card(result),
        shown=format_rate(shown), recorded=recorded_text(runs), key=curve_key(curves), loads=load_table(result),
        curves=rate_charts(curves, experiment.subject_to, objectives),
        latencies=latency_charts(latencies, slo_of(summary)), queues=queue_charts(runs), table=capacities(result),
        bounds=describe_bounds(experiment.subject_to), cut=MAX_TABLE_ROWS if len(result.curves) > MAX_TABLE_ROWS else 0,
    )  # fmt: skip


def describe_runs(result: LoadSummary) -> str:
    """Return the line below the title."""
    counts = f"{format_count(len(result.curves), 'configuration')}, {format_count(len(result.loads), 'load')}"
    runs = format_count(result.run_count, "simulated run")
    return f"{counts}, {runs}. Every load has the same requests. {describe_counted(result.experiment)}"


def shown_load(result: LoadSummary) -> float:
    """Return the load of the charts of single runs: the winner's capacity, or the highest load without a backlog."""
    capacity = None if result.winner is None else result.winner.capacity
    if capacity is not None:
        return max((load for load in result.loads if load <= capacity.rate), default=result.loads[0])
    stable = [load for load, summary in result.by_load.items() if not is_saturated(summary)]
    return max(stable, default=result.loads[0])


def is_saturated(summary: Summary) -> bool:
    """Whether the backlog of the winner grows; also without a winner."""
    return summary.winner is None or "saturated" in summary.winner.labels


def result_card(result: LoadSummary) -> ResultCard:
    """Return the verdict, and the winner by capacity with its settings."""
    verdict, winner, notes = result.verdict, result.winner, []
    if result.experiment.subject_to and not result.experiment.precision:
        method = "the highest tested rate below all rates that miss a constraint"
        estimate = 'The number after "about" is interpolated up to the next tested rate.'
        notes.append(f"The capacity is {method}. {estimate} The key precision finds it more exactly.")
    title, won = TITLES[verdict.kind], verdict.kind == "winner"
    if winner is None or winner.capacity is None:
        return ResultCard(title, verdict.text, notes=notes)
    big, settings = f"up to {winner.capacity.text}", setting_chips(winner.assignment)
    return ResultCard(title, verdict.text, won, big, settings=settings, notes=notes)


def rate_curves(result: LoadSummary) -> list[RateCurve]:
    """Return the curves of all configurations; winner and baseline come first, because long lists are cut."""
    curves = []
    for curve in result.curves:
        role = "baseline" if curve.is_baseline else "winner" if curve is result.winner else ""
        points = [
            RatePoint(p.load, {metric: p.row.mean(metric) for metric in METRICS if p.row.values(metric)}, p.problem)
            for p in curve.points
        ]
        curves.append(RateCurve(curve.label, points, role, curve.config, capacity_limit(curve, role)))
    first = [curve for curve in curves if curve.role]
    return [*first, *(curve for curve in curves if not curve.role)]


def capacity_limit(curve: Curve, role: str) -> Optional[Limit]:
    """Return the capacity of a configuration as a line of the charts; None without one."""
    if curve.capacity is None or not curve.capacity.rate:
        return None
    return Limit("x", curve.capacity.estimate, f"{role}: {curve.capacity.text}")


def load_table(result: LoadSummary) -> Table:
    """Return the verdict at each load."""
    rows = []
    for load, summary in result.by_load.items():
        rows.append(TableRow([number_cell(load, format_rate(load)), Cell(verdict_of(summary).text)]))
    return Table([Column("load", "load", True), Column("result", wrap=True)], rows)


def capacities(result: LoadSummary) -> Table:
    """Return one row per configuration: settings, capacity, and a metric at each load."""
    experiment = result.experiment
    metric = (experiment.subject_to[0] if experiment.subject_to else experiment.objectives[0]).metric
    keys = list(experiment.knobs)
    columns = [Column("rank", "rank", True), *(Column(key.removeprefix("policy."), key) for key in keys)]
    columns += [Column("capacity", "capacity", True)] if experiment.subject_to else []
    columns += [Column(f"{metric} at {format_rate(load)}", f"at_{load:g}", True) for load in result.loads]
    columns.append(Column("labels", "labels", wrap=True))
    return Table(columns, [capacity_row(result, curve, keys, metric) for curve in result.curves[:MAX_TABLE_ROWS]])


def capacity_row(result: LoadSummary, curve: Curve, keys: Sequence[str], metric: str) -> TableRow:
    """Return the row of a configuration; a tag says why it misses a constraint above its capacity."""
    values = setting_values(result.experiment, curve.config, keys)
    cells = [number_cell(curve.rank), *(Cell(format_value(values[key])) for key in keys)]
    if curve.capacity is not None:
        cells.append(number_cell(curve.capacity.estimate, curve.capacity.text))
    points = {point.load: point for point in curve.points}
    for load in result.loads:
        point = points.get(load)
        level = math.nan if point is None else point.row.mean(metric)
        mark = "" if point is None or point.good or not result.experiment.subject_to else " !"
        cells.append(number_cell(level, format_mean(Interval(level, None, 1), metric) + mark))
    tags = [Tag("baseline")] if curve.is_baseline else []
    if curve.capacity is not None and curve.capacity.missed_at is not None:
        tags.append(Tag(f"at {format_rate(curve.capacity.missed_at)}: {curve.capacity.reason}", "bad"))
    kind = "is-baseline" if curve.is_baseline else "is-winner" if curve is result.winner else ""
    return TableRow([*cells, Cell("", None, False, tags)], curve.config, kind)
