"""A comparison as text and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

from servesim.files.write import write_json
from servesim.runs.run_folder import RunData

from .verify import JUDGED, Comparison, Line, as_json, latencies, ranks

HEAD = f"{'metric':<24}{'simulated':>13}{'measured':>13}{'error':>11}{'steps':>11}{'decisions':>11}"


def percent(value: Optional[float]) -> str:
    """Return a share as signed percent."""
    return "-" if value is None else f"{100 * value:+.2f}%"


def number(value: Optional[float]) -> str:
    """Return a figure, short."""
    if value is None:
        return "-"
    return (
        f"{value:.0f}" if value == int(value) and abs(value) < 1e9 else f"{value:.4g}" if value < 10 else f"{value:.2f}"
    )


def row(line: Line, judged: Sequence[str]) -> str:
    """Return a figure's line; those that are judged are marked."""
    mark = "*" if line.metric in judged else " "
    cells = f"{number(line.simulated):>13}{number(line.measured):>13}{percent(line.error):>11}"
    return f"{mark}{line.metric:<23}{cells}{percent(line.steps):>11}{percent(line.decisions):>11}"


def text(comparison: Comparison, judged: Sequence[str] = JUDGED, tolerance: Optional[float] = None) -> str:
    """Return one setting's report."""
    title = f" simulated against measured{': ' + comparison.name if comparison.name else ''} "
    lines = [f"{title:=^83}", HEAD, *(row(line, judged) for line in comparison.lines)]
    lines += ["-" * 83, *about_decisions(comparison)]
    for pair in comparison.paired:
        lines.append(
            f"{pair.name} of {pair.count} requests, simulated - measured: mean {1e3 * pair.mean:+.2f} ms, "
            f"median {1e3 * pair.median:+.2f} ms, sd {1e3 * pair.spread:.2f} ms, {100 * pair.within:.0f} % within 5 %"
        )
    if tolerance is not None:
        outside = comparison.outside(tolerance, judged)
        names = ", ".join(f"{line.metric} {percent(line.error)}" for line in outside)
        lines.append(f"tolerance {100 * tolerance:g} %: " + (f"missed by {names}" if outside else "met"))
    return "\n".join(lines)


def about_decisions(comparison: Comparison) -> list[str]:
    """Say how far both sides decided alike."""
    alike = comparison.decisions
    if alike is None:
        said = "not compared (one side has no log)"
    elif alike.identical:
        said = f"identical, {alike.same} turns"
    else:
        where = "" if alike.first is None else f", at t={alike.first['t']:.4f} s"
        said = f"{alike.simulated} turns simulated, {alike.measured} measured; the first difference is turn "
        said += f"{alike.same}{where}; {alike.alike} equal place by place"
    lines = [f"decisions: {said}"]
    if comparison.followed is not None:
        followed, calls = comparison.followed
        lines.append(f"with measured step times the simulation makes {followed} of {calls} calls as measured")
    return lines


def rank_text(comparisons: Sequence[Comparison]) -> str:
    """Say whether the order of settings holds."""
    taus = ranks(comparisons).items()
    cells = ", ".join(f"{metric} {'-' if tau is None else f'{tau:+.2f}'}" for metric, tau in taus)
    return f"rank agreement over {len(comparisons)} settings (Kendall's tau): {cells}"


def write_report(comparisons: Sequence[Comparison], folder: Path, tolerance: Optional[float]) -> None:
    """Write verify.json."""
    report: dict[str, Any] = {"tolerance": tolerance, "settings": [as_json(c) for c in comparisons]}
    if len(comparisons) > 1:
        report["kendall_tau"] = ranks(comparisons)
    write_json(folder / "verify.json", report)


def plot(sides: Mapping[str, tuple[RunData, RunData]], comparisons: Sequence[Comparison], path: Path) -> None:
    """Draw simulated over measured, request by request, and the errors of the judged figures."""
    import matplotlib

    matplotlib.use("Agg", force=False)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.2), layout="constrained")
    for place, name in enumerate(("ttft", "e2el"), 1):
        axes = figure.add_subplot(1, 3, place)
        for label, (simulated, measured) in sides.items():
            pairs = latencies(name, simulated, measured).values()
            axes.plot([b for _, b in pairs], [a for a, _ in pairs], ".", markersize=3, label=label or None)
        low, high = axes.get_xlim()
        axes.plot([low, high], [low, high], color="grey", linewidth=0.8)
        axes.set(xlabel=f"measured {name} (s)", ylabel=f"simulated {name} (s)", title=f"{name}, a dot a request")
    axes = figure.add_subplot(1, 3, 3)
    width = 0.8 / max(1, len(comparisons))
    for index, comparison in enumerate(comparisons):
        errors = [100 * (comparison.line(metric).error or 0.0) for metric in JUDGED]
        places = [place + index * width for place in range(len(JUDGED))]
        axes.bar(places, errors, width, label=comparison.name or None)
    axes.set_xticks([place + 0.4 - width / 2 for place in range(len(JUDGED))], JUDGED, rotation=30, ha="right")
    axes.axhline(0, color="grey", linewidth=0.8)
    axes.set(ylabel="error (%)", title="simulated - measured")
    if len(comparisons) > 1:
        axes.legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
