"""What the page shows about its scenarios, as JSON: table of metrics, charts, verdict, curves over the request rate."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Optional

from servesim.config.layers import Tree
from servesim.config.scenario import Scenario
from servesim.report.charts import Latencies, latency_charts, queue_line, time_chart
from servesim.report.page import finite
from servesim.report.plots import Chart, Trace
from servesim.report.rate_charts import CurveStyle, over_rate
from servesim.runs.leading import leading_metrics
from servesim.runs.metric_table import METRICS, metric_named, metric_title, metrics_in, title_inside, unit_of
from servesim.runs.notes import Note, note, sentence
from servesim.runs.request_rate import rate_key_value
from servesim.statistics.constraints import Bound, describe_bounds
from servesim.statistics.number_format import format_metric
from servesim.statistics.objective import parse_objective
from servesim.study.compare import compare, default_objectives, summarise
from servesim.study.compared_runs import ComparedRuns
from servesim.study.ranking import Row
from servesim.study.rates import Curve, rate_point
from servesim.study.single_run import Record

from .state import MAX_VARIANTS

CURRENT, BASELINE = "current", "baseline"
NAMES = (CURRENT, BASELINE, *(f"variant {number}" for number in range(1, 1 + MAX_VARIANTS)))
COLOURS = ("front", "baseline", "winner", "swapped", "queued", "stalled")  # one per name
RATE_FACTORS = (0.25, 0.5, 0.75, 1.25, 1.5, 2.0)  # times the request rate, which has run before
TABLE = (*metrics_in("summary"), "request_imbalance")
TIMES = (
    ("waiting", "Waiting requests", "requests"),
    ("running", "Running requests", "requests"),
    ("kv", "KV blocks in use", "% of the blocks"),
)
LIMITS = {"slots": "slots", "budget": "token budget", "blocks": "KV blocks", "compute": "the device",
          "front end": "the front end", "none": "nothing"}  # fmt: skip
METRIC = re.compile(rf"\b({'|'.join(METRICS)}|p[\d.]+_\w+_ms)(\[\w+=[^\]]+\])?(?!\w)")  # in a sentence
WORDS = {"A and B": "Baseline and current", ". cu": ". Cu", "(B is 0)": "(current has none)",
         "(A is 0)": "(baseline has none)"}  # fmt: skip
OUTCOMES = {"better": CURRENT, "worse": BASELINE, "the same": "same", "no difference": "none"}  # of the headline
CONFIDENCE = 0.95


@dataclass
class Shown:
    """A scenario on the page and its runs so far."""

    number: int  # in NAMES
    tree: Tree
    scenario: Scenario
    runs: list[Record] = field(default_factory=list)  # replications; the first has the details
    rates: dict[float, Record] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return NAMES[self.number]

    @property
    def colour(self) -> str:
        return f"@{COLOURS[self.number]}"

    @property
    def refused(self) -> list[str]:
        """Why the real engine does not start with these settings; empty if it does."""
        return [Note(*found).text for found in self.runs[0]["notes"] if found[0] == "refused"] if self.runs else []

    @property
    def own_rate(self) -> Optional[float]:
        """Requests per second; None if they wait for each other or all arrive at once."""
        measured: Optional[float] = self.runs[0].get("own_rate")
        return measured and (rate_key_value(self.tree) or measured)


def picture_json(shown: Sequence[Shown]) -> dict[str, Any]:
    """Return the table, the charts and the notes of the scenarios that have run."""
    done = [item for item in shown if item.runs]
    latencies = [Latencies(item.name, item.colour, item.runs[0]["quantiles"]) for item in done]
    breakdown = time_chart([(item.name, item.runs[0]["time_breakdown"]) for item in done])
    breakdown = replace(breakdown, title="Where the time of a request goes")
    distributions = latency_charts(latencies, done[0].scenario.slo.seconds(), showlegend=False)
    for trace in (trace for chart in distributions for trace in chart.data):
        del trace["hovertext"]  # one text per point: most of the bytes of an answer
        trace["hovertemplate"] = f"{trace['name']}: %{{y:.1f}} % of requests up to %{{x:.4~g}}<extra></extra>"
    charts = [*distributions, *over_time(done), breakdown]
    limits = [item.runs[0]["limit"] for item in done]
    texts = [LIMITS[limit["limit"]] for limit in limits]
    limit = {"title": "Limited by", "key": "limit", "texts": texts, "detail": limits[0]["limit_text"]}
    return {
        "kind": "picture",
        "columns": [item.number for item in done],
        "tiles": {**metric_tiles(done), "limit": limit},
        "table": table_json(done),
        "charts": [chart_json(chart) for chart in charts],
        "notes": notes_of(done[0]),
        "requests": done[0].runs[0]["requests"],
    }


def chart_json(chart: Chart) -> dict[str, Any]:
    """Return a chart with its title."""
    content: dict[str, Any] = finite({"id": chart.id, "title": chart.title, **chart.as_json()})
    return content


def table_json(done: Sequence[Shown]) -> list[dict[str, Any]]:
    """Return the rows of the table, the leading metrics first: a metric, its text and value in every scenario."""
    rows = []
    for metric in dict.fromkeys([*leading_metrics(done[0].tree), *TABLE]):
        values = [item.runs[0]["metrics"].get(metric) for item in done]
        if any(values) or metric == "makespan":
            cells = [{"text": text, "value": value} for text, value in zip(metric_texts(done, metric), values)]
            rows.append(
                {"metric": metric, "name": metric_title(metric), "goal": metric_named(metric).goal, "cells": cells}
            )
    return rows


def metric_texts(done: Sequence[Shown], metric: str, replications: Optional[int] = 1) -> list[str]:
    """Return a metric of all scenarios in one unit: its mean over the first replications, None for all of them."""
    rows = [Row(item.number, {}, item.name, item.runs[:replications]) for item in done]
    values = [row.mean(metric) if row.values(metric) else None for row in rows]
    unit = unit_of(metric, values)
    return ["–" if value is None else format_metric(value, metric, unit) for value in values]


def with_titles(text: str) -> str:
    """Return a sentence with the titles of its metrics instead of their keys."""
    return METRIC.sub(lambda match: (title_inside if match.start() else metric_title)(match[0]), text)


def metric_tiles(done: Sequence[Shown]) -> dict[str, Any]:
    """Return the tiles of metrics: means over all replications, as the constraints use them."""
    count = len(done[0].runs)
    detail = f"mean of {count} replications" if count > 1 else ""
    goodput = "request_goodput" if "request_goodput" in done[0].runs[0]["metrics"] else "request_throughput"
    tiles: dict[str, Any] = {}
    for name, metric in (("ttft", "p99_ttft_ms"), ("goodput", goodput)):
        texts = metric_texts(done, metric, None)
        tiles[name] = {"title": metric_title(metric), "key": metric, "texts": texts, "detail": detail}
    return tiles


def over_time(done: Sequence[Shown]) -> list[Chart]:
    """Return queues and KV use over time, one line per scenario."""
    charts = []
    for name, title, unit in TIMES:
        data: list[Trace] = []
        for item in done:
            run = item.runs[0]
            if run[name]:
                text = f"{item.name}: %{{y:,.4~g}} at %{{x:,.1f}} s<extra></extra>"
                trace = queue_line(item.name, COLOURS[item.number], list(zip(run["times"], run[name])))
                data.append({**trace, "hovertemplate": text})
        if data:
            axes = {"xaxis": {"title": {"text": "time (s)"}}, "yaxis": {"title": {"text": unit}, "rangemode": "tozero"}}
            charts.append(Chart(f"time-{name}", title, data, axes))
    return charts


def notes_of(item: Shown) -> list[str]:
    """Return what a reader must know about the current scenario."""
    run = item.runs[0]
    notes = [note("stuck run", reason=run["stuck"])] if run["stuck"] else []
    if run["outside_profile"]:
        notes.append(note("outside range", sizes="; ".join(run["outside_profile"])))
    if run["saturated"]:
        notes.append(note("saturated"))
    return [sentence(found.text) for found in (*notes, *(Note(*found) for found in run["notes"]))]


def verdict_json(shown: Sequence[Shown], metric: str, bounds: Sequence[Bound]) -> dict[str, Any]:
    """Return the comparison of the current scenario with the baseline, as `sim compare` makes it, and the tiles."""
    current, done = shown[0], [item for item in shown if item.runs]
    message: dict[str, Any] = {"kind": "verdict", "better": "", "text": "", "limits": "", "pairs": ""}
    message |= {"tiles": metric_tiles(done), "columns": [item.number for item in done]}
    if current.refused:
        return {**message, "better": "refused", "text": sentence(current.refused[0])}
    rows = [Row(item.number, {}, item.name, item.runs) for item in done]
    misses = [f"{item.name} does not start" for item in shown if item.refused]
    misses += [f"{row.label} misses {describe_bounds(list(row.missed))}" for row in rows if row.find_missed(bounds)]
    means = f", by the means of {len(current.runs)} replications" if len(current.runs) > 1 else ""
    limits = f"Constraints{means}: {'; '.join(misses) or 'all met'}." if bounds or misses else ""
    if len(shown) < 2:
        return {**message, "limits": limits}
    sides = [(item.name, item.runs, item.scenario.model_dump(mode="json")) for item in (shown[1], current)]
    a, b = (ComparedRuns(name, runs, scenario=scenario) for name, runs, scenario in sides)
    chosen = [parse_objective(metric, "metric")] if metric else []
    differences = compare(a, b, list(dict.fromkeys([*chosen, *default_objectives(a, b)])), CONFIDENCE)
    size, text = max(row.change.n for row in differences), summarise(differences, CURRENT)
    for old, new in WORDS.items():
        text = text.replace(old, new)
    return {
        **message,
        "better": OUTCOMES.get(differences[0].outcome, ""),
        "text": with_titles(text),
        "limits": limits,
        "pairs": f"{size} pairs of replications, {100 * CONFIDENCE:g} % intervals." if size > 1 else "",
    }


def curve_of(item: Shown, bounds: Sequence[Bound]) -> Curve:
    """Return the results of a scenario over the request rate."""
    runs = dict(sorted(item.rates.items()))
    unserved = next(iter(runs.values())).get("metrics", {}).get("failed", 0.0)  # at any rate, such as too long ones
    replications = {item.own_rate: item.runs} if item.runs else {}  # the constraints use their means
    rows = {rate: Row(item.number, {}, item.name, replications.get(rate, [run])) for rate, run in runs.items()}
    points = [rate_point(rate, row, bounds, unserved) for rate, row in rows.items()]
    return Curve(1 + item.number, {}, item.name, points, bounds, outcome="")  # 0 is the baseline of a sweep


def rates_json(shown: Sequence[Shown], bounds: Sequence[Bound]) -> dict[str, Any]:
    """Return throughput over the request rate, and the first bounded metric; open points miss a constraint."""
    curves = [curve_of(item, bounds) for item in shown]
    drawn = [(curve, CurveStyle(item.colour)) for curve, item in zip(curves, shown)]
    latency = next((bound.metric for bound in bounds if bound.metric.endswith("_ms")), "p99_ttft_ms")
    charts = [over_rate(drawn, metric, bounds, f"rate-{metric}") for metric in ("output_throughput", latency)]
    loads = [load_json(item, curve) for item, curve in zip(shown, curves)]
    count = len(shown[0].runs)
    caption = f"One run per rate{f', {count} at the rate of the scenario' if count > 1 else ''}. "
    caption = caption + "An open point misses a constraint." if bounds else "Set an SLO or a constraint."
    return {"kind": "rates", "charts": [chart_json(chart) for chart in charts], "caption": caption, "loads": loads}


def load_json(item: Shown, curve: Curve) -> dict[str, str]:
    """Return the highest load within the constraints, and why a higher one misses them."""
    if item.refused:
        return {"text": "none", "detail": "the engine does not start"}
    capacity = curve.capacity
    if capacity is None:
        return {"text": "–", "detail": "set an SLO or a constraint"}
    short = "; the run is short, a longer one may hold less" if capacity.upper_bound else ""
    text = capacity.text if capacity.missed_at is None else f"{capacity.rate:.3g} req/s" if capacity.rate else "none"
    return {"text": text, "detail": with_titles(f"{capacity.misses}{short}")}


def slo_bounds(slo: Mapping[str, Optional[float]]) -> list[Bound]:
    """Return the SLO as constraints on the P99, which the curves use if the page has no other constraint."""
    return [Bound(f"p99_{name}_ms", "<=", value) for name, value in slo.items() if value is not None]
