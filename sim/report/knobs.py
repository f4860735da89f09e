"""The effect of the parameters of a sweep: the metric over each of them, and single changes of the winner."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

from servesim.runs.metric_table import Unit
from servesim.statistics.intervals import Interval
from servesim.statistics.number_format import format_mean
from servesim.study.experiment import format_value, short_key
from servesim.study.knob_table import UNSET, RowSearch, sorted_values
from servesim.study.ranking import Row, Summary

from .plots import Chart, Trace, axis_scale, common_range, log_axis, plain, points

MAX_TICKS = 10  # texts on the axis of a parameter


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
    others = dict.fromkeys(summary.experiment.knobs, UNSET)
    changes = [] if winner is None else [{**others, **winner.assignment, key: value} for value in values]
    single = [(value, search.best(change)) for value, change in zip(values, changes)]
    points, changed = (curve_points(summary, rows, metric) for rows in (best, single))
    return Knob(key, metric, points, changed, summary.baseline.mean(metric))


def curve_points(summary: Summary, rows: Sequence[tuple[Any, Optional[Row]]], metric: str) -> list[CurvePoint]:
    """Return points of a curve. If the bar of one reaches the winner's level, the difference is not significant."""
    points = []
    for value, row in rows:
        if row is not None and row.eligible and summary.winner is not None:
            change = summary.difference(row, summary.winner, metric)
            points.append(CurvePoint(value, Interval(row.mean(metric), change.half_width, change.n), row))
    return points


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


def knob_axis(knob: Knob) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the x axis of a parameter and the place of each value: neighbours have the same distance."""
    values = [point.value for point in knob.best]
    shown = range(0, len(values), math.ceil(len(values) / MAX_TICKS))
    texts = [format_value(values[k]) for k in shown]
    shortened = [plain(text if len(text) <= 22 else f"{text[:21]}…") for text in texts]
    axis = {"tickvals": list(shown), "ticktext": shortened, "range": [-0.5, len(values) - 0.5]}
    return axis, {repr(value): k for k, value in enumerate(values)}
