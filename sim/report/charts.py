"""Charts of a sweep: parameters, time breakdown, latencies of requests, and queues over time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from servesim.runs.request_rows import STATES
from servesim.statistics.number_format import format_mean, format_number
from servesim.study.experiment import format_value

from .knob_curves import CurvePoint, Knob
from .plots import (
    HOVER,
    Chart,
    Limit,
    Trace,
    axis_scale,
    common_range,
    line,
    log_axis,
    plain,
    points,
    value_axis,
    with_limits,
)
from .recorded_runs import QUANTILES, RecordedRun

STATE_LEGEND = {
    "front_end": "front end", "queued": "queued", "prefill": "prefill", "stalled": "stalled by other requests",
    "decoding": "decoding", "swapped": "swapped out",
}  # fmt: skip
SLO_KEYS = {"TTFT": "ttft", "TPOT": "tpot", "E2E latency": "e2el"}
MAX_TICKS = 10  # texts on the axis of a parameter
QUEUES = (("waiting", "queued"), ("running", "decoding"), ("swapped", "swapped"))  # name, colour


class Latencies(NamedTuple):
    """The quantiles of the latencies of one run, by name and in seconds."""

    name: str
    colour: str
    quantiles: Mapping[str, Sequence[float]]


def knob_charts(knobs: Sequence[Knob]) -> list[Chart]:
    """Return one chart per parameter; all have the same y axis."""
    ends = [end for knob in knobs for point in (*knob.best, *knob.single_change) for end in interval_ends(point)]
    if not ends:
        return []
    divisor, y_title = axis_scale(knobs[0].metric, ends)
    positive = min(ends) > 0 or min(point.result.mean for knob in knobs for point in knob.best) <= 0
    ends = ends if positive else [end for end in ends if end > 0]
    span, is_log = common_range([end / divisor for end in ends])
    y_axis: dict[str, Any] = {"title": {"text": f"{y_title}{', log scale' if is_log else ''}"}, "range": span}
    if is_log:
        y_axis |= log_axis(10 ** span[0], 10 ** span[1])
    return [knob_chart(knob, f"knob-{index}", divisor, y_axis) for index, knob in enumerate(knobs)]


def interval_ends(point: CurvePoint) -> tuple[float, float]:
    """Return both ends of the interval of a point."""
    mean, half_width = point.result.mean, point.result.half_width or 0.0
    return mean - half_width, mean + half_width


def knob_chart(knob: Knob, id: str, divisor: float, y_axis: dict[str, Any]) -> Chart:
    """Return the chart of a parameter: the best with each value, and the winner with only this parameter changed."""
    x_axis, place = knob_axis(knob)
    data = []
    for name, curve, colour, marker in (
        ("best with this value", knob.best, "@front", ("circle", 7.0)),
        ("winner, only this setting changed", knob.single_change, "@winner", ("star-open", 12.0)),
    ):
        data.append(knob_trace(knob, curve, place, divisor, name, colour, marker))
    layout: dict[str, Any] = {"xaxis": x_axis, "yaxis": dict(y_axis), "showlegend": False, "height": 260}
    level = knob.baseline / divisor
    low, high = (10**end if y_axis.get("type") == "log" else end for end in y_axis["range"])
    if low <= level <= high:
        line = {"color": "@baseline", "width": 1.5, "dash": "dash"}
        layout["shapes"] = [{"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": level, "y1": level, "line": line}]
    return Chart(id, knob.name, data, layout, group="knobs")


def knob_trace(
    knob: Knob, curve: Sequence[CurvePoint], place: Mapping[str, Any], divisor: float, name: str, colour: str,
    marker: tuple[str, float],
) -> Trace:  # fmt: skip
    """Return one curve of a parameter: points with intervals, connected if the values are numbers."""
    xy = [(place[repr(point.value)], point.result.mean / divisor) for point in curve]
    hover = [
        f"<b>{plain(knob.name)} = {plain(format_value(point.value))}</b><br>{name}: "
        f"{format_mean(point.result, knob.metric)}<br>{plain(point.row.label)}"
        for point in curve
    ]
    bars = {"type": "data", "array": [(p.result.half_width or 0.0) / divisor for p in curve], "color": colour}
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


def time_chart(bars: Sequence[tuple[str, Mapping[str, float]]]) -> Chart:
    """Return the time breakdown of requests, one bar per configuration."""
    data = []
    names = [name for name, _ in bars]
    for state in STATES:
        seconds = [times.get(state, 0.0) for _, times in bars]
        if not any(seconds):
            continue
        hover = [
            f"<b>{name}</b><br>{STATE_LEGEND[state]}: {format_number(value)} s" for name, value in zip(names, seconds)
        ]
        data.append({
            "type": "bar", "orientation": "h", "name": STATE_LEGEND[state], "x": seconds, "y": names,
            "marker": {"color": f"@{state}"}, "hovertext": hover, "hovertemplate": HOVER,
        })  # fmt: skip
    layout = {
        "barmode": "stack", "height": 130 + 45 * len(bars), "xaxis": {"title": {"text": "mean seconds per request"}},
        "yaxis": {"autorange": "reversed", "automargin": True}, "legend": {"traceorder": "normal"},
    }  # fmt: skip
    return Chart("time-breakdown", "Mean time of a request", data, layout)


def latency_charts(runs: Sequence[Latencies], slo: Mapping[str, float]) -> list[Chart]:
    """Return the distribution (CDF) of each latency in every run; `slo` has bounds in seconds, as of `Slo.seconds`."""
    charts: list[Chart] = []
    for name in dict.fromkeys(name for run in runs for name in run.quantiles):
        curves = [(run, run.quantiles[name]) for run in runs if name in run.quantiles]
        scale, unit = (1e3, "ms") if max(values[-1] for _, values in curves) < 1 else (1.0, "s")
        data = [cdf(run, [value * scale for value in values], name, unit) for run, values in curves]
        layout = {
            "xaxis": value_axis(f"{name} ({unit})", [x for trace in data for x in trace["x"] if x > 0]),
            "yaxis": {"title": {"text": "% of requests"}, "range": [0, 102]},
            "height": 280,
        }
        bound = slo.get(SLO_KEYS.get(name, ""))
        limits = [] if bound is None else [Limit("x", bound * scale, f"SLO {bound * scale:g} {unit}")]
        charts.append(Chart(f"cdf-{len(charts)}", f"{name} of the requests", data, with_limits(layout, limits)))
    return charts


def cdf(run: Latencies, values: Sequence[float], name: str, unit: str) -> Trace:
    """Return a cumulative distribution."""
    shares = [100 * float(q) for q in QUANTILES]
    who = plain(run.name)
    hover = [
        f"<b>{who}</b><br>{q:.1f} % of requests: {name} up to {format_number(x)} {unit}" for x, q in zip(values, shares)
    ]
    trace = line(who, list(zip(values, shares)), run.colour)
    return {**trace, "hovertext": hover, "hovertemplate": HOVER}


def queue_charts(runs: Sequence[RecordedRun]) -> list[Chart]:
    """Return the queues and the KV blocks over time, one pair of charts per run, with common axes."""
    logs = [run for run in runs if run.log.times]
    if not logs:
        return []
    last, top, most_blocks = timeline_limits(logs)
    charts = []
    for run in logs:
        traces = [queue_line(run, name, colour) for name, colour in QUEUES]
        traces = [trace for trace in traces if trace["name"] != "swapped" or any(trace["y"])]
        charts.append(time_line(f"queues-{run.role}", f"Queues: {run.role}", traces, "requests", last, top))
    for run in logs if most_blocks else ():
        trace, title = queue_line(run, "blocks_used", "front"), f"KV blocks: {run.role}"
        charts.append(time_line(f"blocks-{run.role}", title, [trace], "KV blocks in use", last, most_blocks))
    return charts


def timeline_limits(runs: Sequence[RecordedRun]) -> tuple[float, int, int]:
    """Return the last time, the longest queue and the most used blocks of all runs."""
    queues = [queue for run in runs for queue in run.log.queues]
    longest = max(max(queue.waiting, queue.running, queue.swapped) for queue in queues)
    return max(run.log.times[-1] for run in runs), longest, max(queue.blocks_used for queue in queues)


def queue_line(run: RecordedRun, name: str, colour: str) -> Trace:
    """Return one number of the queue log over time; each value holds until the next one."""
    xy = [(t, getattr(queue, name)) for t, queue in zip(run.log.times, run.log.queues)]
    text = name.replace("_", " ")
    return line(text, xy, f"@{colour}", hovertemplate=f"%{{y:,}} {text} at %{{x:.1f}} s<extra></extra>") | {
        "line": {"color": f"@{colour}", "width": 1.6, "shape": "hv"}
    }


def time_line(id: str, title: str, traces: Sequence[Trace], y_title: str, last: float, top: float) -> Chart:
    """Return a chart over time; `last` and `top` give several charts the same axes."""
    layout = {
        "xaxis": {"title": {"text": "time (s)"}, "range": [0, last or 1]},
        "yaxis": {"title": {"text": y_title}, "range": [0, 1.06 * (top or 1)]},
        "height": 260,
        "showlegend": len(traces) > 1,
    }
    return Chart(id, title, traces, layout, group=id.partition("-")[0])
