"""Tables of the report pages: columns, rows and cells with the values by which they sort and filter."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Optional

from servesim.config.scenario import Scenario
from servesim.core import BadInput, field_values
from servesim.statistics.intervals import Interval
from servesim.statistics.number_format import format_mean, format_number
from servesim.study.experiment import Experiment, format_value
from servesim.study.files import parameter_keys
from servesim.study.ranking import Row, Summary
from servesim.study.table import TIE_MARKS, format_difference, printed_label, utilisation_columns

MAX_TABLE_ROWS = 1000  # keeps a page below 6 MB; summary.csv has all rows
NOT_ELIGIBLE = ("stuck", "failed", "serves fewer")


class Column(NamedTuple):
    """A column; its key is the name in filters such as decode_batch=32."""

    name: str
    key: str = ""
    numeric: bool = False
    wrap: bool = False  # long texts in several lines


class Tag(NamedTuple):
    """A label of a configuration."""

    text: str
    tone: str = ""


class Cell(NamedTuple):
    """A cell; `value` is what it sorts by, if not by its text."""

    text: str
    value: Optional[str] = None
    numeric: bool = False
    tags: Sequence[Tag] = ()


class TableRow(NamedTuple):
    """A row; `config` links it to the points of this configuration in the charts."""

    cells: Sequence[Cell]
    config: Optional[int] = None
    kind: str = ""


class Table(NamedTuple):
    """The content of a table."""

    columns: Sequence[Column]
    rows: Sequence[TableRow]


def number_cell(value: float, text: str | None = None) -> Cell:
    """Return a numeric cell; a missing value has an empty sort key."""
    if math.isnan(value):
        return Cell("–", "", True)
    return Cell(format_number(value) if text is None else text, f"{value:.9g}", True)


def configurations(summary: Summary) -> Table:
    """Return the table of all configurations."""
    keys = [key for key in parameter_keys(summary.rows) if key in summary.experiment.knobs]
    metrics = [objective.metric for objective in summary.experiment.objectives]
    columns = [Column("rank", "rank", True), *(Column(key.removeprefix("policy."), key) for key in keys)]
    for metric in metrics:
        columns += [Column(metric, metric, True), Column("vs. baseline", f"{metric}_vs_baseline", True)]
    utilisation = utilisation_columns(summary)
    columns += [Column(name, name, True) for name in utilisation]
    columns += [Column("draws won", "draws_won", True)] if summary.draw_count else []
    columns += [Column("preemptions", "preemptions", True), Column("labels", "labels", wrap=True)]
    rest = [row for row in summary.rows[MAX_TABLE_ROWS:] if row is summary.baseline or row.on_pareto_front]
    shown = [*summary.rows[:MAX_TABLE_ROWS], *rest]
    return Table(columns, [configuration(row, summary, keys, metrics, utilisation) for row in shown])


def configuration(
    row: Row, summary: Summary, keys: Sequence[str], metrics: Sequence[str], utilisation: Sequence[str]
) -> TableRow:
    """Return the row of a configuration."""
    cells = [number_cell(row.rank, f"{row.rank} {TIE_MARKS.get(row.relation.outcome, '')}".strip())]
    values = setting_values(summary.experiment, row.config, keys)
    cells += [Cell(format_value(values[key])) for key in keys]
    for metric in metrics:
        mean, change = row.means[metric], row.differences[metric]
        cells.append(number_cell(mean.mean, format_mean(mean, metric)))
        cells.append(number_cell(change.mean, format_difference(row, metric)))
    for name in utilisation:
        cells.append(number_cell(row.mean(name), format_mean(Interval(row.mean(name), None, 0), name)))
    cells += [number_cell(row.draws_won if row.draws else math.nan)] if summary.draw_count else []
    tags = [Tag(printed_label(name), "bad" if is_reason(name, row) else "") for name in row.labels]
    kind = "is-baseline" if row is summary.baseline else "is-winner" if row is summary.winner else ""
    return TableRow([*cells, number_cell(row.mean("evictions")), Cell("", None, False, tags)], row.config, kind)


def is_reason(label: str, row: Row) -> bool:
    """Whether a label says why a configuration cannot win."""
    return label in NOT_ELIGIBLE or label in row.misses


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
    return {**{key: value_at(tree, key) for key in keys}, **assignment}


def value_at(tree: Any, key: str) -> Any:
    """Return the value of `section.key`, empty if there is none."""
    for name in key.split("."):
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return "" if tree is None else tree
