"""The parts of a Plotly chart as plain dictionaries: axes, points, lines and limits.

A colour is `@name` of chart_style.py: script.js replaces it, so that charts follow the light or dark mode of the page.
Texts of users (names, settings) pass `plain`, because Plotly reads a few HTML tags in texts.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, NamedTuple, Optional

from servesim.runs.metric_table import Unit, metric_title, unit_of
from servesim.statistics.constraints import Bound

Trace = dict[str, Any]
HOVER = "%{hovertext}<extra></extra>"
MARGIN = 0.06  # of a common range


@dataclass(frozen=True)
class Chart:
    """One chart of a page: Plotly's data and layout."""

    id: str
    title: str
    data: Sequence[Trace]
    layout: dict[str, Any] = field(default_factory=dict)
    caption: str = ""
    group: str = ""  # charts of one group share the range of their y axes, also after a zoom

    def as_json(self) -> dict[str, Any]:
        """Return what script.js draws."""
        return {"data": list(self.data), "layout": self.layout, "group": self.group}


def plain(text: str, width: int = 60) -> str:
    """Return a text of a user for Plotly, without tags and in short lines."""
    lines = textwrap.wrap(text, width, break_long_words=True) or [""]
    return "<br>".join(escape(line, quote=False) for line in lines)


def spans_decade(values: Iterable[float]) -> bool:
    """Whether an axis of these values is logarithmic: all are positive, and they span a decade or more."""
    numbers = [value for value in values if not math.isnan(value)]
    return bool(numbers) and min(numbers) > 0 and max(numbers) >= 10 * min(numbers)


def axis_scale(metric: str, values: Iterable[float]) -> tuple[Unit, str]:
    """Return the unit and the title of an axis."""
    unit = unit_of(metric, values)
    return unit, unit.after(metric_title(metric))


def value_axis(title: str, values: Iterable[float]) -> dict[str, Any]:
    """Return an axis that shows all values."""
    numbers = [value for value in values if not math.isnan(value)]
    if not spans_decade(numbers):
        return {"title": {"text": title}}
    return {"title": {"text": f"{title}, log scale"}, **log_axis(min(numbers), max(numbers))}


def log_axis(low: float, high: float) -> dict[str, Any]:
    """Return a logarithmic axis with ticks at 1, 2 and 5 of each decade, or at powers of ten if it is long."""
    steps = (1, 2, 5) if high < 300 * low else (1,)
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    values = [step * 10.0**decade for decade in decades for step in steps]
    return {"type": "log", "tickvals": values, "ticktext": [f"{value:,.12g}" for value in values]}


def common_range(values: Sequence[float]) -> tuple[list[float], bool]:
    """Return one range for several charts, in Plotly's form, and whether it is logarithmic.

    It is at least 2 % of the value wide, so that small changes look small.
    """
    low, high = min(values), max(values)
    if spans_decade(values):
        room = MARGIN * math.log10(high / low)
        return [math.log10(low) - room, math.log10(high) + room], True
    room = max(MARGIN * (high - low), 0.01 * abs(low + high) / 2 - (high - low) / 2, 1e-12)
    bottom = low - room
    return [max(0.0, bottom) if low >= 0 else bottom, high + room], False


def points(
    name: str, xy: Sequence[tuple[float, float]], hover: Sequence[str], colour: str, *,
    symbol: str = "circle", size: float = 7, rows: Optional[Sequence[Sequence[int]]] = None, **more: Any,
) -> Trace:  # fmt: skip
    """Return points; `rows` are the configurations of each, which link it to the table."""
    trace = {
        "type": "scatter", "mode": "markers", "name": name, "x": [x for x, _ in xy], "y": [y for _, y in xy],
        "hovertext": list(hover), "hovertemplate": HOVER, "marker": {"color": colour, "symbol": symbol, "size": size},
        **more,
    }  # fmt: skip
    return trace if rows is None else {**trace, "customdata": list(rows)}


def line(name: str, xy: Sequence[tuple[float, float]], colour: str, dash: str = "solid", **more: Any) -> Trace:
    """Return a line without points."""
    style = {"color": colour, "width": 2, "dash": dash}
    return {
        "type": "scatter", "mode": "lines", "name": name, "x": [x for x, _ in xy], "y": [y for _, y in xy],
        "line": style, **more,
    }  # fmt: skip


def metric_rows_layout(names: Sequence[str], x_title: str, legend: bool = False) -> dict[str, Any]:
    """Return the layout of a chart with one row per metric, the first one on top, and a line at 0."""
    x_axis = {"title": {"text": x_title}, "rangemode": "tozero", "zeroline": True, "zerolinecolor": "@soft"}
    y_axis = {"tickvals": list(range(len(names))), "ticktext": list(names), "range": [len(names) - 0.5, -0.5]}
    return {"xaxis": x_axis, "yaxis": y_axis, "height": 140 + 42 * len(names), "showlegend": legend}


class Limit(NamedTuple):
    """A line across a chart: an SLO, a constraint or a capacity."""

    side: str  # the axis of its value: x | y
    value: float
    text: str


def bound_limit(side: str, bound: Bound, unit: Unit) -> Limit:
    """Return a constraint with the unit of its axis: `P99 TTFT <= 5 s`."""
    level = bound.value / unit.divisor
    return Limit(side, level, f"{metric_title(bound.metric)} {bound.sign} {level:g} {unit.name}".strip())


def limit_line(limit: Limit, above: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the shape and the annotation of a limit; the text of a vertical line is `above` the chart or along it."""
    side, value, text = limit
    other = "y" if side == "x" else "x"
    shape = {
        "type": "line", f"{side}0": value, f"{side}1": value, f"{other}0": 0, f"{other}1": 1, f"{other}ref": "paper",
        "line": {"color": "@limit", "width": 1.5, "dash": "dot"}, "layer": "below",
    }  # fmt: skip
    place: dict[str, Any] = {"x": 0, "xref": "paper", "y": value, "xanchor": "left", "yanchor": "bottom"}
    if side == "x":
        place = {"x": value, "y": 1, "yref": "paper"}
        place |= {"yanchor": "bottom"} if above else {"xanchor": "right", "yanchor": "top", "textangle": -90}
    return shape, {"text": text, "showarrow": False, "font": {"color": "@limit", "size": 11}, **place}


def with_limits(layout: dict[str, Any], limits: Sequence[Limit], across: Sequence[float] = ()) -> dict[str, Any]:
    """Return a layout with the lines of limits; values on a logarithmic axis must be positive.

    A chart with a legend above it has no room for texts there. `across` are the values on the x axis: a text near an
    end is not centred at its line, so that it stays inside the frame.
    """
    shapes, notes, rows = [], [], 0
    for limit in limits:
        is_log = layout.get(f"{limit.side}axis", {}).get("type") == "log"
        if is_log and limit.value <= 0:
            continue
        shape, note = limit_line(limit, not layout.get("showlegend", True))
        note[limit.side] = math.log10(limit.value) if is_log else limit.value  # a shape takes the value itself
        if note.get("yanchor") == "bottom" and limit.side == "x":  # one line of text each, so that none overlap
            note |= {"yshift": 14 * rows, "xanchor": text_anchor(limit.value, across, is_log)}
            rows += 1
        shapes.append(shape)
        notes.append(note)
    return {**layout, "shapes": shapes, "annotations": notes, "meta": {"above": rows}} if shapes else layout


def text_anchor(value: float, across: Sequence[float], is_log: bool) -> str:
    """Return the side of a text that is at its line: left, center or right."""
    low, high = min((value, *across)), max((value, *across))
    if is_log:
        value, low, high = math.log(value), math.log(low), math.log(high)
    part = (value - low) / (high - low) if high > low else 0.5
    return "left" if part < 1 / 3 else "right" if part > 2 / 3 else "center"
