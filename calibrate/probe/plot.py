"""Plot samples and fit: prefill time over tokens, decode time over context, and the error of every point."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from servesim.core import Shape
from servesim.costs.device_profile import Profile
from servesim.files.write import save_figure

from .samples import Point, measured_points


def plot_fit(profile: Profile, path: Path) -> None:
    """Write a chart of a profile's samples and its cost model."""
    from matplotlib.figure import Figure

    points = [point for point in measured_points(profile.path) if point.seconds and point.kind != "busy"]
    figure = Figure(figsize=(15, 4.6), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    plot_prefill(left, profile, [p for p in points if p.kind == "prefill" and not p.shape.cross])
    plot_decode(middle, profile, [p for p in points if p.kind == "decode"])
    plot_errors(right, profile, points)
    figure.suptitle(f"{profile.name}: measured medians (dots) and fit (lines)")
    save_figure(figure, path, dpi=110)


def plot_prefill(axes: Any, profile: Profile, points: list[Point]) -> None:
    """Plot prefill time over tokens, per number of rows."""
    for rows in sorted({point.shape.prefill_rows for point in points})[:6]:
        group = sorted((p for p in points if p.shape.prefill_rows == rows), key=lambda p: p.shape.prefill_tokens)
        (dots,) = axes.plot(
            [p.shape.prefill_tokens for p in group], [1e3 * p.median for p in group], "o", ms=4, label=f"{rows} rows"
        )
        predicted = [1e3 * profile.cost.seconds(p.shape) for p in group]
        axes.plot([p.shape.prefill_tokens for p in group], predicted, "-", lw=1, color=dots.get_color())
    label_axes(axes, "prompt tokens per step", "ms", bool(points))


def plot_decode(axes: Any, profile: Profile, points: list[Point]) -> None:
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


def plot_errors(axes: Any, profile: Profile, points: list[Point]) -> None:
    """Plot the error of the fit at every point."""
    for kind in sorted({point.kind for point in points}):
        group = [p for p in points if p.kind == kind]
        predicted = np.array([profile.cost.seconds(p.shape) for p in group])
        measured = np.array([p.median for p in group])
        axes.plot(1e3 * measured, 100 * (predicted / measured - 1), ".", ms=5, label=kind)
    axes.axhline(0, color="0.5", lw=0.8)
    label_axes(axes, "measured, ms", "error of the fit, %", bool(points))


def label_axes(axes: Any, x: str, y: str, has_points: bool) -> None:
    """Set labels, log scales (times differ by orders of magnitude) and the legend."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if has_points:
        axes.set_xscale("log")
        axes.set_yscale("log") if y == "ms" else None
        axes.legend(fontsize=8)
