"""The tables of a sweep: their columns in all media, and its files.

These are summary.csv, pareto.csv and best.yaml; with rates also rates.csv and capacity.csv.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

from servesim.config.layers import Tree, value_at
from servesim.config.paths import relative_paths
from servesim.config.scenario import Scenario
from servesim.core import BadInput, field_values
from servesim.files.write import comment, write_yaml
from servesim.runs.metric_table import format_quantity, metric_title, metrics_in, unit_of, whole_metric
from servesim.runs.request_rate import format_rate
from servesim.statistics.intervals import Interval
from servesim.statistics.number_format import format_mean, format_percentage

from .columns import EVERYWHERE, Column, Medium, inner_columns, metric_column, write_csv
from .experiment import Experiment, format_setting, format_value, short_key
from .ranking import Row, Summary
from .rate_summary import RateSummary, Result
from .rates import Curve, RatePoint

TIE_MARKS = {"equal": "=", "undecided": "?"}  # before the rank
PRINTED_LABELS = {"serves fewer": "more unserved"}  # label in summary.csv -> label in tables and in the report


def describe_window(experiment: Experiment) -> str:
    """Return which requests the metrics include; also a column of summary.csv."""
    if experiment.steady_window is None:
        return "terminating: all requests"
    warm_up, drain = experiment.steady_window
    return f"steady state: without the first {warm_up:.0%} and the last {drain:.0%} of arrivals (ITL: all tokens)"


def format_difference(row: Row, metric: str) -> str:
    """Return the relative difference of a row from the baseline."""
    change = row.differences[metric]
    if change.mean == 0:
        return "no difference"
    return format_percentage(change.relative_to(row.means[metric].mean - change.mean))


def sweep_columns(summary: Summary) -> list[Column]:
    """Return the columns of a sweep: a row is a configuration. Some are present only if their feature is used."""
    experiment, draws = summary.experiment, summary.draw_count
    changed = lambda row: changed_settings(row, summary)  # noqa: E731
    ranked = lambda row: f"{TIE_MARKS.get(row.relation.outcome, '')} {row.rank}".strip()  # noqa: E731
    columns = [] if experiment.rate is None else [Column("rate", lambda row: experiment.rate)]
    columns += [
        Column("rank", lambda row: row.rank, ranked, shown=EVERYWHERE),
        Column("config", lambda row: row.config),
        Column("relation", lambda row: row.relation.outcome),
        Column("eligible", lambda row: row.eligible),
    ]
    if experiment.subject_to:
        columns += [Column("feasible", lambda row: row.feasible), Column("violation", lambda row: row.violation)]
    columns += [
        Column("on_pareto_front", lambda row: row.on_pareto_front),
        Column("replications", lambda row: len(row.runs)),
        Column("counted", lambda row: describe_window(experiment)),
        *setting_columns(summary),
        *(column for number in range(len(experiment.objectives)) for column in objective_columns(summary, number)),
        Column("changed_settings", changed, None, "changed settings", ("terminal",), wrap=True),
        *(metric_column(name, mean_of(name), shown, summary.rows) for name, shown in other_metrics(summary).items()),
    ]
    if experiment.intervals:
        won = lambda row: f"{row.draws_won} of {draws}" if row.draws else ""  # noqa: E731
        shown = EVERYWHERE if draws else EVERYWHERE[:1]
        columns.append(Column("draws_won", lambda row: row.draws_won, won, "draws won", shown))
    return [*columns, label_column(summary)]


def setting_columns(summary: Summary) -> list[Column]:
    """Return one column per parameter. Data is empty and pages have the value of the scenario if a row sets none."""
    experiment = summary.experiment
    keys = list(dict.fromkeys(key for config in experiment.configs for key in config))
    values = lru_cache(None)(lambda config: setting_values(experiment, config, keys))

    def column(key: str) -> Column:
        text = lambda row: format_value(values(row.config)[key])  # noqa: E731
        shown: Sequence[Medium] = ("data", "page") if key in experiment.knobs else ("data",)
        return Column(key, lambda row: row.assignment.get(key), text, short_key(key), shown, "settings")

    return [column(key) for key in keys]


def setting_values(experiment: Experiment, config: int, keys: Sequence[str]) -> dict[str, Any]:
    """Return the parameters of a configuration; those that it does not set come from its scenario and its policy."""
    assignment = experiment.configs[config]
    if all(key in assignment for key in keys):
        return dict(assignment)
    scenario = Scenario.model_validate(experiment.tree(config))
    tree = scenario.model_dump()
    try:
        defaults = field_values(scenario.make_policy()) if scenario.policy_is_loadable else {}
    except BadInput:
        defaults = {}
    tree["policy"] = {**defaults, **scenario.policy}
    known = {key: value_at(tree, key) for key in keys}
    return {**{key: "" if value is None else value for key, value in known.items()}, **assignment}


def objective_columns(summary: Summary, number: int) -> list[Column]:
    """Return an objective: mean and paired difference from the baseline, with half-widths.

    The terminal shows the difference of the first objective only.
    """
    metric = summary.experiment.objectives[number].metric
    name, shown = f"{metric}_difference", EVERYWHERE if number == 0 else ("data", "page")

    def versus(row: Row) -> str:
        return "" if row is summary.baseline else format_difference(row, metric).removesuffix(" %")

    return [
        metric_column(metric, lambda row: row.means[metric], EVERYWHERE, summary.rows),
        Column(f"{metric}_half_width", lambda row: row.means[metric].half_width, group="metrics"),
        Column(name, lambda row: row.differences[metric].mean, versus, "vs. baseline (%)", shown, "metrics"),
        Column(f"{name}_half_width", lambda row: row.differences[metric].half_width, group="metrics"),
    ]


def mean_of(metric: str) -> Callable[[Row], Interval]:
    """Return a function that returns the mean of a metric, without an interval."""
    return lambda row: Interval(row.mean(metric), None, 0)


def other_metrics(summary: Summary) -> dict[str, Sequence[Medium]]:
    """Return the metrics besides the objectives, and where they are shown."""
    experiment = summary.experiment
    records = [record.get("metrics", {}) for row in summary.rows for record in row.runs]
    present = [name for name in dict.fromkeys(chain(*records)) if "[" in name]  # of one priority or session
    in_files = [*metrics_in("summary"), *(name for name in present if whole_metric(name) in metrics_in("summary"))]
    names = dict.fromkeys([*in_files, *(bound.metric for bound in experiment.subject_to)])
    printed = [name for name in metrics_in("table") if any(any(row.values(name)) for row in summary.rows)]
    shown: dict[str, Sequence[Medium]] = {"preemptions": ("data", "page"), **dict.fromkeys(printed, EVERYWHERE)}
    objectives = [objective.metric for objective in experiment.objectives]
    return {name: shown.get(name, ("data",)) for name in names if name not in objectives}


def label_column(summary: Summary) -> Column:
    """Return the labels of a configuration; tables leave out those that all configurations have."""
    rows = summary.rows
    common = set.intersection(*(set(row.labels) for row in rows)) if len(rows) > 1 else set()
    text = lambda row: ", ".join(printed_label(name) for name in row.labels if name not in common)  # noqa: E731
    return Column("labels", lambda row: tuple(row.labels), text, shown=("data", "terminal"), wrap=True)


def point_columns(result: RateSummary) -> list[Column]:
    """Return the columns of the tested rates: a row is a RatePoint. Tables show those of a single configuration."""
    experiment, summary = result.experiment, result.by_rate[result.rates[0]]
    objectives = [objective.metric for objective in experiment.objectives]

    def mean(metric: str) -> Callable[[RatePoint], Interval]:
        return lambda point: point.row.interval(metric, experiment.confidence)

    meets = lambda point: "yes" if point.good else f"no: {', '.join(point.problems)}"  # noqa: E731
    missed = lambda point: f"no: {point.problem}" if point.problem else "yes"  # noqa: E731
    return [
        Column("config", lambda point: point.row.config),
        Column("rate", lambda point: point.rate, lambda point: f"{point.rate:.10g}", "rate (req/s)", EVERYWHERE),
        *inner_columns(setting_columns(summary), lambda point: point.row),
        Column("meets", lambda point: point.good, meets, shown=("data", "terminal")),
        Column("problem", lambda point: point.problem, missed, "meets the constraints", ("data", "page"), wrap=True),
        *(metric_column(name, mean(name), EVERYWHERE, result.baseline.points) for name in objectives),
        *(metric_column(name, mean(name), ("data",)) for name in other_metrics(summary)),
    ]


def capacity_columns(result: RateSummary) -> list[Column]:
    """Return the columns of the configurations over all rates: a row is a Curve."""
    changed = lambda curve: curve_settings(result, curve)  # noqa: E731
    columns = [
        Column("rank", lambda curve: curve.rank, lambda curve: f"{'= ' * (curve.outcome == 'equal')}{curve.rank}",
               shown=EVERYWHERE),
        Column("config", lambda curve: curve.config),
        Column("relation", lambda curve: curve.outcome),
        *setting_columns(result.by_rate[result.rates[0]]),
    ]  # fmt: skip
    if result.experiment.subject_to:
        columns += [
            Column("capacity", capacity_field("rate"), capacity_text, "capacity (req/s)", EVERYWHERE),
            *(Column(name, capacity_field(name)) for name in ("missed_at", "reason", "upper_bound", "missed_below")),
        ]  # fmt: skip
    return [
        *columns,
        Column("rates_tested", lambda curve: len(curve.points)),
        *(level_column(result, rate) for rate in result.rates),
        Column("changed_settings", changed, title="changed settings", shown=("terminal",), wrap=True),
        Column("labels", curve_labels, shown=("terminal",), wrap=True),
    ]


def capacity_field(name: str) -> Callable[[Curve], Any]:
    """Return a function that reads a field of the capacity; None for a configuration that has not run yet."""
    return lambda curve: None if curve.capacity is None else getattr(curve.capacity, name)


def capacity_text(curve: Curve) -> str:
    """Return the capacity as tables print it."""
    text = "" if curve.capacity is None else curve.capacity.text
    return "does not start" if curve.refused else text.replace(" req/s", "")


def level_column(result: RateSummary, rate: float) -> Column:
    """Return the main metric at one rate; ! marks a rate that misses a constraint, with the name of another metric."""
    metric = result.main_metric
    shown = [point for curve in result.curves for point in curve.points if point.rate in result.rates]
    unit = unit_of(metric, [point.row.mean(metric) for point in shown])

    def level(curve: Curve) -> float:
        return next((point.row.mean(metric) for point in curve.points if point.rate == rate), math.nan)

    def text(curve: Curve) -> str:
        point = next((point for point in curve.points if point.rate == rate), None)
        if point is None or point.good or not result.experiment.subject_to:
            return "" if point is None else format_quantity(level(curve), None, unit)
        others = [] if metric in point.problems else list(point.problems)
        return " ".join([format_quantity(level(curve), None, unit), "!", ", ".join(others)]).strip()

    return Column(f"at_{rate:g}", level, text, unit.after(f"at {rate:.6g} req/s"), ("terminal", "page"))


def curve_labels(curve: Curve) -> str:
    """Return the labels of a configuration."""
    names = {"baseline": curve.is_baseline, "outside profile": is_outside_profile(curve)}
    names["does not start"] = bool(curve.refused)
    return ", ".join(name for name, applies in names.items() if applies)


def is_outside_profile(curve: Curve) -> bool:
    """Whether the profile does not cover the steps of a configuration at a rate that meets the constraints."""
    return any(point.row.is_outside_profile for point in curve.points if point.good)


def curve_settings(result: RateSummary, curve: Curve) -> str:
    """Return the settings of a configuration that differ from the baseline."""
    summary = result.by_rate[result.rates[0]]
    return changed_settings(next(row for row in summary.rows if row.config == curve.config), summary)


def printed_label(name: str) -> str:
    """Return a label as tables and the report print it."""
    return PRINTED_LABELS.get(name, name)


def changed_settings(row: Row, summary: Summary) -> str:
    """Return the settings that differ from the baseline, as short text."""
    keys = [] if row is summary.baseline else summary.experiment.changed_keys(row.config)
    set_here = [format_setting(key, row.assignment[key]) for key in keys if key in row.assignment]
    of_base = []
    for key in (key for key in keys if key not in row.assignment):  # of the baseline or of another grid
        value = summary.experiment.value(row.config, key)
        if value is not None or not ("policy.name" in keys and key.startswith("policy.")):
            of_base.append(format_setting(key, value))  # but another policy has its own settings
    return " ".join([*set_here, *of_base]) or row.label


def format_count(count: int, noun: str) -> str:
    """Return `1 run` or `2 runs`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def write_summary(result: Result, folder: Path) -> None:
    """Write the tables and the winner; of a sweep over rates, also the curves and the capacities."""
    if isinstance(result, Summary):
        write_tables([result], folder)
        if result.winner is not None:
            winner, metric = result.winner, result.experiment.objectives[0].metric
            level, change = format_mean(winner.means[metric], metric), format_difference(winner, metric)
            about = f"{metric_title(metric)} {level}; to the baseline: {change}"
            tree = result.experiment.tree(winner.config)
            write_best(folder / "best.yaml", result.experiment, winner.config, tree, about)
        return
    write_tables(list(result.by_rate.values()), folder)
    write_csv(folder / "rates.csv", [(point_columns(result), curve.points) for curve in result.curves])
    if result.experiment.subject_to:
        write_csv(folder / "capacity.csv", [(capacity_columns(result), result.curves)])
    if result.winner is not None and result.winner.capacity is not None:
        write_winner(folder / "best.yaml", result, result.winner.config, result.winner.capacity.rate)
    for rate, summary in result.by_rate.items() if not result.experiment.subject_to else ():
        if summary.winner is not None:
            write_winner(folder / f"best-at-{rate:.10g}.yaml", result, summary.winner.config, rate)


def write_winner(path: Path, result: RateSummary, config: int, rate: float) -> None:
    """Write the scenario of a winner at its rate."""
    experiment = result.experiment
    try:
        tree, note = result.scenario(config, rate), ""
    except BadInput:
        tree, note = experiment.tree(config), "; the workload has no key for its rate"
    write_best(path, experiment.at_rate(rate), config, tree, f"at {format_rate(rate)}{note}")


def write_tables(summaries: Sequence[Summary], folder: Path) -> None:
    """Write one line per configuration, best first; an experiment with rates has one table per rate."""
    tables = [(sweep_columns(summary), summary.rows) for summary in summaries]
    write_csv(folder / "summary.csv", tables)
    fronts = [(columns, [row for row in rows if row.on_pareto_front]) for columns, rows in tables]
    write_csv(folder / "pareto.csv", fronts)


def write_best(path: Path, experiment: Experiment, config: int, tree: Tree, about: str) -> None:
    """Write a winner as a scenario for `sim run` and `sim replay`."""
    name = f"The best of {len(experiment.configs)} configurations of {experiment.name}: {experiment.label(config)}"
    name = name if len(experiment.configs) > 1 or experiment.rate is None else f"The capacity of {experiment.name}"
    write_yaml(path, relative_paths(tree, path.parent), comment(name) + comment(about))
