"""Every configuration by two metrics, with the Pareto front of these two as a line."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from servesim.config.scenario import Scenario
from servesim.runs.metric_table import Unit, format_number, metric_title, title_inside
from servesim.statistics.objective import Objective
from servesim.study.ranking import Row, Summary, pareto_front
from servesim.study.table import format_count

from .plots import Chart, Limit, Trace, axis_scale, bound_limit, line, plain, points, value_axis, with_limits

MAX_POINTS = 1000  # of the configurations that are not on a front; the table has the same limit
Place = tuple[float, float]
Groups = dict[tuple[str, str, str, float], list[Row]]  # name, colour, symbol and size: its configurations


def trade_offs(summary: Summary) -> list[Chart]:
    """Return one chart per pair of metrics."""
    charts = [trade_off(summary, x, y, f"trade-off-{number}") for number, (x, y) in enumerate(pairs(summary))]
    return [chart for chart in charts if chart is not None]


def pairs(summary: Summary) -> list[tuple[Objective, Objective]]:
    """Return the pairs (x, y): the objectives, throughput against TPOT, TTFT against throughput.

    Metrics of constraints that are on none of them follow, over the first objective.
    """
    first, *others = summary.experiment.objectives
    throughput, tpot = Objective("output_throughput", "max"), Objective("mean_tpot_ms", "min")
    ttft = next((o for o in (first, *others) if o.metric.endswith("_ttft_ms")), Objective("p99_ttft_ms", "min"))
    chosen = [*((first, other) for other in others), (tpot, throughput), (throughput, ttft)]
    drawn = {objective.metric for pair in chosen for objective in pair} | {first.metric}
    limited = {bound.metric: "min" if bound.sign == "<=" else "max" for bound in summary.experiment.subject_to}
    chosen += [(first, Objective(metric, goal)) for metric, goal in limited.items() if metric not in drawn]
    unique = {frozenset(pair): pair for pair in reversed(chosen)}
    return [pair for pair in chosen if unique[frozenset(pair)] is pair]


def trade_off(summary: Summary, x: Objective, y: Objective, id: str) -> Chart | None:
    """Return one chart, None if fewer than two configurations have both metrics."""
    levels = {row.config: (row.mean(x.metric), row.mean(y.metric)) for row in summary.rows}
    values = {config: pair for config, pair in levels.items() if not any(map(math.isnan, pair))}
    rows = [row for row in summary.rows if row.config in values]
    if len(set(values.values())) < 2:
        return None
    across, x_title = axis_scale(x.metric, [values[row.config][0] for row in rows])
    up, y_title = axis_scale(y.metric, [values[row.config][1] for row in rows])
    place = {row.config: (values[row.config][0] / across.divisor, values[row.config][1] / up.divisor) for row in rows}
    front = front_rows([row for row in rows if row.eligible], x, y)
    data = [line("Pareto front", [place[row.config] for row in front], "@front", hoverinfo="skip")]
    data += draw_groups(group_rows(summary, rows, front), place, x_title, y_title)
    layout: dict[str, Any] = {
        "xaxis": value_axis(x_title, [a for a, _ in place.values()]),
        "yaxis": value_axis(y_title, [b for _, b in place.values()]),
    }
    limits = [*limits_of(summary, x.metric, "x", across), *limits_of(summary, y.metric, "y", up)]
    layout = with_limits({**layout, "showlegend": False}, limits, [a for a, _ in place.values()])
    better = f"Better: {'up' if y.goal == 'max' else 'down'} and {'right' if x.goal == 'max' else 'left'}."
    return Chart(id, f"{metric_title(y.metric)} against {title_inside(x.metric)}", data, layout, better)


def front_rows(rows: Sequence[Row], x: Objective, y: Objective) -> list[Row]:
    """Return the configurations on the Pareto front of two metrics, in the order of the line."""
    front = pareto_front([[x.sign * row.mean(x.metric), y.sign * row.mean(y.metric)] for row in rows])
    return sorted((rows[index] for index in front), key=lambda row: (row.mean(x.metric), row.mean(y.metric), row.rank))


def group_rows(summary: Summary, rows: Sequence[Row], front: Sequence[Row]) -> Groups:
    """Return the configurations by how they are drawn: (name, colour, symbol, size)."""
    special = {row.config for row in (summary.winner, summary.baseline) if row is not None}
    on_front = [row for row in front if row.config not in special]
    drawn = special | {row.config for row in on_front}
    others = [row for row in rows if row.config not in drawn][:MAX_POINTS]
    groups = {
        ("cannot win", "@point", "circle-open", 6.0): [row for row in others if not row.eligible],
        ("other", "@point", "circle", 6.0): [row for row in others if row.eligible],
        ("on the Pareto front", "@front", "circle", 8.0): on_front,
        ("baseline", "@baseline", "diamond", 12.0): [row for row in rows if row is summary.baseline],
        ("winner", "@winner", "star", 15.0): [row for row in rows if row is summary.winner is not summary.baseline],
    }
    return {style: members for style, members in groups.items() if members}


def draw_groups(groups: Groups, place: Mapping[int, Place], x_title: str, y_title: str) -> list[Trace]:
    """Return the points of all groups. Configurations at the same place are one point, of the most special group."""
    at_place: dict[Place, list[int]] = {}
    for members in reversed(list(groups.values())):
        for row in members:
            at_place.setdefault(place[row.config], []).append(row.config)
    data = []
    for (name, colour, symbol, size), members in groups.items():
        first = [row for row in members if at_place[place[row.config]][0] == row.config]
        together = [at_place[place[row.config]] for row in first]
        shown, hover = [place[row.config] for row in first], []
        for (x, y), same in zip(shown, together):  # script.js puts the name before it
            others = f"<br>and {format_count(len(same) - 1, 'other configuration')} with these values"
            values = f"{x_title}: {format_number(x)}<br>{y_title}: {format_number(y)}"
            hover.append(f"{values}{others if len(same) > 1 else ''}")
        data.append(points(name, shown, hover, colour, symbol=symbol, size=size, rows=together, meta="named"))
    return data


def point_names(summary: Summary) -> dict[int, str]:
    """Return rank, settings and labels of the configurations, for the hover texts of all charts."""
    rows = [*summary.rows[: MAX_POINTS + 1], *(row for row in summary.rows[MAX_POINTS + 1 :] if row.on_pareto_front)]
    labels = {row.config: f"{plain(', '.join(row.labels))}<br>" for row in summary.rows if row.labels}
    shown = (*rows, summary.baseline)
    return {r.config: f"<b>rank {r.rank}</b><br>{plain(r.label)}<br>{labels.get(r.config, '')}" for r in shown}


def limits_of(summary: Summary, metric: str, side: str, unit: Unit) -> list[Limit]:
    """Return the constraints and the SLO of the scenario on one axis."""
    limits = [bound_limit(side, bound, unit) for bound in summary.experiment.subject_to if bound.metric == metric]
    name = metric.removesuffix("_ms").rpartition("_")[2]
    bound = slo_of(summary).get(name) if metric.endswith("_ms") else None
    if bound is not None and not limits:
        level = 1e3 * bound / unit.divisor
        limits.append(Limit(side, level, f"SLO {name} {level:g} {unit.name}"))
    return limits


def slo_of(summary: Summary) -> dict[str, float]:
    """Return the SLO of the base scenario in seconds."""
    return Scenario.model_validate(summary.experiment.tree(0)).slo.seconds()
