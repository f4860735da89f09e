"""Charts as SVG text, readable at phone width; the page's style sheet sets the colours."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from servesim.runs.request_rows import STATES
from servesim.study.experiment import format_value
from servesim.study.number_format import format_number, ticks
from servesim.study.objective import unit
from servesim.study.ranking import Row, Summary

from .figures import CurvePoint, Knob, QueueTimeline

WIDTH, HEIGHT = 360, 230
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 24, 40
STATE_LEGEND = {
    "front_end": "front end", "queued": "queued", "prefill": "prefill", "stalled": "stalled by other requests",
    "decoding": "decoding", "swapped": "swapped out",
}  # fmt: skip


class Frame:
    """The axes of a chart, and the conversion of values to coordinates."""

    def __init__(self, x: tuple[float, float], y: tuple[float, float], height: int = HEIGHT) -> None:
        self.x_span, self.y_span, self.height = widen_if_empty(*x), widen_if_empty(*y), height
        self.elements: list[str] = []

    def x(self, value: float) -> float:
        """Return the x coordinate of a value."""
        low, high = self.x_span
        return round(LEFT + (value - low) / (high - low) * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        """Return the y coordinate of a value."""
        low, high = self.y_span
        return round(self.height - BOTTOM - (value - low) / (high - low) * (self.height - TOP - BOTTOM), 1)

    def axes(self, x_title: str, y_title: str, x_names: Mapping[float, str] | None = None) -> None:
        """Draw grid lines, ticks and axis titles; `x_names` replaces the numbers of the x axis."""
        floor, right = self.height - BOTTOM, WIDTH - RIGHT
        for value in ticks(*self.y_span):
            y = self.y(value)
            self.elements.append(f'<path class="grid" d="M{LEFT} {y}H{right}"/>')
            self.text(LEFT - 6, y + 4, format_number(value), "end")
        for value, name in (x_names or {value: format_number(value) for value in ticks(*self.x_span)}).items():
            self.elements.append(f'<path class="grid" d="M{self.x(value)} {floor}v4"/>')
            self.text(self.x(value), floor + 15, name, "middle")
        self.elements.append(f'<path class="axis" d="M{LEFT} {floor}H{right}"/>')
        self.text((LEFT + right) / 2, self.height - 6, x_title, "middle", "title")
        self.elements.append(f'<text class="title" x="{LEFT - 46}" y="{TOP - 13}">{escape(y_title)}</text>')

    def text(self, x: float, y: float, text: str, anchor: str = "start", kind: str = "tick") -> None:
        self.elements.append(f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>')

    def polyline(self, points: Sequence[tuple[float, float]], kind: str) -> None:
        """Draw a polyline through points."""
        path = "L".join(f"{self.x(x)} {self.y(y)}" for x, y in points)
        self.elements.append(f'<path class="{kind}" d="M{path}"/>')

    def steps(self, points: Sequence[tuple[float, float]], kind: str) -> None:
        """Draw a step function: each value holds until the next point."""
        path = "".join(f"H{self.x(x)}V{self.y(y)}" for x, y in points[1:])
        self.elements.append(f'<path class="{kind}" d="M{self.x(points[0][0])} {self.y(points[0][1])}{path}"/>')

    def dot(self, x: float, y: float, kind: str, title: str, size: float = 4, focus: bool = False) -> None:
        """Draw a point with a tooltip."""
        extra = f' tabindex="0" role="img" aria-label="{escape(title)}"' if focus else ""
        position = f'cx="{self.x(x)}" cy="{self.y(y)}" r="{size:g}"'
        self.elements.append(f'<circle class="{kind}" {position}{extra}><title>{escape(title)}</title></circle>')

    def bar(self, x: float, low: float, high: float, kind: str) -> None:
        self.elements.append(f'<path class="{kind}" d="M{self.x(x)} {self.y(low)}V{self.y(high)}"/>')

    def svg(self, title: str) -> str:
        head = f'<svg viewBox="0 0 {WIDTH} {self.height}" role="img" aria-label="{escape(title)}">'
        return head + "".join(self.elements) + "</svg>"


def widen_if_empty(low: float, high: float) -> tuple[float, float]:
    """Return the span, or a wider one if it is empty."""
    return (low, high) if high > low else (low - (abs(low) or 1) * 0.05, high + (abs(high) or 1) * 0.05)


def pad_span(values: Sequence[float], margin: float = 0.06) -> tuple[float, float]:
    """Return a span slightly wider than the values; not below zero if no value is."""
    low, high = min(values, default=0.0), max(values, default=1.0)  # no value: all requests timed out
    room = (high - low) * margin
    return (max(0.0, low - room) if low >= 0 else low - room), high + room


def axis_scale(metric: str, values: Sequence[float]) -> tuple[float, str]:
    """Return the divisor and the axis title; 10,000 ms and more are shown in seconds."""
    if metric.endswith("_ms") and max(values, default=0) >= 10_000:
        return 1000.0, f"{metric.removesuffix('_ms')} (s)"
    return 1.0, f"{metric.removesuffix('_ms')} ({unit(metric)})" if unit(metric) else metric


def trade_off(summary: Summary, x_metric: str, y_metric: str) -> str:
    """Draw every configuration by two objectives, with Pareto front, winner and baseline."""
    rows = [row for row in summary.rows if not math.isnan(row.means[x_metric].mean + row.means[y_metric].mean)]
    across, x_title = axis_scale(x_metric, [row.means[x_metric].mean for row in rows])
    up, y_title = axis_scale(y_metric, [row.means[y_metric].mean for row in rows])

    def point(row: Row) -> tuple[float, float]:
        return row.means[x_metric].mean / across, row.means[y_metric].mean / up

    points = [point(row) for row in rows]
    frame = Frame(pad_span([x for x, _ in points]), pad_span([y for _, y in points]), 280)
    frame.axes(x_title, y_title)
    front = sorted((row for row in rows if row.on_pareto_front), key=point)
    for row in rows:
        if not row.on_pareto_front and row.rank > 1 and row is not summary.baseline:
            frame.dot(*point(row), "point" if row.eligible else "point out", f"{row.rank}: {row.label}", 2.5)
    if len(front) > 1 and len(summary.experiment.objectives) == 2:
        frame.polyline([point(row) for row in front], "front")
    for row in front:
        frame.dot(*point(row), "on-front", describe_point(row, x_metric, y_metric), 4, focus=len(front) <= 12)
    if summary.baseline in rows:
        text = f"baseline: {describe_point(summary.baseline, x_metric, y_metric)}"
        frame.dot(*point(summary.baseline), "base", text, 5, True)
    if summary.winner is not None:
        frame.dot(
            *point(summary.winner), "win", f"winner: {describe_point(summary.winner, x_metric, y_metric)}", 6, True
        )
    return frame.svg(f"{y_metric} by {x_metric}, {len(rows)} configurations")


def describe_point(row: Row, *metrics: str) -> str:
    """Return the tooltip of a configuration."""
    return f"{row.label}: " + ", ".join(f"{m} {format_number(row.means[m].mean)}" for m in metrics)


def knob_chart(knob: Knob) -> str:
    """Draw the curve of a parameter: the best with each value, and the winner with only this parameter changed."""
    points = [*knob.best, *knob.single_change]
    divisor, y_title = axis_scale(knob.metric, [point.result.mean for point in points])
    span = value_span(points, divisor)
    values = [point.value for point in knob.best]
    on_scale = knob.numeric and is_evenly_spaced(values)
    positions = {repr(value): float(value) if on_scale else float(k) for k, value in enumerate(values)}
    low, high = min(positions.values()), max(positions.values())
    room = (high - low) * 0.08 if on_scale else 0.5
    frame = Frame((low - room, high + room), span)
    names = {positions[repr(value)]: shorten(format_value(value), len(values)) for value in values}
    frame.axes(knob.name, y_title, names if len(names) <= 8 or not on_scale else None)
    if span[0] <= knob.baseline / divisor <= span[1]:
        frame.polyline([(x, knob.baseline / divisor) for x in frame.x_span], "base-line")
    for series, kind in ((knob.best, "best"), (knob.single_change, "alone")):
        draw_series(frame, series, positions, divisor, kind)
    return frame.svg(f"{knob.metric} by {knob.name}")


def value_span(points: Sequence[CurvePoint], divisor: float) -> tuple[float, float]:
    """Return the y span of a curve with its intervals: at least 2 % of the value, so that small changes look small."""
    ends = [point.result.mean + side * (point.result.half_width or 0.0) for point in points for side in (-1, 1)]
    middle = (min(ends) + max(ends)) / 2
    half_span = max((max(ends) - min(ends)) * 0.58, abs(middle) * 0.01)
    return (middle - half_span) / divisor, (middle + half_span) / divisor


def draw_series(
    frame: Frame, series: Sequence[CurvePoint], positions: Mapping[str, float], divisor: float, kind: str
) -> None:
    """Draw one series with its intervals."""
    xy = [(positions[repr(point.value)], point.result.mean / divisor) for point in series]
    if len(xy) > 1:
        frame.polyline(xy, f"{kind}-line")
    for (x, y), point in zip(xy, series):
        if point.result.half_width:
            frame.bar(x, y - point.result.half_width / divisor, y + point.result.half_width / divisor, f"{kind}-line")
        frame.dot(
            x, y, kind, f"{format_value(point.value)}: {format_number(point.result.mean)} ({point.row.label})", 3.5
        )


def is_evenly_spaced(values: Sequence[float]) -> bool:
    """Whether the values are evenly enough spaced for a linear axis."""
    gaps = [b - a for a, b in zip(values, values[1:])]
    return bool(gaps) and min(gaps) * 12 >= values[-1] - values[0]


def shorten(name: str, count: int) -> str:
    """Return a name that fits below its tick when there are `count` ticks."""
    room = max(4, 56 // max(1, count))
    return name if len(name) <= room else name[: room - 1] + "…"


def time_chart(bars: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    """Draw the time breakdown, one bar per configuration."""
    max_seconds = max((sum(seconds.values()) for _, seconds in bars), default=0.0) or 1.0
    elements, y = [], 6
    for name, seconds in bars:
        total = format_number(sum(seconds.values()))
        elements.append(f'<text class="title" x="0" y="{y + 10}">{escape(name)}: {total} s</text>')
        x = 0.0
        for index, state in enumerate(STATES):
            width = seconds.get(state, 0.0) / max_seconds * WIDTH
            title = f"{STATE_LEGEND[state]}: {format_number(round(seconds.get(state, 0.0), 4))} s"
            elements.append(f'<rect class="w{index}" x="{x:.1f}" y="{y + 16}" width="{width:.1f}" height="22">'
                            f"<title>{title}</title></rect>")  # fmt: skip
            x += width
        y += 52
    return f'<svg viewBox="0 0 {WIDTH} {y}" role="img" aria-label="time breakdown">{"".join(elements)}</svg>'


def queue_chart(timeline: QueueTimeline, last: float, max_value: int) -> str:
    """Draw the queues of a run over time; `last` and `max_value` give all runs the same scales."""
    log = timeline.log
    frame = Frame((0.0, last), (0.0, float(max_value) * 1.05))
    frame.axes("time (s)", "requests")
    for name in ("waiting", "running", "swapped"):
        points = [(t, float(getattr(q, name))) for t, q in zip(log.times, log.queues)]
        if points and (name != "swapped" or any(y for _, y in points)):
            frame.steps(points, f"q-{name}")
    return frame.svg(f"queues over time: {timeline.row.label}")


def block_chart(timeline: QueueTimeline, last: float, max_value: int) -> str:
    """Draw the KV blocks in use over time."""
    frame = Frame((0.0, last), (0.0, float(max_value) * 1.05), 150)
    frame.axes("time (s)", "KV blocks in use")
    frame.steps([(t, float(q.blocks_used)) for t, q in zip(timeline.log.times, timeline.log.queues)], "q-held")
    return frame.svg(f"KV blocks in use over time: {timeline.row.label}")


def legend(*items: tuple[str, str]) -> str:
    """Return the legend of a chart: (CSS colour variable, name)."""
    entries = "".join(f'<li><i style="background:var({colour})"></i>{escape(name)}</li>' for colour, name in items)
    return f'<ul class="key">{entries}</ul>'
