"""Columns of a result: one list of them feeds the terminal, notebooks, CSV, JSON, frames and pages.

A row is any object. A value is a number, a text, a tuple of texts, a setting, or None.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any, Literal, Optional

from servesim.files.terminal import Screen, align_columns
from servesim.files.write import open_text, write_rows
from servesim.runs.metric_table import Unit, format_quantity, metric_title, short_metric, unit_of
from servesim.statistics.intervals import Interval

Medium = Literal["data", "terminal", "page"]  # data: CSV, JSON and frames
EVERYWHERE: tuple[Medium, ...] = ("data", "terminal", "page")


@dataclass(frozen=True)
class Column:
    """One column of a table of results."""

    name: str  # in files, JSON and frames, and in filters of a page
    value: Callable[[Any], Any]  # of a row
    text: Optional[Callable[[Any], str]] = None  # of a row, as printed; None: the value
    title: Optional[str] = None  # printed above the column; None: the name
    shown: Sequence[Medium] = ("data",)
    group: str = ""  # key of JSON that contains the columns of a group
    wrap: bool = False  # a long text, wrapped first on a narrow terminal
    page_title: Optional[str] = None  # above the column of a page; None: as printed

    @property
    def head(self) -> str:
        return self.name if self.title is None else self.title

    def print(self, row: Any) -> str:
        """Return the text of a row in a table."""
        return str(self.value(row)) if self.text is None else self.text(row)


def metric_column(
    metric: str, value: Callable[[Any], Interval], shown: Sequence[Medium], rows: Sequence[Any] = ()
) -> Column:
    """Return the column of a metric, printed with half-width; `value` returns its mean and interval.

    `rows` are all rows, whose values have one unit.
    """
    unit = unit_of(metric, [value(row).mean for row in rows]) if len(shown) > 1 else Unit("")
    text = lambda row: format_quantity(*value(row)[:2], unit)  # noqa: E731
    heads = [unit.after(name) for name in (short_metric(metric), metric_title(metric))]
    return Column(metric, lambda row: value(row).mean, text, heads[0], shown, "metrics", page_title=heads[1])


def inner_columns(columns: Sequence[Column], inner: Callable[[Any], Any]) -> list[Column]:
    """Return data columns of a part of a row."""

    def column(of: Column) -> Column:
        return replace(of, value=lambda row: of.value(inner(row)), shown=("data",))

    return [column(of) for of in columns]


def columns_in(columns: Sequence[Column], medium: Medium) -> list[Column]:
    """Return the columns of a medium."""
    return [column for column in columns if medium in column.shown]


def printed_cells(columns: Sequence[Column], rows: Sequence[Any]) -> list[list[str]]:
    """Return the cells of a printed table; the first line is its head."""
    chosen = columns_in(columns, "terminal")
    return [[column.head for column in chosen], *([column.print(row) for column in chosen] for row in rows)]


def table_lines(
    columns: Sequence[Column], rows: Sequence[Any], screen: Screen, meaning: Callable[[Any], str] = lambda row: ""
) -> list[str]:
    """Return the lines of a printed table; the `meaning` of a row selects its colour."""
    wrapped = [column.head for column in columns if column.wrap]  # first on a narrow terminal
    meanings = {number: meaning(row) for number, row in enumerate(rows, 1)}
    return align_columns(printed_cells(columns, rows), screen, wrapped, meanings)


def html_result(title: str, cells: Sequence[Sequence[str]], notes: Sequence[str] = ()) -> str:
    """Return a title, a table and sentences below it. The first line of `cells` is the head of the table.

    This is the only place that writes HTML for notebooks: it escapes every text, as names can come from files.
    """
    head, *body = cells
    lines = [html_row(head, "th"), "</thead><tbody>", *(html_row(line, "td") for line in body)]
    table = f'<table class="dataframe"><thead>{"".join(lines)}</tbody></table>'
    return f"<p><b>{escape(title)}</b></p>{table}" + "".join(f"<p>{escape(note)}</p>" for note in notes if note)


def html_row(cells: Sequence[str], tag: str) -> str:
    """Return one line of a table."""
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"


def write_csv(path: Path, tables: Sequence[tuple[Sequence[Column], Sequence[Any]]]) -> None:
    """Write rows; several tables with the same columns follow each other."""
    with open_text(path) as file:
        write_rows(file, [[column.name for column in columns_in(tables[0][0], "data")]])
        for columns, rows in tables:
            chosen = columns_in(columns, "data")
            write_rows(file, ([csv_cell(column.value(row)) for column in chosen] for row in rows))


def csv_cell(value: Any) -> Any:
    """Return a value as a cell; a missing one is empty."""
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, float):
        return "" if math.isnan(value) else repr(float(value))
    return json.dumps(value) if isinstance(value, (dict, list)) else flat(value)


def flat(value: Any) -> Any:
    """Return a value of CSV or of a frame: a tuple of texts is one text."""
    return "; ".join(value) if isinstance(value, tuple) else value


def json_row(columns: Sequence[Column], row: Any) -> dict[str, Any]:
    """Return a row as JSON. Columns of a group are one mapping; numbers that JSON does not have are null."""
    result: dict[str, Any] = {}
    for column in columns_in(columns, "data"):
        value = column.value(row)
        place = result.setdefault(column.group, {}) if column.group else result
        place[column.name] = None if isinstance(value, float) and not math.isfinite(value) else value
    return result


def frame_row(columns: Sequence[Column], row: Any) -> dict[str, Any]:
    """Return a row of a frame."""
    return {column.name: flat(column.value(row)) for column in columns_in(columns, "data")}
