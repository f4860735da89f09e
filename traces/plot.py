"""Charts of a trace: arrivals over time, prompt and output lengths, and their correlation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from servesim.files.chart_style import LIGHT, matplotlib_style
from servesim.files.read import PathLike
from servesim.files.write import save_figure

from .describe import statistics
from .trace import Trace

INK, FAINT, PROMPT, OUTPUT, BARS = (LIGHT[name] for name in ("ink", "point", "front", "baseline", "winner"))
BINS = 120  # maximum time bins in the arrivals chart


def plot_trace(trace: Trace, path: PathLike) -> None:
    """Draw a trace into a PNG, SVG or PDF file; the file name selects the format."""
    from matplotlib.figure import Figure

    metrics = statistics(trace)
    rows = 2 if metrics["span_s"] else 1  # no arrivals chart for a trace of lengths only
    with matplotlib_style():
        figure = Figure(figsize=(11, 3.3 * rows + 0.3))
        grid = figure.add_gridspec(rows, 3, height_ratios=(1.0, 1.15)[-rows:])
        if rows == 2:
            _plot_arrivals(figure.add_subplot(grid[0, :]), trace, metrics)
        _plot_lengths(figure.add_subplot(grid[-1, 0]), trace.prompts, "prompt", PROMPT, metrics["prompt"])
        _plot_lengths(figure.add_subplot(grid[-1, 1]), trace.outputs, "output", OUTPUT, metrics["output"])
        _plot_joint(figure.add_subplot(grid[-1, 2]), trace, metrics)
        name = Path(trace.source).name
        figure.suptitle(
            f"{name}: {len(trace):,} requests", color=INK, fontsize=13, fontweight="bold", x=0.01, ha="left"
        )
        save_figure(figure, path, parents=False, dpi=150)


def _plot_arrivals(axes: Any, trace: Trace, metrics: dict[str, Any]) -> None:
    """Draw requests per second over time."""
    arrivals = np.array([request.arrival for request in trace.requests if request.follows is None])
    unit, name = next((u, n) for u, n, min_span in TIME_UNITS if metrics["span_s"] >= min_span)
    edges = np.linspace(arrivals[0], arrivals[-1], min(BINS, max(2, len(arrivals) // 5)) + 1)
    width = edges[1] - edges[0]
    rates = np.histogram(arrivals, edges)[0] / width
    axes.stairs(rates, edges / unit, fill=True, color=BARS, alpha=0.75, linewidth=0)
    axes.axhline(metrics["rate"], color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
    axes.set_xlim(edges[0] / unit, edges[-1] / unit)
    axes.set_ylim(0, max(rates.max() * 1.12, 1e-9))
    spread = ", ".join(f"{v:.3g} at {w} s" for w, v in metrics["dispersion"].items() if v is not None)
    title = f"arrivals: {metrics['rate']:.4g}/s on average, CV of gaps {metrics['gap_cv'] or 0:.3g}"
    title += f", dispersion {spread}" if spread else ""
    _style_axes(axes, f"time ({name})", "requests/s", title)


TIME_UNITS = ((86400.0, "days", 4 * 86400.0), (3600.0, "hours", 4 * 3600.0), (60.0, "minutes", 600.0), (1.0, "s", 0.0))


def _plot_lengths(axes: Any, lengths: Any, name: str, colour: str, metrics: dict[str, float]) -> None:
    """Draw a histogram; the scale is logarithmic if lengths differ by more than a factor of 30."""
    low, high = int(lengths.min()), int(lengths.max())
    if high > 30 * low:
        edges = np.unique(np.rint(np.geomspace(low, high + 1, 31))) - 0.5
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(_format_tick)
    else:
        edges = np.unique(np.rint(np.linspace(low, high + 1, 31))) - 0.5
    counts = np.histogram(lengths, edges)[0]
    axes.stairs(counts / counts.sum() * 100, edges, fill=True, color=colour, alpha=0.75, linewidth=0)
    top = counts.max() / counts.sum() * 100 * 1.18
    axes.set_ylim(0, top)
    for key, style in (("p50", "-"), ("p99", ":")):
        axes.axvline(metrics[key], color=INK, linewidth=1.0, linestyle=style)
        axes.text(metrics[key], top * 0.985, f" {key}", color=INK, fontsize=8, va="top", ha="left")
    title = ", ".join(f"{key} {_format_length(metrics[key])}" for key in ("mean", "p50", "p99"))
    _style_axes(axes, f"{name} tokens", "% of requests", f"{name}: {title}")


def _plot_joint(axes: Any, trace: Trace, metrics: dict[str, Any]) -> None:
    """Draw output lengths against prompt lengths; darker cells hold more requests."""
    correlation = metrics["correlation"]
    title = "no correlation" if correlation is None else f"correlation {correlation:.2f}"
    _style_axes(axes, "prompt tokens", "output tokens", title)
    prompts, outputs = trace.prompts, trace.outputs
    scales: dict[str, str] = {}
    for side, lengths in (("x", prompts), ("y", outputs)):
        scales[f"{side}scale"] = "log" if lengths.max() > 30 * lengths.min() else "linear"
    if prompts.min() < prompts.max() and outputs.min() < outputs.max():
        axes.grid(False)
        axes.hexbin(
            prompts, outputs, gridsize=30, bins="log", cmap=_grey_colormap(), mincnt=1, linewidths=0.1, **scales
        )
    else:
        axes.plot(prompts, outputs, "o", color=INK, markersize=3)
    for side, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
        if scales[f"{side}scale"] == "log":
            axis.set_major_formatter(_format_tick)


def _grey_colormap() -> Any:
    """Return greys; the lightest one is visible on white."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("shades", ["#dde3e8", FAINT, INK])


def _format_length(value: float) -> str:
    """Return a length for a chart title."""
    return f"{value:.1f}" if value < 100 and value != int(value) else f"{value:,.0f}"


def _format_tick(value: float, position: Any) -> str:
    """Return the label of a tick."""
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


def _style_axes(axes: Any, x: str, y: str, title: str) -> None:
    """Set labels and title."""
    axes.set(xlabel=x, ylabel=y, title=title)
