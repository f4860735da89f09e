"""Parquet files: a row of one is an object as a line of JSON is, read with pyarrow, the extra `parquet`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any

from servesim.core import BadInput
from servesim.files.read import PathLike

MAGIC = b"PAR1"


def is_parquet(path: PathLike) -> bool:
    """Return whether a file begins as Parquet does."""
    try:
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except (OSError, ValueError):
        return False  # who reads it as text says what is wrong


def parquet_rows(path: PathLike) -> tuple[list[dict[str, Any]], Sequence[int]]:
    """Return the rows of a Parquet file as objects, and their numbers."""
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        records = ParquetFile(path).read().to_pylist()
    except (ArrowException, OSError) as error:
        reason = str(error).splitlines()[0][:80]
        raise BadInput(f"{path}: row 1: damaged Parquet file: {reason}") from None
    if not records:
        raise BadInput(f"{path}: row 1: no rows")
    return [{key: plain(value) for key, value in record.items()} for record in records], range(1, len(records) + 1)


def plain(value: Any) -> Any:
    """Return a value as JSON would have it: a date as text, a decimal as a number."""
    if isinstance(value, datetime):
        return str(value)
    return float(value) if isinstance(value, Decimal) else value
