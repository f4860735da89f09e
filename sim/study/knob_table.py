"""A table of one metric over two parameters of a sweep.

Each cell is one configuration: the other parameters have the winner's values, or the best ones for each cell. If the
winner does not set both parameters (its own grid lacks one), the best configuration that sets them takes its place.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Optional

from servesim.core import BadInput
from servesim.files.read import did_you_mean
from servesim.files.terminal import PLAIN, Screen, align_columns
from servesim.runs.metric_table import Unit, format_quantity, short_metric, unit_of
from servesim.statistics.objective import Objective, parse_objective

from .experiment import format_setting, format_value, short_key
from .ranking import Row, Summary

UNSET = object()  # the value of a parameter that a configuration does not set


@dataclass(frozen=True)
class KnobTable:
    """Configurations by the values of two parameters."""

    row_key: str
    column_key: str
    row_values: Sequence[Any]
    column_values: Sequence[Any]
    objective: Objective  # the metric of the cells
    cells: Sequence[Sequence[Optional[Row]]]  # by row and column; None: the sweep has no such configuration
    others: Mapping[str, Any]  # the other parameters, and their values in the scenario of `reference`; None: not set
    reference: Optional[Row]  # the cells have its values of the other parameters; None: each cell has its own best ones
    winner: Optional[Row]

    @property
    def metric(self) -> str:
        return self.objective.metric

    @cached_property
    def unit(self) -> Unit:
        """The unit of all cells."""
        return unit_of(self.metric, [row.mean(self.metric) for cells in self.cells for row in cells if row is not None])

    @property
    def fixed(self) -> dict[str, Any]:
        """The other parameters that all cells set, with their values."""
        values = {} if self.reference is None else self.reference.assignment
        return {key: values[key] for key in self.others if key in values}

    @property
    def best(self) -> bool:
        """Whether every cell has its own best values of the other parameters."""
        return bool(self.others) and self.reference is None

    @property
    def note(self) -> str:
        """How the other parameters are set; empty without other ones."""
        if not self.others or self.best:
            return "other parameters: the best values for each cell" if self.best else ""
        known = {key: self.fixed.get(key, value) for key, value in self.others.items()}
        values = [format_setting(key, value) for key, value in known.items() if value is not None]
        values += [format_setting(key, value) for key, value in known.items() if value is None]
        source = (
            "" if self.reference is self.winner or self.reference is None else f" (as in rank {self.reference.rank})"
        )
        return f"other parameters: {', '.join(values)}{source}"


def knob_table(
    summary: Summary,
    rows: Optional[str] = None,
    columns: Optional[str] = None,
    metric: Optional[str] = None,
    best: bool = False,
) -> KnobTable:
    """Return the table of a metric; by default, the first objective over the two parameters that change it most."""
    knobs = summary.experiment.knobs
    if len(knobs) < 2:
        raise BadInput(f"expected a sweep with at least two parameters, got {', '.join(knobs) or 'none'}")
    objective = summary.experiment.objectives[0] if metric is None else parse_objective(metric, "--metric")
    chosen = [None if name is None else find_knob(name, list(knobs), option)
              for name, option in ((rows, "--rows"), (columns, "--columns"))]  # fmt: skip
    search = RowSearch(summary, objective)
    free = iter(strongest(search, [key for key in knobs if key not in chosen]))
    row_key, column_key = (key or next(free) for key in chosen)
    if row_key == column_key:
        raise BadInput(f"--columns {column_key}: expected another parameter than --rows")
    others = [key for key in knobs if key not in (row_key, column_key)]
    setting_both = (row for row in summary.rows if row_key in row.assignment and column_key in row.assignment)
    reference = None if best or not others else next(setting_both, None)  # the winner, or the best one that sets both
    fixed = {} if reference is None else {key: reference.assignment.get(key, UNSET) for key in others}
    values = [sorted_values(knobs[key]) for key in (row_key, column_key)]
    cells = [[search.best({**fixed, row_key: row, column_key: column}) for column in values[1]] for row in values[0]]
    scenario = {key: reference and summary.experiment.value(reference.config, key) for key in others}
    return KnobTable(row_key, column_key, values[0], values[1], objective, cells, scenario, reference, summary.winner)


def find_knob(name: str, knobs: Sequence[str], where: str) -> str:
    """Return the parameter with a name; the name may leave out the section."""
    matches = [key for key in knobs if key == name] or [key for key in knobs if key.endswith(f".{name}")]
    if len(matches) != 1:
        hint = did_you_mean(name, knobs)
        raise BadInput(f"{where} {name}: expected a parameter of the sweep: {', '.join(knobs)}{hint}")
    return matches[0]


class RowSearch:
    """Finds the best configuration with given values of parameters: one that can win, else one that has the metric."""

    def __init__(self, summary: Summary, objective: Objective) -> None:
        self.summary, self.objective = summary, objective
        self.rows = sorted(summary.rows, key=self._order)  # best first
        self._by_keys: dict[tuple[str, ...], dict[Hashable, Row]] = {}  # an index per list of parameters

    def _order(self, row: Row) -> tuple[bool, bool, float]:
        level = row.mean(self.objective.metric)
        return not row.eligible, math.isnan(level), self.objective.sign * level

    def best(self, values: Mapping[str, Any]) -> Optional[Row]:
        """Return the best configuration with these values; UNSET is a parameter that it does not set."""
        keys = tuple(values)
        if keys not in self._by_keys:
            index = self._by_keys[keys] = {}
            for row in self.rows:
                index.setdefault(tuple(hashable(row.assignment.get(key, UNSET)) for key in keys), row)
        return self._by_keys[keys].get(tuple(map(hashable, values.values())))


def hashable(value: Any) -> Hashable:
    """Return a value as a key of an index; lists and mappings by their text."""
    return value if isinstance(value, Hashable) else repr(value)


def strongest(search: RowSearch, keys: Sequence[str]) -> list[str]:
    """Return parameters by their effect, the largest first; those that the winner does not set come last."""
    winner = search.summary.winner
    return sorted(keys, key=lambda key: (winner is not None and key not in winner.assignment, -effect(search, key)))


def effect(search: RowSearch, key: str) -> float:
    """Return how much a parameter changes the best value of a metric."""
    rows = [search.best({key: value}) for value in search.summary.experiment.knobs[key]]
    levels = [row.mean(search.objective.metric) for row in rows if row is not None]
    levels = [level for level in levels if not math.isnan(level)]
    return max(levels) - min(levels) if levels else 0.0


def sorted_values(values: Sequence[Any]) -> list[Any]:
    """Return numbers in rising order, other values in the order of the sweep."""
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
    return sorted(values) if numbers else list(values)


def format_knob_table(table: KnobTable, screen: Screen = PLAIN) -> str:
    """Return the table as text; * marks the winner, ! a configuration that cannot win."""
    lines = [[f"{short_key(table.row_key)} \\ {short_key(table.column_key)}", *map(format_value, table.column_values)]]
    for value, cells in zip(table.row_values, table.cells):
        lines.append([format_value(value), *(cell_text(row, table) for row in cells)])
    shown = [row for cells in table.cells for row in cells if row is not None]
    notes = [table.note] if table.note else []
    if any(row is table.winner for row in shown):
        is_baseline = table.winner is not None and table.winner.config == 0
        notes.append(f"*: {'the baseline, which nothing beats' if is_baseline else 'the winner'}")
    notes += ["!: cannot win"] if any(not row.eligible for row in shown) else []
    return "\n".join([table.unit.after(short_metric(table.metric)), *align_columns(lines, screen), *notes])


def cell_text(row: Optional[Row], table: KnobTable) -> str:
    """Return a cell: the metric, and whether the configuration wins or cannot win."""
    if row is None:
        return "–"
    mark = " *" if row is table.winner else "" if row.eligible else " !"
    return f"{format_quantity(row.mean(table.metric), None, table.unit)}{mark}"
