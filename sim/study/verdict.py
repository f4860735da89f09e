"""The verdict of a sweep in one sentence: the winner, or why there is none."""

from __future__ import annotations

from typing import NamedTuple, Optional

from servesim.statistics.constraints import describe_bounds
from servesim.statistics.number_format import format_mean

from .ranking import Row, Summary
from .table import changed_settings, describe_needed, format_count, format_difference


class Verdict(NamedTuple):
    """The answer of a sweep."""

    kind: str  # winner | baseline (nothing beats it) | infeasible (nothing meets the constraints) | failed
    text: str
    nearest: Optional[Row] = None  # infeasible: the configuration with the smallest violation


def verdict_of(summary: Summary) -> Verdict:
    """Return the verdict of a sweep."""
    winner = summary.winner
    if winner is None:
        return without_winner(summary)
    if winner is summary.baseline:
        text = f"No winner: nothing beats the baseline{describe_tied(summary)}."
        return Verdict("baseline", text + describe_best_mean(summary))
    metric = summary.experiment.objectives[0].metric
    text = f"Winner: {changed_settings(winner, summary)}: {metric} {format_mean(winner.means[metric], metric)}"
    if not summary.baseline.feasible:
        text += f"; the baseline {', '.join(summary.baseline.misses)}"
    elif summary.baseline.values(metric):
        text += f", {format_difference(winner, metric)} vs. the baseline"
    return Verdict("winner", f"{text}{describe_choice(summary)}.{describe_best_mean(summary)}")


def without_winner(summary: Summary) -> Verdict:
    """Return why there is no winner: the constraints, or runs that failed."""
    nearest = min((row for row in summary.rows if row.complete), key=lambda row: row.rank, default=None)
    if nearest is None:
        return Verdict("failed", "No winner: every configuration failed, got stuck or served too few requests.")
    bounds = describe_bounds(summary.experiment.subject_to)
    name = "the baseline" if nearest is summary.baseline else changed_settings(nearest, summary)
    text = f"No winner: no configuration meets {bounds}. Nearest: {name}, {', '.join(nearest.misses)}."
    return Verdict("infeasible", text, nearest)


def describe_tied(summary: Summary) -> str:
    """Return how many configurations are tied with the best one, in brackets."""
    outcomes = [row.relation.outcome for row in summary.rows]
    margin = f"{100 * summary.experiment.indifference:g} %"
    equal, undecided = outcomes.count("equal"), outcomes.count("undecided")
    parts = [f"{format_count(equal, 'configuration')} equal within {margin}"] if equal else []
    parts += [f"{undecided} not decided: more runs needed"] if undecided else []
    return f" ({', '.join(parts)})" if parts else ""


def describe_choice(summary: Summary) -> str:
    """Return what separates the winner from the configurations that are tied with it."""
    tied = sum(row.relation.tied for row in summary.rows)
    if not tied:
        return ""
    metrics = [objective.metric for objective in summary.experiment.objectives]
    names = ["the fewest changes" if number is None else metrics[number] for number in summary.decided_by]
    decide = "decides" if len(names) == 1 and None not in summary.decided_by else "decide"
    return f"; tied in {metrics[0]} with {format_count(tied, 'other')}, {', then '.join(names)} {decide}"


def describe_best_mean(summary: Summary) -> str:
    """Return a sentence on the configuration with the best mean, if it is not clear whether the winner is as good."""
    best = summary.best_mean
    if best is None or best is summary.winner or best.relation.outcome != "undecided":
        return ""
    objective = summary.experiment.objectives[0]
    word = "lowest" if objective.goal == "min" else "highest"
    name = "the baseline" if best is summary.baseline else changed_settings(best, summary)
    level = format_mean(best.means[objective.metric], objective.metric)
    reason = f"not decided: {describe_needed([best.relation.replications])}"
    return f" The {word} mean of {objective.metric} is {level} ({name}), but the difference is {reason}."
