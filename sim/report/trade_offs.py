"""Every configuration by two measures, with the Pareto front of these two as a line."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from servesim.config.scenario import Scenario
from servesim.runs.metric_table import Unit, format_number
from servesim.statistics.objective import Objective
from servesim.study.ranking import Row, Summary
from servesim.study.table import format_count

from .plots import Chart, Limit, Trace, axis_scale, bound_limit, line, plain, points, value_axis, with_limits

MAX_POINTS = 1000  # of the configurations that are not on a front; the table has the same limit
Place = tuple[float, float]
Groups = dict[tuple[str, str, str, float], list[Row]]  # name, colour, symbol and size: its configurations


@dataclass(frozen=True)
class Measure:
    """A metric of a configuration on an axis."""

    metric: str
    goal: str  # min | max
    per_user: bool = False  # tokens/s of one user, from the metric TPOT

    def of(self, row: Row) -> float:
        """Return the value of a configuration, NaN if it has none."""
        value = row.means[self.metric].mean if self.metric in row.means else row.mean(self.metric)
        return self.convert(value)

    def convert(self, value: float) -> float:
        """Return the value on the axis of a value of the metric."""
        return value if not self.per_user else 1000 / value if value > 0 else math.nan

    def scale(self, values: Sequence[float]) -> tuple[Unit, str]:
        """Return the unit and the title of the axis."""
        per_user = Unit("tok/s"), "Output throughput per user (tok/s)"
        return per_user if self.per_user else axis_scale(self.metric, values)

    @property
    def sign(self) -> int:
        """1 if small values are better, -1 if large ones are."""
        return 1 if self.goal == "min" else -1


def measure(objective: Objective) -> Measure:
    """Return an objective as a measure."""
    return Measure(objective.metric, objective.goal)


def trade_offs(summary: Summary) -> list[Chart]:
    """Return one chart per pair of measures."""
    charts = [trade_off(summary, x, y, f"trade-off-{number}") for number, (x, y) in enumerate(pairs(summary))]
    return [chart for chart in charts if chart is not None]


def pairs(summary: Summary) -> list[tuple[Measure, Measure]]:
    """Return the pairs (x, y): the objectives, throughput against the speed of one user, TTFT against throughput.

    Metrics of constraints that are on none of them follow, over the first objective.
    """
    objectives = [measure(objective) for objective in summary.experiment.objectives]
    throughput = Measure("output_throughput", "max")
    ttft = next((m for m in objectives if m.metric.endswith("_ttft_ms")), Measure("p99_ttft_ms", "min"))
    chosen = [(objectives[0], other) for other in objectives[1:]]
    chosen += [(Measure("mean_tpot_ms", "max", per_user=True), throughput), (throughput, ttft)]
    drawn = {m.metric for pair in chosen for m in pair} | {objectives[0].metric}
    limited = {bound.metric: "min" if bound.sign == "<=" else "max" for bound in summary.experiment.subject_to}
    chosen += [(objectives[0], Measure(metric, goal)) for metric, goal in limited.items() if metric not in drawn]
    unique = {frozenset(pair): pair for pair in reversed(chosen)}
    return [pair for pair in chosen if unique[frozenset(pair)] is pair]


def measured_rows(summary: Summary, x: Measure, y: Measure) -> dict[int, tuple[float, float]]:
    """Return both values of every configuration that has them; empty if all values are equal."""
    values = {row.config: (x.of(row), y.of(row)) for row in summary.rows}
    known = {config: pair for config, pair in values.items() if not any(map(math.isnan, pair))}
    return known if len(set(known.values())) > 1 else {}


def trade_off(summary: Summary, x: Measure, y: Measure, id: str) -> Chart | None:
    """Return one chart, None if fewer than two configurations have both measures."""
    values = measured_rows(summary, x, y)
    rows = [row for row in summary.rows if row.config in values]
    if not rows:
        return None
    across, x_title = x.scale([values[row.config][0] for row in rows])
    up, y_title = y.scale([values[row.config][1] for row in rows])
    place = {row.config: (values[row.config][0] / across.divisor, values[row.config][1] / up.divisor) for row in rows}
    front = front_rows([row for row in rows if row.eligible], x, y)
    data = [line("Pareto front", [place[row.config] for row in front], "@front", hoverinfo="skip")]
    data += draw_groups(group_rows(summary, rows, front), place, x_title, y_title)
    layout: dict[str, Any] = {
        "xaxis": value_axis(x_title, [a for a, _ in place.values()]),
        "yaxis": value_axis(y_title, [b for _, b in place.values()]),
    }
    limits = [*limits_of(summary, x, "x", across), *limits_of(summary, y, "y", up)]
    layout = with_limits({**layout, "showlegend": False}, limits, [a for a, _ in place.values()])
    return Chart(id, f"{short(y_title)} against {short(x_title)}", data, layout, caption=explain(x, y))


def front_rows(rows: Sequence[Row], x: Measure, y: Measure) -> list[Row]:
    """Return the configurations on the Pareto front of two measures, in the order of the line."""
    scores = sorted(
        ((x.sign * x.of(row), y.sign * y.of(row), row.rank, row) for row in rows), key=lambda item: item[:3]
    )
    front: list[tuple[float, float, Row]] = []
    for first, second, _, row in scores:  # in this order, a row is on the front if it is the best so far by `y`
        if not front or second < front[-1][1] or (first, second) == front[-1][:2]:
            front.append((first, second, row))
    return [row for _, _, row in front[:: x.sign]]


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
        hover = [hover_text(x_title, y_title, place[row.config], len(same)) for row, same in zip(first, together)]
        shown = [place[row.config] for row in first]
        data.append(points(name, shown, hover, colour, symbol=symbol, size=size, rows=together, meta="named"))
    return data


def hover_text(x_title: str, y_title: str, place: Place, count: int) -> str:
    """Return both values of a point; `count` configurations are at this place. script.js puts the name before it."""
    values = f"{x_title}: {format_number(place[0])}<br>{y_title}: {format_number(place[1])}"
    others = f"<br>and {format_count(count - 1, 'other configuration')} with these values" if count > 1 else ""
    return f"{values}{others}"


def point_names(summary: Summary) -> dict[int, str]:
    """Return rank, settings and labels of the configurations, for the hover texts of all charts."""
    rows = [*summary.rows[: MAX_POINTS + 1], *(row for row in summary.rows[MAX_POINTS + 1 :] if row.on_pareto_front)]
    return {row.config: point_name(row) for row in (*rows, summary.baseline)}


def point_name(row: Row) -> str:
    """Return rank, settings and labels of a configuration."""
    labels = f"{plain(', '.join(row.labels))}<br>" if row.labels else ""
    return f"<b>rank {row.rank}</b><br>{plain(row.label)}<br>{labels}"


def limits_of(summary: Summary, measure: Measure, side: str, unit: Unit) -> list[Limit]:
    """Return the constraints and the SLO of the scenario on one axis."""
    bounds = [bound for bound in summary.experiment.subject_to if bound.metric == measure.metric]
    unit = Unit("ms") if measure.per_user else unit
    limits = [bound_limit(side, bound, unit) for bound in bounds]
    limits = [limit._replace(value=measure.convert(limit.value)) for limit in limits]
    name = measure.metric.removesuffix("_ms").rpartition("_")[2]
    bound = slo_of(summary).get(name) if measure.metric.endswith("_ms") else None
    if bound is not None and not limits:
        text = f"SLO {name} {1e3 * bound / unit.divisor:g} {unit.name}"
        limits.append(Limit(side, measure.convert(1e3 * bound) / unit.divisor, text))
    return limits


def slo_of(summary: Summary) -> dict[str, float]:
    """Return the SLO of the base scenario in seconds."""
    return Scenario.model_validate(summary.experiment.tree(0)).slo.seconds()


def explain(x: Measure, y: Measure) -> str:
    """Return where the best configurations are, and the meaning of a derived measure."""
    text = f"Better: {'up' if y.goal == 'max' else 'down'} and {'right' if x.goal == 'max' else 'left'}."
    return f"{text} Output throughput per user = 1000 / mean TPOT in ms." if x.per_user or y.per_user else text


def short(title: str) -> str:
    """Return an axis title without its unit and its explanation."""
    return title.partition(" (")[0]
