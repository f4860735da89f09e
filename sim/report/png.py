"""The figures of a report as PNG or SVG files, drawn with matplotlib."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from servesim.runs.metrics import WHERE
from servesim.study.experiment import shown
from servesim.study.objective import Objective
from servesim.study.ranking import Row, Summary

from .charts import STATES, scale_of
from .figures import Knob, Story, knobs, stories

WIN, BASE, MARK, POINT = "#0b6e4f", "#b3541e", "#3b5bdb", "#9aa1ab"
SHADES = ("#b9bec6", "#e0a33e", "#3b5bdb", "#c2456d", "#0b8f6a", "#7a5bb5")


def plot(summary: Summary, folder: Path, format: str = "png") -> list[Path]:
    """Write every figure of a sweep; return the files."""
    import matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "servesim", "figure.constrained_layout.use": True}):
        return [save(folder / f"{name}.{format}", size, draw) for name, size, draw in drawings(summary)]


def drawings(summary: Summary) -> Iterator[tuple[str, tuple[int, int], Callable[[Any], None]]]:
    """Yield the figures: a file name, how many panels down and across, and the function that draws them."""
    first, *others = summary.experiment.objectives
    for other in others:
        name = f"pareto_{first.metric}_{other.metric}"
        yield name, (1, 1), partial(trade_off, summary=summary, one=first, other=other)
    if turned := knobs(summary):
        across = min(3, len(turned))
        yield "knobs", (-(-len(turned) // across), across), partial(curves, turned=turned)
    yield "time", (1, 1), partial(times, summary=summary)
    if watched := stories(summary):
        yield "queues", (len(watched), 1), partial(timeline, watched=watched)


def save(path: Path, size: tuple[int, int], draw: Callable[[Any], None]) -> Path:
    """Draw one figure and write it, the same bytes every time."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(6.0, 4.0 * size[1]), 3.4 * size[0] + 0.6))
    FigureCanvasAgg(figure)
    draw(list(figure.subplots(*size, squeeze=False).flat))
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else {})
    return path


def trade_off(panels: Any, summary: Summary, one: Objective, other: Objective) -> None:
    """Draw configurations by two objectives."""
    axes = panels[0]
    rows = [row for row in summary.rows if not math.isnan(row.found[one.metric].mean + row.found[other.metric].mean)]
    across, x_title = scale_of(one.metric, [row.found[one.metric].mean for row in rows])
    up, y_title = scale_of(other.metric, [row.found[other.metric].mean for row in rows])

    def scatter(chosen: list[Row], colour: str, size: int, label: str) -> None:
        xs = [row.found[one.metric].mean / across for row in chosen]
        ys = [row.found[other.metric].mean / up for row in chosen]
        axes.scatter(xs, ys, s=size, c=colour, label=label, zorder=2 + size / 100)

    scatter([row for row in rows if not row.front], POINT, 10, "beaten")
    scatter([row for row in rows if row.front], MARK, 22, "on the front")
    scatter([summary.baseline], BASE, 50, "baseline")
    scatter([summary.winner] if summary.winner else [], WIN, 70, "winner")
    axes.set(xlabel=x_title, ylabel=y_title)
    axes.legend(frameon=False)


def curves(axes: Any, turned: list[Knob]) -> None:
    """Draw what each knob does."""
    for panel, knob in zip(axes, turned):
        divisor, y_title = scale_of(knob.metric, [mark.found.mean for mark in knob.best])
        places = {repr(mark.value): place for place, mark in enumerate(knob.best)}
        for series, colour, label in ((knob.best, MARK, "best with it"), (knob.alone, WIN, "winner, this changed")):
            xs = [places[repr(mark.value)] for mark in series]
            ys = [mark.found.mean / divisor for mark in series]
            halves = [(mark.found.half or 0.0) / divisor for mark in series]
            panel.errorbar(xs, ys, halves, color=colour, marker="o", markersize=4, capsize=2, label=label)
        panel.set_xticks(range(len(places)), [shown(mark.value) for mark in knob.best])
        panel.set(xlabel=knob.name, ylabel=y_title)
    for panel in axes[len(turned) :]:
        panel.set_axis_off()
    axes[0].legend(frameon=False, fontsize="small")


def times(panels: Any, summary: Summary) -> None:
    """Draw where requests' time went."""
    axes = panels[0]
    rows = [("baseline", summary.baseline)]
    if summary.winner is not None and summary.winner is not summary.baseline:
        rows.append(("winner", summary.winner))
    left = [0.0] * len(rows)
    for state, colour in zip(WHERE, SHADES):
        widths = [row.where().get(state, 0.0) for _, row in rows]
        axes.barh([name for name, _ in rows], widths, left=left, color=colour, label=STATES[state])
        left = [a + b for a, b in zip(left, widths)]
    axes.set(xlabel="seconds of a request, mean")
    axes.legend(frameon=False, fontsize="small", ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))


def timeline(axes: Any, watched: list[Story]) -> None:
    """Draw the queues over time."""
    for panel, story in zip(axes, watched):
        for name, colour in (("waiting", SHADES[1]), ("running", SHADES[4]), ("swapped", SHADES[5])):
            values = [getattr(queue, name) for queue in story.log.queues]
            panel.step(story.log.times, values, where="post", color=colour, label=name)
        panel.set(xlabel="time (s)", ylabel="requests")
        panel.set_title(textwrap.fill(story.row.label, 70), fontsize="small")
        panel.sharex(axes[0])
    axes[0].legend(frameon=False)
