"""Charts of single runs: time breakdown, latencies of requests, and queues over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from servesim.runs.request_rows import STATES
from servesim.runs.text import STATE_LABELS
from servesim.statistics.number_format import format_number

from .plots import HOVER, Chart, Limit, Trace, line, plain, value_axis, with_limits
from .recorded_runs import QUANTILES, RecordedRun

SLO_KEYS = {"TTFT": "ttft", "TPOT": "tpot", "E2E latency": "e2el"}
QUEUES = (("waiting", "queued"), ("running", "decoding"), ("swapped", "swapped"))  # name, colour


class Latencies(NamedTuple):
    """The quantiles of the latencies of one run, by name and in seconds."""

    name: str
    colour: str
    quantiles: Mapping[str, Sequence[float]]


def time_chart(bars: Sequence[tuple[str, Mapping[str, float]]]) -> Chart:
    """Return the time breakdown of requests, one bar per configuration."""
    data = []
    names = [name for name, _ in bars]
    for state in STATES:
        seconds = [times.get(state, 0.0) for _, times in bars]
        if not any(seconds):
            continue
        hover = [
            f"<b>{name}</b><br>{STATE_LABELS[state]}: {format_number(value)} s" for name, value in zip(names, seconds)
        ]
        data.append({
            "type": "bar", "orientation": "h", "name": STATE_LABELS[state], "x": seconds, "y": names,
            "marker": {"color": f"@{state}"}, "hovertext": hover, "hovertemplate": HOVER,
        })  # fmt: skip
    layout = {
        "barmode": "stack", "height": 130 + 45 * len(bars), "xaxis": {"title": {"text": "mean seconds per request"}},
        "yaxis": {"autorange": "reversed", "automargin": True}, "legend": {"traceorder": "normal"},
    }  # fmt: skip
    return Chart("time-breakdown", "Mean time of a request", data, layout)


def latency_charts(runs: Sequence[Latencies], slo: Mapping[str, float]) -> list[Chart]:
    """Return the distribution (CDF) of each latency in every run; `slo` has bounds in seconds, as of `Slo.seconds`."""
    charts: list[Chart] = []
    for name in dict.fromkeys(name for run in runs for name in run.quantiles):
        curves = [(run, run.quantiles[name]) for run in runs if name in run.quantiles]
        scale, unit = (1e3, "ms") if max(values[-1] for _, values in curves) < 1 else (1.0, "s")
        data = [cdf(run, [value * scale for value in values], name, unit) for run, values in curves]
        layout = {
            "xaxis": value_axis(f"{name} ({unit})", [x for trace in data for x in trace["x"] if x > 0]),
            "yaxis": {"title": {"text": "% of requests"}, "range": [0, 102]},
            "height": 280,
        }
        bound = slo.get(SLO_KEYS.get(name, ""))
        limits = [] if bound is None else [Limit("x", bound * scale, f"SLO {bound * scale:g} {unit}")]
        charts.append(Chart(f"cdf-{len(charts)}", f"{name} of the requests", data, with_limits(layout, limits)))
    return charts


def cdf(run: Latencies, values: Sequence[float], name: str, unit: str) -> Trace:
    """Return a cumulative distribution."""
    shares = [100 * float(q) for q in QUANTILES]
    who = plain(run.name)
    hover = [
        f"<b>{who}</b><br>{q:.1f} % of requests: {name} up to {format_number(x)} {unit}" for x, q in zip(values, shares)
    ]
    trace = line(who, list(zip(values, shares)), run.colour)
    return {**trace, "hovertext": hover, "hovertemplate": HOVER}


def queue_charts(runs: Sequence[RecordedRun]) -> list[Chart]:
    """Return the queues and the KV blocks over time, one pair of charts per run, with common axes."""
    logs = [run for run in runs if run.log.times]
    if not logs:
        return []
    last, top, most_blocks = timeline_limits(logs)
    charts = []
    for run in logs:
        traces = [queue_line(run, name, colour) for name, colour in QUEUES]
        traces = [trace for trace in traces if trace["name"] != "swapped" or any(trace["y"])]
        charts.append(time_line(f"queues-{run.role}", f"Queues: {run.role}", traces, "requests", last, top))
    for run in logs if most_blocks else ():
        trace, title = queue_line(run, "blocks_used", "front"), f"KV blocks: {run.role}"
        charts.append(time_line(f"blocks-{run.role}", title, [trace], "KV blocks in use", last, most_blocks))
    return charts


def timeline_limits(runs: Sequence[RecordedRun]) -> tuple[float, int, int]:
    """Return the last time, the longest queue and the most used blocks of all runs."""
    queues = [queue for run in runs for queue in run.log.queues]
    longest = max(max(queue.waiting, queue.running, queue.swapped) for queue in queues)
    return max(run.log.times[-1] for run in runs), longest, max(queue.blocks_used for queue in queues)


def queue_line(run: RecordedRun, name: str, colour: str) -> Trace:
    """Return one number of the queue log over time; each value holds until the next one."""
    xy = [(t, getattr(queue, name)) for t, queue in zip(run.log.times, run.log.queues)]
    text = name.replace("_", " ")
    return line(text, xy, f"@{colour}", hovertemplate=f"%{{y:,}} {text} at %{{x:.1f}} s<extra></extra>") | {
        "line": {"color": f"@{colour}", "width": 1.6, "shape": "hv"}
    }


def time_line(id: str, title: str, traces: Sequence[Trace], y_title: str, last: float, top: float) -> Chart:
    """Return a chart over time; `last` and `top` give several charts the same axes."""
    layout = {
        "xaxis": {"title": {"text": "time (s)"}, "range": [0, last or 1]},
        "yaxis": {"title": {"text": y_title}, "range": [0, 1.06 * (top or 1)]},
        "height": 260,
        "showlegend": len(traces) > 1,
    }
    return Chart(id, title, traces, layout, group=id.partition("-")[0])
