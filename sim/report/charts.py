"""Charts as SVG text: small enough to be read one to one on a phone, coloured by the page around them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from servesim.runs.metrics import WHERE
from servesim.study.experiment import shown
from servesim.study.number_format import number, ticks
from servesim.study.objective import Objective, unit
from servesim.study.ranking import Row, Summary

from .figures import Knob, Mark, Story

WIDTH, HEIGHT = 360, 230
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 24, 40
STATES = {
    "front_end": "front end", "queued": "queued", "prefill": "own prefill", "stalled": "stalled behind others",
    "decoding": "decoding", "swapped": "swapped out",
}  # fmt: skip


class Frame:
    """Axes, and where values lie between them."""

    def __init__(self, x: tuple[float, float], y: tuple[float, float], height: int = HEIGHT) -> None:
        self.x_span, self.y_span, self.height = widened(*x), widened(*y), height
        self.parts: list[str] = []

    def x(self, value: float) -> float:
        """Return where a value lies across."""
        low, high = self.x_span
        return round(LEFT + (value - low) / (high - low) * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        """Return where a value lies up."""
        low, high = self.y_span
        return round(self.height - BOTTOM - (value - low) / (high - low) * (self.height - TOP - BOTTOM), 1)

    def axes(self, x_title: str, y_title: str, named: Mapping[float, str] | None = None) -> None:
        """Draw the grid, the scales and what they are of; `named` places say what they are themselves."""
        floor, right = self.height - BOTTOM, WIDTH - RIGHT
        for value in ticks(*self.y_span):
            y = self.y(value)
            self.parts.append(f'<path class="grid" d="M{LEFT} {y}H{right}"/>')
            self.text(LEFT - 6, y + 4, number(value), "end")
        for value, name in (named or {value: number(value) for value in ticks(*self.x_span)}).items():
            self.parts.append(f'<path class="grid" d="M{self.x(value)} {floor}v4"/>')
            self.text(self.x(value), floor + 15, name, "middle")
        self.parts.append(f'<path class="axis" d="M{LEFT} {floor}H{right}"/>')
        self.text((LEFT + right) / 2, self.height - 6, x_title, "middle", "title")
        self.parts.append(f'<text class="title" x="{LEFT - 46}" y="{TOP - 13}">{escape(y_title)}</text>')

    def text(self, x: float, y: float, text: str, anchor: str = "start", kind: str = "tick") -> None:
        self.parts.append(f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>')

    def line(self, points: Sequence[tuple[float, float]], kind: str) -> None:
        """Draw a line through points."""
        path = "L".join(f"{self.x(x)} {self.y(y)}" for x, y in points)
        self.parts.append(f'<path class="{kind}" d="M{path}"/>')

    def steps(self, points: Sequence[tuple[float, float]], kind: str) -> None:
        """Draw a line that keeps each value until the next."""
        path = "".join(f"H{self.x(x)}V{self.y(y)}" for x, y in points[1:])
        self.parts.append(f'<path class="{kind}" d="M{self.x(points[0][0])} {self.y(points[0][1])}{path}"/>')

    def dot(self, x: float, y: float, kind: str, title: str, size: float = 4, focus: bool = False) -> None:
        """Draw a point that says what it is."""
        extra = f' tabindex="0" role="img" aria-label="{escape(title)}"' if focus else ""
        place = f'cx="{self.x(x)}" cy="{self.y(y)}" r="{size:g}"'
        self.parts.append(f'<circle class="{kind}" {place}{extra}><title>{escape(title)}</title></circle>')

    def bar(self, x: float, low: float, high: float, kind: str) -> None:
        self.parts.append(f'<path class="{kind}" d="M{self.x(x)} {self.y(low)}V{self.y(high)}"/>')

    def svg(self, title: str) -> str:
        head = f'<svg viewBox="0 0 {WIDTH} {self.height}" role="img" aria-label="{escape(title)}">'
        return head + "".join(self.parts) + "</svg>"


def widened(low: float, high: float) -> tuple[float, float]:
    """Return a span that is not empty."""
    return (low, high) if high > low else (low - (abs(low) or 1) * 0.05, high + (abs(high) or 1) * 0.05)


def padded(values: Sequence[float], part: float = 0.06) -> tuple[float, float]:
    """Return a span a little wider than its values; never below zero where they are not."""
    low, high = min(values), max(values)
    room = (high - low) * part
    return (max(0.0, low - room) if low >= 0 else low - room), high + room


def scale_of(metric: str, values: Sequence[float]) -> tuple[float, str]:
    """Return what to divide by and the axis title: long milliseconds read better as seconds."""
    if metric.endswith("_ms") and max(values, default=0) >= 10_000:
        return 1000.0, f"{metric.removesuffix('_ms')} (s)"
    return 1.0, f"{metric.removesuffix('_ms')} ({unit(metric)})" if unit(metric) else metric


def trade_off(summary: Summary, one: Objective, other: Objective) -> str:
    """Draw every configuration by two objectives, with the front, the winner and the baseline."""
    rows = [row for row in summary.rows if not math.isnan(row.found[one.metric].mean + row.found[other.metric].mean)]
    across, x_title = scale_of(one.metric, [row.found[one.metric].mean for row in rows])
    up, y_title = scale_of(other.metric, [row.found[other.metric].mean for row in rows])

    def point(row: Row) -> tuple[float, float]:
        return row.found[one.metric].mean / across, row.found[other.metric].mean / up

    points = [point(row) for row in rows]
    frame = Frame(padded([x for x, _ in points]), padded([y for _, y in points]), 280)
    frame.axes(x_title, y_title)
    front = sorted((row for row in rows if row.front), key=point)
    for row in rows:
        if not row.front and row.rank > 1 and row is not summary.baseline:
            frame.dot(*point(row), "point" if row.eligible else "point out", f"{row.rank}: {row.label}", 2.5)
    if len(front) > 1 and len(summary.experiment.objectives) == 2:
        frame.line([point(row) for row in front], "front")
    for row in front:
        frame.dot(*point(row), "on-front", described(row, one, other), 4, focus=len(front) <= 12)
    frame.dot(*point(summary.baseline), "base", f"baseline: {described(summary.baseline, one, other)}", 5, True)
    if summary.winner is not None:
        frame.dot(*point(summary.winner), "win", f"winner: {described(summary.winner, one, other)}", 6, True)
    return frame.svg(f"{other.metric} against {one.metric} of {len(rows)} configurations")


def described(row: Row, *objectives: Objective) -> str:
    """Say what a point is."""
    return f"{row.label}: " + ", ".join(f"{o.metric} {number(row.found[o.metric].mean)}" for o in objectives)


def knob_chart(knob: Knob) -> str:
    """Draw what a knob does: the best with each value, and the winner with this knob alone changed."""
    marks = [*knob.best, *knob.alone]
    divisor, y_title = scale_of(knob.metric, [mark.found.mean for mark in marks])
    span = heights(marks, divisor)
    values = [mark.value for mark in knob.best]
    on_scale = knob.numeric and spaced(values)
    places = {repr(value): float(value) if on_scale else float(k) for k, value in enumerate(values)}
    low, high = min(places.values()), max(places.values())
    room = (high - low) * 0.08 if on_scale else 0.5
    frame = Frame((low - room, high + room), span)
    named = {places[repr(value)]: short(shown(value), len(values)) for value in values}
    frame.axes(knob.name, y_title, named if len(named) <= 8 or not on_scale else None)
    if span[0] <= knob.baseline / divisor <= span[1]:
        frame.line([(x, knob.baseline / divisor) for x in frame.x_span], "base-line")
    for series, kind in ((knob.best, "best"), (knob.alone, "alone")):
        draw(frame, series, places, divisor, kind)
    return frame.svg(f"{knob.metric} by {knob.name}")


def heights(marks: Sequence[Mark], divisor: float) -> tuple[float, float]:
    """Return the span of a knob's values and intervals: never so narrow that a hundredth looks like a cliff."""
    ends = [mark.found.mean + side * (mark.found.half or 0.0) for mark in marks for side in (-1, 1)]
    middle = (min(ends) + max(ends)) / 2
    half = max((max(ends) - min(ends)) * 0.58, abs(middle) * 0.01)
    return (middle - half) / divisor, (middle + half) / divisor


def draw(frame: Frame, series: Sequence[Mark], places: Mapping[str, float], divisor: float, kind: str) -> None:
    """Draw one series with its intervals."""
    at = [(places[repr(mark.value)], mark.found.mean / divisor) for mark in series]
    if len(at) > 1:
        frame.line(at, f"{kind}-line")
    for (x, y), mark in zip(at, series):
        if mark.found.half:
            frame.bar(x, y - mark.found.half / divisor, y + mark.found.half / divisor, f"{kind}-line")
        frame.dot(x, y, kind, f"{shown(mark.value)}: {number(mark.found.mean)} ({mark.row.label})", 3.5)


def spaced(values: Sequence[float]) -> bool:
    """Whether numbers are spread evenly enough to be told apart on a linear scale."""
    gaps = [b - a for a, b in zip(values, values[1:])]
    return bool(gaps) and min(gaps) * 12 >= values[-1] - values[0]


def short(name: str, count: int) -> str:
    """Return a name that fits under its place."""
    room = max(4, 56 // max(1, count))
    return name if len(name) <= room else name[: room - 1] + "…"


def where_chart(bars: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    """Draw where a request's time went, one bar each."""
    longest = max((sum(where.values()) for _, where in bars), default=0.0) or 1.0
    parts, y = [], 6
    for name, where in bars:
        parts.append(f'<text class="title" x="0" y="{y + 10}">{escape(name)}: {number(sum(where.values()))} s</text>')
        x = 0.0
        for place, state in enumerate(WHERE):
            width = where.get(state, 0.0) / longest * WIDTH
            title = f"{STATES[state]}: {number(round(where.get(state, 0.0), 4))} s"
            parts.append(f'<rect class="w{place}" x="{x:.1f}" y="{y + 16}" width="{width:.1f}" height="22">'
                         f"<title>{title}</title></rect>")  # fmt: skip
            x += width
        y += 52
    return f'<svg viewBox="0 0 {WIDTH} {y}" role="img" aria-label="where requests\' time went">{"".join(parts)}</svg>'


def queue_chart(story: Story, last: float, most: int) -> str:
    """Draw the queues of a run over time, on scales that its neighbour shares."""
    log = story.log
    frame = Frame((0.0, last), (0.0, float(most) * 1.05))
    frame.axes("time (s)", "requests")
    for name in ("waiting", "running", "swapped"):
        points = [(t, float(getattr(q, name))) for t, q in zip(log.times, log.queues)]
        if points and (name != "swapped" or any(y for _, y in points)):
            frame.steps(points, f"q-{name}")
    return frame.svg(f"queues over time: {story.row.label}")


def block_chart(story: Story, last: float, most: int) -> str:
    """Draw the blocks in use over time."""
    frame = Frame((0.0, last), (0.0, float(most) * 1.05), 150)
    frame.axes("time (s)", "blocks in use")
    frame.steps([(t, float(q.held)) for t, q in zip(story.log.times, story.log.queues)], "q-held")
    return frame.svg(f"blocks in use over time: {story.row.label}")
