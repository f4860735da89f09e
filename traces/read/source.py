"""An open trace file: its text, kind and rows, and the user's options for it."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, Optional, Union

from servesim.core import BadInput
from servesim.files.read import STDIN_NAME, PathLike, decode_text, read_stdin, read_text

from .table import Table, csv_table, json_rows, json_table

OBJECTS = ("json", "parquet")  # kinds whose rows are objects with typed values
STDIN = "-"  # instead of a path
PARQUET = b"PAR1"  # the first bytes of a Parquet file
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


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
            try:
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
        records = ParquetFile(file).read().to_pylist()
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
