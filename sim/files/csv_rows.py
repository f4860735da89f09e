"""Rows of CSV files with checked values. Python 3.9 and the standard library, because the worker reads CSV files too.

A cell that a spreadsheet would run as a formula is written with a leading `'`; reading removes it again.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from typing import Any, Optional

from servesim.core import BadInput
from servesim.core.limits import MAX_INT, MAX_RESULT

from .read import MAX_BYTES, PathLike, quote, read_text, show_path

FORMULA = ("=", "+", "-", "@")
MARKED = (*FORMULA, "'")


class CsvRow:
    """One row of a CSV file. An error names the file, the row and the column."""

    __slots__ = ("cells", "where")

    def __init__(self, where: str, cells: dict[str, str]) -> None:
        self.where = where  # file and row, for messages
        self.cells = cells

    def __getitem__(self, column: str) -> str:
        return self.cells[column]

    def error(self, column: str, expected: str) -> BadInput:
        """Return the error for one cell."""
        return BadInput(f"{self.where}: {column}: expected {expected}, got {quote(self.cells[column])}")

    def whole(self, column: str, maximum: float = MAX_INT) -> int:
        """Return a cell as a whole number of at least 0; 120.0 is one, because data frames write integers like this."""
        text = self.cells[column]
        try:
            value = int(text) if text.isdecimal() else float(text)
        except ValueError:
            value = -1
        if not 0 <= value <= maximum or value != int(value):
            raise self.error(column, f"a whole number from 0 to {maximum:.10g}")
        return int(value)

    def number(self, column: str, minimum: float = -MAX_RESULT, maximum: float = MAX_RESULT) -> float:
        """Return a cell as a number."""
        try:
            value = float(self.cells[column])
        except ValueError:
            value = math.nan
        if not minimum <= value <= maximum:
            limits = "" if maximum == MAX_RESULT else f" from {minimum:g} to {maximum:g}"
            raise self.error(column, f"a number{limits}")
        return value


def read_csv(path: PathLike, columns: Iterable[str] = ()) -> list[CsvRow]:
    """Return the rows of a CSV file with a header that has at least `columns`."""
    return parse_csv(show_path(path), read_text(path), columns)


def parse_csv(name: str, text: str, columns: Iterable[str] = ()) -> list[CsvRow]:
    """Return the rows of a CSV text with a header that has at least `columns`; `name` is its file, for messages."""
    header, numbers, rows = split_table(name, text)
    missing = [column for column in columns if column not in header]
    if missing:
        raise BadInput(f"{name}: row 1: expected the column {missing[0]}, got {quote(','.join(header))}")
    return [CsvRow(f"{name}: row {number}", dict(zip(header, cells))) for number, cells in zip(numbers, rows)]


def split_table(
    name: str, text: str, header: Optional[Sequence[str]] = None
) -> tuple[Sequence[str], list[int], list[list[str]]]:
    """Return the header, and the row numbers and cells of all other rows that are not blank.

    The first row is the header unless `header` is passed.
    """
    lines = split_csv(name, text)
    numbers = [number for number, cells in enumerate(lines, 1) if cells]
    rows = [cells for cells in lines if cells]
    if "'" in text:
        rows = [list(map(unmark_formula, cells)) for cells in rows]
    if header is None:
        header = [column.strip() for column in rows.pop(0)] if rows else []
        del numbers[:1]
    if len(set(header)) < len(header):
        repeated = next(column for column in header if list(header).count(column) > 1)
        raise BadInput(f"{name}: row 1: expected every column once, got {quote(repeated)} twice")
    for number, cells in zip(numbers, rows):
        if len(cells) != len(header):
            raise BadInput(f"{name}: row {number}: expected {len(header)} columns, got {len(cells)}")
    return header, numbers, rows


def split_csv(name: str, text: str) -> list[list[str]]:
    """Return the cells of each row of a CSV text; a blank row has none."""
    lines = text.replace("\r\n", "\n")
    if '"' not in lines and "\r" not in lines:  # no quotes: splitting is several times faster
        return [line.split(",") if line else [] for line in lines.split("\n")]
    rows: list[list[str]] = []
    limit = csv.field_size_limit(MAX_BYTES)  # the token times of a long response exceed the default of 128 KiB
    try:
        rows.extend(csv.reader(io.StringIO(text, newline=""), strict=True))
    except csv.Error as error:
        raise BadInput(f"{name}: row {len(rows) + 1}: expected comma-separated values: {error}") from None
    finally:
        csv.field_size_limit(limit)
    return rows


def mark_formula(cell: Any) -> Any:
    """Return a text cell with a leading `'` if a spreadsheet would take it as a formula; other cells unchanged."""
    return f"'{cell}" if type(cell) is str and cell.startswith(MARKED) and _is_formula(cell) else cell


def unmark_formula(cell: str) -> str:
    """Return the text that `mark_formula` was given."""
    return cell[1:] if cell.startswith("'") and _is_formula(cell) else cell


def _is_formula(cell: str) -> bool:
    """Ignore leading `'`, so that marking and unmarking agree on every text."""
    text = cell.lstrip("'")
    if not text.startswith(FORMULA):
        return False
    try:
        float(text)
    except ValueError:
        return True
    return False  # a negative number is harmless
