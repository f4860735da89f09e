"""Formats with one row a request: which column holds which field, and in what unit of time."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Optional, Union

import numpy as np
from servesim.core import BadInput
from servesim.traces.trace import Columns

from .source import Source
from .table import Table

Names = Union[str, Sequence[str]]  # a column, or those that mean the same, the first one present wins

FIELDS = (
    "arrival", "prompt", "output", "id", "limit", "generated", "priority", "session", "prefix", "after", "delay",
    "fails",
)  # fmt: skip

OURS: Mapping[str, Names] = {
    "arrival": ("arrival_s", "arrival"),
    "prompt": ("prompt_tokens", "prompt"),
    "output": ("output_tokens", "output"),
    "id": ("id", "idx", "request_id"),
    "limit": ("limit_tokens", "limit"),
    "generated": "generated_tokens",
    "priority": "priority",
    "session": ("session_id", "session"),
    "prefix": "hash_ids",
    "after": "after",
    "delay": ("delay_s", "delay"),
    "fails": "fail_at",
}


def located(source: Source, fields: Mapping[str, Names]) -> dict[str, str]:
    """Return the column of every field this file has; the user's word goes before the format's."""
    found = {}
    for field, column in source.columns.items():
        if field not in FIELDS:
            raise BadInput(f"{source.name}: no field {field!r} to take from a column: expected {', '.join(FIELDS)}")
        if column not in source.table:
            has = ", ".join(sorted(source.header))[:200]
            raise BadInput(f"{source.name}: row 1: no column {column!r} for {field}: expected one of {has}")
        found[field] = column
    for field, names in fields.items():
        there = [name for name in ([names] if isinstance(names, str) else names) if name in source.table]
        if there:
            found.setdefault(field, there[0])
    for field in ("prompt", "output"):
        if field not in found:
            has = ", ".join(sorted(source.header))[:200]
            raise BadInput(f"{source.name}: row 1: no column for {field} (use --column {field}=NAME): it has {has}")
    return found


def flat(source: Source, fields: Mapping[str, Names], unit: float = 1.0, block: Optional[int] = None) -> Columns:
    """Return the columns of a file with one row a request."""
    table, at = source.table, located(source, fields)
    unit = source.seconds(unit)
    columns = Columns(table.tokens(at["prompt"]), table.tokens(at["output"]), numbers=table.numbers, block=block)
    if "arrival" in at:
        columns.arrival = arrivals(table, at["arrival"], unit, "after" in at)
    integral = True
    if "id" in at:
        columns.id, integral = identities(table, at["id"])
    if "after" in at:
        after = Table.integers if integral else lambda part, column: list(part.columns[column])
        columns.after = table.optional(at["after"], after)
        columns.delay = [0.0] * len(table)
    if "delay" in at:
        columns.delay = [v or 0.0 for v in table.optional(at["delay"], lambda part, name: part.seconds(name, unit))]
    if "limit" in at:
        columns.limit = table.optional(at["limit"], _positive)
    if "generated" in at:
        _generated(columns, table, at["generated"])
    if "priority" in at:
        columns.priority = [value or 0 for value in table.optional(at["priority"], Table.integers)]
    if "session" in at:
        columns.session = table.optional(at["session"], Table.text)
    if "prefix" in at:
        columns.prefix = [value or () for value in table.optional(at["prefix"], Table.id_lists)]
    if "fails" in at:
        columns.fails = table.optional(at["fails"], _positive)
    return columns


def ours(source: Source) -> Columns:
    """Return the columns of our own CSV or JSONL."""
    columns = flat(source, OURS)
    known = {name for names in OURS.values() for name in ([names] if isinstance(names, str) else names)}
    unused = sorted(set(source.header) - known - set(source.columns.values()))
    if unused:
        columns.notes.append(f"columns not used: {', '.join(unused)[:200]}")
    return columns


def _positive(table: Table, column: str) -> list[int]:
    values = table.tokens(column)
    for i, value in enumerate(values):
        if value < 1:
            raise table.bad(i, column, "a whole number of tokens, at least 1")
    return values


def _generated(columns: Columns, table: Table, column: str) -> None:
    """Take what was written for the output; the output column then is what may be written at most."""
    written = table.optional(column, Table.tokens)
    limits = columns.limit or [None] * len(table)
    columns.limit = [
        limit or (output if wrote is not None and output > 0 else None)
        for limit, output, wrote in zip(limits, columns.output, written)
    ]
    columns.output = [output if wrote is None else wrote for output, wrote in zip(columns.output, written)]


def identities(table: Table, column: str) -> tuple[list[Any], bool]:
    """Return a column of ids, and whether they are whole numbers: in text, if all of them look it."""
    values = table.columns[column]
    for i, value in enumerate(values):
        if type(value) not in (str, int) or value == "":
            raise table.bad(i, column, "an id")
    types = set(map(type, values))
    if types == {str} and not table.typed and _numeric(values):
        return list(map(int, values)), True
    return list(values), types == {int}


def _numeric(values: Sequence[str]) -> bool:
    try:
        return all(str(int(value)) == value for value in values)
    except ValueError:
        return False


STAMP = re.compile(r"(?:19|20)\d\d-\d\d-\d\d(?:[ T]\d\d:\d\d(?::\d\d(?:\.\d{1,9})?)?)?(Z|[+-]\d\d:?\d\d)?")


def arrivals(table: Table, column: str, unit: float, chained: bool = False) -> list[Optional[float]]:
    """Return arrival times: numbers, or dates as in Azure's traces. Dates count from the first."""
    values = table.columns[column]
    if len(values) and type(values[0]) is str and STAMP.fullmatch(values[0].strip()):
        return list(dates(table, column))
    if chained:
        return table.optional(column, lambda part, name: part.seconds(name, unit))
    return list(table.seconds(column, unit))


def dates(table: Table, column: str) -> list[float]:
    """Return a column of dates as seconds since the earliest of them."""
    stamps, offsets = [], []
    for i, value in enumerate(table.columns[column]):
        match = STAMP.fullmatch(value.strip()) if type(value) is str else None
        if match is None:
            raise table.bad(i, column, "a date as 2023-11-16 18:15:46.6805900")
        zone = match.group(1) or ""
        stamps.append(match.group()[: -len(zone)] if zone else match.group())
        offsets.append(_offset(zone))
    try:
        instants = np.array(stamps, dtype="datetime64[ns]")
    except ValueError:
        wrong = next(i for i, stamp in enumerate(stamps) if date(stamp) is None)
        raise table.bad(wrong, column, "a date that exists") from None
    # Differences are taken in whole nanoseconds: a float of seconds since 1970 keeps only tenths of microseconds.
    since = (instants - instants.min()).astype(np.int64) / 1e9 - np.array(offsets)
    return [float(value) for value in since - since.min()]


def date(text: str) -> Optional[float]:
    """Return the seconds since 1970 of a date, None if it is not one."""
    match = STAMP.fullmatch(text.strip())
    if match is None:
        return None
    zone = match.group(1) or ""
    try:
        instant = np.datetime64(match.group()[: -len(zone)] if zone else match.group(), "us")
    except ValueError:
        return None
    return float(instant.astype(np.int64)) / 1e6 - _offset(zone)


def _offset(zone: str) -> int:
    """Return the seconds by which a time zone is ahead: "" and Z mean none."""
    if zone in ("", "Z"):
        return 0
    return int(zone[0] + "1") * (int(zone[1:3]) * 3600 + int(zone[-2:]) * 60)
