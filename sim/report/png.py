"""The charts of a report as PNG or SVG files, drawn with matplotlib."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from servesim.files.chart_style import LIGHT, matplotlib_style
from servesim.files.write import save_figure
from servesim.runs.request_rows import STATES
from servesim.statistics.constraints import Bound
from servesim.study.experiment import format_value
from servesim.study.load_summary import LoadSummary, Result
from servesim.study.ranking import Summary

from .charts import QUEUES, STATE_LEGEND, interval_ends, timeline_limits
from .knob_curves import Knob, knobs
from .load_page import rate_curves
from .plots import axis_scale, common_range, spans_decade
from .rate_charts import MAX_CURVES, RateCurve, chart_metrics, curve_styles
from .recorded_runs import RecordedRun, record_runs
from .roles import compared_rows
from .trade_offs import Measure, front_rows, group_rows, measured_rows, pairs

DrawnChart = tuple[str, tuple[int, int], Callable[[Any], None]]  # file name, (rows, columns) of panels, draws them
MARKERS = {"circle": "o", "circle-open": "o", "diamond": "D", "star": "*"}  # symbol of Plotly: marker of matplotlib


def plot(result: Result, folder: Path, format: str = "png") -> list[Path]:
    """Write every chart of a sweep; return the files."""
    charts = list_charts(result) if isinstance(result, Summary) else list_load_charts(result)
    with matplotlib_style():
        return [save(folder / f"{name}.{format}", size, draw) for name, size, draw in charts]


def list_load_charts(result: LoadSummary) -> Iterator[DrawnChart]:
    """Yield the chart of a sweep over loads."""
    bounds = result.experiment.subject_to
    curves = rate_curves(result)
    metrics = chart_metrics(curves, bounds, [objective.metric for objective in result.experiment.objectives])
    across = min(2, len(metrics))
    draw = partial(draw_loads, curves=curves[:MAX_CURVES], metrics=metrics, bounds=bounds)
    yield "loads", (-(-len(metrics) // across), across), draw


def draw_loads(axes: Any, curves: Sequence[RateCurve], metrics: Sequence[str], bounds: Sequence[Bound]) -> None:
    """Draw each metric over the request rate; an open point misses a constraint."""
    for panel, metric in zip(axes, metrics):
        values = [value for curve in curves for _, value in curve.values(metric)]
        divisor, title = axis_scale(metric, values)
        for curve, style in zip(curves, curve_styles(curves)):
            colour, dash = LIGHT[style.colour[1:]], "--" if style.dashed else "-"
            xy = [(point.rate, value / divisor, point.problem) for point, value in curve.values(metric)]
            label = f"{curve.role}: {curve.name}" if curve.role else curve.name
            width = 2.0 if curve.role else 1.0
            panel.plot([x for x, _, _ in xy], [y for _, y, _ in xy], dash, color=colour, linewidth=width, label=label)
            fills = ["white" if problem else colour for _, _, problem in xy]
            panel.scatter([x for x, _, _ in xy], [y for _, y, _ in xy], s=22, c=fills, edgecolors=colour, zorder=3)
        for bound in (bound for bound in bounds if bound.metric == metric):
            panel.axhline(bound.value / divisor, color=LIGHT["limit"], linestyle=":", linewidth=1.2)
        panel.set(xlabel="request rate (req/s)", ylabel=title)
        set_scale(panel, "x", [point.rate for curve in curves for point in curve.points])
        set_scale(panel, "y", [value / divisor for value in values])
    for panel in axes[len(metrics) :]:
        panel.set_axis_off()
    if len(curves) <= 8:
        axes[0].figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)


def list_charts(summary: Summary) -> Iterator[DrawnChart]:
    """Yield the charts: file name, (rows, columns) of panels, and the function that draws them."""
    for x, y in pairs(summary):
        if measured_rows(summary, x, y):
            yield f"pareto_{x.metric}_{y.metric}", (1, 1), partial(draw_trade_off, summary=summary, x=x, y=y)
    if curves := knobs(summary):
        across = min(3, len(curves))
        yield "knobs", (-(-len(curves) // across), across), partial(draw_curves, curves=curves)
    yield "time", (1, 1), partial(draw_times, summary=summary)
    runs = [run for run in record_runs(summary, compared_rows(summary)) if run.log.times]
    if runs:
        yield (
            "queues",
            (len(runs), 1),
            partial(draw_queues, runs=runs),
        )


def save(path: Path, size: tuple[int, int], draw: Callable[[Any], None]) -> Path:
    """Draw one chart and write it; the bytes are reproducible."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(6.0, 4.0 * size[1]), 3.4 * size[0] + 0.6))
    FigureCanvasAgg(figure)
    draw(list(figure.subplots(*size, squeeze=False).flat))
    save_figure(figure, path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else {})
    return path


def draw_trade_off(panels: Any, summary: Summary, x: Measure, y: Measure) -> None:
    """Draw the configurations by two measures, with the Pareto front of both."""
    axes, values = panels[0], measured_rows(summary, x, y)
    rows = [row for row in summary.rows if row.config in values]
    across, x_title = x.scale([a for a, _ in values.values()])
    up, y_title = y.scale([b for _, b in values.values()])
    front = front_rows([row for row in rows if row.eligible], x, y)
    line = [values[row.config] for row in front]
    axes.plot([a / across for a, _ in line], [b / up for _, b in line], color=LIGHT["front"], linewidth=1.2)
    for (name, colour, symbol, size), members in group_rows(summary, rows, front).items():
        places = [values[row.config] for row in members]
        fill = "none" if symbol.endswith("open") else LIGHT[colour[1:]]
        axes.scatter(
            [a / across for a, _ in places], [b / up for _, b in places], s=size**2 / 1.6, marker=MARKERS[symbol],
            facecolors=fill, edgecolors=LIGHT[colour[1:]], label=name, zorder=2 + size / 10,
        )  # fmt: skip
    axes.set(xlabel=x_title, ylabel=y_title)
    set_scale(axes, "x", [a / across for a, _ in values.values()])
    set_scale(axes, "y", [b / up for _, b in values.values()])
    axes.figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=5)


def set_scale(axes: Any, side: str, values: Sequence[float]) -> None:
    """Use a logarithmic axis with plain numbers if the values span a decade."""
    if not spans_decade(values):
        return
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set(**{f"{side}scale": "log"})
    axis = getattr(axes, f"{side}axis")
    steps = (1, 2, 5) if max(values) < 300 * min(values) else (1,)
    axis.set_major_locator(LogLocator(subs=steps))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.12g}"))
    axis.set_minor_formatter(NullFormatter())


def draw_curves(axes: Any, curves: list[Knob]) -> None:
    """Draw the curve of each parameter; all panels have the same y axis. Categories are points without a line."""
    ends = [end for knob in curves for point in (*knob.best, *knob.single_change) for end in interval_ends(point)]
    divisor, y_title = axis_scale(curves[0].metric, ends)
    span, is_log = common_range([end / divisor for end in ends])
    for panel, knob in zip(axes, curves):
        positions = {repr(point.value): index for index, point in enumerate(knob.best)}
        both = (
            (knob.best, "front", "best with this value"),
            (knob.single_change, "winner", "winner, only this changed"),
        )
        for series, colour, label in both:
            xs = [positions[repr(point.value)] for point in series]
            ys = [point.result.mean / divisor for point in series]
            half_widths = [(point.result.half_width or 0.0) / divisor for point in series]
            panel.errorbar(
                xs, ys, half_widths, color=LIGHT[colour], marker="o", markersize=4, capsize=2, label=label,
                linestyle="-" if knob.numeric else "none",
            )  # fmt: skip
        panel.set_xticks(range(len(positions)), [format_value(point.value) for point in knob.best])
        panel.set_xlim(-0.5, len(positions) - 0.5)
        panel.set(xlabel=knob.name, ylabel=y_title)
        panel.set_ylim(*(limit if not is_log else 10**limit for limit in span))
        panel.set_yscale("log" if is_log else "linear")
    for panel in axes[len(curves) :]:
        panel.set_axis_off()
    axes[0].figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)


def draw_times(panels: Any, summary: Summary) -> None:
    """Draw the time breakdown of the baseline and the winner."""
    axes = panels[0]
    rows = list(compared_rows(summary).items())[::-1]
    left = [0.0] * len(rows)
    for state in STATES:
        widths = [row.time_breakdown().get(state, 0.0) for _, row in rows]
        axes.barh([name for name, _ in rows], widths, left=left, color=LIGHT[state], label=STATE_LEGEND[state])
        left = [a + b for a, b in zip(left, widths)]
    axes.set(xlabel="mean seconds per request")
    axes.grid(axis="y", visible=False)
    axes.figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=3)


def draw_queues(axes: Any, runs: Sequence[RecordedRun]) -> None:
    """Draw the queues over time; all panels have the same axes."""
    last, top, _ = timeline_limits(runs)
    for panel, run in zip(axes, runs):
        for name, colour in QUEUES:
            values = [getattr(queue, name) for queue in run.log.queues]
            panel.step(run.log.times, values, where="post", color=LIGHT[colour], label=name)
        panel.set(xlabel="time (s)", ylabel="requests")
        panel.set_title(textwrap.fill(f"{run.role}: {run.row.label}", 80), fontsize="small")
        panel.set(xlim=(0, last), ylim=(0, 1.06 * (top or 1)))
    axes[0].figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
