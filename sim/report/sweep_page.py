"""report.html of a sweep or a search: the winner, why it wins, trade-offs, parameters, queues and the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from servesim.runs.metric_table import format_number
from servesim.runs.notes import sentence
from servesim.runs.request_rows import STATES
from servesim.runs.text import STATE_LABELS
from servesim.statistics.number_format import format_mean
from servesim.statistics.objective import Objective
from servesim.study.ranking import INCOMPLETE, Row, Summary
from servesim.study.table import format_difference, printed_label, sweep_columns
from servesim.study.verdict import table_notes, verdict_of

from .charts import Latencies, latency_charts, queue_charts, time_chart
from .knobs import knob_charts, knobs
from .page import (
    MAX_TABLE_ROWS,
    MetricFact,
    ResultCard,
    RowStyle,
    Table,
    Tag,
    exported_server,
    page_table,
    setting_chips,
    write_page,
)
from .plots import Chart
from .recorded_runs import COLOURS, RecordedRun, compared_rows, leader, record_runs
from .trade_offs import point_names, slo_of, trade_offs
from .trust import sweep_facts

TITLES = {
    "winner": "Winner", "baseline": "No winner: nothing beats the baseline", "rates": "Winner at each rate",
    "capacity": "Capacity", "infeasible": "No winner: no configuration meets the constraints", "failed": "No winner",
}  # fmt: skip


def write_sweep_report(summary: Summary, path: Path) -> None:
    """Write the page."""
    roles, notes = compared_rows(summary), table_notes(summary)
    runs = record_runs(summary, roles)
    write_page(
        path, "sweep.html", title=f"Sweep report: {summary.experiment.name}", about=sentence(notes[0]),
        trust=sweep_facts(summary.experiment, (row.config for row in roles.values())),
        result=result(summary, runs, notes[1:]), trade_offs=trade_offs(summary) if len(summary.rows) > 1 else [],
        knobs=knob_charts(knobs(summary)), times=times(summary), table=configurations(summary),
        cut=MAX_TABLE_ROWS if len(summary.rows) > MAX_TABLE_ROWS else 0, names=point_names(summary),
        draws=summary.draw_count, **charts_of_runs(summary, runs),
    )  # fmt: skip


def result(summary: Summary, runs: Sequence[RecordedRun], notes: Sequence[str]) -> ResultCard:
    """Return the verdict, and the leading configuration with its metrics."""
    verdict, row, texts = verdict_of(summary), leader(summary), list(map(sentence, notes))
    title, won = TITLES[verdict.kind], verdict.kind == "winner"
    if row is None:
        return ResultCard(title, verdict.text, notes=texts)
    first, *others = summary.experiment.objectives
    big = f"{first.metric} {format_mean(row.means[first.metric], first.metric)}"
    facts = [metric_fact(row, objective) for objective in others]
    change, settings = compare_with_baseline(row, first), setting_chips(row.assignment)
    times, limit = request_times(row, summary.baseline), runs[0].limit if runs else ""
    server = exported_server(summary.experiment.tree(row.config)) if row.eligible else None
    return ResultCard(title, verdict.text, won, big, change, facts, settings, texts, times, limit, server)


def metric_fact(row: Row, objective: Objective) -> MetricFact:
    """Return a further objective of the leading configuration."""
    metric = objective.metric
    value = format_mean(row.means[metric], metric)
    return MetricFact(metric, value, compare_with_baseline(row, objective))


def compare_with_baseline(row: Row, objective: Objective) -> str:
    """Return the difference from the baseline in words."""
    change = row.differences[objective.metric]
    if row.labels[:1] == ["baseline"] or change.mean == 0:
        return "the same as the baseline"
    word = "better" if objective.better(change.mean) else "worse"
    note = "" if change.half_width is None else ", significant" if change.excludes_zero else ", not significant"
    return f"{format_difference(row, objective.metric)}: {word} than the baseline{note}"


def request_times(row: Row, baseline: Row) -> str:
    """Return where a request spends its time: in which states less or more than with the baseline."""
    seconds, base = row.time_breakdown(), baseline.time_breakdown()
    if not seconds or not base:
        return "No times of requests: a compared configuration served no request."
    if row is baseline:
        return describe_times(seconds)
    total, before = sum(seconds.values()), sum(base.values())
    changes = sorted(((seconds[name] - base[name], STATE_LABELS[name]) for name in STATES), key=lambda item: item[0])
    less = [f"{name} -{format_number(-change)} s" for change, name in changes if change < -0.005 * before]
    more = [f"{name} +{format_number(change)} s" for change, name in changes[::-1] if change > 0.005 * before]
    changed = ": " + ", ".join(less + more) if less or more else ""
    return f"A request takes {format_number(total)} s on average (baseline: {format_number(before)} s){changed}."


def describe_times(seconds: Mapping[str, float]) -> str:
    """Return where a request spends its time, the longest part first."""
    total = sum(seconds.values())
    largest = sorted(((seconds.get(name, 0.0), STATE_LABELS[name]) for name in STATES), reverse=True)
    parts = [f"{name} {format_number(part)} s" for part, name in largest if part > 0.005 * total]
    return f"A request takes {format_number(total)} s on average: {', '.join(parts)}."


def times(summary: Summary) -> list[Chart]:
    """Return the time breakdown of the compared configurations."""
    bars = [(role, row.time_breakdown()) for role, row in compared_rows(summary).items()]
    bars = [(role, seconds) for role, seconds in bars if seconds]
    return [time_chart(bars)] if bars else []


def configurations(summary: Summary) -> Table:
    """Return the table of all configurations."""
    rest = [row for row in summary.rows[MAX_TABLE_ROWS:] if row is summary.baseline or row.on_pareto_front]

    def style(row: Row) -> RowStyle:
        tags = [Tag(printed_label(name), "bad" if is_reason(name, row) else "") for name in row.labels]
        kind = "is-baseline" if row is summary.baseline else "is-winner" if row is summary.winner else ""
        return RowStyle(row.config, kind, tags)

    return page_table(sweep_columns(summary), [*summary.rows[:MAX_TABLE_ROWS], *rest], style)


def is_reason(label: str, row: Row) -> bool:
    """Whether a label says why a configuration cannot win."""
    return label in INCOMPLETE or label in row.misses


def charts_of_runs(summary: Summary, runs: Sequence[RecordedRun]) -> dict[str, Any]:
    """Return the charts of single runs, and which requests they show."""
    latencies = [Latencies(run.role, COLOURS[run.role], run.latencies) for run in runs]
    return {
        "latencies": latency_charts(latencies, slo_of(summary)),
        "queues": queue_charts(runs),
        "recorded": f"The first replication, {runs[0].requests:,} requests." if runs else "",
    }
