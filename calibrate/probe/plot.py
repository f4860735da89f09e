"""Plot samples and fit: times and fitted curves, the error of every point, and for which sizes the fit is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from servesim.core import Shape
from servesim.costs.device_profile import Profile
from servesim.files.chart_style import LIGHT, matplotlib_style
from servesim.files.write import save_figure

from .samples import MeasuredPoint, measured_points

MAX_COLOR = 15  # error in % with the strongest colour


def plot_fit(profile: Profile, path: Path) -> None:
    """Write a chart of a profile's samples and its cost model."""
    from matplotlib.figure import Figure

    points = [point for point in measured_points(profile.path) if point.seconds and point.kind != "busy"]
    with matplotlib_style():
        figure = Figure(figsize=(15, 9))
        (left, middle, right), where = figure.subplots(2, 3)
        plot_prefill(left, profile, [p for p in points if p.kind == "prefill" and not p.shape.cross])
        plot_decode(middle, profile, [p for p in points if p.kind == "decode"])
        plot_errors(right, profile, points)
        for axes, kind in zip(where, ("prefill", "decode", "mixed"), strict=True):
            plot_error_map(axes, profile, [p for p in points if p.kind == kind], kind)
        figure.suptitle(f"{profile.name}: measured medians (dots) and fit (lines)")
        save_figure(figure, path, dpi=110)


def plot_prefill(axes: Any, profile: Profile, points: list[MeasuredPoint]) -> None:
    """Plot prefill time over tokens, per number of rows."""
    for rows in sorted({point.shape.prefill_rows for point in points})[:6]:
        group = sorted((p for p in points if p.shape.prefill_rows == rows), key=lambda p: p.shape.prefill_tokens)
        (dots,) = axes.plot(
            [p.shape.prefill_tokens for p in group], [1e3 * p.median for p in group], "o", ms=4, label=f"{rows} rows"
        )
        predicted = [1e3 * profile.cost.seconds(p.shape) for p in group]
        axes.plot([p.shape.prefill_tokens for p in group], predicted, "-", lw=1, color=dots.get_color())
    label_axes(axes, "prompt tokens per step", "ms", bool(points))


def plot_decode(axes: Any, profile: Profile, points: list[MeasuredPoint]) -> None:
    """Plot decode time over cached tokens read, per number of rows."""
    counts = sorted({point.shape.decode_rows for point in points})
    for rows in counts[:: max(1, len(counts) // 7)]:
        group = sorted((p for p in points if p.shape.decode_rows == rows), key=lambda p: p.shape.context)
        reads = np.array([p.shape.context for p in group])
        (dots,) = axes.plot(reads, [1e3 * p.median for p in group], "o", ms=4, label=f"{rows} rows")
        shapes = [
            Shape(decode_rows=rows, decode_live=rows, context=int(x)) for x in np.linspace(reads[0], reads[-1], 40)
        ]
        predicted = [1e3 * profile.cost.seconds(shape) for shape in shapes]
        axes.plot([shape.context for shape in shapes], predicted, "-", lw=1, color=dots.get_color())
    label_axes(axes, "cached tokens read", "ms", bool(points))


def plot_errors(axes: Any, profile: Profile, points: list[MeasuredPoint]) -> None:
    """Plot the error of the fit at every point."""
    for kind in sorted({point.kind for point in points}):
        group = [p for p in points if p.kind == kind]
        predicted = np.array([profile.cost.seconds(p.shape) for p in group])
        measured = np.array([p.median for p in group])
        axes.plot(1e3 * measured, 100 * (predicted / measured - 1), ".", ms=5, label=kind)
    axes.axhline(0, color=LIGHT["soft"], lw=0.8)
    label_axes(axes, "measured, ms", "error of the fit, %", bool(points))


def plot_error_map(axes: Any, profile: Profile, points: list[MeasuredPoint], kind: str) -> None:
    """Plot each point by its rows and its mean length, coloured by the error: red is too slow, blue is too fast."""
    rows = np.array([p.shape.prefill_rows + p.shape.decode_rows for p in points], dtype=float)
    tokens = np.array([p.shape.prefill_tokens + p.shape.context for p in points], dtype=float)
    errors = np.array([100 * (profile.cost.seconds(p.shape) / p.median - 1) for p in points])
    axes.set_title(f"{kind}: error of the fit, %")
    if len(points):
        order = np.argsort(np.abs(errors))  # large errors on top
        lengths = np.maximum(tokens / rows, 1)
        dots = axes.scatter(
            lengths[order], rows[order], c=errors[order], cmap="RdBu_r", vmin=-MAX_COLOR, vmax=MAX_COLOR, s=14
        )
        axes.figure.colorbar(dots, ax=axes, extend="both")
        axes.set_xscale("log")
        axes.set_yscale("log")
    axes.set_xlabel("tokens per row (prompt tokens and context)")
    axes.set_ylabel("rows")


def label_axes(axes: Any, x: str, y: str, has_points: bool) -> None:
    """Set labels, log scales (times differ by orders of magnitude) and the legend."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if has_points:
        axes.set_xscale("log")
        axes.set_yscale("log") if y == "ms" else None
        axes.legend()
