"""Rows of a file as columns, checked and converted to tokens and seconds. Errors name the row."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Optional

import numpy as np
from servesim.core import BadInput
from servesim.core.limits import MAX_INT
from servesim.files.csv_cells import unmark_formula
from servesim.files.read import parse_json, quote, split_csv

MAX_TIMESTAMP = 1e11  # seconds, 3,000 years; more is a wrong unit
MAX_ID = 2**63 - 1  # np.fromstring returns this for larger ids
MISSING = ("", None)
SPACE = re.compile(r"\s*")


class Table:
    """Columns of equal length with the row number of each entry."""

    def __init__(self, name: str, columns: Mapping[str, Sequence[Any]], numbers: Sequence[int], typed: bool) -> None:
        self.name = name  # file, for messages
        self.columns = columns
        self.numbers = numbers
        self.typed = typed  # values have types (JSON): a number in quotes is an error

    def __len__(self) -> int:
        return len(self.numbers)

    def __contains__(self, column: str) -> bool:
        return column in self.columns

    def error(self, index: int, column: str, expected: str) -> BadInput:
        """Return the error for one entry."""
        got = quote(self.columns[column][index])
        return BadInput(f"{self.name}: row {self.numbers[index]}: {column}: expected {expected}, got {got}")

    def tokens(self, column: str) -> list[int]:
        """Return a column of lengths in tokens."""
        return self._convert(column, parse_int, int, "a whole number of tokens", 0, MAX_INT)

    def integers(self, column: str, minimum: int = -(2**63), maximum: int = 2**63) -> list[int]:
        """Return a column of whole numbers."""
        return self._convert(column, parse_int, int, "a whole number", minimum, maximum)

    def seconds(self, column: str, unit: float = 1.0) -> list[float]:
        """Return a column of times in seconds; the file counts in units of `unit` seconds."""
        values = self._convert(column, parse_float, float, "a time of 0 or more", 0.0, MAX_TIMESTAMP / unit)
        if unit == 1.0:
            return values
        # 3052 ms must give 3.052 s, not 3.0520000000000005: a division rounds once, a multiplication twice.
        per = round(1 / unit)
        return [value / per for value in values] if per * unit == 1.0 else [value * unit for value in values]

    def optional(self, column: str, convert: Callable[[Table, str], list[Any]]) -> list[Any]:
        """Return a column with optional entries; a missing one is None."""
        if column not in self.columns:
            return [None] * len(self)
        values = self.columns[column]
        present = [i for i, value in enumerate(values) if value not in MISSING]
        if len(present) == len(values):
            return convert(self, column)
        subset = Table(
            self.name, {column: [values[i] for i in present]}, [self.numbers[i] for i in present], self.typed
        )
        result: list[Any] = [None] * len(self)
        for i, value in zip(present, convert(subset, column)):
            result[i] = value
        return result

    def text(self, column: str) -> list[str]:
        """Return a column of names as text; JSON may hold numbers."""
        values = self.columns[column]
        for i, value in enumerate(values):
            if type(value) not in (str, int):
                raise self.error(i, column, "a name or a number")
        return list(map(str, values))

    def id_lists(self, column: str) -> list[Sequence[int]]:
        """Return a column of hash ids: JSON lists, or whole numbers separated by spaces."""
        values = self.columns[column]
        converted = None if self.typed else convert_all_ids(values)
        if converted is not None:
            return converted
        return [self._ids(i, column, value) for i, value in enumerate(values)]

    def _ids(self, index: int, column: str, value: Any) -> Sequence[int]:
        try:
            if type(value) is str and not self.typed:
                return tuple(map(int, value.split()))
            if type(value) is list and (not value or set(map(type, value)) == {int}):
                return tuple(value)
        except ValueError:
            pass
        raise self.error(index, column, "hash ids, whole numbers")

    def _convert(
        self, column: str, parse: Callable[[Any, bool], Any], kind: type, expected: str, minimum: float, maximum: float
    ) -> list[Any]:
        """Return the column converted. Entries are checked one by one only if the fast conversion fails."""
        values = self.columns[column]
        converted = convert_all(values, kind, self.typed)
        if converted is not None and all_within(converted, minimum, maximum):
            return converted
        converted = []
        for i, value in enumerate(values):
            try:
                number = parse(value, self.typed)
            except (ValueError, TypeError, OverflowError):
                raise self.error(i, column, expected) from None
            if not number >= minimum:
                raise self.error(i, column, expected if math.isnan(number) else f"{expected}, at least {minimum:g}")
            if not number <= maximum:
                raise self.error(i, column, f"{expected}, at most {maximum:g}")
            converted.append(number)
        return converted


def convert_all(values: Sequence[Any], kind: type, typed: bool) -> Optional[list[Any]]:
    """Return all values converted in one call, or None if they need a check one by one."""
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


def convert_all_ids(values: Sequence[str]) -> Optional[list[Sequence[int]]]:
    """Return hash ids parsed in one call, or None if they need a check one by one."""
    joined = " ".join(values)
    if joined.encode().translate(None, b"0123456789 ") or not joined.strip():
        return None
    ids = np.fromstring(joined, np.int64, sep=" ")
    counts = [value.count(" ") + 1 if value else 0 for value in values]
    if sum(counts) != len(ids) or ids.max() == MAX_ID:
        return None
    remaining = iter(ids.tolist())
    return [tuple(islice(remaining, count)) for count in counts]


def all_within(values: list[Any], minimum: float, maximum: float) -> bool:
    """Return whether all values are numbers from `minimum` to `maximum`."""
    # A NaN makes the sum NaN, so the comparison fails. min() and max() alone may miss a NaN.
    return not values or (min(values) >= minimum and max(values) <= maximum and sum(values) >= minimum)


def parse_int(value: Any, typed: bool) -> int:
    """Return a whole number; 120.0 is allowed because data frames write integers like this."""
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


def parse_float(value: Any, typed: bool) -> float:
    """Return a number."""
    if type(value) in (int, float) or (type(value) is str and not typed and "_" not in value):
        return float(value)
    raise ValueError(value)


def csv_table(name: str, text: str, header: Optional[Sequence[str]] = None) -> Table:
    """Return the table of a CSV text; row 1 is the header unless `header` is passed."""
    rows = split_csv(name, text)
    numbers = [number for number, row in enumerate(rows, 1) if row]  # blank lines are skipped
    rows = [row for row in rows if row]
    if "'" in text:  # our own files mark formula cells
        rows = [list(map(unmark_formula, row)) for row in rows]
    if header is None:
        header = [column.strip() for column in rows.pop(0)]
        numbers.pop(0)
    if len(set(header)) < len(header):
        repeated = next(column for column in header if list(header).count(column) > 1)
        raise BadInput(f"{name}: row 1: expected every column once, got {quote(repeated)} twice")
    width = len(header)
    for number, row in zip(numbers, rows):
        if len(row) != width:
            raise BadInput(f"{name}: row {number}: expected {width} columns, got {len(row)}")
    if not rows:
        raise BadInput(f"{name}: row 2: no rows after the header")
    return Table(name, dict(zip(header, zip(*rows))), numbers, typed=False)


def json_rows(name: str, text: str) -> tuple[list[dict[str, Any]], Sequence[int]]:
    """Return the objects of a JSON Lines text, of one JSON list, or of indented objects, and their row numbers."""
    if text.lstrip()[:1] == "[":
        records = parse_json(name, text)
        numbers: Sequence[int] = range(1, len(records) + 1)
    elif is_indented(text):
        parts = list(json_parts(text))
        numbers = [number for number, _ in parts]
        records = [parse_json(name, part, number) for number, part in parts]
    else:
        lines = text.split("\n")
        numbers = [number for number, line in enumerate(lines, 1) if line and not line.isspace()]
        records = [parse_json(name, lines[number - 1], number) for number in numbers]
    for number, record in zip(numbers, records):
        if type(record) is not dict:
            raise BadInput(f"{name}: row {number}: expected a JSON object, got {quote(record)}")
    if not records:
        raise BadInput(f"{name}: row 1: no rows")
    return records, numbers


def is_indented(text: str) -> bool:
    """Return whether the first JSON object continues after its first line."""
    first_line = text.lstrip().split("\n", 1)[0].rstrip()
    try:
        json.loads(first_line)
    except json.JSONDecodeError as error:
        return error.pos == len(first_line)
    except (ValueError, RecursionError):
        pass
    return False


def json_parts(text: str) -> Iterator[tuple[int, str]]:
    """Yield the row and the text of each JSON value. If a value is damaged, the last part is the rest of the text."""
    decoder, end, row = json.JSONDecoder(), 0, 1
    while (start := skip_space(text, end)) < len(text):
        row += text.count("\n", end, start)
        try:
            end = decoder.raw_decode(text, start)[1]
        except (ValueError, RecursionError):
            end = len(text)
        yield row, text[start:end]
        row += text.count("\n", start, end)


def skip_space(text: str, start: int) -> int:
    space = SPACE.match(text, start)
    return start if space is None else space.end()


def json_table(name: str, records: Sequence[Mapping[str, Any]], numbers: Sequence[int]) -> Table:
    """Return the table of JSON objects; every key of any object is a column."""
    keys = dict.fromkeys(key for record in records for key in record)
    return Table(name, {key: [record.get(key) for record in records] for key in keys}, numbers, typed=True)
