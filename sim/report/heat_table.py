"""The table of one metric over two parameters, with a colour scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Optional

from servesim.core import BadInput
from servesim.study.experiment import format_value
from servesim.study.knob_table import KnobTable, cell_text, knob_table
from servesim.study.ranking import Row, Summary
from servesim.study.table import short_key

MAX_VALUES = 24  # rows or columns


class HeatCell(NamedTuple):
    """A configuration; `heat` is 1 for the best value of the table and 0 for the worst one."""

    text: str
    config: Optional[int]
    heat: float
    title: str = ""


class HeatTable(NamedTuple):
    """The content of the table."""

    caption: str
    corner: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[HeatCell]]]


def heat_table(summary: Summary) -> Optional[HeatTable]:
    """Return the first objective over the two parameters that change it most; None with fewer parameters.

    The random values of a search fill few cells; then each cell has the best values of the other parameters.
    """
    try:
        table = next((t for best in (False, True) if is_readable(t := knob_table(summary, best=best))), None)
    except BadInput:
        return None
    if table is None:
        return None
    rows = [
        (format_value(value), [heat_cell(row, table) for row in cells])
        for value, cells in zip(table.row_values, table.cells)
    ]
    shown = [row for cells in table.cells for row in cells if row is not None]
    notes = [table.metric, table.note]
    notes += [f"* is {table.winner_name}"] if any(row is table.winner for row in shown) else []
    notes += ["! cannot win"] if any(not row.eligible for row in shown) else []
    return HeatTable(
        "; ".join(filter(None, notes)) + ".",
        f"{short_key(table.row_key)} \\ {short_key(table.column_key)}",
        [format_value(value) for value in table.column_values],
        rows,
    )


def is_readable(table: KnobTable) -> bool:
    """Whether a table has at most MAX_VALUES rows and columns, and at least half of its cells have a configuration."""
    cells = [cell for line in table.cells for cell in line]
    filled = sum(cell is not None for cell in cells)
    return max(len(table.row_values), len(table.column_values)) <= MAX_VALUES and 2 * filled >= len(cells)


def heat_cell(row: Optional[Row], table: KnobTable) -> HeatCell:
    """Return the cell of a configuration."""
    if row is None:
        return HeatCell("–", None, 0.0)
    return HeatCell(cell_text(row, table), row.config, heat_of(row, table), row.label)


def heat_of(row: Row, table: KnobTable) -> float:
    """Return where a value lies between the worst and the best one, on a logarithmic scale if all are positive."""
    sign = table.objective.sign
    levels = [other.mean(table.metric) for cells in table.cells for other in cells if other is not None]
    levels = [level for level in levels if not math.isnan(level)]
    level = row.mean(table.metric)
    if math.isnan(level) or not row.eligible or min(levels) == max(levels):
        return 0.0
    scale = math.log if min(levels) > 0 else float
    worst, best = (max(levels), min(levels)) if sign > 0 else (min(levels), max(levels))
    return (scale(level) - scale(worst)) / (scale(best) - scale(worst))
