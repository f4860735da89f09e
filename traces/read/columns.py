"""Formats with one row per request: the column of each field, and the unit of time."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Optional, Union

import numpy as np
from servesim.core import BadInput
from servesim.core.content import content_of_pieces
from servesim.files.read import shorten
from servesim.traces.contents import ID_SIZES, Name, Pieces, own_text, parse_name, parse_pieces
from servesim.traces.samplings import SAMPLING_COLUMNS, make_sampling
from servesim.traces.trace import Columns

from .source import Convert, Source, Table

Names = Union[str, Sequence[str]]  # one column name, or alternatives: the first one present is used

SERVESIM_FIELDS: Mapping[str, Names] = {
    "arrival": ("arrival_s", "arrival"),
    "prompt": ("prompt_tokens", "prompt"),
    "output": ("output_tokens", "output"),
    "id": ("id", "idx", "request_id"),
    "limit": ("limit_tokens", "limit"),
    "generated": "generated_tokens",
    "priority": "priority",
    "session": ("session_id", "session"),
    "hash_ids": "hash_ids",
    "content": "content",
    "answer": "answer",
    "follows": "follows",
    "think_time": ("think_time_s", "think_time"),
    "fails_at_token": "fails_at_token",
    "acceptance": "acceptance",
    **{name: name for name in SAMPLING_COLUMNS},
}
FIELDS = tuple(SERVESIM_FIELDS)


def find_columns(source: Source, fields: Mapping[str, Names]) -> dict[str, str]:
    """Return the column of every field in this file; the user's columns override those of the format."""
    located, available = {}, ", ".join(sorted(source.header))[:200]
    for field, column in source.columns.items():
        if field not in FIELDS:
            raise BadInput(f"{source.name}: no field {field!r} for --column: expected {', '.join(FIELDS)}")
        if column not in source.table:
            raise BadInput(f"{source.name}: row 1: no column {column!r} for {field}: expected one of {available}")
        located[field] = column
    for field, names in fields.items():
        present = [name for name in ([names] if isinstance(names, str) else names) if name in source.table]
        if present:
            located.setdefault(field, present[0])
    for field in ("prompt", "output"):
        if field not in located:
            raise BadInput(f"{source.name}: row 1: no column for {field} in {available}: use --column {field}=NAME")
    return located


def read_columns(
    source: Source, fields: Mapping[str, Names], unit: float = 1.0, id_sizes: Sequence[int] = ID_SIZES
) -> Columns:
    """Return the columns of a file with one row per request."""
    table, column_of = source.table, find_columns(source, fields)
    unit = source.seconds(unit)
    prompts, outputs = table.tokens(column_of["prompt"]), table.tokens(column_of["output"])
    columns = Columns(prompts, outputs, numbers=table.numbers, id_sizes=id_sizes)
    if "arrival" in column_of:
        columns.arrival = parse_arrivals(table, column_of["arrival"], unit, "follows" in column_of)
    integral = True
    if "id" in column_of:
        columns.id, integral = parse_ids(table, column_of["id"])
    if "follows" in column_of:
        follows = Table.integers if integral else lambda subset, column: list(subset.columns[column])
        columns.follows = table.optional(column_of["follows"], follows)
        columns.think_time = [0.0] * len(table)
    if "think_time" in column_of:
        times = table.optional(column_of["think_time"], lambda subset, name: subset.seconds(name, unit))
        columns.think_time = [time or 0.0 for time in times]
    for field, (convert, missing) in CONVERSIONS.items():
        if field in column_of:
            values = table.optional(column_of[field], convert)
            setattr(columns, field, [missing if value is None else value for value in values])
    if "generated" in column_of:
        _apply_generated(columns, table, column_of["generated"])
    if "content" in column_of or "answer" in column_of:
        _read_contents(columns, table, column_of.get("content", ""), column_of.get("answer", ""))
    if not column_of.keys().isdisjoint(SAMPLING_COLUMNS):
        _read_samplings(columns, table, [column_of.get(name, "") for name in SAMPLING_COLUMNS])
    return columns


def _read_samplings(columns: Columns, table: Table, names: Sequence[str]) -> None:
    """Read how many answers the rows ask for."""
    values = [table.optional(name, parse_lists if k > 2 else Table.integers) for k, name in enumerate(names)]
    columns.sampling = []
    for row, cells in enumerate(zip(*values)):
        try:
            columns.sampling.append(make_sampling(columns.output[row], cells))
        except ValueError as error:
            raise BadInput(f"{table.name}: row {table.numbers[row]}: {error}") from None


def parse_lists(table: Table, column: str) -> list[Any]:
    """Return a column of lists, in files with comma-separated values as JSON."""
    parse = lambda value: json.loads(value) if type(value) is str else value  # noqa: E731
    return table.each(column, parse, "a list in JSON, e.g. [20, 35]")


def _read_contents(columns: Columns, table: Table, content: str, answer: str) -> None:
    """Read the pieces of prompts and the names of answers. The rest of a prompt after its pieces is its own text."""
    ids = range(len(table)) if columns.id is None else columns.id
    columns.content = []
    contents, answers = table.optional(content, parse_contents), table.optional(answer, parse_names)
    for row, (pieces, name) in enumerate(zip(contents, answers)):
        rest = columns.prompt[row] - sum(tokens for _, tokens in pieces or ())
        if rest < 0:
            columns.unusable.setdefault(row, "content longer than the prompt")
        elif pieces is None and name is None:
            columns.content.append(None)
            continue
        columns.content.append(content_of_pieces([*(pieces or ()), (own_text(ids[row]), rest)], name))


def parse_contents(table: Table, column: str) -> list[Pieces]:
    """Return a column of contents: JSON lists of [name, tokens], or NAME:TOKENS separated by spaces."""
    return table.each(column, parse_content, "texts and their tokens, e.g. system:1500 question:40")


def parse_content(value: Any) -> Pieces:
    pieces = parse_pieces(value) if type(value) is str else [(name, tokens) for name, tokens in value]
    if not all(type(name) in (str, int) and type(tokens) is int and tokens > 0 for name, tokens in pieces):
        raise ValueError(value)
    return pieces


def parse_names(table: Table, column: str) -> list[Name]:
    """Return a column of names of texts."""

    def parse(name: Any) -> Name:
        if type(name) not in (str, int):
            raise ValueError(name)
        return name if table.typed else parse_name(name)

    return table.each(column, parse, "the name of a text")


def servesim_columns(source: Source) -> Columns:
    """Return the columns of a servesim CSV or JSONL file."""
    columns = read_columns(source, SERVESIM_FIELDS)
    known = {name for names in SERVESIM_FIELDS.values() for name in ([names] if isinstance(names, str) else names)}
    unused = sorted(set(source.header) - known - set(source.columns.values()))
    if unused:
        columns.notes.append(f"columns not used: {', '.join(map(shorten, unused))[:200]}")
    return columns


def _positive_tokens(table: Table, column: str) -> list[int]:
    return table.tokens(column, minimum=1)


def _rates(table: Table, column: str) -> list[float]:
    return table.each(column, parse_rate, "a rate from 0 to 1")


def parse_rate(value: Any) -> float:
    rate = float(value)
    if isinstance(value, bool) or not 0 <= rate <= 1:
        raise ValueError(value)
    return rate


CONVERSIONS: Mapping[str, tuple[Convert, Any]] = {  # optional field -> its conversion, and the value of an empty cell
    "limit": (_positive_tokens, None),
    "priority": (Table.integers, 0),
    "session": (Table.text, None),
    "hash_ids": (Table.id_lists, ()),
    "fails_at_token": (_positive_tokens, None),
    "acceptance": (_rates, None),
}


def _apply_generated(columns: Columns, table: Table, column: str) -> None:
    """Use the generated tokens as output length; the output column then becomes the output limit."""
    generated = table.optional(column, Table.tokens)
    limits = columns.limit or [None] * len(table)
    columns.limit = [
        limit or (output if count is not None and output > 0 else None)
        for limit, output, count in zip(limits, columns.output, generated)
    ]
    columns.output = [output if count is None else count for output, count in zip(columns.output, generated)]


def parse_ids(table: Table, column: str) -> tuple[list[Any], bool]:
    """Return a column of ids, and whether all of them are whole numbers."""
    values = table.columns[column]
    for i, value in enumerate(values):
        if type(value) not in (str, int) or value == "":
            raise table.error(i, column, "an id")
    types = set(map(type, values))
    if types == {str} and not table.typed and _all_integers(values):
        return list(map(int, values)), True
    return list(values), types == {int}


def _all_integers(values: Sequence[str]) -> bool:
    try:
        return all(str(int(value)) == value for value in values)
    except ValueError:
        return False


DATE = re.compile(r"(?:19|20)\d\d-\d\d-\d\d(?:[ T]\d\d:\d\d(?::\d\d(?:\.\d{1,9})?)?)?(Z|[+-]\d\d:?\d\d)?")


def parse_arrivals(table: Table, column: str, unit: float, chained: bool = False) -> list[Optional[float]]:
    """Return arrival times in seconds, from numbers or dates. Dates count from the earliest one."""
    values = table.columns[column]
    if len(values) and type(values[0]) is str and DATE.fullmatch(values[0].strip()):
        return list(parse_dates(table, column))
    if chained:
        return table.optional(column, lambda subset, name: subset.seconds(name, unit))
    return list(table.seconds(column, unit))


def parse_dates(table: Table, column: str) -> list[float]:
    """Return a column of dates as seconds since the earliest date."""
    dates = table.each(column, split_date, "a date as 2023-11-16 18:15:46.6805900")
    try:
        times = np.array([stamp for stamp, _ in dates], dtype="datetime64[ns]")
    except ValueError:
        bad_row = next(i for i, text in enumerate(table.columns[column]) if parse_date(text) is None)
        raise table.error(bad_row, column, "a date that exists") from None
    # Subtract in whole nanoseconds: a float of seconds since 1970 has a resolution of 0.2 microseconds only.
    seconds = (times - times.min()).astype(np.int64) / 1e9 - np.array([offset for _, offset in dates])
    return [float(value) for value in seconds - seconds.min()]


def parse_date(text: str) -> Optional[float]:
    """Return a date as seconds since 1970, or None if the text is no date."""
    try:
        stamp, offset = split_date(text)
        return float(np.datetime64(stamp, "us").astype(np.int64)) / 1e6 - offset
    except ValueError:
        return None


def split_date(text: Any) -> tuple[str, int]:
    """Return a date without its time zone, and the offset of that zone from UTC in seconds; without one it is UTC."""
    match = DATE.fullmatch(text.strip()) if type(text) is str else None
    if match is None:
        raise ValueError(text)
    zone = match.group(1) or ""
    offset = 0 if zone in ("", "Z") else int(zone[0] + "1") * (int(zone[1:3]) * 3600 + int(zone[-2:]) * 60)
    return match.group().removesuffix(zone), offset
