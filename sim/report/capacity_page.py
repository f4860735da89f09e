"""report.html of `sim search --meet`: the highest rate, and every rate that was tried."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Optional

from servesim.config.scenario import Scenario
from servesim.runs.request_rate import format_rate
from servesim.searches.capacity import CapacitySearch, Trial, describe_misses
from servesim.statistics.constraints import describe_bounds
from servesim.statistics.intervals import Interval
from servesim.statistics.number_format import format_mean
from servesim.study.table import format_count

from .cards import MetricFact, ResultCard
from .page import write_page
from .plots import Limit
from .rate_charts import RateCurve, RatePoint, rate_charts
from .tables import Cell, Column, Table, TableRow, number_cell
from .trust import CHECK, GOOD, Fact, policy_fact, profile_facts

NOTHING = Interval(math.nan, None, 0)


def write_capacity_report(search: CapacitySearch, best: Optional[Trial], name: str, path: Path) -> None:
    """Write the page; `name` is the scenario."""
    trials = sorted(search.trials, key=lambda trial: trial.rate)
    capacity = None if best is None else Limit("x", best.rate, f"capacity {format_rate(best.rate)}")
    curve = RateCurve(name, [rate_point(trial) for trial in trials], "winner", capacity=capacity)
    write_page(
        path, "capacity.html", title=f"Capacity: {name}", trust=trust(search),
        about=f"{format_count(len(trials), 'tested rate')}; every rate has the same requests.",
        result=result(search, best), curves=rate_charts([curve], search.bounds), table=rate_table(search, trials),
        bounds=describe_bounds(search.bounds),
    )  # fmt: skip


def rate_point(trial: Trial) -> RatePoint:
    """Return a tested rate as a point of the charts."""
    means = {metric: value.mean for metric, value in trial.metrics.items()}
    return RatePoint(trial.rate, means, "" if trial.good else describe_misses(trial))


def trust(search: CapacitySearch) -> list[Fact]:
    """Return the trust panel."""
    scenario = Scenario.model_validate(search.tree)
    count = search.replications
    text = f"{count} of each rate; a rate meets a bound by the mean of its replications"
    replications = Fact("Replications", text, GOOD if count > 1 or not scenario.varies else CHECK)
    return [*profile_facts(scenario.profile), replications, policy_fact([scenario])]


def result(search: CapacitySearch, best: Optional[Trial]) -> ResultCard:
    """Return the highest rate and its metrics."""
    bounds = describe_bounds(search.bounds)
    if best is None:
        lowest = min(search.trials, key=lambda trial: trial.rate)
        text = f"No tested rate meets {bounds}: at {format_rate(lowest.rate)}, {describe_misses(lowest)}."
        return ResultCard("No rate meets the bounds", text)
    names = dict.fromkeys([*(bound.metric for bound in search.bounds), "request_throughput", "output_throughput"])
    facts = [MetricFact(name, format_mean(best.metrics[name], name)) for name in names if name in best.metrics]
    miss = search.first_miss(best)
    verdict = f"The highest tested rate that meets {bounds}."
    note = "Every tested rate meets the bounds."
    if miss is not None:
        note = f"Not met at {format_rate(miss.rate)}: {describe_misses(miss)}."
    return ResultCard("Capacity", verdict, True, format_rate(best.rate), facts=facts, notes=[note])


def rate_table(search: CapacitySearch, trials: list[Trial]) -> Table:
    """Return one row per rate."""
    metrics = dict.fromkeys(
        [*(bound.metric for bound in search.bounds), "request_throughput", "output_throughput", "mean_e2el_ms"]
    )
    columns = [Column("rate", "rate", True), Column("meets the bounds", "meets", wrap=True)]
    columns += [Column(metric, metric, True) for metric in metrics]
    rows = []
    for trial in trials:
        values = [trial.metrics.get(metric, NOTHING) for metric in metrics]
        cells = [number_cell(v.mean, format_mean(v, metric)) for metric, v in zip(metrics, values)]
        answer = Cell("yes" if trial.good else f"no: {describe_misses(trial)}")
        rows.append(TableRow([number_cell(trial.rate, format_rate(trial.rate)), answer, *cells]))
    return Table(columns, rows)
