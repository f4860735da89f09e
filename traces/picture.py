"""A picture of a trace: arrivals over time, how long prompts and outputs are, and whether one goes with the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from servesim.core import BadInput
from servesim.files.read import PathLike

from .describe import statistics
from .trace import Trace

INK, FAINT, PROMPT, OUTPUT, BARS = "#22303c", "#8a97a3", "#3a7ca5", "#d1603d", "#5b8e7d"
BINS = 120  # stretches of time in the upper panel


def picture(trace: Trace, path: PathLike) -> None:
    """Draw a trace into a file, PNG, SVG or PDF by its name."""
    from matplotlib.figure import Figure

    figures = statistics(trace)
    rows = 2 if figures["span_s"] else 1  # lengths alone have no arrivals to show
    figure = Figure(figsize=(11, 3.3 * rows + 0.3), layout="constrained", facecolor="white")
    grid = figure.add_gridspec(rows, 3, height_ratios=(1.0, 1.15)[-rows:])
    if rows == 2:
        _arrivals(figure.add_subplot(grid[0, :]), trace, figures)
    _lengths(figure.add_subplot(grid[-1, 0]), trace.prompts, "prompt", PROMPT, figures["prompt"])
    _lengths(figure.add_subplot(grid[-1, 1]), trace.outputs, "output", OUTPUT, figures["output"])
    _together(figure.add_subplot(grid[-1, 2]), trace, figures)
    name = Path(trace.source).name
    figure.suptitle(f"{name}: {len(trace):,} requests", color=INK, fontsize=13, fontweight="bold", x=0.01, ha="left")
    try:
        figure.savefig(str(path), dpi=150)
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: cannot be drawn: {str(error)[:100]}") from None


def _arrivals(axes: Any, trace: Trace, figures: dict[str, Any]) -> None:
    """Draw requests a second over time."""
    free = np.array([request.arrival for request in trace.requests if request.after is None])
    unit, name = next((u, n) for u, n, least in TIMES if figures["span_s"] >= least)
    edges = np.linspace(free[0], free[-1], min(BINS, max(2, len(free) // 5)) + 1)
    width = edges[1] - edges[0]
    rates = np.histogram(free, edges)[0] / width
    axes.stairs(rates, edges / unit, fill=True, color=BARS, alpha=0.75, linewidth=0)
    axes.axhline(figures["rate"], color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
    axes.set_xlim(edges[0] / unit, edges[-1] / unit)
    axes.set_ylim(0, max(rates.max() * 1.12, 1e-9))
    spread = ", ".join(f"{v:.3g} at {w} s" for w, v in figures["dispersion"].items() if v is not None)
    title = f"arrivals: {figures['rate']:.4g}/s on average, CV of gaps {figures['gap_cv'] or 0:.3g}"
    title += f", dispersion {spread}" if spread else ""
    _plain(axes, f"time ({name})", "requests/s", title)


TIMES = ((86400.0, "days", 4 * 86400.0), (3600.0, "hours", 4 * 3600.0), (60.0, "minutes", 600.0), (1.0, "s", 0.0))


def _lengths(axes: Any, lengths: Any, name: str, colour: str, figures: dict[str, float]) -> None:
    """Draw a histogram, on a logarithmic scale where lengths differ by more than a factor of thirty."""
    low, high = int(lengths.min()), int(lengths.max())
    if high > 30 * low:
        edges = np.unique(np.rint(np.geomspace(low, high + 1, 31))) - 0.5
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(_thousands)
    else:
        edges = np.unique(np.rint(np.linspace(low, high + 1, 31))) - 0.5
    counts = np.histogram(lengths, edges)[0]
    axes.stairs(counts / counts.sum() * 100, edges, fill=True, color=colour, alpha=0.75, linewidth=0)
    top = counts.max() / counts.sum() * 100 * 1.18
    axes.set_ylim(0, top)
    for key, style in (("p50", "-"), ("p99", ":")):
        axes.axvline(figures[key], color=INK, linewidth=1.0, linestyle=style)
        axes.text(figures[key], top * 0.985, f" {key}", color=INK, fontsize=8, va="top", ha="left")
    title = f"{name}: mean {_count(figures['mean'])}, p50 {_count(figures['p50'])}, p99 {_count(figures['p99'])}"
    _plain(axes, f"{name} tokens", "% of requests", title)


def _together(axes: Any, trace: Trace, figures: dict[str, Any]) -> None:
    """Draw outputs over prompts, darker where many are."""
    related = figures["correlation"]
    title = "no correlation" if related is None else f"correlation {related:.2f}"
    _plain(axes, "prompt tokens", "output tokens", title)
    prompts, outputs = trace.prompts, trace.outputs
    kinds: dict[str, str] = {}
    for side, lengths in (("x", prompts), ("y", outputs)):
        kinds[f"{side}scale"] = "log" if lengths.max() > 30 * lengths.min() else "linear"
    if prompts.min() < prompts.max() and outputs.min() < outputs.max():
        axes.grid(False)
        axes.hexbin(prompts, outputs, gridsize=30, bins="log", cmap=_shades(), mincnt=1, linewidths=0.1, **kinds)
    else:
        axes.plot(prompts, outputs, "o", color=INK, markersize=3)
    for side, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
        if kinds[f"{side}scale"] == "log":
            axis.set_major_formatter(_thousands)


def _shades() -> Any:
    """Return greys of which even the lightest can be seen on white."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("shades", ["#dde3e8", FAINT, INK])


def _count(value: float) -> str:
    """Return a length as a title shows it."""
    return f"{value:.1f}" if value < 100 and value != int(value) else f"{value:,.0f}"


def _thousands(value: float, place: Any) -> str:
    """Return a tick's label."""
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


def _plain(axes: Any, x: str, y: str, title: str) -> None:
    """Name the axes and take away what a picture does not need."""
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)
    axes.set_title(title, loc="left", color=INK, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=INK, labelsize=8.5)
    axes.grid(axis="y", color=FAINT, alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
