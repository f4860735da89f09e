"""Charts of results in notebooks and scripts: matplotlib axes in the style of all charts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pandas as pd
from servesim.files.chart_style import LIGHT, SERIES, matplotlib_style
from servesim.searches.rate_files import axis_name, spans_decade
from servesim.statistics.constraints import Bound
from servesim.study.compare import Difference

COLOURS = {"better": "winner", "worse": "baseline"}  # outcome -> colour; other outcomes are grey


@contextmanager
def styled_axes(axes: Any = None, size: tuple[float, float] = (6.4, 3.6)) -> Iterator[Any]:
    """Return the axes to draw on; without axes, those of a new figure, which a notebook shows after its cell."""
    import matplotlib.pyplot as plt

    with matplotlib_style():
        yield plt.subplots(figsize=size)[1] if axes is None else axes


def plot_changes(axes: Any, differences: Sequence[Difference]) -> None:
    """Draw the relative change of each metric with its confidence interval."""
    shown = [d for d in differences if math.isfinite(d.relative.mean)]
    for position, d in enumerate(shown):
        mean, low, high = (None if part is None else 100 * part for part in d.relative)
        bars = None if low is None or high is None or mean is None else [[mean - low], [high - mean]]
        axes.errorbar([mean], [position], xerr=bars, fmt="o", capsize=3, color=LIGHT[COLOURS.get(d.outcome, "point")])
    axes.axvline(0, color=LIGHT["soft"], linewidth=0.8)
    axes.set_yticks(range(len(shown)), [d.objective.metric for d in shown])
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set(xlabel="B against A (%)")


def plot_knob(axes: Any, curve: pd.DataFrame, metric: str) -> None:
    """Draw a metric for each value of a parameter: the best configuration, and the single change of the winner."""
    positions = range(len(curve))
    numeric = all(type(value) in (int, float) for value in curve.index)
    for name, colour, marker in (("best", "front", "o"), ("single_change", "winner", "s")):
        axes.errorbar(
            positions, curve[name], curve[f"{name}_half"], marker=marker, markersize=4, capsize=3, color=LIGHT[colour],
            label=name.replace("_", " "), linestyle="-" if numeric else "none",
        )  # fmt: skip
    axes.set_xticks(positions, [str(value) for value in curve.index])
    axes.set_xlim(-0.5, len(curve) - 0.5)
    axes.set(xlabel=str(curve.index.name), ylabel=axis_name(metric))
    axes.legend()


def plot_loads(axes: Any, curves: Mapping[str, pd.DataFrame], metric: str, bounds: Sequence[Bound]) -> None:
    """Draw a metric over the load, one line per configuration; a cross marks a load that misses a constraint."""
    for number, (name, points) in enumerate(curves.items()):
        colour = LIGHT[SERIES[number % len(SERIES)]]
        axes.plot(points.load, points[metric], marker="o", markersize=4, color=colour, label=name)
        missed = points[~points.meets]
        axes.scatter(missed.load, missed[metric], marker="x", color=colour, s=45, zorder=3)
    for bound in bounds:
        axes.axhline(bound.value, color=LIGHT["limit"], linestyle="--", linewidth=1, label=str(bound))
    values = [value for points in curves.values() for value in points[metric].dropna()]
    axes.set_yscale("log" if spans_decade(values) else "linear")
    axes.set(xlabel="requests per second", ylabel=axis_name(metric))
    axes.legend()
