"""report.html of any result; and the page of a sweep over rates: curves, capacities, and the ranking at each rate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from servesim.runs.notes import sentence
from servesim.runs.request_rate import format_rate
from servesim.statistics.constraints import describe_bounds
from servesim.study.columns import Column
from servesim.study.ranking import Summary
from servesim.study.rate_summary import RateSummary, capacity_columns, point_columns, rate_notes
from servesim.study.rates import Curve
from servesim.study.result import Result
from servesim.study.verdict import verdict_of

from .page import (
    MAX_TABLE_ROWS,
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
from .recorded_runs import RecordedRun, record_runs, roles_at_rate
from .sweep_page import TITLES, charts_of_runs, write_sweep_report
from .trust import sweep_facts


def write_report(result: Result, path: Path) -> None:
    """Write the page of a sweep or a search, with or without rates."""
    if isinstance(result, RateSummary):
        write_rate_report(result, path)
    else:
        write_sweep_report(result, path)


def write_rate_report(result: RateSummary, path: Path) -> None:
    """Write the page."""
    experiment, shown, notes = result.experiment, shown_rate(result), rate_notes(result)
    summary = result.by_rate[shown]
    roles = roles_at_rate(result, shown)
    runs = record_runs(summary, roles)
    objectives = [objective.metric for objective in experiment.objectives]
    curves, kind = drawn_curves(result), "Capacity" if result.is_single else "Sweep over rates"
    write_page(
        path, "rates.html", title=f"{kind}: {experiment.name}", about=sentence(notes[0]),
        trust=sweep_facts(experiment, (row.config for row in roles.values())),
        result=result_card(result, runs, notes[1:]),
        shown=format_rate(shown), key=curve_key(curves), rates=rate_table(result),
        curves=rate_charts(curves, experiment.subject_to, objectives), **charts_of_runs(summary, runs),
        table=None if result.is_single else capacities(result),
        metric=result.main_metric, bounds=describe_bounds(experiment.subject_to),
        cut=MAX_TABLE_ROWS if len(result.curves) > MAX_TABLE_ROWS else 0,
    )  # fmt: skip


def shown_rate(result: RateSummary) -> float:
    """Return the rate of the charts of single runs: the winner's capacity, or the highest rate without a backlog."""
    capacity = None if result.winner is None else result.winner.capacity
    if capacity is not None:
        return max((rate for rate in result.rates if rate <= capacity.rate), default=result.rates[0])
    stable = [rate for rate, summary in result.by_rate.items() if not is_saturated(summary)]
    return max(stable, default=result.rates[0])


def is_saturated(summary: Summary) -> bool:
    """Whether the backlog of the winner grows; also without a winner."""
    return summary.winner is None or "saturated" in summary.winner.labels


def result_card(result: RateSummary, runs: Sequence[RecordedRun], lines: Sequence[str]) -> ResultCard:
    """Return the verdict, and the winner by capacity with its settings."""
    verdict, winner, notes = result.verdict, result.winner, list(map(sentence, lines))
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
