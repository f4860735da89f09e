"""The effect of the parameters of a sweep: the metric over each of them, single changes of the winner, a heat table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

from servesim.core import BadInput
from servesim.runs.metric_table import Unit, metric_title
from servesim.statistics.intervals import Interval
from servesim.statistics.number_format import format_mean
from servesim.study.experiment import format_value, short_key
from servesim.study.knob_table import KnobTable, RowSearch, cell_text, knob_table, sorted_values
from servesim.study.ranking import Row, Summary

from .plots import Chart, Trace, axis_scale, common_range, log_axis, plain, points

MAX_TICKS = 10  # texts on the axis of a parameter
MAX_VALUES = 24  # rows or columns of a heat table


class CurvePoint(NamedTuple):
    """A value of a parameter and its result; the half-width is that of the paired difference from the winner."""

    value: Any
    result: Interval
    row: Row


@dataclass(frozen=True)
class Knob:
    """The first objective as a function of one parameter."""

    key: str
    metric: str
    best: Sequence[CurvePoint]  # the best configuration with each value
    single_change: Sequence[CurvePoint]  # the winner with only this parameter changed, if the sweep has it
    baseline: float

    @property
    def numeric(self) -> bool:
        """Whether all values are numbers."""
        return all(type(point.value) in (int, float) for point in self.best)

    @property
    def name(self) -> str:
        """The parameter's short name."""
        return short_key(self.key)


def knobs(summary: Summary) -> list[Knob]:
    """Return the curve of the first objective over each parameter, in the order of the sweep file."""
    search = RowSearch(summary, summary.experiment.objectives[0])
    curves = [knob_curve(search, key) for key in summary.experiment.knobs]
    return [knob for knob in curves if len(knob.best) > 1]


def knob_curve(search: RowSearch, key: str) -> Knob:
    """Return the curve of a parameter; configurations that are not eligible are left out."""
    summary, metric, winner = search.summary, search.objective.metric, search.summary.winner
    values = sorted_values(summary.experiment.knobs[key])
    best = [(value, search.best({key: value})) for value in values]
    eligible: dict[Optional[int], Row] = {row.config: row for row in summary.rows if row.eligible}
    changes = [] if winner is None else [{**winner.assignment, key: value} for value in values]
    single = [(value, eligible.get(summary.experiment.find_config(change))) for value, change in zip(values, changes)]
    return Knob(
        key, metric, curve_points(summary, [pair for pair in best if pair[1] and pair[1].eligible], metric),
        curve_points(summary, single, metric), summary.baseline.mean(metric),
    )  # fmt: skip


def curve_points(summary: Summary, rows: Sequence[tuple[Any, Optional[Row]]], metric: str) -> list[CurvePoint]:
    """Return points of a curve. If the bar of one reaches the winner's level, the difference is not significant."""
    points = []
    for value, row in rows:
        if row is not None and summary.winner is not None:
            change = summary.difference(row, summary.winner, metric)
            points.append(CurvePoint(value, Interval(row.mean(metric), change.half_width, change.n), row))
    return points


class SingleChange(NamedTuple):
    """The winner with another value of one parameter."""

    knob: str
    value: str
    change: Interval  # paired difference from the winner


def single_change_costs(summary: Summary, curves: Sequence[Knob]) -> list[SingleChange]:
    """Return what each single change costs, worst first."""
    winner, metric = summary.winner, summary.experiment.objectives[0].metric
    sign = summary.experiment.objectives[0].sign
    costs = []
    for knob in curves:
        for point in knob.single_change:
            if point.row is not winner and winner is not None:
                change = summary.difference(point.row, winner, metric)
                costs.append(SingleChange(knob.name, format_value(point.value), change))
    return sorted(costs, key=lambda cost: -sign * cost.change.mean)


class KnobScale(NamedTuple):
    """The common y axis of the charts of parameters."""

    unit: Unit
    title: str
    span: Sequence[float]  # powers of ten if it is logarithmic
    is_log: bool


def knob_scale(curves: Sequence[Knob]) -> KnobScale:
    """Return the y axis that shows all intervals; those below 0 of a positive metric are cut."""
    points = [point.result for knob in curves for point in (*knob.best, *knob.single_change)]
    ends = [mean + sign * (half_width or 0.0) for mean, half_width, _ in points for sign in (-1, 1)]
    unit, title = axis_scale(curves[0].metric, ends)
    if min(mean for mean, *_ in points) > 0:
        ends = [end for end in ends if end > 0]
    return KnobScale(unit, title, *common_range([end / unit.divisor for end in ends]))


def knob_charts(curves: Sequence[Knob]) -> list[Chart]:
    """Return one chart per parameter; all have the same y axis."""
    return [knob_chart(knob, f"knob-{index}", knob_scale(curves)) for index, knob in enumerate(curves)]


def knob_chart(knob: Knob, id: str, scale: KnobScale) -> Chart:
    """Return the chart of a parameter: the best with each value, and the winner with only this parameter changed."""
    x_axis, place = knob_axis(knob)
    data = []
    for name, curve, colour, marker in (
        ("best with this value", knob.best, "@front", ("circle", 7.0)),
        ("winner, only this setting changed", knob.single_change, "@winner", ("star-open", 12.0)),
    ):
        data.append(knob_trace(knob, curve, place, scale.unit, name, colour, marker))
    low, high = (10**end if scale.is_log else end for end in scale.span)
    y_axis: dict[str, Any] = {"title": {"text": f"{scale.title}{', log scale' if scale.is_log else ''}"}}
    y_axis |= {"range": scale.span, **(log_axis(low, high) if scale.is_log else {})}
    layout: dict[str, Any] = {"xaxis": x_axis, "yaxis": y_axis, "showlegend": False, "height": 260}
    level = knob.baseline / scale.unit.divisor
    if low <= level <= high:
        line = {"color": "@baseline", "width": 1.5, "dash": "dash"}
        layout["shapes"] = [{"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": level, "y1": level, "line": line}]
    return Chart(id, knob.name, data, layout, group="knobs")


def knob_trace(
    knob: Knob, curve: Sequence[CurvePoint], place: Mapping[str, Any], unit: Unit, name: str, colour: str,
    marker: tuple[str, float],
) -> Trace:  # fmt: skip
    """Return one curve of a parameter: points with intervals, connected if the values are numbers."""
    xy = [(place[repr(point.value)], point.result.mean / unit.divisor) for point in curve]
    hover = [
        f"<b>{plain(knob.name)} = {plain(format_value(point.value))}</b><br>{name}: "
        f"{format_mean(point.result, knob.metric, unit=unit)}<br>{plain(point.row.label)}"
        for point in curve
    ]
    bars = {"type": "data", "array": [(p.result.half_width or 0.0) / unit.divisor for p in curve], "color": colour}
    more: dict[str, Any] = {"error_y": {**bars, "thickness": 1.2, "width": 3}}
    if knob.numeric:
        dash = "solid" if curve is knob.best else "dot"
        more |= {"mode": "lines+markers", "line": {"color": colour, "width": 1.5, "dash": dash}}
    symbol, size = marker
    return points(
        name, xy, hover, colour, symbol=symbol, size=size, rows=[[point.row.config] for point in curve], **more
    )


def knob_axis(knob: Knob) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the x axis of a parameter and the place of each value: a number on a scale, or a category."""
    values = [point.value for point in knob.best]
    texts = [format_value(value) for value in values]
    is_log = knob.numeric and values[0] > 0 and values[-1] >= 10 * values[0]
    if is_log or (knob.numeric and is_evenly_spaced(values)):
        shown = spread([math.log(value) if is_log else value for value in values])
        axis: dict[str, Any] = {"tickvals": [values[k] for k in shown], "ticktext": [texts[k] for k in shown]}
        return {**axis, **({"type": "log"} if is_log else {})}, {repr(value): value for value in values}
    shortened = [plain(text if len(text) <= 22 else f"{text[:21]}…") for text in texts]
    shown = spread(list(range(len(values))))
    axis = {"type": "linear", "tickvals": shown, "ticktext": [shortened[k] for k in shown]}
    return {**axis, "range": [-0.5, len(values) - 0.5]}, {repr(value): k for k, value in enumerate(values)}


def spread(places: Sequence[float]) -> list[int]:
    """Return which of the rising places get a text on an axis: those that are far enough from each other."""
    gap = (places[-1] - places[0]) / MAX_TICKS
    shown: list[int] = []
    for index, place in enumerate(places):
        if not shown or place - places[shown[-1]] >= gap:
            shown.append(index)
    return shown


def is_evenly_spaced(values: Sequence[float]) -> bool:
    """Whether the values are evenly enough spaced for a linear axis."""
    gaps = [b - a for a, b in zip(values, values[1:])]
    return bool(gaps) and min(gaps) * 12 >= values[-1] - values[0]


class HeatCell(NamedTuple):
    """A configuration; `heat` is 1 for the best value of the table and 0 for the worst one."""

    text: str
    config: Optional[int]
    heat: float
    title: str = ""


class HeatTable(NamedTuple):
    """The content of the table."""

    caption: str
    corner: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[HeatCell]]]


def heat_table(summary: Summary) -> Optional[HeatTable]:
    """Return the first objective over the two parameters that change it most; None with fewer parameters.

    The random values of a search fill few cells; then each cell has the best values of the other parameters.
    """
    try:
        table = next((t for best in (False, True) if is_readable(t := knob_table(summary, best=best))), None)
    except BadInput:
        return None
    if table is None:
        return None
    rows = [
        (format_value(value), [heat_cell(row, table) for row in cells])
        for value, cells in zip(table.row_values, table.cells)
    ]
    shown = [row for cells in table.cells for row in cells if row is not None]
    notes = [table.unit.after(metric_title(table.metric)), table.note]
    notes += [f"* is {table.winner_name}"] if any(row is table.winner for row in shown) else []
    notes += ["! cannot win"] if any(not row.eligible for row in shown) else []
    return HeatTable(
        "; ".join(filter(None, notes)) + ".",
        f"{short_key(table.row_key)} \\ {short_key(table.column_key)}",
        [format_value(value) for value in table.column_values],
        rows,
    )


def is_readable(table: KnobTable) -> bool:
    """Whether a table has at most MAX_VALUES rows and columns, and at least half of its cells have a configuration."""
    cells = [cell for line in table.cells for cell in line]
    filled = sum(cell is not None for cell in cells)
    return max(len(table.row_values), len(table.column_values)) <= MAX_VALUES and 2 * filled >= len(cells)


def heat_cell(row: Optional[Row], table: KnobTable) -> HeatCell:
    """Return the cell of a configuration."""
    if row is None:
        return HeatCell("–", None, 0.0)
    return HeatCell(cell_text(row, table), row.config, heat_of(row, table), row.label)


def heat_of(row: Row, table: KnobTable) -> float:
    """Return where a value lies between the worst and the best one, on a logarithmic scale if all are positive."""
    sign = table.objective.sign
    levels = [other.mean(table.metric) for cells in table.cells for other in cells if other is not None]
    levels = [level for level in levels if not math.isnan(level)]
    level = row.mean(table.metric)
    if math.isnan(level) or not row.eligible or min(levels) == max(levels):
        return 0.0
    scale = math.log if min(levels) > 0 else float
    worst, best = (max(levels), min(levels)) if sign > 0 else (min(levels), max(levels))
    return (scale(level) - scale(worst)) / (scale(best) - scale(worst))
