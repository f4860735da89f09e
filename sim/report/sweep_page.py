"""report.html of a sweep or a search: the winner and why it wins; over rates, the curves and the capacities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
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
from .rate_charts import curve_key, drawn_curves, rate_charts
from .recorded_runs import COLOURS, RecordedRun, Roles, compared_rows, leader, record_runs, roles_at_rate
from .trade_offs import point_names, slo_of, trade_offs
from .trust import sweep_facts

TITLES = {
    "winner": "Winner", "baseline": "No winner: nothing beats the baseline", "rates": "Winner at each rate",
    "capacity": "Capacity", "infeasible": "No winner: no configuration meets the constraints", "failed": "No winner",
}  # fmt: skip


def write_report(result: Result, path: Path) -> None:
    """Write the page of a sweep or a search, with or without rates."""
    summary, roles, at = shown_runs(result)
    runs = record_runs(summary, roles)
    latencies = [Latencies(run.role, COLOURS[run.role], run.latencies) for run in runs]
    if isinstance(result, RateSummary):
        notes, content = rate_notes(result), content_over_rates(result)
        if not result.experiment.subject_to:  # the notes are those of one rate
            notes[0] = f"at each of {len(result.rates)} rates: {notes[0]}"
    else:
        notes, content = table_notes(result), content_at_one_rate(result, roles)
    write_page(
        path, "sweep.html", about=sentence(notes[0]),
        trust=sweep_facts(result.experiment, (row.config for row in roles.values())),
        result=result_card(result, runs, notes[1:]), latencies=latency_charts(latencies, slo_of(summary)),
        queues=queue_charts(runs), at=at,
        recorded=f"The first replication, {runs[0].requests:,} requests." if runs else "", **content,
    )  # fmt: skip


def shown_runs(result: Result) -> tuple[Summary, Roles, str]:
    """Return the ranking and the configurations whose single runs the page shows, and at which rate.

    Over rates, it is the rate of the winner's capacity, or the highest one without a backlog.
    """
    if isinstance(result, Summary):
        return result, compared_rows(result), ""
    capacity = None if result.winner is None else result.winner.capacity
    if capacity is not None:
        rates = [rate for rate in result.rates if rate <= capacity.rate]
    else:
        winners = {rate: summary.winner for rate, summary in result.by_rate.items()}
        rates = [rate for rate, row in winners.items() if row is not None and not row.is_saturated]
    rate = max(rates, default=result.rates[0])
    return result.by_rate[rate], roles_at_rate(result, rate), f" at {format_rate(rate)}"


def content_at_one_rate(summary: Summary, roles: Roles) -> dict[str, Any]:
    """Return the parts of the page of a sweep without rates: trade-offs, parameters and the table."""
    bars = [(role, row.time_breakdown()) for role, row in roles.items()]
    bars = [(role, seconds) for role, seconds in bars if seconds]
    return {
        "title": f"Sweep report: {summary.experiment.name}", "rates": None, "table": configurations(summary),
        "trade_offs": trade_offs(summary) if len(summary.rows) > 1 else [], "knobs": knob_charts(knobs(summary)),
        "times": [time_chart(bars)] if bars else [], "names": point_names(summary), "draws": summary.draw_count,
        "cut": MAX_TABLE_ROWS if len(summary.rows) > MAX_TABLE_ROWS else 0,
    }  # fmt: skip


def content_over_rates(result: RateSummary) -> dict[str, Any]:
    """Return the parts of the page of a sweep over rates: curves, the ranking at each rate, and capacities."""
    return {
        "title": f"{'Capacity' if result.is_single else 'Sweep over rates'}: {result.experiment.name}",
        "rates": rate_table(result), "table": None if result.is_single else configurations(result),
        "curves": rate_charts(result), "key": curve_key(drawn_curves(result)), "metric": result.main_metric,
        "bounds": describe_bounds(result.experiment.subject_to), "times": [],
        "cut": MAX_TABLE_ROWS if len(result.curves) > MAX_TABLE_ROWS else 0,
    }  # fmt: skip


def result_card(result: Result, runs: Sequence[RecordedRun], notes: Sequence[str]) -> ResultCard:
    """Return the verdict, and the leading configuration with its metrics; over rates, the winner by capacity."""
    verdict, first = verdict_of(result), leader(result) if isinstance(result, Summary) else result.winner
    won, lines = verdict.kind in ("winner", "capacity"), list(map(sentence, notes))
    card = ResultCard(TITLES[verdict.kind], verdict.text, won, notes=lines)
    if isinstance(result, Summary) and isinstance(first, Row):
        card = card_of_row(card, result, first)
    elif isinstance(first, Curve) and first.capacity is not None:
        card = replace(card, big=f"up to {first.capacity.text}")
    else:
        return card
    can_win = isinstance(first, Curve) or first.eligible
    server = exported_server(result.experiment.tree(first.config)) if can_win else None
    limit = runs[0].limit if runs else ""
    return replace(card, settings=setting_chips(first.assignment), limit=limit, server=server)


def card_of_row(card: ResultCard, summary: Summary, row: Row) -> ResultCard:
    """Return a card with the objectives of a configuration, and where its requests spend their time."""
    first, *others = summary.experiment.objectives
    levels = {goal.metric: format_mean(row.means[goal.metric], goal.metric) for goal in (first, *others)}
    facts = [MetricFact(goal.metric, levels[goal.metric], compare_with_baseline(row, goal)) for goal in others]
    change, times = compare_with_baseline(row, first), request_times(row, summary.baseline)
    return replace(card, big=f"{first.metric} {levels[first.metric]}", change=change, facts=facts, times=times)


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


def configurations(result: Result) -> Table:
    """Return the table of all configurations; over rates with their capacities, and a metric at each rate."""
    rows: list[Any]
    if isinstance(result, RateSummary):
        columns, rows = capacity_columns(result), list(result.curves[:MAX_TABLE_ROWS])
    else:
        rest = [row for row in result.rows[MAX_TABLE_ROWS:] if row is result.baseline or row.on_pareto_front]
        columns, rows = sweep_columns(result), [*result.rows[:MAX_TABLE_ROWS], *rest]

    def style(row: Any) -> RowStyle:
        kind = "is-baseline" if row is result.baseline else "is-winner" if row is result.winner else ""
        return RowStyle(row.config, kind, row_tags(row) if isinstance(row, Row) else curve_tags(row))

    return page_table(columns, rows, style)


def row_tags(row: Row) -> list[Tag]:
    """Return the labels of a configuration; those that say why it cannot win are red."""
    reasons = (*INCOMPLETE, *row.misses)
    return [Tag(printed_label(name), "bad" if name in reasons else "") for name in row.labels]


def curve_tags(curve: Curve) -> list[Tag]:
    """Return what limits the capacity of a configuration."""
    tags = [Tag("baseline")] if curve.is_baseline else []
    if curve.capacity is not None and curve.capacity.missed_at is not None:
        tags.append(Tag(f"at {format_rate(curve.capacity.missed_at)}: {curve.capacity.reason}", "bad"))
    return tags


def rate_table(result: RateSummary) -> Table:
    """Return the verdict at each rate; of a single configuration, its objectives at every tested rate."""
    if result.is_single:
        return page_table(point_columns(result), result.baseline.points)
    columns = [
        Column("rate", lambda item: item[0], lambda item: f"{item[0]:.10g}", "rate (req/s)", ("page",)),
        Column("result", lambda item: verdict_of(item[1]).text, shown=("page",), wrap=True),
    ]
    return page_table(columns, list(result.by_rate.items()))
