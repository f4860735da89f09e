"""report.html of a sweep or a search: the winner, why it wins, trade-offs, parameters, queues and the table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from servesim.runs.metric_table import format_number
from servesim.runs.notes import LABEL_MEANINGS, sentence
from servesim.runs.request_rows import STATES
from servesim.runs.text import STATE_LABELS
from servesim.statistics.intervals import Interval
from servesim.statistics.number_format import format_mean
from servesim.statistics.objective import Objective
from servesim.study.columns import Column
from servesim.study.experiment import Experiment, format_value
from servesim.study.ranking import INCOMPLETE, Row, Summary
from servesim.study.table import format_count, format_difference, printed_label, sweep_columns
from servesim.study.verdict import (
    describe_confirmation,
    describe_constraints,
    describe_draws,
    verdict_of,
)

from .charts import Latencies, latency_charts, queue_charts, time_chart
from .knobs import Knob, heat_table, knob_charts, knobs, single_change_costs
from .page import (
    MAX_TABLE_ROWS,
    MetricFact,
    ResultCard,
    RowStyle,
    Table,
    Tag,
    page_table,
    setting_chips,
    write_page,
)
from .plots import Chart
from .recorded_runs import COLOURS, RecordedRun, compared_rows, leader, record_runs
from .trade_offs import point_names, slo_of, trade_offs
from .trust import sweep_facts

TITLES = {
    "winner": "Winner", "baseline": "No winner: nothing beats the baseline",
    "infeasible": "No winner: no configuration meets the constraints", "failed": "No winner",
}  # fmt: skip


def write_sweep_report(summary: Summary, path: Path) -> None:
    """Write the page."""
    roles, curves = compared_rows(summary), knobs(summary)
    runs = record_runs(summary, roles)
    write_page(
        path, "sweep.html", title=f"Sweep report: {summary.experiment.name}", about=describe_runs(summary),
        trust=sweep_facts(summary, runs, roles), result=result(summary),
        single_changes=single_changes(summary, curves), two_knobs=heat_table(summary),
        trade_offs=trade_offs(summary) if len(summary.rows) > 1 else [],
        knobs=knob_charts(curves), times=times(summary), table=configurations(summary),
        example=filter_example(summary), cut=MAX_TABLE_ROWS if len(summary.rows) > MAX_TABLE_ROWS else 0,
        some_cannot_win=not all(row.eligible for row in summary.rows), method=method(summary),
        names=point_names(summary), **charts_of_runs(summary, runs),
    )  # fmt: skip


def describe_counted(experiment: Experiment) -> str:
    """Return which requests the metrics include, as a sentence."""
    if experiment.steady_window is None:
        return "All requests count."
    warm_up, drain = experiment.steady_window
    return f"Steady state: the first {warm_up:.0%} and the last {drain:.0%} of the arrivals do not count."


def describe_runs(summary: Summary) -> str:
    """Return the line below the title: configurations, runs, and the requests that count."""
    counts = f"{format_count(len(summary.rows), 'configuration')}, {format_count(summary.run_count, 'simulated run')}"
    return f"{counts}. {describe_counted(summary.experiment)}"


def result(summary: Summary) -> ResultCard:
    """Return the verdict, and the leading configuration with its metrics."""
    verdict, row = verdict_of(summary), leader(summary)
    notes = [*describe_draws(summary), *describe_confirmation(summary), *describe_constraints(summary)]
    texts = list(map(sentence, notes))
    title, won = TITLES[verdict.kind], verdict.kind == "winner"
    if row is None:
        return ResultCard(title, verdict.text, notes=texts)
    first, *others = summary.experiment.objectives
    big = f"{first.metric.removesuffix('_ms')} {format_mean(row.means[first.metric], first.metric)}"
    facts = [metric_fact(row, objective) for objective in others]
    change, settings = compare_with_baseline(row, first), setting_chips(row.assignment)
    times = request_times(row, summary.baseline)
    return ResultCard(title, verdict.text, won, big, change, facts, settings, texts, times)


def metric_fact(row: Row, objective: Objective) -> MetricFact:
    """Return a further objective of the leading configuration."""
    metric = objective.metric
    value = format_mean(row.means[metric], metric)
    return MetricFact(metric.removesuffix("_ms"), value, compare_with_baseline(row, objective))


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
    total, before = sum(seconds.values()), sum(base.values())
    text = f"A request takes {format_number(total)} s on average"
    if row is baseline:
        largest = sorted(((seconds[name], STATE_LABELS[name]) for name in STATES), reverse=True)
        parts = [f"{name} {format_number(part)} s" for part, name in largest if part > 0.005 * total]
        return f"{text}: {', '.join(parts)}."
    changes = sorted(((seconds[name] - base[name], STATE_LABELS[name]) for name in STATES), key=lambda item: item[0])
    less = [f"{name} -{format_number(-change)} s" for change, name in changes if change < -0.005 * before]
    more = [f"{name} +{format_number(change)} s" for change, name in changes[::-1] if change > 0.005 * before]
    changed = ": " + ", ".join(less + more) if less or more else ""
    return f"{text} (baseline: {format_number(before)} s){changed}."


def single_changes(summary: Summary, curves: Sequence[Knob]) -> Table | None:
    """Return the cost of changing each setting of the winner, None if the sweep has no such configuration."""
    costs = single_change_costs(summary, curves)
    if not costs:
        return None
    objective = summary.experiment.objectives[0]
    signed = lambda cost: format_mean(cost.change, objective.metric, True)  # noqa: E731
    columns = [
        Column("setting", lambda cost: cost.knob, shown=("page",)),
        Column("changed to", lambda cost: cost.value, shown=("page",)),
        Column(f"change of {objective.metric}", lambda cost: cost.change.mean, signed, shown=("page",)),
        Column("effect", lambda cost: effect(cost.change, objective), shown=("page",)),
    ]
    return page_table(columns, costs)


def effect(change: Interval, objective: Objective) -> str:
    """Return whether a change is better, worse or not significant."""
    if change.mean == 0:
        return "none"
    if change.half_width is not None and not change.excludes_zero:
        return "not significant"
    word = "better" if objective.better(change.mean) else "worse"
    return word + (" (one run)" if change.half_width is None else "")


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


def filter_example(summary: Summary) -> str:
    """Return a term for the filter of the table, with a setting of this sweep."""
    for key, values in summary.experiment.knobs.items():
        return f"{key.rpartition('.')[2]}={format_value(values[-1])}"
    return "baseline"


def method(summary: Summary) -> dict[str, Any]:
    """Return how to read the page."""
    return {
        "confidence": f"{100 * summary.experiment.confidence:g} %",
        "draws": summary.draw_count,
        "margin": f"{100 * summary.experiment.indifference:g} %",
        "window": describe_counted(summary.experiment),
        "labels": [(printed_label(name), text) for name, text in LABEL_MEANINGS.items()],
    }
