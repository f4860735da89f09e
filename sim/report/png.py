"""The charts of a report as PNG or SVG files, drawn with matplotlib."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from servesim.files.write import save_figure
from servesim.runs.request_rows import STATES
from servesim.study.experiment import format_value
from servesim.study.ranking import Row, Summary

from .charts import STATE_LEGEND, axis_scale
from .figures import Knob, QueueTimeline, knobs, record_queues

WINNER, BASELINE, FRONT, POINT = "#0b6e4f", "#b3541e", "#3b5bdb", "#9aa1ab"  # colours
COLOURS = ("#b9bec6", "#e0a33e", "#3b5bdb", "#c2456d", "#0b8f6a", "#7a5bb5")


def plot(summary: Summary, folder: Path, format: str = "png") -> list[Path]:
    """Write every chart of a sweep; return the files."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "servesim", "figure.constrained_layout.use": True}):
        return [save(folder / f"{name}.{format}", size, draw) for name, size, draw in list_charts(summary)]


def list_charts(summary: Summary) -> Iterator[tuple[str, tuple[int, int], Callable[[Any], None]]]:
    """Yield the charts: file name, (rows, columns) of panels, and the function that draws them."""
    first, *others = summary.experiment.objectives
    for other in others:
        name = f"pareto_{first.metric}_{other.metric}"
        yield name, (1, 1), partial(draw_trade_off, summary=summary, x_metric=first.metric, y_metric=other.metric)
    if curves := knobs(summary):
        across = min(3, len(curves))
        yield "knobs", (-(-len(curves) // across), across), partial(draw_curves, curves=curves)
    yield "time", (1, 1), partial(draw_times, summary=summary)
    if timelines := record_queues(summary):
        yield "queues", (len(timelines), 1), partial(draw_queues, timelines=timelines)


def save(path: Path, size: tuple[int, int], draw: Callable[[Any], None]) -> Path:
    """Draw one chart and write it; the bytes are reproducible."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(6.0, 4.0 * size[1]), 3.4 * size[0] + 0.6))
    FigureCanvasAgg(figure)
    draw(list(figure.subplots(*size, squeeze=False).flat))
    save_figure(figure, path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else {})
    return path


def draw_trade_off(panels: Any, summary: Summary, x_metric: str, y_metric: str) -> None:
    """Draw the configurations by two objectives."""
    axes = panels[0]
    rows = [row for row in summary.rows if not math.isnan(row.means[x_metric].mean + row.means[y_metric].mean)]
    across, x_title = axis_scale(x_metric, [row.means[x_metric].mean for row in rows])
    up, y_title = axis_scale(y_metric, [row.means[y_metric].mean for row in rows])

    def scatter(chosen: list[Row], colour: str, size: int, label: str) -> None:
        xs = [row.means[x_metric].mean / across for row in chosen]
        ys = [row.means[y_metric].mean / up for row in chosen]
        axes.scatter(xs, ys, s=size, c=colour, label=label, zorder=2 + size / 100)

    scatter([row for row in rows if not row.on_pareto_front], POINT, 10, "not on the Pareto front")
    scatter([row for row in rows if row.on_pareto_front], FRONT, 22, "on the Pareto front")
    scatter([summary.baseline], BASELINE, 50, "baseline")
    scatter([summary.winner] if summary.winner else [], WINNER, 70, "winner")
    axes.set(xlabel=x_title, ylabel=y_title)
    axes.legend(frameon=False)


def draw_curves(axes: Any, curves: list[Knob]) -> None:
    """Draw the curve of each parameter."""
    for panel, knob in zip(axes, curves):
        divisor, y_title = axis_scale(knob.metric, [point.result.mean for point in knob.best])
        positions = {repr(point.value): index for index, point in enumerate(knob.best)}
        both = ((knob.best, FRONT, "best with this value"), (knob.single_change, WINNER, "winner, only this changed"))
        for series, colour, label in both:
            xs = [positions[repr(point.value)] for point in series]
            ys = [point.result.mean / divisor for point in series]
            half_widths = [(point.result.half_width or 0.0) / divisor for point in series]
            panel.errorbar(xs, ys, half_widths, color=colour, marker="o", markersize=4, capsize=2, label=label)
        panel.set_xticks(range(len(positions)), [format_value(point.value) for point in knob.best])
        panel.set(xlabel=knob.name, ylabel=y_title)
    for panel in axes[len(curves) :]:
        panel.set_axis_off()
    axes[0].legend(frameon=False, fontsize="small")


def draw_times(panels: Any, summary: Summary) -> None:
    """Draw the time breakdown of the baseline and the winner."""
    axes = panels[0]
    rows = [("baseline", summary.baseline)]
    if summary.winner is not None and summary.winner is not summary.baseline:
        rows.append(("winner", summary.winner))
    left = [0.0] * len(rows)
    for state, colour in zip(STATES, COLOURS):
        widths = [row.time_breakdown().get(state, 0.0) for _, row in rows]
        axes.barh([name for name, _ in rows], widths, left=left, color=colour, label=STATE_LEGEND[state])
        left = [a + b for a, b in zip(left, widths)]
    axes.set(xlabel="mean seconds per request")
    axes.legend(frameon=False, fontsize="small", ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))


def draw_queues(axes: Any, timelines: list[QueueTimeline]) -> None:
    """Draw the queues over time."""
    for panel, timeline in zip(axes, timelines):
        for name, colour in (("waiting", COLOURS[1]), ("running", COLOURS[4]), ("swapped", COLOURS[5])):
            values = [getattr(queue, name) for queue in timeline.log.queues]
            panel.step(timeline.log.times, values, where="post", color=colour, label=name)
        panel.set(xlabel="time (s)", ylabel="requests")
        panel.set_title(textwrap.fill(timeline.row.label, 70), fontsize="small")
        panel.sharex(axes[0])
    axes[0].legend(frameon=False)
