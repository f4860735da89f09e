"""Simulated against measured, as text: the table of `sim verify` and `sim replay`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

from .verify import CHECKED_METRICS, Comparison, MetricRow, rank_correlations

HEAD = f"{'metric':<24}{'simulated':>13}{'measured':>13}{'error':>11}"


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
    sources = "".join(f"{format_percent(source):>11}" for source in row.sources)
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
    http = any(row.from_http is not None for row in comparison.rows)
    head = HEAD + (f"{'HTTP':>11}{'rest':>11}" if http else f"{'steps':>11}{'decisions':>11}")
    head += f"{'interval':>23}" if any(row.interval for row in comparison.rows) else ""
    lines = [f"{title:=^83}", head, *(format_row(row, checked) for row in comparison.rows)]
    lines += ["-" * 83, *describe_decisions(comparison), *describe_inside(comparison), *describe_http(comparison)]
    for pair in comparison.latencies:
        lines.append(
            f"{pair.name} of {pair.count} requests, simulated - measured: mean {1e3 * pair.mean:+.2f} ms, "
            f"median {1e3 * pair.median:+.2f} ms, sd {1e3 * pair.spread:.2f} ms, {100 * pair.within:.0f} % within 5 %"
        )
    if comparison.token_check is not None:
        check = comparison.token_check
        lines.append(f"token check of the measured run: {check['equal']} of {check['checked']} answers equal")
    lines += [f"note: {note}" for note in comparison.notes]
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
        share = decisions.alike / max(1, decisions.measured)
        text += f"{decisions.same}{time}; {share:.1%} of the measured steps are equal at the same index"
    lines = [f"decisions: {text}"]
    if comparison.calls_matched is not None:
        matched, calls = comparison.calls_matched
        lines.append(f"with measured step times, {matched} of {calls} simulated model calls match the measured ones")
    return lines


def describe_http(comparison: Comparison) -> list[str]:
    """Return how much of the TTFT is outside the server, and the setting that simulates it."""
    parts = [row.outside_server for row in comparison.rows if row.metric == "mean_ttft_ms" and row.outside_server]
    return [
        f"HTTP: of the mean TTFT, {measured:.2f} ms are outside the server (network, HTTP, client), {simulated:.2f} ms "
        f"in the simulation; engine.front_end.seconds: {max(0.0, measured) / 1e3:.4f} simulates them"
        for simulated, measured in parts
    ]


def format_ranks(comparisons: Sequence[Comparison]) -> str:
    """Return the rank correlation per metric."""
    taus = rank_correlations(comparisons).items()
    cells = ", ".join(f"{metric} {'-' if tau is None else f'{tau:+.2f}'}" for metric, tau in taus)
    return f"rank agreement over {len(comparisons)} settings (Kendall's tau): {cells}"
