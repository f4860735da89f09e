"""Print, plot and write comparisons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

from servesim.files.chart_style import LIGHT, matplotlib_style
from servesim.files.write import save_figure, write_json
from servesim.runs.run_folder import RunData

from .verify import CHECKED_METRICS, Comparison, MetricRow, as_json, latency_pairs, rank_correlations

HEAD = f"{'metric':<24}{'simulated':>13}{'measured':>13}{'error':>11}{'steps':>11}{'decisions':>11}"


def format_percent(value: Optional[float]) -> str:
    """Return a fraction as signed percent."""
    return "-" if value is None else f"{100 * value:+.2f}%"


def format_number(value: Optional[float]) -> str:
    """Return a metric with a few digits."""
    if value is None:
        return "-"
    return (
        f"{value:.0f}" if value == int(value) and abs(value) < 1e9 else f"{value:.4g}" if value < 10 else f"{value:.2f}"
    )


def format_row(row: MetricRow, checked: Sequence[str]) -> str:
    """Return the line of a metric; a star marks checked metrics."""
    mark = "*" if row.metric in checked else " "
    cells = f"{format_number(row.simulated):>13}{format_number(row.measured):>13}{format_percent(row.error):>11}"
    sources = f"{format_percent(row.from_step_times):>11}{format_percent(row.from_decisions):>11}"
    return f"{mark}{row.metric:<23}{cells}{sources}{format_limits(row)}"


def format_limits(row: MetricRow) -> str:
    """Return the interval of a metric, and whether the measured value is inside."""
    if row.interval is None:
        return ""
    word = "" if row.inside is None else "  inside" if row.inside else "  outside"
    return f"  {f'[{format_number(row.interval[0])}, {format_number(row.interval[1])}]':>21}{word}"


def describe_inside(comparison: Comparison) -> list[str]:
    """Return how many measured values are in their intervals."""
    checked = [row for row in comparison.rows if row.inside is not None]
    if not checked:
        return []
    outside = [f"{row.metric} {format_percent(row.error)}" for row in checked if not row.inside]
    text = f"inside the intervals: {len(checked) - len(outside)} of {len(checked)} measured values"
    return [text + (f"; outside: {', '.join(outside)}" if outside else "")]


def format_comparison(
    comparison: Comparison, checked: Sequence[str] = CHECKED_METRICS, tolerance: Optional[float] = None
) -> str:
    """Return the report of one scenario."""
    title = f" simulated against measured{': ' + comparison.name if comparison.name else ''} "
    head = f"{HEAD}{'interval':>23}" if any(row.interval for row in comparison.rows) else HEAD
    lines = [f"{title:=^83}", head, *(format_row(row, checked) for row in comparison.rows)]
    lines += ["-" * 83, *describe_decisions(comparison), *describe_inside(comparison)]
    for pair in comparison.paired:
        lines.append(
            f"{pair.name} of {pair.count} requests, simulated - measured: mean {1e3 * pair.mean:+.2f} ms, "
            f"median {1e3 * pair.median:+.2f} ms, sd {1e3 * pair.spread:.2f} ms, {100 * pair.within:.0f} % within 5 %"
        )
    if comparison.token_check is not None:
        check = comparison.token_check
        lines.append(f"token check of the measured run: {check['equal']} of {check['checked']} answers equal")
    if tolerance is not None:
        outside = comparison.outside(tolerance, checked)
        names = ", ".join(f"{row.metric} {format_percent(row.error)}" for row in outside)
        lines.append(f"tolerance {100 * tolerance:g} %: " + (f"missed by {names}" if outside else "met"))
    return "\n".join(lines)


def describe_decisions(comparison: Comparison) -> list[str]:
    """Return how many decisions and model calls of both runs are equal."""
    decisions = comparison.decisions
    if decisions is None:
        text = "not compared (one run has no decision log)"
    elif decisions.identical:
        text = f"identical, {decisions.same} steps"
    else:
        time = "" if decisions.first is None else f", at t={decisions.first['t']:.4f} s"
        text = f"{decisions.simulated} steps simulated, {decisions.measured} measured; first difference at step "
        text += f"{decisions.same}{time}; {decisions.alike} steps equal at the same index"
    lines = [f"decisions: {text}"]
    if comparison.calls_matched is not None:
        matched, calls = comparison.calls_matched
        lines.append(f"with measured step times, {matched} of {calls} simulated model calls match the measured ones")
    return lines


def format_ranks(comparisons: Sequence[Comparison]) -> str:
    """Return the rank correlation per metric."""
    taus = rank_correlations(comparisons).items()
    cells = ", ".join(f"{metric} {'-' if tau is None else f'{tau:+.2f}'}" for metric, tau in taus)
    return f"rank agreement over {len(comparisons)} settings (Kendall's tau): {cells}"


def write_report(comparisons: Sequence[Comparison], folder: Path, tolerance: Optional[float]) -> None:
    """Write verify.json."""
    report: dict[str, Any] = {"tolerance": tolerance, "settings": [as_json(c) for c in comparisons]}
    if len(comparisons) > 1:
        report["kendall_tau"] = rank_correlations(comparisons)
    write_json(folder / "verify.json", report)


def plot_comparisons(
    runs: Mapping[str, tuple[RunData, RunData]], comparisons: Sequence[Comparison], path: Path
) -> None:
    """Plot simulated over measured latency per request, and the errors of the checked metrics."""
    from matplotlib.figure import Figure

    with matplotlib_style():
        figure = Figure(figsize=(13, 4.6 if len(comparisons) > 1 else 4.2))
        left, middle, right = figure.subplots(1, 3)
        for axes, name in ((left, "ttft"), (middle, "e2el")):
            plot_latencies(axes, name, runs)
        plot_errors(right, comparisons)
        if len(comparisons) > 1:  # below the charts, so that it covers no point
            columns = min(len(comparisons), 4)
            figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=columns)
        save_figure(figure, path, dpi=110)


def plot_latencies(axes: Any, name: str, runs: Mapping[str, tuple[RunData, RunData]]) -> None:
    """Plot one dot per request, and the line of equal values."""
    values = []
    for simulated, measured in runs.values():
        pairs = list(latency_pairs(name, simulated, measured).values())
        axes.plot([b for _, b in pairs], [a for a, _ in pairs], ".", markersize=3)
        values += [value for pair in pairs for value in pair]
    if values:
        axes.plot([min(values), max(values)], [min(values), max(values)], color=LIGHT["soft"], linewidth=0.8)
    axes.set(xlabel=f"measured {name} (s)", ylabel=f"simulated {name} (s)", title=f"{name}, one dot per request")


def plot_errors(axes: Any, comparisons: Sequence[Comparison]) -> None:
    """Plot the errors of the checked metrics. Bars are horizontal: long names do not overlap."""
    height = 0.8 / max(1, len(comparisons))
    for index, comparison in enumerate(comparisons):
        errors = [100 * (comparison.row(metric).error or 0.0) for metric in CHECKED_METRICS]
        places = [place + index * height for place in range(len(CHECKED_METRICS))]
        axes.barh(places, errors, height, label=comparison.name or None)
    axes.set_yticks([place + 0.4 - height / 2 for place in range(len(CHECKED_METRICS))], CHECKED_METRICS)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", visible=True)
    axes.axvline(0, color=LIGHT["soft"], linewidth=0.8)
    axes.set(xlabel="error (%)", title="simulated - measured")
