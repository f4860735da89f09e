"""Charts drawn with matplotlib: the PNG and SVG files of `sim plot`, and notebooks.

Each `plot_` function draws on one axes, which may be part of a larger figure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from servesim.files.chart_style import LIGHT, matplotlib_style
from servesim.files.write import save_figure
from servesim.runs.metric_table import metric_title
from servesim.statistics.constraints import Bound
from servesim.statistics.objective import Objective
from servesim.study.compare import Difference
from servesim.study.experiment import format_value
from servesim.study.ranking import Summary
from servesim.study.rate_summary import RateSummary, Result
from servesim.study.rates import Curve

from .compare_page import OUTCOME_COLOURS
from .knobs import Knob, knob_scale, knobs
from .plots import axis_scale, spans_decade
from .rate_charts import MAX_CURVES, chart_metrics, curve_styles, drawn_curves
from .trade_offs import front_rows, group_rows, measured_rows, pairs

MAX_LEGEND = 12  # names
MARKERS = {"circle": "o", "circle-open": "o", "diamond": "D", "star": "*"}  # symbol of Plotly: marker of matplotlib


class Picture(NamedTuple):
    """One file: panels with the legend of the first one."""

    name: str
    panels: Sequence[Callable[[Any], None]]
    columns: int = 1
    legend_columns: int = 2


def plot(result: Result, folder: Path, format: str = "png") -> list[Path]:
    """Write every chart of a sweep; return the files."""
    pictures = sweep_pictures(result) if isinstance(result, Summary) else rate_pictures(result)
    with matplotlib_style():
        return [save(picture, folder / f"{picture.name}.{format}") for picture in pictures]


def sweep_pictures(summary: Summary) -> Iterator[Picture]:
    """Yield the charts of a sweep."""
    for x, y in pairs(summary):
        if measured_rows(summary, x, y):
            yield Picture(f"pareto_{x.metric}_{y.metric}", [partial(plot_trade_off, summary=summary, x=x, y=y)], 1, 5)
    if curves := knobs(summary):
        yield Picture("knobs", [partial(plot_knob, knob=knob, together=curves) for knob in curves], 3)


def rate_pictures(result: RateSummary) -> Iterator[Picture]:
    """Yield the chart of a sweep over rates: one panel per metric."""
    bounds, curves = result.experiment.subject_to, drawn_curves(result)
    metrics = chart_metrics(curves, bounds, [objective.metric for objective in result.experiment.objectives])
    draw = partial(plot_rates, curves=curves[:MAX_CURVES], bounds=bounds)
    yield Picture("rates", [partial(draw, metric=metric) for metric in metrics], 2)


def save(picture: Picture, path: Path) -> Path:
    """Draw one file and write it; the bytes are reproducible."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(picture.columns, len(picture.panels))
    rows = math.ceil(len(picture.panels) / columns)
    figure = Figure(figsize=(max(6.0, 4.0 * columns), 3.4 * rows + 0.6))
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for panel, draw in zip(axes, picture.panels):
        draw(panel)
    for panel in axes[len(picture.panels) :]:
        panel.set_axis_off()
    handles, labels = axes[0].get_legend_handles_labels()
    if 0 < len(labels) <= MAX_LEGEND:
        figure.legend(handles, labels, loc="outside upper center", ncols=picture.legend_columns)
    save_figure(figure, path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else {})
    return path


@contextmanager
def styled_axes(axes: Any = None, size: tuple[float, float] = (6.4, 3.6)) -> Iterator[Any]:
    """Return the axes to draw on; without axes, those of a new figure, which a notebook shows after its cell."""
    import matplotlib.pyplot as plt

    with matplotlib_style():
        yield plt.subplots(figsize=size)[1] if axes is None else axes


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


def plot_trade_off(axes: Any, summary: Summary, x: Objective, y: Objective) -> None:
    """Draw the configurations by two metrics, with the Pareto front of both."""
    values = measured_rows(summary, x, y)
    rows = [row for row in summary.rows if row.config in values]
    (_, across), x_title = axis_scale(x.metric, [a for a, _ in values.values()])
    (_, up), y_title = axis_scale(y.metric, [b for _, b in values.values()])
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


def plot_knob(axes: Any, knob: Knob, together: Sequence[Knob] = ()) -> None:
    """Draw the curve of a parameter; those drawn together have one y axis. Categories are points without a line."""
    scale = knob_scale(together or [knob])
    positions = {repr(point.value): index for index, point in enumerate(knob.best)}
    both = ((knob.best, "front", "best with this value"), (knob.single_change, "winner", "winner, only this changed"))
    for series, colour, label in both:
        axes.errorbar(
            [positions[repr(point.value)] for point in series],
            [point.result.mean / scale.unit.divisor for point in series],
            [(point.result.half_width or 0.0) / scale.unit.divisor for point in series],
            color=LIGHT[colour], marker="o", markersize=4, capsize=2, label=label,
            linestyle="-" if knob.numeric else "none",
        )  # fmt: skip
    axes.set_xticks(range(len(positions)), [format_value(point.value) for point in knob.best])
    axes.set_xlim(-0.5, len(positions) - 0.5)
    axes.set(xlabel=knob.name, ylabel=scale.title)
    limits = [10**limit if scale.is_log else limit for limit in scale.span]
    if scale.is_log:
        set_scale(axes, "y", limits)
    axes.set_ylim(*limits)


def plot_rates(axes: Any, curves: Sequence[Curve], metric: str, bounds: Sequence[Bound]) -> None:
    """Draw a metric over the request rate, one line per configuration; an open point misses a constraint."""
    values = [value for curve in curves for _, value in curve.values(metric)]
    unit, title = axis_scale(metric, values)
    for curve, style in zip(curves, curve_styles(curves)):
        colour, dash = LIGHT[style.colour[1:]], "--" if style.dashed else "-"
        points = curve.values(metric)
        xs, ys = [point.rate for point, _ in points], [value / unit.divisor for _, value in points]
        label = f"{curve.role}: {curve.label}" if curve.role else curve.label
        axes.plot(xs, ys, dash, color=colour, linewidth=2.0 if curve.role else 1.0, label=label)
        fills = ["white" if point.problem else colour for point, _ in points]
        axes.scatter(xs, ys, s=22, c=fills, edgecolors=colour, zorder=3)
    for bound in (bound for bound in bounds if bound.metric == metric):
        axes.axhline(bound.value / unit.divisor, color=LIGHT["limit"], linestyle=":", linewidth=1.2)
    axes.set(xlabel="request rate (req/s)", ylabel=title)
    set_scale(axes, "x", [point.rate for curve in curves for point in curve.points])
    set_scale(axes, "y", [value / unit.divisor for value in values])


def plot_changes(axes: Any, differences: Sequence[Difference]) -> None:
    """Draw the relative change of each metric with its confidence interval."""
    shown = [d for d in differences if math.isfinite(d.relative.mean)]
    for position, d in enumerate(shown):
        mean, low, high = (None if part is None else 100 * part for part in d.relative)
        bars = None if low is None or high is None or mean is None else [[mean - low], [high - mean]]
        colour = LIGHT[OUTCOME_COLOURS[d.outcome][1:]]
        axes.errorbar([mean], [position], xerr=bars, fmt="o", capsize=3, color=colour)
    axes.axvline(0, color=LIGHT["soft"], linewidth=0.8)
    axes.set_yticks(range(len(shown)), [metric_title(d.objective.metric) for d in shown])
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set(xlabel="B against A (%)")
