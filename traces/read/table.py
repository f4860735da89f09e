"""A file's rows as columns, and the checks that turn text into tokens and seconds or name the row that is wrong."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, Optional

import numpy as np
from servesim.core import BadInput
from servesim.files.read import parse_json, shown

MOST_TOKENS = 2**31 - 1
MOST_SECONDS = 1e11  # three thousand years: more is a wrong unit or rubbish
MOST_ID = 2**63 - 1  # what larger ids come out as when many are parsed at once
MISSING = ("", None)


class Table:
    """Columns of equal length with the row number of each entry."""

    def __init__(self, name: str, columns: Mapping[str, Sequence[Any]], numbers: Sequence[int], typed: bool) -> None:
        self.name = name  # file, for messages
        self.columns = columns
        self.numbers = numbers
        self.typed = typed  # values have types of their own (JSON): a number in quotes is a mistake

    def __len__(self) -> int:
        return len(self.numbers)

    def __contains__(self, column: str) -> bool:
        return column in self.columns

    def bad(self, index: int, column: str, expected: str) -> BadInput:
        """Return the complaint about one entry."""
        got = shown(self.columns[column][index])
        return BadInput(f"{self.name}: row {self.numbers[index]}: {column}: expected {expected}, got {got}")

    def tokens(self, column: str) -> list[int]:
        """Return a column of lengths."""
        return self._all(column, whole, int, "a whole number of tokens", 0, MOST_TOKENS)

    def integers(self, column: str, least: int = -(2**63), most: int = 2**63) -> list[int]:
        """Return a column of whole numbers."""
        return self._all(column, whole, int, "a whole number", least, most)

    def seconds(self, column: str, unit: float = 1.0) -> list[float]:
        """Return a column of times, each entry counted in `unit` seconds."""
        values = self._all(column, real, float, "a time of 0 or more", 0.0, MOST_SECONDS / unit)
        if unit == 1.0:
            return values
        # 3052 ms are 3.052 s and not 3.0520000000000005: dividing by a whole number rounds once, multiplying twice.
        per = round(1 / unit)
        return [value / per for value in values] if per * unit == 1.0 else [value * unit for value in values]

    def optional(self, column: str, convert: Callable[[Table, str], list[Any]]) -> list[Any]:
        """Return a column in which entries may be missing: None for those."""
        if column not in self.columns:
            return [None] * len(self)
        values = self.columns[column]
        there = [i for i, value in enumerate(values) if value not in MISSING]
        if len(there) == len(values):
            return convert(self, column)
        part = Table(self.name, {column: [values[i] for i in there]}, [self.numbers[i] for i in there], self.typed)
        result: list[Any] = [None] * len(self)
        for i, value in zip(there, convert(part, column)):
            result[i] = value
        return result

    def text(self, column: str) -> list[str]:
        """Return a column of names; JSON may have numbers for them."""
        values = self.columns[column]
        for i, value in enumerate(values):
            if type(value) not in (str, int):
                raise self.bad(i, column, "a name or a number")
        return list(map(str, values))

    def id_lists(self, column: str) -> list[Sequence[int]]:
        """Return a column of hash ids: JSON lists, or whole numbers with spaces between."""
        values = self.columns[column]
        quickly = None if self.typed else quick_ids(values)
        if quickly is not None:
            return quickly
        return [self._ids(i, column, value) for i, value in enumerate(values)]

    def _ids(self, index: int, column: str, value: Any) -> Sequence[int]:
        try:
            if type(value) is str and not self.typed:
                return tuple(map(int, value.split()))
            if type(value) is list and (not value or set(map(type, value)) == {int}):
                return tuple(value)
        except ValueError:
            pass
        raise self.bad(index, column, "hash ids, whole numbers")

    def _all(
        self, column: str, one: Callable[[Any, bool], Any], kind: type, expected: str, least: float, most: float
    ) -> list[Any]:
        """Return the column converted; look for the culprit only when something is wrong with the whole."""
        values = self.columns[column]
        converted = quick(values, kind, self.typed)
        if converted is not None and within(converted, least, most):
            return converted
        converted = []
        for i, value in enumerate(values):
            try:
                number = one(value, self.typed)
            except (ValueError, TypeError, OverflowError):
                raise self.bad(i, column, expected) from None
            if not number >= least:
                raise self.bad(i, column, expected if math.isnan(number) else f"{expected}, at least {least:g}")
            if not number <= most:
                raise self.bad(i, column, f"{expected}, at most {most:g}")
            converted.append(number)
        return converted


def quick(values: Sequence[Any], kind: type, typed: bool) -> Optional[list[Any]]:
    """Return the values converted at one go, or None where they need a closer look."""
    types = set(map(type, values))
    if types <= {kind}:
        return list(values)
    if kind is float and types <= {int, float}:
        try:
            return list(map(float, values))
        except OverflowError:
            return None
    if types == {str} and not typed and "_" not in "".join(values):
        try:
            return list(map(kind, values))
        except ValueError:
            return None
    return None


def quick_ids(values: Sequence[str]) -> Optional[list[Sequence[int]]]:
    """Return hash ids parsed at one go, or None where they need a closer look."""
    together = " ".join(values)
    if together.encode().translate(None, b"0123456789 ") or not together.strip():
        return None
    ids = np.fromstring(together, np.int64, sep=" ")
    counts = [value.count(" ") + 1 if value else 0 for value in values]
    if sum(counts) != len(ids) or ids.max() == MOST_ID:
        return None
    every = iter(ids.tolist())
    return [tuple(islice(every, count)) for count in counts]


def within(values: list[Any], least: float, most: float) -> bool:
    """Return whether all values are numbers from `least` to `most`."""
    # One NaN makes the sum a NaN, which no comparison lets through; least and most alone may miss it.
    return not values or (min(values) >= least and max(values) <= most and sum(values) >= least)


def whole(value: Any, typed: bool) -> int:
    """Return a whole number; 120.0 is one, as tables that passed through a data frame have it."""
    if type(value) is int:
        return value
    if type(value) is str and not typed and "_" not in value:
        try:
            return int(value)
        except ValueError:
            value = float(value)
    if type(value) is float and value.is_integer():
        return int(value)
    raise ValueError(value)


def real(value: Any, typed: bool) -> float:
    """Return a number."""
    if type(value) in (int, float) or (type(value) is str and not typed and "_" not in value):
        return float(value)
    raise ValueError(value)


def csv_rows(name: str, text: str) -> list[list[str]]:
    """Return the cells of a CSV text; a blank line has none."""
    plain = text.replace("\r\n", "\n")
    if '"' not in plain and "\r" not in plain:  # nothing to unquote: splitting is several times faster
        return [line.split(",") if line else [] for line in plain.split("\n")]
    rows: list[list[str]] = []
    try:
        rows.extend(csv.reader(io.StringIO(text, newline=""), strict=True))
    except csv.Error as error:
        raise BadInput(f"{name}: row {len(rows) + 1}: expected comma-separated values: {error}") from None
    return rows


def csv_table(name: str, text: str, header: Optional[Sequence[str]] = None) -> Table:
    """Return the table of a CSV text; row 1 is its header unless one is given."""
    rows = csv_rows(name, text)
    numbers = [number for number, row in enumerate(rows, 1) if row]  # blank lines are passed over
    rows = [row for row in rows if row]
    if header is None:
        header = [column.strip() for column in rows.pop(0)]
        numbers.pop(0)
    if len(set(header)) < len(header):
        twice = next(column for column in header if list(header).count(column) > 1)
        raise BadInput(f"{name}: row 1: expected every column once, got {shown(twice)} twice")
    width = len(header)
    for number, row in zip(numbers, rows):
        if len(row) != width:
            raise BadInput(f"{name}: row {number}: expected {width} columns, got {len(row)}")
    if not rows:
        raise BadInput(f"{name}: row 2: no rows after the header")
    return Table(name, dict(zip(header, zip(*rows))), numbers, typed=False)


def json_rows(name: str, text: str) -> tuple[list[dict[str, Any]], Sequence[int]]:
    """Return the objects of a JSON Lines text, or of one JSON list, and the row of each."""
    if text.lstrip()[:1] == "[":
        records = parse_json(name, text)
        numbers: Sequence[int] = range(1, len(records) + 1)
    else:
        lines = text.split("\n")
        numbers = [number for number, line in enumerate(lines, 1) if line and not line.isspace()]
        records = [parse_json(name, lines[number - 1], number) for number in numbers]
    for number, record in zip(numbers, records):
        if type(record) is not dict:
            raise BadInput(f"{name}: row {number}: expected a JSON object, got {shown(record)}")
    if not records:
        raise BadInput(f"{name}: row 1: no rows")
    return records, numbers


def json_table(name: str, records: Sequence[Mapping[str, Any]], numbers: Sequence[int]) -> Table:
    """Return the table of JSON objects: every key that any of them has is a column."""
    keys = dict.fromkeys(key for record in records for key in record)
    return Table(name, {key: [record.get(key) for record in records] for key in keys}, numbers, typed=True)
