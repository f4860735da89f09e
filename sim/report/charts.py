"""Charts of single runs: time breakdown, latencies of requests; queues, KV blocks and the prefix cache over time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from servesim.files.chart_style import SERIES
from servesim.runs.metric_table import format_number
from servesim.runs.request_rows import STATES
from servesim.runs.text import STATE_LABELS
from servesim.runs.timeline import QueueLog

from .plots import HOVER, Chart, Limit, Trace, line, plain, value_axis, with_limits
from .recorded_runs import QUANTILES, RecordedRun

LATENCY_NAMES = {"ttft": "TTFT", "tpot": "TPOT", "e2el": "E2E latency"}
QUEUES = (("waiting", "queued"), ("running", "decoding"), ("swapped", "swapped"))  # name, colour
BLOCKS = (("blocks_used", "front"), ("cached_blocks", "queued"))
EVICTED = (("evicted_blocks", "stalled"),)
HIT_WINDOWS = 60  # parts of a run with a hit rate each


class Latencies(NamedTuple):
    """The quantiles of the latencies of one run, in seconds."""

    name: str
    colour: str
    quantiles: Mapping[str, Sequence[float]]  # by ttft, tpot and e2el


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


def latency_charts(runs: Sequence[Latencies], slo: Mapping[str, float], **keys: Any) -> list[Chart]:
    """Return the distribution (CDF) of each latency in every run.

    `slo` has bounds in seconds, as of `Slo.seconds`; `keys` are further ones of the layout.
    """
    charts: list[Chart] = []
    for key in dict.fromkeys(key for run in runs for key in run.quantiles):
        name, bound = LATENCY_NAMES[key], slo.get(key)
        curves = [(run, run.quantiles[key]) for run in runs if key in run.quantiles]
        scale, unit = (1e3, "ms") if max(values[-1] for _, values in curves) < 1 else (1.0, "s")
        data = [cdf(run, [value * scale for value in values], name, unit) for run, values in curves]
        positive = [x for trace in data for x in trace["x"] if x > 0]
        layout = {
            "xaxis": value_axis(f"{name} ({unit})", positive), "height": 280,
            "yaxis": {"title": {"text": "% of requests"}, "range": [0, 102]}, **keys,
        }  # fmt: skip
        limits = [] if bound is None else [Limit("x", bound * scale, f"SLO {bound * scale:g} {unit}")]
        layout = with_limits(layout, limits, positive)
        charts.append(Chart(f"cdf-{len(charts)}", f"{name} of the requests", data, layout))
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
    """Return queues, KV blocks, hits and evictions over time: one chart of each per run, with common axes.

    Without hits no requests share a text: then the evicted blocks cost nothing, and have no chart.
    """
    logs = [run for run in runs if run.log.times]
    cached = [run for run in logs if run.log.queues[-1].queries]
    shared = cached if any(run.log.queues[-1].hits for run in cached) else []
    blocks = "KV blocks" if cached else "KV blocks in use"
    return [
        *time_charts("queues", "Queues", "requests", [(run, queue_lines(run, QUEUES)) for run in logs]),
        *time_charts("blocks", "KV blocks", blocks, [(run, queue_lines(run, BLOCKS)) for run in logs]),
        *time_charts("hits", "Prefix cache", "hits, % of prompt tokens", [(run, [hit_line(run)]) for run in shared]),
        *time_charts(
            "evicted", "Evicted blocks", "blocks so far", [(run, queue_lines(run, EVICTED)) for run in shared]
        ),
    ]


def replica_charts(log: QueueLog, names: Sequence[str]) -> list[Chart]:
    """Return the requests in each replica of a fleet over time, in one chart; of a large fleet, the first ones."""
    lines = []
    for name, colour in zip([name for name in names if name in log.replicas], SERIES):
        own = log.replicas[name]
        counts = [state.waiting + state.running + state.swapped for state in own.queues]
        lines.append({**queue_line("requests", colour, list(zip(own.times, counts))), "name": plain(name)})
    layout = {
        "xaxis": {"title": {"text": "time (s)"}}, "height": 260, "showlegend": True,
        "yaxis": {"title": {"text": "requests"}, "rangemode": "tozero"},
    }  # fmt: skip
    return [Chart("replica-load", "Waiting and running requests of each replica", lines, layout)] if lines else []


def queue_lines(run: RecordedRun, values: Sequence[tuple[str, str]]) -> list[Trace]:
    """Return numbers of the queue log over time; the first one always, the others if they are ever above 0."""
    lines = [queue_line(name, colour, [(t, getattr(q, name)) for t, q in zip(run.log.times, run.log.queues)])
             for name, colour in values]  # fmt: skip
    return [trace for k, trace in enumerate(lines) if not k or any(trace["y"])]


def hit_line(run: RecordedRun) -> Trace:
    """Return the hit rate of the requests that were admitted in each part of a run."""
    times, queues = run.log.times, run.log.queues
    ends = np.searchsorted(times, np.linspace(times[0], times[-1], HIT_WINDOWS + 1)).tolist()
    rates = []
    for first, last in zip(ends, ends[1:]):
        queries, hits = queues[last].queries - queues[first].queries, queues[last].hits - queues[first].hits
        if queries:
            rates.append((times[first], 100 * hits / queries))
    return queue_line("hit rate", "front", [*rates, (times[-1], rates[-1][1])], "%{y:.1f} %")


def queue_line(name: str, colour: str, xy: Sequence[tuple[float, float]], value: str = "%{y:,}") -> Trace:
    """Return a line over time; each value holds until the next one."""
    text = name.replace("_", " ")
    return line(text, xy, f"@{colour}", hovertemplate=f"{value} {text} at %{{x:.1f}} s<extra></extra>") | {
        "line": {"color": f"@{colour}", "width": 1.6, "shape": "hv"}
    }


def time_charts(
    id: str, title: str, y_title: str, runs: Sequence[tuple[RecordedRun, Sequence[Trace]]]
) -> Iterator[Chart]:
    """Yield a chart over time for each run, all with the same axes; none if all values are 0."""
    last = max((run.log.times[-1] for run, _ in runs), default=0)
    top = max((max(trace["y"]) for _, traces in runs for trace in traces), default=0)
    for run, traces in runs if top or id == "queues" else ():
        layout = {
            "xaxis": {"title": {"text": "time (s)"}, "range": [0, last or 1]},
            "yaxis": {"title": {"text": y_title}, "range": [0, 1.06 * (top or 1)]},
            "height": 260,
            "showlegend": len(traces) > 1,
        }
        yield Chart(f"{id}-{run.role}", f"{title}: {run.role}", traces, layout, group=id)
