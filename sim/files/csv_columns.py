"""Write CSV by columns: the bytes of `write_rows`, in a fifth of its time for numbers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any, TextIO

from pydantic_core import to_json

from .write import write_rows

SMALL, LARGE = 1e-4, 1e16  # between them, `repr` writes a float without an exponent
PLAIN = re.compile(r"[\w.:/]*")  # no text of these letters needs quotes, or is a formula


def write_columns(file: TextIO, columns: Sequence[Sequence[Any]]) -> None:
    """Write the rows of two or more columns. One column has other rules: its empty cells are quoted."""
    file.write("".join(f"{','.join(row)}\n" for row in zip(*map(_cells, columns))))


def _cells(values: Sequence[Any]) -> Iterable[str]:
    """Return the values of a column as cells."""
    kinds = set(map(type, values)) - {type(None)}
    if kinds == {float}:
        return _float_cells(values)
    if kinds == {int} and None not in values:
        return map(repr, values)
    if not kinds <= {str}:
        return _other_cells(values)
    if None not in values and PLAIN.fullmatch("".join(values)):
        return values
    texts = list(set(values))  # most texts come many times
    return map(dict(zip(texts, _other_cells(texts))).__getitem__, values)


def _float_cells(values: Sequence[Any]) -> list[str]:
    """Return floats as `repr` writes them, and None as an empty cell. JSON has the same digits, ten times faster."""
    texts = to_json(values).decode()[1:-1].split(",")
    return [
        "" if value is None else text if SMALL <= value < LARGE else repr(value) for text, value in zip(texts, values)
    ]


def _other_cells(values: Sequence[Any]) -> list[str]:
    """Return values as `csv` writes them."""
    rows = _Rows()
    write_rows(rows, zip(values, repeat("")))
    return [row[: -len(",\n")] for row in rows]


class _Rows(list[str]):
    """The rows that are written to it."""

    write = list.append
