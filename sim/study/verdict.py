"""The verdict of a sweep in one sentence: the winner, or why there is none."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple, Optional

from servesim.runs.metric_table import title_inside, whole_metric
from servesim.runs.request_rate import format_rate
from servesim.statistics.constraints import describe_bounds
from servesim.statistics.number_format import format_mean

from .ranking import INCOMPLETE, Row, Summary
from .rate_summary import RateSummary, Result
from .table import changed_settings, curve_settings, format_count, format_difference


class Verdict(NamedTuple):
    """The answer of a sweep."""

    kind: str  # winner | baseline (nothing beats it) | infeasible (nothing meets the constraints) | failed
    text: str
    nearest: Optional[Row] = None  # infeasible: the configuration with the smallest violation


def verdict_of(summary: Result) -> Verdict:
    """Return the verdict of a sweep: the winner, and how it compares with the baseline."""
    if isinstance(summary, RateSummary):
        return verdict_of_rates(summary)
    winner = summary.winner
    if winner is None:
        return without_winner(summary)
    if winner is summary.baseline:
        text = f"No winner: nothing beats the baseline{describe_tied(summary)}."
        return Verdict("baseline", text + describe_best_mean(summary))
    metric = summary.experiment.objectives[0].metric
    level = f"{title_inside(metric)} {format_mean(winner.means[metric], metric)}"
    text = f"Winner: {changed_settings(winner, summary)}: {level}"
    if summary.baseline.refused:
        text += "; the baseline does not start"
    elif not summary.baseline.feasible:
        text += f"; the baseline {', '.join(summary.baseline.misses)}"
    elif summary.baseline.values(metric):
        text += f", {format_difference(winner, metric)} vs. the baseline"
    return Verdict("winner", f"{text}{describe_choice(summary)}.{describe_best_mean(summary)}")


def without_winner(summary: Summary) -> Verdict:
    """Return why there is no winner: the constraints, or runs that failed."""
    nearest = min((row for row in summary.rows if row.complete), key=lambda row: row.rank, default=None)
    if nearest is None:
        return Verdict("failed", f"No winner: {describe_incomplete(summary)}.")
    bounds = describe_bounds(summary.experiment.subject_to)
    name = "the baseline" if nearest is summary.baseline else changed_settings(nearest, summary)
    text = f"No winner: no configuration meets {bounds}. Nearest: {name}, {describe_misses(nearest)}."
    return Verdict("infeasible", text, nearest)


def describe_incomplete(summary: Summary) -> str:
    """Return why no configuration can win: an objective without values, or what happened to them."""
    for objective in summary.experiment.objectives:
        metric = objective.metric
        ran = [row for row in summary.rows if any("metrics" in run for run in row.runs)]
        if ran and not any(row.values(metric) for row in ran):
            return f"no run has a value of {metric}{why_no_value(metric)}"
    found = [text for label, text in INCOMPLETE.items() if any(label in row.labels for row in summary.rows)]
    return f"every configuration {' or '.join(found)}" if found else "no configuration has run"


def describe_misses(row: Row) -> str:
    """Return the constraints that a configuration misses, and why a metric has no value."""
    return ", ".join(row.misses) + why_without(row)


def why_without(row: Row) -> str:
    """Return why the metric of a constraint has no value, as the end of a sentence; empty if all have one."""
    return next((why_no_value(bound.metric) for bound in row.missed if math.isnan(row.mean(bound.metric))), "")


def why_no_value(metric: str) -> str:
    """Return what a metric without values needs, as the end of a sentence."""
    if whole_metric(metric) in ("request_goodput", "attainment"):
        return ": expected a `slo` in the scenario"
    if whole_metric(metric) != metric:
        return ": no request of it finished, or there are too many priorities or sessions"
    return ", for example because no request finished, or each has one output token"


def describe_tied(summary: Summary) -> str:
    """Return how many configurations are tied with the best one, in brackets."""
    outcomes = [row.relation.outcome for row in summary.rows]
    margin = f"{100 * summary.experiment.indifference:g} %"
    equal, undecided = outcomes.count("equal"), outcomes.count("undecided")
    parts = [f"{format_count(equal, 'configuration')} equal within {margin}"] if equal else []
    parts += [f"{undecided} not decided"] if undecided else []
    return f" ({', '.join(parts)})" if parts else ""


def describe_choice(summary: Summary) -> str:
    """Return what separates the winner from the configurations that are tied with it."""
    tied = sum(row.relation.tied for row in summary.rows)
    if not tied:
        return ""
    names = deciding_metrics(summary)
    decide = "decides" if len(names) == 1 and None not in summary.decided_by else "decide"
    first = title_inside(summary.experiment.objectives[0].metric)
    return f"; tied in {first} with {format_count(tied, 'other')}, {', then '.join(names)} {decide}"


def deciding_metrics(summary: Summary) -> list[str]:
    """Return what separates the winner from the configurations that are tied with it, in order."""
    metrics = [title_inside(objective.metric) for objective in summary.experiment.objectives]
    return ["the fewest changes" if number is None else metrics[number] for number in summary.decided_by]


def describe_best_mean(summary: Summary) -> str:
    """Return a sentence on the configuration with the best mean, if it is not clear whether the winner is as good."""
    best = summary.best_mean
    if best is None or best is summary.winner or best.relation.outcome != "undecided":
        return ""
    objective = summary.experiment.objectives[0]
    word = "lowest" if objective.goal == "min" else "highest"
    name = "the baseline" if best is summary.baseline else changed_settings(best, summary)
    level = format_mean(best.means[objective.metric], objective.metric)
    title = title_inside(objective.metric)
    return f" The {word} mean of {title} is {level} ({name}), but the difference is not decided."


def verdict_of_rates(result: RateSummary) -> Verdict:
    """Return the winner by capacity, or the winner at each rate."""
    bounds = describe_bounds(result.experiment.subject_to)
    if not bounds:
        return verdict_per_rate(result)
    if result.winner is None:
        return rates_without_winner(result)
    capacity = result.winner.capacity
    assert capacity is not None
    if result.is_single:
        misses = "".join(f"; {text}" for text in [capacity.misses] if text)
        return Verdict("capacity", f"Capacity: meets {bounds} up to {capacity.text}{misses}.")
    tied = describe_equal(result)
    tied = f"; {tied}" if tied else ""
    if result.winner.is_baseline:
        text = f"No winner: nothing beats the baseline, which meets {bounds} up to {capacity.text}{tied}."
        return Verdict("baseline", text)
    base = result.baseline.capacity
    reach = "" if base is None else f"up to {base.text}" if base.rate else "at no tested rate"
    reach = "does not start" if result.baseline.refused else reach
    versus = f"; the baseline {reach}" if reach else ""
    text = f"Winner: {curve_settings(result, result.winner)}: meets {bounds} up to {capacity.text}{versus}{tied}."
    return Verdict("winner", text)


def describe_equal(result: RateSummary) -> str:
    """Return why the winner is the winner, although another capacity is equal, or even higher; empty if none is."""
    others = {curve.config: result.rate_of(curve) for curve in result.curves if curve.outcome == "equal"}
    if not others or result.decided_at is None:
        return ""
    summary = result.by_rate[result.decided_at]
    tied = any(row.relation.tied for row in summary.rows if row.config in others)
    chosen = deciding_metrics(summary) if tied else [title_inside(result.experiment.objectives[0].metric)]
    number = f"{format_count(len(others), 'other')} equal within {100 * result.margin:g} %"
    by = f"chosen by {', then '.join(chosen)} at {format_rate(result.decided_at)}"
    return f"{number} (up to {format_rate(max(others.values()))}), {by}"


def rates_without_winner(result: RateSummary) -> Verdict:
    """Return that no rate meets the constraints, and the configuration nearest to them at the lowest rate."""
    rate = result.rates[0]
    bounds = describe_bounds(result.experiment.subject_to)
    if result.is_single:
        misses = "" if result.baseline.capacity is None else result.baseline.capacity.misses
        row = result.by_rate[rate].baseline
        return Verdict("infeasible", f"No tested rate meets {bounds}: {misses}{why_without(row)}.", row)
    summary = result.by_rate[rate]
    nearest = verdict_of(summary).nearest
    text = f"No winner: no configuration meets {bounds} at a tested rate."
    if nearest is None:
        return Verdict("failed", text)
    name = "the baseline" if nearest is summary.baseline else changed_settings(nearest, summary)
    at = f"at {format_rate(rate)}"
    return Verdict("infeasible", f"{text} Nearest {at}: {name}, {describe_misses(nearest)}.", nearest)


def verdict_per_rate(result: RateSummary) -> Verdict:
    """Return the winner at each rate."""
    names = []
    for rate, summary in result.by_rate.items():
        verdict = verdict_of(summary)
        settings = "" if summary.winner is None else changed_settings(summary.winner, summary)
        name = {"winner": settings, "baseline": "nothing beats the baseline"}.get(verdict.kind, "no winner")
        names.append((rate, name))
    found = any(summary.winner is not None for summary in result.by_rate.values())
    text = "; ".join(f"{rates}: {name}" for rates, name in join_rates(names))
    return Verdict("rates" if found else "failed", f"Winner per rate: {text}.")


def join_rates(texts: Iterable[tuple[float, str]]) -> list[tuple[str, str]]:
    """Return (rates, text): neighbouring rates with the same text are joined."""
    groups = [(text, [rate for rate, _ in group]) for text, group in groupby(texts, key=itemgetter(1))]
    return [(f"{rates[0]:.10g} to " * (len(rates) > 1) + format_rate(rates[-1]), text) for text, rates in groups]
