"""report.html of a sweep or a search: the winner and why it wins. A sweep over rates has a page of its own kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from servesim.runs.metric_table import format_number
from servesim.runs.notes import sentence
from servesim.runs.request_rate import format_rate
from servesim.runs.request_rows import STATES
from servesim.runs.text import STATE_LABELS
from servesim.statistics.constraints import describe_bounds
from servesim.statistics.number_format import format_mean
from servesim.statistics.objective import Objective
from servesim.study.columns import Column
from servesim.study.ranking import INCOMPLETE, Row, Summary
from servesim.study.rate_summary import RateSummary, Result
from servesim.study.rates import Curve
from servesim.study.sweep_text import rate_notes, table_notes
from servesim.study.table import capacity_columns, format_difference, point_columns, printed_label, sweep_columns
from servesim.study.verdict import verdict_of

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
from .rate_charts import curve_key, drawn_curves, rate_charts
from .recorded_runs import COLOURS, RecordedRun, compared_rows, leader, record_runs, roles_at_rate
from .trade_offs import point_names, slo_of, trade_offs
from .trust import sweep_facts

TITLES = {
    "winner": "Winner", "baseline": "No winner: nothing beats the baseline", "rates": "Winner at each rate",
    "capacity": "Capacity", "infeasible": "No winner: no configuration meets the constraints", "failed": "No winner",
}  # fmt: skip


def write_report(result: Result, path: Path) -> None:
    """Write the page of a sweep or a search, with or without rates."""
    if isinstance(result, RateSummary):
        write_rate_report(result, path)
    else:
        write_sweep_report(result, path)


def write_sweep_report(summary: Summary, path: Path) -> None:
    """Write the page of a sweep at one rate: trade-offs, parameters, queues and the table."""
    roles, notes = compared_rows(summary), table_notes(summary)
    runs = record_runs(summary, roles)
    write_page(
        path, "sweep.html", title=f"Sweep report: {summary.experiment.name}", about=sentence(notes[0]),
        trust=sweep_facts(summary.experiment, (row.config for row in roles.values())),
        result=result_card(summary, runs, notes[1:]), trade_offs=trade_offs(summary) if len(summary.rows) > 1 else [],
        knobs=knob_charts(knobs(summary)), times=times(summary), table=configurations(summary),
        cut=MAX_TABLE_ROWS if len(summary.rows) > MAX_TABLE_ROWS else 0, names=point_names(summary),
        draws=summary.draw_count, **charts_of_runs(summary, runs),
    )  # fmt: skip


def result_card(summary: Summary, runs: Sequence[RecordedRun], notes: Sequence[str]) -> ResultCard:
    """Return the verdict, and the leading configuration with its metrics."""
    verdict, row, texts = verdict_of(summary), leader(summary), list(map(sentence, notes))
    title, won = TITLES[verdict.kind], verdict.kind == "winner"
    if row is None:
        return ResultCard(title, verdict.text, notes=texts)
    first, *others = summary.experiment.objectives
    big = f"{first.metric} {format_mean(row.means[first.metric], first.metric)}"
    facts = [
        MetricFact(o.metric, format_mean(row.means[o.metric], o.metric), compare_with_baseline(row, o)) for o in others
    ]
    change, settings = compare_with_baseline(row, first), setting_chips(row.assignment)
    times, limit = request_times(row, summary.baseline), runs[0].limit if runs else ""
    server = exported_server(summary.experiment.tree(row.config)) if row.eligible else None
    return ResultCard(title, verdict.text, won, big, change, facts, settings, texts, times, limit, server)


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
        reasons = (*INCOMPLETE, *row.misses)  # why it cannot win
        tags = [Tag(printed_label(name), "bad" if name in reasons else "") for name in row.labels]
        kind = "is-baseline" if row is summary.baseline else "is-winner" if row is summary.winner else ""
        return RowStyle(row.config, kind, tags)

    return page_table(sweep_columns(summary), [*summary.rows[:MAX_TABLE_ROWS], *rest], style)


def charts_of_runs(summary: Summary, runs: Sequence[RecordedRun]) -> dict[str, Any]:
    """Return the charts of single runs, and which requests they show."""
    latencies = [Latencies(run.role, COLOURS[run.role], run.latencies) for run in runs]
    return {
        "latencies": latency_charts(latencies, slo_of(summary)),
        "queues": queue_charts(runs),
        "recorded": f"The first replication, {runs[0].requests:,} requests." if runs else "",
    }


def write_rate_report(result: RateSummary, path: Path) -> None:
    """Write the page of a sweep over rates: curves, capacities, and the ranking at each rate."""
    experiment, shown, notes = result.experiment, shown_rate(result), rate_notes(result)
    summary = result.by_rate[shown]
    roles = roles_at_rate(result, shown)
    runs = record_runs(summary, roles)
    kind = "Capacity" if result.is_single else "Sweep over rates"
    write_page(
        path, "rates.html", title=f"{kind}: {experiment.name}", about=sentence(notes[0]),
        trust=sweep_facts(experiment, (row.config for row in roles.values())),
        result=capacity_card(result, runs, notes[1:]),
        shown=format_rate(shown), key=curve_key(drawn_curves(result)), rates=rate_table(result),
        curves=rate_charts(result), **charts_of_runs(summary, runs),
        table=None if result.is_single else capacities(result),
        metric=result.main_metric, bounds=describe_bounds(experiment.subject_to),
        cut=MAX_TABLE_ROWS if len(result.curves) > MAX_TABLE_ROWS else 0,
    )  # fmt: skip


def shown_rate(result: RateSummary) -> float:
    """Return the rate of the charts of single runs: the winner's capacity, or the highest rate without a backlog."""
    capacity = None if result.winner is None else result.winner.capacity
    if capacity is not None:
        return max((rate for rate in result.rates if rate <= capacity.rate), default=result.rates[0])
    winners = {rate: summary.winner for rate, summary in result.by_rate.items()}
    stable = [rate for rate, winner in winners.items() if winner is not None and "saturated" not in winner.labels]
    return max(stable, default=result.rates[0])


def capacity_card(result: RateSummary, runs: Sequence[RecordedRun], lines: Sequence[str]) -> ResultCard:
    """Return the verdict, and the winner by capacity with its settings."""
    verdict, winner, notes = verdict_of(result), result.winner, list(map(sentence, lines))
    title, won = TITLES[verdict.kind], verdict.kind in ("winner", "capacity")
    if winner is None or winner.capacity is None:
        return ResultCard(title, verdict.text, notes=notes)
    big, settings = f"up to {winner.capacity.text}", setting_chips(winner.assignment)
    limit, server = runs[0].limit if runs else "", exported_server(result.experiment.tree(winner.config))
    return ResultCard(title, verdict.text, won, big, settings=settings, notes=notes, limit=limit, server=server)


def rate_table(result: RateSummary) -> Table:
    """Return the verdict at each rate; of a single configuration, its objectives at every tested rate."""
    if result.is_single:
        return page_table(point_columns(result), result.baseline.points)
    columns = [
        Column("rate", lambda item: item[0], lambda item: f"{item[0]:.10g}", "rate (req/s)", ("page",)),
        Column("result", lambda item: verdict_of(item[1]).text, shown=("page",), wrap=True),
    ]
    return page_table(columns, list(result.by_rate.items()))


def capacities(result: RateSummary) -> Table:
    """Return one row per configuration: settings, capacity, and a metric at each rate."""

    def style(curve: Curve) -> RowStyle:
        tags = [Tag("baseline")] if curve.is_baseline else []
        if curve.capacity is not None and curve.capacity.missed_at is not None:
            tags.append(Tag(f"at {format_rate(curve.capacity.missed_at)}: {curve.capacity.reason}", "bad"))
        kind = "is-baseline" if curve.is_baseline else "is-winner" if curve is result.winner else ""
        return RowStyle(curve.config, kind, tags)

    return page_table(capacity_columns(result), result.curves[:MAX_TABLE_ROWS], style)
