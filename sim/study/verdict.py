"""A sweep as text: the verdict in one sentence, the printed table, and notes on how to read it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Optional, TypeVar

from servesim.files.terminal import PLAIN, Screen
from servesim.runs.metric_table import title_inside, whole_metric
from servesim.runs.notes import LABEL_MEANINGS
from servesim.runs.run_warnings import source_notes
from servesim.statistics.constraints import describe_bounds
from servesim.statistics.number_format import format_mean, format_percentage

from .columns import table_lines
from .experiment import Experiment
from .ranking import INCOMPLETE, Row, Summary
from .table import changed_settings, describe_window, format_count, format_difference, printed_label, sweep_columns

R = TypeVar("R")
NOT_TESTED = "not tested against the error of the cost model; --intervals does it"


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
    text = f"No winner: no configuration meets {bounds}. Nearest: {name}, {', '.join(nearest.misses)}."
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


def format_table(summary: Summary, top: int = 10, screen: Screen = PLAIN) -> str:
    """Return the best configurations, the baseline and the notes as text."""
    return "\n".join([*ranking_lines(summary, top, screen), *table_notes(summary)])


def ranking_lines(summary: Summary, top: int, screen: Screen) -> list[str]:
    """Return the best configurations and the baseline, one line each."""
    rows = top_rows(summary.rows, summary.baseline, top)
    meanings = {
        number: meaning(row is summary.winner, row is summary.baseline, not row.eligible)
        for number, row in enumerate(rows, 1)
    }
    return table_lines(sweep_columns(summary), rows, screen, meanings)


def top_rows(rows: Sequence[R], baseline: R, top: int) -> list[R]:
    """Return the best configurations and the baseline."""
    return [*rows[:top], *([] if baseline in rows[:top] else [baseline])]


def meaning(is_winner: bool, is_baseline: bool, cannot_win: bool) -> str:
    """Return the meaning of a row, which selects its colour."""
    return "winner" if is_winner else "cannot win" if cannot_win else "baseline" if is_baseline else ""


def table_notes(summary: Summary, hint: bool = True) -> list[str]:
    """Return the lines below the table; `hint`: also how many replications would decide."""
    experiment = summary.experiment
    runs = f"{format_count(len(summary.rows), 'configuration')}, {format_count(summary.run_count, 'run')}"
    method = f"common random numbers, {100 * experiment.confidence:g} % t intervals"
    notes = [f"{runs}; {describe_window(experiment)}; {method}"]
    notes += [*describe_draws(summary), *describe_precision(summary), *describe_confirmation(summary)]
    notes += [*describe_ties(summary, hint), *describe_constraints(summary)]
    if not experiment.is_random:
        notes.append("no randomness: one run per configuration, no confidence intervals")
    elif all(len(row.runs) <= 1 for row in summary.rows):
        notes.append("one replication: differences are not tested; set `replications` to at least 3")
    counts = {name: sum(name in row.labels for row in summary.rows) for name in LABEL_MEANINGS}
    for name, count in counts.items():
        if count:
            number = "all" if count == len(summary.rows) else count
            notes.append(f"{printed_label(name)}: {number} ({LABEL_MEANINGS[name]})")
    notes += [*describe_refused(summary), *describe_unserved(summary), *profile_notes(experiment)]
    return notes + [f"failed: configuration {run['config']}: {run['error']}" for run in summary.failures[:3]]


def describe_refused(summary: Summary) -> list[str]:
    """Return why the real engine does not start with some configurations; these did not run."""
    texts: dict[str, list[str]] = {}
    for row in summary.rows:
        if row.refused:
            texts.setdefault("; ".join(row.refused), []).append(changed_settings(row, summary))
    return [f"does not start: {', '.join(names)}: {reasons}" for reasons, names in texts.items()]


def describe_unserved(summary: Summary) -> list[str]:
    """Return how many requests the baseline leaves unserved: then its times are those of fewer requests."""
    failed = summary.baseline.mean("failed")
    if not failed > 0:
        return []
    return [f"the baseline leaves {failed:,.10g} requests unserved: its metrics are those of the served ones"]


def profile_notes(experiment: Experiment) -> list[str]:
    """Return what to know about the profiles of a sweep."""
    notes = source_notes([experiment.profile, *(config.get("profile") for config in experiment.configs)])
    return [note.text for note in notes]


def describe_ties(summary: Summary, hint: bool = True) -> list[str]:
    """Return how many configurations equal the best one, and how many more runs would decide the others."""
    experiment = summary.experiment
    metric, margin = experiment.objectives[0].metric, f"{100 * experiment.indifference:g} %"
    equal = sum(row.relation.outcome == "equal" for row in summary.rows)
    open_rows = [row.relation for row in summary.rows if row.relation.outcome == "undecided"]
    notes = (
        [f"=: {format_count(equal, 'configuration')} equal to the best in {metric} within {margin}"] if equal else []
    )
    if open_rows:
        number = format_count(len(open_rows), "configuration")
        text = f"?: {number} not decided: the interval of the difference from the best in {metric} is too wide"
        needed = f"; {describe_needed([relation.replications for relation in open_rows])}" if hint else ""
        notes.append(f"{text}{needed}")
    return notes


def describe_needed_of(summaries: Iterable[Summary]) -> list[str]:
    """Return how many replications would decide what is open in several tables, in one line."""
    relations = [row.relation for summary in summaries for row in summary.rows]
    needed = [relation.replications for relation in relations if relation.outcome == "undecided"]
    return [f"?: {describe_needed(needed)}"] if needed else []


def describe_needed(needed: Sequence[Optional[int]]) -> str:
    """Return how many replications would decide; None is a difference that no number would decide."""
    known = sorted(count for count in needed if count is not None)
    texts = []
    if known:
        half, most = known[(len(known) - 1) // 2], known[-1]
        parts = f" half of them, {most:,} all" if half < most else ""
        texts.append(f"about {format_count(half, 'replication')} would decide{parts}")
    if None in needed:
        number = "it" if len(needed) == 1 else needed.count(None)
        texts.append(f"the uncertainty of the cost model leaves {number} open")
    return ", ".join(texts)


def describe_constraints(summary: Summary) -> list[str]:
    """Return how many configurations meet the constraints."""
    bounds = summary.experiment.subject_to
    if not bounds:
        return []
    met = sum(row.feasible for row in summary.rows)
    count = f"{met} of {format_count(len(summary.rows), 'configuration')}"
    others = "" if met == len(summary.rows) else "; the others cannot win"
    meet = "meets" if met == 1 else "meet"
    return [f"{count} {meet} {describe_bounds(bounds)} by the mean of the replications{others}"]


def describe_draws(summary: Summary) -> list[str]:
    """Return how often the winner stays the winner with random cost models, or that this was not tested."""
    winner, draws = summary.winner, summary.draw_count
    if winner is not None and not summary.experiment.intervals:
        return [f"the winner is {NOT_TESTED}"]
    if winner is None or not draws:
        return []
    metric = summary.experiment.objectives[0].metric
    return [
        f"winner in {winner.draws_won} of {draws} draws of the cost model, by {metric}; intervals include this "
        "uncertainty of the calibration"
    ]


def describe_precision(summary: Summary) -> list[str]:
    """Return whether all configurations reached the half-width of `ci`."""
    ci, metric = summary.experiment.ci, summary.experiment.objectives[0].metric
    if ci is None:
        return []
    level = abs(summary.baseline.means[metric].mean)
    too_wide = 0
    for row in summary.rows:
        mean, change = summary.without_draws(row, metric)
        too_wide += (mean.half_width or 0) > ci * abs(mean.mean) or (change.half_width or 0) > ci * level
    replications = max(len(row.runs) for row in summary.rows)
    text = f"half-widths of {metric} within {100 * ci:g} % after at most {replications} replications"
    return [text if not too_wide else f"{text}, except for {format_count(too_wide, 'configuration')}"]


def describe_confirmation(summary: Summary) -> list[str]:
    """Return the winner's difference on the confirming replications."""
    metric = summary.experiment.objectives[0].metric
    change = summary.confirm_difference(metric)
    if not change.n:
        return []
    percentage = format_percentage(change.relative_to(summary.confirm_baseline_mean(metric)))
    text = f"winner vs. baseline on {change.n} new replications (not used to choose it)"
    return [f"{text}: {title_inside(metric)} {percentage}"]
