"""Samples against the fit: prompts over tokens, decodes over the context, and measured over predicted for all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from servesim.core import Shape
from servesim.costs.device_profile import Profile

from .samples import Point, measured_points


def plot_fit(profile: Profile, path: Path) -> None:
    """Draw a profile's samples and its cost model into one picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    points = [point for point in measured_points(profile.path) if point.seconds and point.kind != "busy"]
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(15, 4.6), constrained_layout=True)
    prompts(left, profile, [p for p in points if p.kind == "prefill" and not p.shape.cross])
    decodes(middle, profile, [p for p in points if p.kind == "decode"])
    ratios(right, profile, points)
    figure.suptitle(f"{profile.name}: measured medians (dots) and fit (lines)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def prompts(axes: Any, profile: Profile, points: list[Point]) -> None:
    """Draw prefill time over tokens, by rows."""
    for rows in sorted({point.shape.prefill_rows for point in points})[:6]:
        mine = sorted((p for p in points if p.shape.prefill_rows == rows), key=lambda p: p.shape.prefill_tokens)
        (dots,) = axes.plot(
            [p.shape.prefill_tokens for p in mine], [1e3 * p.median for p in mine], "o", ms=4, label=f"{rows} rows"
        )
        told = [1e3 * profile.cost.seconds(p.shape) for p in mine]
        axes.plot([p.shape.prefill_tokens for p in mine], told, "-", lw=1, color=dots.get_color())
    decorated(axes, "prompt tokens of a step", "ms", bool(points))


def decodes(axes: Any, profile: Profile, points: list[Point]) -> None:
    """Draw decode time over the cached tokens that are read, by rows."""
    counts = sorted({point.shape.decode_rows for point in points})
    for rows in counts[:: max(1, len(counts) // 7)]:
        mine = sorted((p for p in points if p.shape.decode_rows == rows), key=lambda p: p.shape.context)
        reads = np.array([p.shape.context for p in mine])
        (dots,) = axes.plot(reads, [1e3 * p.median for p in mine], "o", ms=4, label=f"{rows} rows")
        shapes = [
            Shape(decode_rows=rows, decode_live=rows, context=int(x)) for x in np.linspace(reads[0], reads[-1], 40)
        ]
        told = [1e3 * profile.cost.seconds(shape) for shape in shapes]
        axes.plot([shape.context for shape in shapes], told, "-", lw=1, color=dots.get_color())
    decorated(axes, "cached tokens read", "ms", bool(points))


def ratios(axes: Any, profile: Profile, points: list[Point]) -> None:
    """Draw what the fit is off by at every point."""
    for kind in sorted({point.kind for point in points}):
        mine = [p for p in points if p.kind == kind]
        told = np.array([profile.cost.seconds(p.shape) for p in mine])
        seen = np.array([p.median for p in mine])
        axes.plot(1e3 * seen, 100 * (told / seen - 1), ".", ms=5, label=kind)
    axes.axhline(0, color="0.5", lw=0.8)
    decorated(axes, "measured, ms", "fit is off by, %", bool(points))


def decorated(axes: Any, x: str, y: str, filled: bool) -> None:
    """Name the axes; time spans orders of magnitude."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if filled:
        axes.set_xscale("log")
        axes.set_yscale("log") if y == "ms" else None
        axes.legend(fontsize=8)
