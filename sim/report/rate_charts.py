"""Charts over the request rate: one curve per configuration, with the constraints as lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Optional

from servesim.files.chart_style import SERIES
from servesim.runs.metric_table import format_number, metric_title
from servesim.runs.request_rate import format_rate
from servesim.statistics.constraints import Bound
from servesim.study.rate_summary import RateSummary
from servesim.study.rates import Curve, RatePoint

from .plots import Chart, Limit, Trace, axis_scale, bound_limit, plain, points, value_axis, with_limits

USUAL_METRICS = ("p99_ttft_ms", "mean_tpot_ms", "output_throughput")
MAX_NAMED = 8  # more curves are grey, except winner and baseline
MAX_CURVES = 60


class CurveStyle(NamedTuple):
    """How a curve is drawn."""

    colour: str  # @name of chart_style.py
    dashed: bool = False


Drawn = Sequence[tuple[Curve, CurveStyle]]


def drawn_curves(result: RateSummary) -> Drawn:
    """Return the curves of all configurations with their styles; winner and baseline first: long lists are cut."""
    return styled(sorted(result.curves, key=lambda curve: not curve.role))


def rate_charts(result: RateSummary) -> list[Chart]:
    """Return one chart per metric over the rate, and latency against throughput."""
    bounds, metrics = result.experiment.subject_to, chart_metrics(result)
    curves = drawn_curves(result)[:MAX_CURVES][::-1]  # winner and baseline last: on top of the others
    charts = [over_rate(curves, metric, bounds, f"rate-{number}") for number, metric in enumerate(metrics)]
    latency = next((metric for metric in metrics if metric.endswith("_ms")), None)
    if latency is not None and "output_throughput" in metrics:
        charts.append(over_rate(curves, latency, bounds, "latency-throughput", "output_throughput"))
    return charts


def chart_metrics(result: RateSummary) -> list[str]:
    """Return the metrics to draw: constraints, objectives, and the usual ones of a latency that is not drawn yet."""
    bounds, objectives = result.experiment.subject_to, result.experiment.objectives
    chosen = list(dict.fromkeys([*(bound.metric for bound in bounds), *(goal.metric for goal in objectives)]))
    for metric in USUAL_METRICS:
        kind = metric.removesuffix("_ms").rpartition("_")[2]
        if not any(kind in name for name in chosen):
            chosen.append(metric)
    return [metric for metric in chosen if any(curve.values(metric) for curve in result.curves)]


def styled(curves: Sequence[Curve]) -> Drawn:
    """Return each curve with its style: winner and baseline have their colours, many others are grey.

    A few others have different colours; when the colours are used up, they repeat as dashed lines.
    """
    free = [f"@{name}" for name in SERIES if name not in ("winner", "baseline", "point")]
    others = [id(curve) for curve in curves if not curve.role]
    styles = {curve: CurveStyle("@point") for curve in others}
    if len(others) <= MAX_NAMED:
        styles = {curve: CurveStyle(free[k % len(free)], k >= len(free)) for k, curve in enumerate(others)}
    return [(curve, CurveStyle(f"@{curve.role}") if curve.role else styles[id(curve)]) for curve in curves]


def curve_key(curves: Drawn) -> list[tuple[str, str, str]]:
    """Return the legend of the charts: CSS colour and line style, and the name of a curve."""
    entries = {}
    for curve, style in curves:
        entries[curve.title if style.colour != "@point" else "other configurations"] = style
    return [(style.colour[1:], "dashed" if style.dashed else "solid", name) for name, style in entries.items()]


def over_rate(curves: Drawn, metric: str, bounds: Sequence[Bound], id: str, against: Optional[str] = None) -> Chart:
    """Return a metric over the request rate, with its bounds and the capacities of winner and baseline.

    With `against`, the x axis is that metric: one point per rate.
    """
    unit, title = axis_scale(metric, [value for curve, _ in curves for _, value in curve.values(metric)])
    x_title = "request rate (req/s)" if against is None else axis_scale(against, [])[1]
    data, across, up = [], [], []
    for curve, style in curves:
        x = {point.rate: point.rate if against is None else value for point, value in curve.values(against or metric)}
        pairs = [(point, value / unit.divisor) for point, value in curve.values(metric) if point.rate in x]
        places = [(x[point.rate], value) for point, value in pairs]
        across += [place for place, _ in places]
        up += [value for _, value in places]
        data.append(curve_trace(curve, style, places, pairs, title))
    layout = {"xaxis": value_axis(x_title, across), "yaxis": value_axis(title, up), "showlegend": False}
    limits = [bound_limit("y", bound, unit) for bound in bounds if bound.metric == metric]
    if against is not None:
        caption, title = "One point per request rate. Better: down and right.", "against throughput"
    else:
        caption, title = "", "over the request rate"
        for curve, _ in reversed(curves):
            if curve.role and curve.capacity is not None and curve.capacity.rate:
                limits.append(Limit("x", curve.capacity.rate, f"{curve.role}: {curve.capacity.text}"))
    return Chart(id, f"{metric_title(metric)} {title}", data, with_limits(layout, limits, across), caption)


def curve_trace(
    curve: Curve,
    style: CurveStyle,
    places: Sequence[tuple[float, float]],
    pairs: Sequence[tuple[RatePoint, float]],
    title: str,
) -> Trace:
    """Return one curve; an open point does not meet the constraints."""
    hover = []
    for point, value in pairs:
        problem = f"<br>{plain(point.problem)}" if point.problem else ""
        name = f"<b>{curve.role or 'configuration'}</b><br>{plain(curve.label)}"
        hover.append(f"{name}<br>{format_rate(point.rate)}<br>{title}: {format_number(value)}{problem}")
    symbols = ["circle-open" if point.problem else "circle" for point, _ in pairs]
    size, rows = 8 if curve.role else 6, [[curve.config]] * len(places)
    trace = points(plain(curve.title), places, hover, style.colour, size=size, rows=rows)
    line = {"color": style.colour, "width": 2.5 if curve.role else 1.4, "dash": "dash" if style.dashed else "solid"}
    return {**trace, "mode": "lines+markers", "line": line, "marker": {**trace["marker"], "symbol": symbols}}
