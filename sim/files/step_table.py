"""The table of measured steps: samples.csv of a profile, steps.csv of a live run, and the step log of an engine.

All have one row per step, with its times in seconds and its shape, as CSV, as JSON lines or as a JSON list.
docs/imports.md lists the columns; all are optional, but a step needs `seconds` or `start`, and a shape. Other columns
are kept. It also runs in the worker: importing it needs only Python 3.9 and the standard library.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional

from servesim.core import BadInput, Shape
from servesim.core.limits import MAX_COST, MAX_NUMBER, is_number

from .csv_rows import CsvRow, parse_csv
from .read import PathLike, parse_json, quote, read_text, show_path
from .write import append, open_text, write_rows

COLUMNS = (
    "step", "start", "called", "end", "seconds", "host_seconds", "kind", "point", *Shape._fields, "prefill_cached",
    "batch", "waiting", "flagged", "failed",
)  # fmt: skip
OWN_NAMES: Mapping[str, tuple[str, ...]] = {column: (column,) for column in COLUMNS}
NAMES: Mapping[str, tuple[str, ...]] = {
    **OWN_NAMES,
    "step": ("step", "id", "step_id", "iteration"),  # the later names are of other tools
    "start": ("start", "start_s", "scheduled_s", "time", "timestamp"),
    "end": ("end", "end_s", "returned_s"),
    "seconds": ("seconds", "duration", "duration_s"),
    "prefill_rows": ("prefill_rows", "prefill_requests"),
    "decode_rows": ("decode_rows", "decode_requests"),
    "context": ("context", "context_tokens"),
}
COUNTS = ("step", "point", *Shape._fields, "prefill_cached", "waiting")
STEP_KINDS = ("prefill", "decode", "mixed", "swap")
OPTIONAL = ("longest", "drafts")  # fields that tables of older versions do not have
CALL_COLUMNS = ("start", "called", "end", *Shape._fields)  # of steps.csv
KINDS = (*STEP_KINDS, "busy")  # busy: a decode while a front end loads the host; earlier probes have it
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}


class MeasuredStep(NamedTuple):
    """One row of the table. A value that the row does not have is None."""

    number: int
    kind: str
    shape: Shape
    start: Optional[float]  # when it was decided
    called: Optional[float]  # when the device was called
    end: Optional[float]  # when its tokens were known
    seconds: Optional[float]
    host: Optional[float]  # seconds of the host in this step, in addition to `seconds`
    point: Optional[int]  # number of the shape
    waiting: Optional[int]  # requests in the queue after the decision
    requests: frozenset[str]  # empty if the row has only counts
    flagged: str  # why it is an outlier
    failed: str  # why it has no time
    cells: dict[str, str]  # all columns, as text

    @property
    def good(self) -> bool:
        """Whether the step is neither failed nor an outlier."""
        return not (self.failed or self.flagged)


class ModelCall(NamedTuple):
    """One measured model call: when its step started, when the backend was called, when it ended, and its shape."""

    start: float
    called: float
    end: float
    shape: Shape

    def flat(self) -> list[float]:
        """Return it as one list of numbers, a row of steps.csv."""
        return [self.start, self.called, self.end, *self.shape]


def model_call(row: Sequence[Any]) -> ModelCall:
    """Return a call from its list of numbers."""
    return ModelCall(float(row[0]), float(row[1]), float(row[2]), Shape(*map(int, row[3:])))


def read_calls(path: PathLike) -> list[ModelCall]:
    """Return the measured calls of steps.csv."""
    steps = read_steps(path, [column for column in CALL_COLUMNS if column not in OPTIONAL])
    return [ModelCall(step.start or 0.0, step.called or 0.0, step.end or 0.0, step.shape) for step in steps]


def write_calls(calls: Iterable[ModelCall], path: PathLike) -> None:
    """Write steps.csv."""
    write_steps(path, ("step", *CALL_COLUMNS), [(number, *call.flat()) for number, call in enumerate(calls)])


def read_steps(
    path: PathLike, required: Sequence[str] = (), columns: Optional[Mapping[str, str]] = None, unit: str = "s",
    complete_lines: bool = False,
) -> list[MeasuredStep]:  # fmt: skip
    """Return the steps of a table.

    A table with required columns is one of ours: names of other tools are columns of the user. `columns` are other
    names, and `unit` is that of all times. `complete_lines` ignores an incomplete last line of a CSV file; one of JSON
    lines is always ignored.
    """
    names = {**(OWN_NAMES if required else NAMES), **{field: (name,) for field, name in (columns or {}).items()}}
    rows = read_rows(path, required, complete_lines)
    return [parse_step(row, names, UNITS[unit], required) for row in rows if "header" not in row.cells]


def write_steps(path: PathLike, columns: Sequence[str], rows: Iterable[Sequence[Any]], overwrite: bool = True) -> None:
    """Write a table as CSV."""
    with open_text(path, overwrite=overwrite) as file:
        write_rows(file, [columns], rows)


def append_steps(path: PathLike, rows: Iterable[Sequence[Any]]) -> None:
    """Add rows to a CSV file."""
    text = io.StringIO()
    write_rows(text, rows)
    append(path, text.getvalue())


def number_shapes(shapes: Sequence[Shape]) -> list[int]:
    """Return a number per step, the same for equal shapes: the default of `point`."""
    numbers = {shape: number for number, shape in enumerate(sorted(set(shapes)))}
    return [numbers[shape] for shape in shapes]


def read_rows(path: PathLike, required: Sequence[str], complete_lines: bool) -> Iterator[CsvRow]:
    """Yield the rows of a file. Values of JSON become text, as the cells of CSV."""
    text, name = read_text(path), show_path(path)
    start, last = text.lstrip()[:1], text.rpartition("\n")[2]
    if start not in ("{", "["):
        yield from parse_csv(name, text.removesuffix(last) if complete_lines else text, required)
        return
    rows: Iterable[tuple[int, Any]]
    if start == "[":
        rows = enumerate(parse_json(path, text), 1)
    else:
        lines = (text if last.endswith("}") else text.removesuffix(last)).splitlines()  # of a program that was killed
        rows = ((number, parse_json(path, line, number)) for number, line in enumerate(lines, 1) if line.strip())
    for number, row in rows:
        if not isinstance(row, dict):
            raise BadInput(f"{name}: row {number}: expected a JSON object per step, got {quote(row)}")
        yield CsvRow(f"{name}: row {number}", {key: as_cell(value) for key, value in row.items()})


def as_cell(value: Any) -> str:
    """Return a value of JSON as the text of a cell."""
    return value if isinstance(value, str) else "" if value is None else json.dumps(value)


def parse_step(own: CsvRow, names: Mapping[str, Sequence[str]], unit: float, required: Sequence[str]) -> MeasuredStep:
    """Return one row as a step; `names` are the possible names of every column."""
    get, where = own.cells.get, own.where
    row = CsvRow(where, {field: next(filter(None, map(get, choices)), "") for field, choices in names.items()})

    def seconds(field: str, minimum: float, maximum: float) -> Optional[float]:
        known = row[field] or field in required
        return row.number(field, minimum / unit, maximum / unit) * unit if known else None

    counts = {field: row.whole(field, MAX_NUMBER) if row[field] else None for field in COUNTS}
    start, called, end = (seconds(field, -MAX_NUMBER, MAX_NUMBER) for field in ("start", "called", "end"))
    duration = None if row["failed"] else seconds("seconds", 0.0, MAX_COST)
    if duration == 0 and "seconds" in required and not row["flagged"]:
        raise row.error("seconds", "more than 0")
    if duration is None and start is None and not row["failed"]:
        raise BadInput(f"{where}: expected seconds, or the start time of the step as {' or '.join(names['start'])}")
    if start is not None and end is not None and end < start:
        raise BadInput(f"{where}: expected the end of the step after its start, got {end:g} s and {start:g} s")
    requests, shape = parse_shape(counts, row["batch"], where)
    if row["kind"]:
        check_kind(row["kind"], shape, where)
    number = int(where.rpartition(" ")[2]) if counts["step"] is None else counts["step"]
    return MeasuredStep(
        number, row["kind"] or shape.kind, shape, start, called, end, duration, seconds("host_seconds", 0.0, MAX_COST),
        counts["point"], counts["waiting"], requests, row["flagged"], row["failed"], own.cells,
    )  # fmt: skip


def parse_shape(counts: Mapping[str, Optional[int]], batch: str, where: str) -> tuple[frozenset[str], Shape]:
    """Return the requests of a step, if its batch is known, and its shape: from the batch or from its counts."""
    given = [counts[field] for field in Shape._fields if field not in OPTIONAL]
    known, requests = Shape(*(counts[field] or 0 for field in Shape._fields)), frozenset[str]()
    if batch and (batch != "[]" or not known.decode_rows):
        requests, shape = parse_batch(batch, f"{where}: batch")
        rows = shape.decode_rows + known.decode_rows  # those that the batch leaves out
        shape = shape._replace(
            decode_rows=rows, decode_live=rows, context=shape.context + known.context, drafts=known.drafts
        )
    else:
        shape = known if None not in given else complete_shape(known, counts, where)
    if not any(shape):
        raise BadInput(f"{where}: expected prefill_tokens or decode_rows above 0")
    return requests, shape


def parse_batch(batch: str, where: str) -> tuple[frozenset[str], Shape]:
    """Return the requests and the shape of a batch: [request, tokens, cached tokens, ...] of each row.

    A row of one token after cached ones is a decode.
    """
    rows = parse_json(where, batch)
    if not isinstance(rows, list) or not rows or not all(map(is_batch_row, rows)):
        raise BadInput(f"{where}: expected a list of [request, tokens, cached tokens], got {quote(rows)}")
    sizes = [(int(row[1]), int(row[2])) for row in rows]
    chunks = [(tokens, cached) for tokens, cached in sizes if tokens > 1 or not cached]
    contexts = [cached for tokens, cached in sizes if tokens == 1 and cached]
    tokens = sum(tokens for tokens, _ in chunks)
    shape = Shape(
        len(chunks), tokens, tokens, sum(t * t for t, _ in chunks), sum(t * cached for t, cached in chunks),
        len(contexts), len(contexts), sum(contexts),
    )  # fmt: skip
    return frozenset(str(row[0]) for row in rows), shape


def is_batch_row(row: Any) -> bool:
    """Return whether a row of a batch has a request, at least one token, and its cached tokens."""
    return isinstance(row, list) and len(row) > 2 and is_number(row[1], 1) and is_number(row[2], 0)


def complete_shape(known: Shape, counts: Mapping[str, Optional[int]], where: str) -> Shape:
    """Return a shape whose row leaves out counts: nothing is padded, and chunks are equally long."""
    tokens, rows = known.prefill_tokens, known.prefill_rows or min(1, known.prefill_tokens)
    if bool(rows) != bool(tokens) or not rows <= tokens:
        raise BadInput(f"{where}: expected at least one prefill token per prefill row, got {tokens} and {rows}")
    squares, cross = 0, 0
    if rows:
        squares, cross = round(tokens**2 / rows), round(tokens * (counts["prefill_cached"] or 0) / rows)
    defaults = {"prefill_live": tokens, "squares": squares, "cross": cross, "decode_live": known.decode_rows}
    missing = {field: default for field, default in defaults.items() if counts[field] is None}
    return known._replace(prefill_rows=rows, **missing)


def check_kind(kind: str, shape: Shape, where: str) -> None:
    """Raise BadInput if the kind of a step does not match its shape."""
    if kind not in KINDS:
        raise BadInput(f"{where}: kind: expected one of {', '.join(KINDS)}, got {quote(kind)}")
    if shape.prefill_rows and not (shape.prefill_tokens and shape.prefill_live):
        raise BadInput(f"{where}: expected prefill_tokens and prefill_live above 0, because prefill_rows is")
    if shape.kind != ("decode" if kind == "busy" else kind):
        raise BadInput(f"{where}: kind: {kind} does not match the shape, which is {shape.kind}")
