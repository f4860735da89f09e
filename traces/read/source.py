"""An open trace file: its text, kind and options, and its rows as columns, checked and converted."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from functools import cached_property
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Optional, Union

import numpy as np
from servesim.core import BadInput
from servesim.core.limits import MAX_INT
from servesim.files.csv_rows import split_table
from servesim.files.read import STDIN_NAME, PathLike, decode_text, parse_json, quote, read_stdin, read_text
from servesim.files.step_table import UNITS

MAX_TIMESTAMP = 1e11  # seconds, 3,000 years; more is a wrong unit
MAX_ID = 2**63 - 1  # np.fromstring returns this for larger ids
MISSING = ("", None)
INK = re.compile(r"\S")  # all but white space


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

    def tokens(self, column: str, minimum: int = 0) -> list[int]:
        """Return a column of lengths in tokens."""
        return self._convert(column, parse_int, int, "a whole number of tokens", minimum, MAX_INT)

    def integers(self, column: str, minimum: int = -(2**63), maximum: int = 2**63) -> list[int]:
        """Return a column of whole numbers."""
        return self._convert(column, parse_int, int, "a whole number", minimum, maximum)

    def seconds(self, column: str, unit: float = 1.0) -> list[float]:
        """Return a column of times in seconds; the file counts in units of `unit` seconds."""
        values = self._convert(column, parse_float, float, "a time of 0 or more", 0.0, MAX_TIMESTAMP / unit)
        return values if unit == 1.0 else to_seconds(values, unit)

    def optional(self, column: str, convert: Convert) -> list[Any]:
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

    def each(self, column: str, parse: Callable[[Any], Any], expected: str) -> list[Any]:
        """Return a column, each entry parsed by itself; `parse` raises ValueError or TypeError for a wrong one."""
        parsed = []
        for i, value in enumerate(self.columns[column]):
            try:
                parsed.append(parse(value))
            except (ValueError, TypeError, RecursionError):
                raise self.error(i, column, expected) from None
        return parsed

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
        return self.each(column, self._ids, "hash ids, whole numbers")

    def _ids(self, value: Any) -> Sequence[int]:
        if type(value) is str and not self.typed:
            return tuple(map(int, value.split()))
        if type(value) is not list or not set(map(type, value)) <= {int}:
            raise ValueError(value)
        return tuple(value)

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


Convert = Callable[[Table, str], list[Any]]  # a column of a table -> its values


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


def to_seconds(values: Sequence[float], unit: float) -> list[float]:
    """Return times in units of `unit` seconds as seconds."""
    # 3052 ms must give 3.052 s, not 3.0520000000000005: a division rounds once, a multiplication twice.
    per = round(1 / unit)
    return [value / per for value in values] if per * unit == 1.0 else [value * unit for value in values]


def parse_float(value: Any, typed: bool) -> float:
    """Return a number."""
    if type(value) in (int, float) or (type(value) is str and not typed and "_" not in value):
        return float(value)
    raise ValueError(value)


def csv_table(name: str, text: str, header: Optional[Sequence[str]] = None) -> Table:
    """Return the table of a CSV text; row 1 is the header unless `header` is passed."""
    header, numbers, rows = split_table(name, text, header)
    if not rows:
        raise BadInput(f"{name}: row 2: no rows after the header")
    return Table(name, dict(zip(header, zip(*rows))), numbers, typed=False)


def json_rows(name: str, text: str) -> tuple[list[dict[str, Any]], Sequence[int]]:
    """Return the objects of a JSON Lines text, of one JSON list, or of indented objects, and their row numbers.

    NaN and Infinity become text, so a field that needs a number refuses them. Others may hold them.
    """
    if text.lstrip()[:1] == "[":
        records = parse_json(name, text, constant=str)
        numbers: Sequence[int] = range(1, len(records) + 1)
    elif is_indented(text):
        parts = list(json_parts(text))
        numbers = [number for number, _ in parts]
        records = [parse_json(name, part, number, constant=str) for number, part in parts]
    else:
        lines = text.split("\n")
        numbers = [number for number, line in enumerate(lines, 1) if line and not line.isspace()]
        records = [parse_json(name, lines[number - 1], number, constant=str) for number in numbers]
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
    while found := INK.search(text, end):
        start = found.start()
        row += text.count("\n", end, start)
        try:
            end = decoder.raw_decode(text, start)[1]
        except (ValueError, RecursionError):
            end = len(text)
        yield row, text[start:end]
        row += text.count("\n", start, end)


def json_table(name: str, records: Sequence[Mapping[str, Any]], numbers: Sequence[int]) -> Table:
    """Return the table of JSON objects; every key of any object is a column."""
    keys = dict.fromkeys(key for record in records for key in record)
    return Table(name, {key: [record.get(key) for record in records] for key in keys}, numbers, typed=True)


OBJECTS = ("json", "parquet")  # kinds whose rows are objects with typed values
STDIN = "-"  # instead of a path
PARQUET = b"PAR1"  # the first bytes of a Parquet file


class Source:
    """One trace file, and the options to read it."""

    def __init__(
        self,
        path: PathLike,
        columns: Optional[Mapping[str, str]] = None,
        unit: Optional[str] = None,
        count: Callable[[str], int] = len,
        seed: int = 0,
        window: tuple[float, float] = (0.0, math.inf),
    ) -> None:
        self.path = Path(path)
        self.is_stdin = str(path) == STDIN
        self.name = STDIN_NAME if self.is_stdin else str(path)
        self.columns = dict(columns or {})  # field -> column name in this file
        self.count = count  # text -> number of tokens
        self.seed = seed
        self.window = window  # first and last second, for formats that are sampled
        if unit is not None and unit not in UNITS:
            raise BadInput(f"time unit: expected one of {', '.join(UNITS)}, got {unit!r}")
        self.unit = unit

    @cached_property
    def text(self) -> str:
        """The whole file."""
        return decode_text(self.name, read_stdin()) if self.is_stdin else read_text(self.path)

    @cached_property
    def kind(self) -> str:
        """parquet, json (a list, or lines of objects), log, or csv."""
        if read_stdin()[:4] == PARQUET if self.is_stdin else is_parquet(self.path):
            return "parquet"
        start = self.text.lstrip()[:200]
        if start[0] in "[{":
            return "json"
        return "log" if re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} - ", start) else "csv"

    @cached_property
    def header(self) -> frozenset[str]:
        """Column names of a CSV file; all keys of the objects of JSON or Parquet."""
        if self.kind in OBJECTS:
            return frozenset().union(*self.records)
        if self.kind == "csv":
            line = self.text.lstrip("\n\r").split("\n", 1)[0][:4000].rstrip("\r")
            try:  # not strict: the line may end inside quotes
                return frozenset(name.strip() for name in next(csv.reader([line]), []))
            except csv.Error as error:
                raise BadInput(f"{self.name}: row 1: expected comma-separated values: {error}") from None
        return frozenset()

    @cached_property
    def _rows(self) -> tuple[list[dict[str, Any]], Sequence[int]]:
        if self.kind != "parquet":
            return json_rows(self.name, self.text)
        return read_parquet(self.name, BytesIO(read_stdin()) if self.is_stdin else self.path)

    @property
    def records(self) -> list[dict[str, Any]]:
        """The objects of a JSON or Parquet file."""
        return self._rows[0]

    @property
    def numbers(self) -> Sequence[int]:
        """The row number of each object."""
        return self._rows[1]

    @cached_property
    def table(self) -> Table:
        """The file as columns."""
        if self.kind in OBJECTS:
            return json_table(self.name, self.records, self.numbers)
        return csv_table(self.name, self.text)

    def seconds(self, default: float) -> float:
        """Return the length of a time unit in seconds: the user's unit, or the default of the format."""
        return default if self.unit is None else UNITS[self.unit]

    def reject_columns(self) -> None:
        """Raise BadInput if the user named columns, for formats that have none."""
        if self.columns:
            raise BadInput(f"{self.name}: this format has no columns to rename")


def is_parquet(path: Path) -> bool:
    """Return whether a file starts with Parquet's magic bytes."""
    try:
        if not path.is_file():  # reading a pipe here would lose its first bytes
            return False
        with path.open("rb") as file:
            return file.read(4) == PARQUET
    except (OSError, ValueError):
        return False  # reading it as text raises the error


def read_parquet(name: str, file: Union[Path, BinaryIO]) -> tuple[list[dict[str, Any]], Sequence[int]]:
    """Return the rows of a Parquet file as objects, and their numbers."""
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        # A process that ends while threads of pyarrow start is aborted, on a busy machine one time in four.
        records = ParquetFile(file, pre_buffer=False).read(use_threads=False).to_pylist()
    except (ArrowException, OSError) as error:
        reason = str(error).splitlines()[0][:80]
        raise BadInput(f"{name}: row 1: damaged Parquet file: {reason}") from None
    if not records:
        raise BadInput(f"{name}: row 1: no rows")
    return [{key: to_json_value(value) for key, value in record.items()} for record in records], range(
        1, len(records) + 1
    )


def to_json_value(value: Any) -> Any:
    """Convert a Parquet value to its JSON type: a date to text, a decimal to a number."""
    if isinstance(value, datetime):
        return str(value)
    return float(value) if isinstance(value, Decimal) else value
