"""Charts of pages drawn with matplotlib: the PNG and SVG files of `sim plot`, and notebooks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import unescape
from pathlib import Path
from typing import Any, NamedTuple

from servesim.files.chart_style import LIGHT, matplotlib_style
from servesim.files.write import save_figure
from servesim.study.ranking import Summary
from servesim.study.rate_summary import Result

from .knobs import knob_charts, knobs
from .plots import Chart, Trace
from .rate_charts import rate_charts
from .trade_offs import pairs, trade_off

MAX_LEGEND = 12  # names
MARKERS = {"circle": "o", "diamond": "D", "star": "*"}  # symbol of Plotly: marker of matplotlib
DASHES = {"solid": "-", "dash": "--", "dot": ":"}


class Picture(NamedTuple):
    """One file: charts with the legend of the first one."""

    name: str
    charts: Sequence[Chart]
    columns: int = 1
    legend_columns: int = 2


def plot(result: Result, folder: Path, format: str = "png") -> list[Path]:
    """Write every chart of a sweep; return the files."""
    with matplotlib_style():
        return [save(picture, folder / f"{picture.name}.{format}") for picture in pictures(result)]


def pictures(result: Result) -> Iterator[Picture]:
    """Yield the charts of a sweep; over rates, one with a panel per metric."""
    if not isinstance(result, Summary):
        yield Picture("rates", rate_charts(result), 2)
        return
    for x, y in pairs(result):
        if chart := trade_off(result, x, y, f"pareto_{x.metric}_{y.metric}"):
            yield Picture(chart.id, [chart], 1, 5)
    if curves := knobs(result):
        yield Picture("knobs", knob_charts(curves), 3)


def save(picture: Picture, path: Path) -> Path:
    """Draw one file and write it; the bytes are reproducible."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(picture.columns, len(picture.charts))
    rows = math.ceil(len(picture.charts) / columns)
    figure = Figure(figsize=(max(6.0, 4.0 * columns), 3.4 * rows + 0.6))
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for panel, chart in zip(axes, picture.charts):
        draw(panel, chart)
    for panel in axes[len(picture.charts) :]:
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


def draw(axes: Any, chart: Chart) -> None:
    """Draw a chart of a page, which may be part of a larger figure."""
    for trace in chart.data:
        draw_trace(axes, trace)
    for shape in chart.layout.get("shapes", ()):
        side, add_line = ("y", axes.axhline) if shape.get("xref") == "paper" else ("x", axes.axvline)
        style = shape["line"]
        add_line(shape[f"{side}0"], color=LIGHT[style["color"][1:]], linestyle=DASHES[style["dash"]], linewidth=1.2)
    for side in ("x", "y"):
        set_axis(axes, side, chart.layout[f"{side}axis"])
    axes.set_title(plain_text(chart.title), fontsize="medium")


def draw_trace(axes: Any, trace: Trace) -> None:
    """Draw a line, points, or both; an open symbol is a point without a fill."""
    x, y, mode, marker = trace["x"], trace["y"], trace["mode"], trace.get("marker")
    if "lines" in mode:
        style = trace["line"]
        axes.plot(x, y, DASHES[style["dash"]], color=LIGHT[style["color"][1:]], linewidth=0.7 * style["width"])
    if marker is None or not x:
        return
    colour, symbol = LIGHT[marker["color"][1:]], marker["symbol"]
    symbols = [symbol] * len(x) if isinstance(symbol, str) else symbol
    fills = ["white" if one.endswith("-open") else colour for one in symbols]
    name, size, shape = plain_text(trace["name"]), marker["size"], MARKERS[symbols[0].removesuffix("-open")]
    axes.scatter(x, y, s=size**2 / 1.6, c=fills, marker=shape, edgecolors=colour, label=name, zorder=2 + size / 10)
    for side in ("x", "y"):
        if bars := trace.get(f"error_{side}"):
            ends = [bars.get("arrayminus", bars["array"]), bars["array"]]
            axes.errorbar(x, y, **{f"{side}err": ends}, fmt="none", ecolor=colour, capsize=2)


def set_axis(axes: Any, side: str, axis: dict[str, Any]) -> None:
    """Set the title, the scale, the ticks and the range of an axis."""
    title = axis.get("title", {}).get("text", "").removesuffix(", log scale")
    is_log = axis.get("type") == "log"
    axes.set(**{f"{side}label": title, f"{side}scale": "log" if is_log else "linear"})
    limits = getattr(axes, f"get_{side}lim")()  # ticks outside would change them
    if "tickvals" in axis:
        getattr(axes, f"set_{side}ticks")(axis["tickvals"], list(map(plain_text, axis["ticktext"])))
        getattr(axes, f"set_{side}ticks")([], minor=True)
    if "range" in axis:
        limits = [10**end if is_log else end for end in axis["range"]]
    getattr(axes, f"set_{side}lim")(*limits)
    if axis.get("zeroline"):
        axes.axvline(0, color=LIGHT["soft"], linewidth=0.8)


def plain_text(text: str) -> str:
    """Return a text of Plotly, which has a few tags of HTML, as plain text."""
    return unescape(text.replace("<br>", " "))
