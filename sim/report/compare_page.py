"""report.html of `sim compare`: the relative difference of every metric."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from servesim.runs.metric_table import metric_title
from servesim.statistics.number_format import format_metric
from servesim.study.compare import COLUMNS, Difference, basis_of, name_of_b, summarise
from servesim.study.compared_runs import ComparedRuns

from .page import MetricFact, ResultCard, page_table, write_page
from .plots import Chart, metric_rows_layout, plain, points
from .trust import CHECK, GOOD, WARN, Fact, facts_of_profiles, policy_fact

OUTCOME_COLOURS = {
    "better": "@winner", "worse": "@baseline",
    **dict.fromkeys(("no difference", "not significant", "not tested", "the same"), "@point"),
}  # fmt: skip


def write_compare_report(a: ComparedRuns, b: ComparedRuns, differences: Sequence[Difference], path: Path) -> None:
    """Write the page."""
    write_page(
        path, "compare.html", title="Comparison of two configurations", about=f"A: {a.name}. B: {b.name}.",
        trust=trust(a, b, differences), result=result(differences, name_of_b(a, b)), charts=[change_chart(differences)],
        table=page_table(COLUMNS, differences),
    )  # fmt: skip


def trust(a: ComparedRuns, b: ComparedRuns, differences: Sequence[Difference]) -> list[Fact]:
    """Return the trust panel: the profiles, the pairs and the policies."""
    facts, servers = facts_of_profiles([*a.profiles, *b.profiles]), [*a.servers, *b.servers]
    if not facts:
        facts = [Fact("Profile", "that of the compared folders; their own reports describe it", CHECK)]
    basis = basis_of(differences)
    facts.append(Fact("Pairs", basis or "one run each: no confidence interval", GOOD if basis else WARN))
    draws = max(len(d.draws) for d in differences)
    text = f"intervals include {draws} draws of the cost model" if draws else "not part of the intervals (--intervals)"
    facts.append(Fact("Calibration uncertainty", text, GOOD if draws else CHECK))
    return [*facts, policy_fact(servers)] if servers else facts


def result(differences: Sequence[Difference], b: str) -> ResultCard:
    """Return the comparison in sentences, and the change of each metric; `b` is the name of B."""
    first, *others = differences
    outcomes = {"better": f"{b} is better", "worse": f"{b} is worse", "the same": "No difference"}
    outcomes |= {"not tested": "A difference that is not tested", "no difference": "No difference"}
    title = f"{outcomes.get(first.outcome, 'No significant difference')} in {first.objective.metric}"
    facts = [MetricFact(d.objective.metric, change_text(d), d.outcome) for d in others]
    big = f"{first.objective.metric} {change_text(first)}"
    text = summarise(differences, b)
    return ResultCard(title, text, first.outcome == "better", big, first.describe(b), facts)


def change_text(difference: Difference) -> str:
    """Return the relative change in percent."""
    mean = difference.relative.mean
    return "from 0" if math.isinf(mean) else f"{100 * mean:+.2f} %"


def change_chart(differences: Sequence[Difference]) -> Chart:
    """Return the relative change of each metric with its interval."""
    shown = [d for d in differences if math.isfinite(d.relative.mean)]
    names = [metric_title(d.objective.metric) for d in shown]
    data = []
    for row, d in enumerate(shown):
        mean, low, high = (None if part is None else 100 * part for part in d.relative)
        assert mean is not None
        metric = d.objective.metric
        levels = f"A: {format_metric(d.a, metric, d.unit)}<br>B: {format_metric(d.b, metric, d.unit)}"
        hover = f"<b>{metric_title(metric)}</b><br>{levels}<br>{plain(d.describe())}"
        trace = points(d.outcome, [(mean, row)], [hover], OUTCOME_COLOURS[d.outcome], size=11)
        if low is not None and high is not None:
            bars = {"type": "data", "symmetric": False, "array": [high - mean], "arrayminus": [mean - low]}
            trace["error_x"] = {**bars, "color": OUTCOME_COLOURS[d.outcome], "thickness": 2, "width": 5}
        data.append(trace)
    layout = metric_rows_layout(names, "B against A (%)")
    caption = "Green: B is better; orange: B is worse; grey: not significant, or none. Bars are confidence intervals."
    return Chart("changes", "Relative change of each metric", data, layout, caption)
