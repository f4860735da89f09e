"""report.html of `sim verify` and `sim replay`: errors of the simulation against measured runs.

The input is the content of verify.json and the latencies of the requests, so this module needs no part of calibrate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Optional

from servesim.config.scenario import Scenario
from servesim.files.chart_style import SERIES
from servesim.runs.metric_table import format_number, metric_title
from servesim.statistics.number_format import format_metric
from servesim.study.columns import Column
from servesim.study.table import format_count

from .charts import LATENCY_NAMES
from .page import MetricFact, ResultCard, Table, page_table, write_page
from .plots import Chart, Limit, line, metric_rows_layout, plain, points, value_axis, with_limits
from .trust import CHECK, GOOD, Fact, facts_of_scenarios, policy_fact

MAX_DOTS = 3000  # requests per chart and run
SOURCES = {  # of an error
    "from_step_times": "from step times", "from_decisions": "from decisions", "from_http": "from HTTP",
}  # fmt: skip


@dataclass(frozen=True)
class VerifiedRun:
    """One scenario, simulated and measured."""

    name: str
    result: Mapping[str, Any]  # its part of verify.json
    latencies: Mapping[str, Sequence[tuple[float, float]]]  # ttft, e2el: seconds, simulated and measured
    scenario: Optional[Scenario]
    outside: Sequence[str] = ()  # checked metrics outside the tolerance

    def metric(self, name: str) -> Mapping[str, Any]:
        """Return the values of a metric."""
        values: Mapping[str, Any] = self.result["metrics"][name]
        return values


def write_verify_report(
    runs: Sequence[VerifiedRun], checked: Sequence[str], tolerance: Optional[float],
    ranks: Mapping[str, Optional[float]], path: Path,
) -> None:  # fmt: skip
    """Write the page; `ranks` has Kendall's tau per metric, empty for a single scenario."""
    write_page(
        path, "verify.html", title="Simulated against measured", about=f"{format_count(len(runs), 'scenario')}.",
        trust=trust(runs), result=result(runs, checked, tolerance, ranks), errors=error_chart(runs, checked, tolerance),
        requests=request_charts(runs), table=metric_table(runs, checked),
    )  # fmt: skip


def trust(runs: Sequence[VerifiedRun]) -> list[Fact]:
    """Return the trust panel: profile, decisions, tokens and policy."""
    scenarios = [run.scenario for run in runs if run.scenario is not None]
    facts = [*facts_of_scenarios(scenarios), decision_fact(runs)]
    checks = [run.result["token_check"] for run in runs if run.result.get("token_check")]
    if checks:
        equal, checked = (sum(check[key] for check in checks) for key in ("equal", "checked"))
        facts.append(Fact("Tokens", f"{equal} of {checked} checked answers equal", GOOD if equal == checked else CHECK))
    return [*facts, policy_fact(scenarios)] if scenarios else facts


def decision_fact(runs: Sequence[VerifiedRun]) -> Fact:
    """Return whether both runs made the same decisions."""
    logs = [run.result.get("decisions") for run in runs]
    known = [log for log in logs if log]
    if not known:
        return Fact("Decisions", "not compared: one side has no decision log", CHECK)
    same = sum(log["identical"] for log in known)
    first = next((log for log in known if not log["identical"]), None)
    note = "" if first is None else f"; first difference after {first['same']:,} equal steps"
    return Fact("Decisions", f"identical in {same} of {format_count(len(known), 'scenario')}{note}",
                GOOD if first is None else CHECK)  # fmt: skip


def result(
    runs: Sequence[VerifiedRun], checked: Sequence[str], tolerance: Optional[float],
    ranks: Mapping[str, Optional[float]],
) -> ResultCard:  # fmt: skip
    """Return the largest error, and whether all errors are within the tolerance."""
    errors = [(run, name, run.metric(name)["error"]) for run in runs for name in checked]
    known = [(abs(error), error, name, run.name) for run, name, error in errors if error is not None]
    big, verdict = "", "No checked metric has a simulated and a measured value."
    if known:
        _, error, name, run_name = max(known)
        big = f"largest error: {name} {100 * error:+.2f} %"
        verdict = f"{sum(size <= 0.05 for size, *_ in known)} of {len(known)} checked values are within 5 %"
        verdict += f"; the largest error is in {run_name}." if run_name and len(runs) > 1 else "."
    title, met = "Simulated against measured", False
    if tolerance is not None:
        met = not any(run.outside for run in runs)
        title = f"Tolerance of {100 * tolerance:g} %: {'met' if met else 'missed'}"
    facts = [mean_error(name, [error for _, metric, error in errors if metric == name]) for name in checked]
    taus = ", ".join(f"{metric} {tau:+.2f}" for metric, tau in ranks.items() if tau is not None)
    notes = [f"Rank agreement of the scenarios (Kendall's tau): {taus}."] if taus else []
    notes += dict.fromkeys(note for run in runs for note in run.result.get("notes", ()))
    return ResultCard(title, verdict, met, big, facts=facts, notes=notes)


def mean_error(name: str, errors: Sequence[Optional[float]]) -> MetricFact:
    """Return the mean absolute error of a metric over the scenarios, or its error in the only one."""
    known = [error for error in errors if error is not None]
    if not known:
        return MetricFact(name, "–")
    if len(errors) == 1:
        return MetricFact(name, f"{100 * known[0]:+.2f} %")
    return MetricFact(name, f"{100 * sum(map(abs, known)) / len(known):.2f} %", "mean absolute error")


def run_colour(index: int) -> str:
    """Return the colour of a scenario."""
    return f"@{SERIES[index % len(SERIES)]}"


def error_chart(runs: Sequence[VerifiedRun], checked: Sequence[str], tolerance: Optional[float]) -> Chart:
    """Return the error of each checked metric, one point per scenario."""
    data = []
    for index, run in enumerate(runs):
        shift = 0.0 if len(runs) == 1 else 0.5 * index / (len(runs) - 1) - 0.25
        known = [(row, name) for row, name in enumerate(checked) if run.metric(name)["error"] is not None]
        xy = [(100 * run.metric(name)["error"], row + shift) for row, name in known]
        hover = [error_text(run, name) for _, name in known]
        data.append(points(plain(run.name or "run", 40), xy, hover, run_colour(index), size=10))
    layout = metric_rows_layout(list(map(metric_title, checked)), "simulated - measured (%)", 1 < len(runs) <= 12)
    limits = [] if tolerance is None else [Limit("x", sign * 100 * tolerance, "tolerance") for sign in (-1, 1)]
    return Chart("errors", "Error of each metric", data, with_limits(layout, limits))


def error_text(run: VerifiedRun, name: str) -> str:
    """Return both values of a metric, the error and its sources."""
    row = run.metric(name)
    sources = [f"<br>{text}: {100 * row[key]:+.2f} %" for key, text in SOURCES.items() if row.get(key) is not None]
    values = f"simulated {format_metric(row['simulated'], name)}, measured {format_metric(row['measured'], name)}"
    error = f"{metric_title(name)}: {100 * row['error']:+.2f} %"
    return f"<b>{plain(run.name or 'run')}</b><br>{error}<br>{values}{''.join(sources)}"


def request_charts(runs: Sequence[VerifiedRun]) -> list[Chart]:
    """Return simulated over measured latency, one point per request."""
    charts = []
    for key in ("ttft", "e2el"):
        name, data, values = LATENCY_NAMES[key], [], []
        for index, run in enumerate(runs):
            pairs = list(run.latencies.get(key, ()))
            pairs = pairs[:: max(1, math.ceil(len(pairs) / MAX_DOTS))]
            values += [value for pair in pairs for value in pair if value > 0]
            hover = [f"measured {format_number(m)} s<br>simulated {format_number(s)} s" for s, m in pairs]
            xy = [(measured, simulated) for simulated, measured in pairs]
            data.append(points(plain(run.name or "run", 40), xy, hover, run_colour(index), size=4, opacity=0.6))
        if not values:
            continue
        ends = [(end, end) for end in (min(values), max(values))]
        data.insert(0, line("equal", ends, "@soft", "dot", hoverinfo="skip", showlegend=False))
        layout = {
            "xaxis": value_axis(f"measured {name} (s)", values), "yaxis": value_axis(f"simulated {name} (s)", values),
            "showlegend": 1 < len(runs) <= 12,
        }  # fmt: skip
        charts.append(Chart(f"requests-{key}", f"{name}: one point per request", data, layout))
    return charts


class VerifiedMetric(NamedTuple):
    """One metric of one scenario."""

    run: str
    name: str
    values: Mapping[str, Any]
    is_checked: bool

    def note(self) -> str:
        """Return whether the metric is checked, and whether the measured value is in its interval."""
        notes = ["checked"] if self.is_checked else []
        limits = self.values.get("interval")
        if limits:
            inside = {True: "inside", False: "outside", None: ""}[self.values.get("inside")]
            notes.append(f"{inside} [{format_metric(limits[0], self.name)}, {format_metric(limits[1], self.name)}]")
        return ", ".join(notes)


def metric_table(runs: Sequence[VerifiedRun], checked: Sequence[str]) -> Table:
    """Return every metric of every scenario."""
    rows = [
        VerifiedMetric(run.name, name, values, name in checked)
        for run in runs
        for name, values in run.result["metrics"].items()
    ]
    columns = [
        Column("scenario", lambda row: row.run, shown=("page",)),
        Column("metric", lambda row: row.name, shown=("page",)),
        *(level_column(side) for side in ("simulated", "measured")),
        percent_column("error"),
        *(percent_column(key) for key in SOURCES if any(row.values.get(key) is not None for row in rows)),
        Column("note", VerifiedMetric.note, shown=("page",)),
    ]
    return page_table(columns, rows)


def level_column(side: str) -> Column:
    """Return the simulated or the measured values."""
    text = lambda row: format_metric(row.values[side], row.name)  # noqa: E731
    return Column(side, lambda row: nan_if_none(row.values[side]), text, shown=("page",))


def percent_column(key: str) -> Column:
    """Return signed percentages, which sort and filter as percent."""

    def percent(row: VerifiedMetric) -> float:
        return 100 * nan_if_none(row.values.get(key))

    return Column(key, percent, lambda row: f"{percent(row):+.2f} %", key.replace("_", " "), ("page",))


def nan_if_none(value: Optional[float]) -> float:
    """Return a number; NaN is a missing one."""
    return math.nan if value is None else float(value)
