"""Readers of the files in a run folder. Each value is validated, because a user can edit or damage a file."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Optional, Union

from pydantic import Field, field_validator
from servesim.core import BadInput, Request, Shape
from servesim.core.limits import MAX_INT, MAX_RESULT
from servesim.core.old_names import REQUEST_FIELDS
from servesim.core.request import CLIENT_FIELDS
from servesim.engine.step import ModelCall
from servesim.files.checked import validate
from servesim.files.read import parse_json, quote, read_csv, read_json, read_text
from servesim.files.stored import Index, Stored, StoredNumber

from .metrics import PERCENTILES
from .request_rows import RECORDED

STEP_COLUMNS = ("start", "called", "end", *Shape._fields)
OLD_KEYS = {new: old for old, new in REQUEST_FIELDS.items()}
SENT_KEYS = tuple(OLD_KEYS.get(name, name) for name in CLIENT_FIELDS)  # sent.jsonl keeps the keys of servesim 0.1
STATISTICS = ("mean", "median", "std", *(f"p{q}" for q in PERCENTILES))
METRIC_KEYS = (  # of result.json: numbers, or null without a value
    "duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput",
    "request_goodput", "output_throughput", "total_token_throughput", "makespan", "evictions", "model_calls", "busy_s",
    "mfu", "mbu", "energy",
    *(f"{kind}_{name}_ms" for name in ("ttft", "tpot", "itl", "e2el") for kind in STATISTICS),
)  # fmt: skip
Tokens = Annotated[int, Field(ge=0, le=MAX_INT)]
Seconds = Annotated[float, Field(ge=0, le=MAX_RESULT)]
Id = Union[str, int]


class ManifestFile(Stored):
    """The key of manifest.json that is read back."""

    scenario: dict[str, Any]


class IntervalKeys(Stored):
    """The intervals of a run's metrics."""

    draws: Index
    confidence: Annotated[float, Field(gt=0, lt=1)]
    metrics: dict[str, Annotated[list[StoredNumber], Field(min_length=2, max_length=2)]]


class ResultFile(Stored):
    """The keys of result.json besides the metrics."""

    outcomes: dict[str, Index] = Field({})
    mean_seconds: dict[str, StoredNumber] = Field({})
    host: list[Seconds] = Field([], max_length=4)  # the fields of host_overhead.HostOverhead
    intervals: Optional[IntervalKeys] = None


class SentLine(Stored):
    """One line of sent.jsonl: the arguments of a request."""

    id: Id
    arrival: Seconds
    prompt: Tokens
    output: Tokens
    limit: Optional[Tokens] = None
    priority: int = Field(0, ge=-MAX_INT, le=MAX_INT)
    session: Optional[Id] = None
    prefix: list[int] = Field([])
    after: Optional[Id] = None
    delay: Seconds = 0.0
    fails: Optional[Tokens] = None


class DecisionLine(Stored):
    """The keys of one line of the decision log that are read back."""

    t: StoredNumber
    t_end: StoredNumber
    kind: str
    free: Optional[int]
    chunks: list[Annotated[list[Any], Field(min_length=2, max_length=2)]]
    prompts: list[Any]
    admitted: list[Any]
    evicted: list[Any]
    swapped_in: list[Any]
    rejected: list[Any]
    waiting: list[Any]
    running: list[Any]
    swapped: list[Any]
    finished: list[Any]

    @field_validator("chunks")
    @classmethod
    def _check_tokens(cls, chunks: list[list[Any]]) -> list[list[Any]]:
        if any(type(tokens) is not int for _, tokens in chunks):
            raise ValueError("pairs of a request and its tokens")
        return chunks


def read_result(path: Path) -> dict[str, Any]:
    """Read result.json; its metrics are numbers or null."""
    result = read_json(path)
    validate(ResultFile, result, str(path))
    for key in METRIC_KEYS:
        value = result.get(key)
        if value is not None and (type(value) not in (int, float) or not abs(value) <= MAX_RESULT):
            raise BadInput(f"{path}: {key}: expected a number or null, got {quote(value)}")
    return dict(result)


def read_requests(path: Path) -> dict[str, dict[str, Any]]:
    """Read requests.csv; empty times are None."""
    rows: dict[str, dict[str, Any]] = {}
    for number, cells in enumerate(read_csv(path, RECORDED), 2):
        row = {key: parse_cell(key, cells[key], f"{path}:{number}") for key in RECORDED}
        needed = ("id", "arrival", "prompt", "output", *(("first_token", "finish") if finished(row) else ()))
        missing = [key for key in needed if row[key] is None]
        if missing:
            raise BadInput(f"{path}:{number}: {missing[0]}: expected a value, got an empty cell")
        if row["id"] in rows:
            raise BadInput(f"{path}:{number}: id: expected every id once, got {quote(row['id'])} twice")
        rows[row["id"]] = row
    return rows


def finished(row: dict[str, Any]) -> bool:
    return bool(row["outcome"] == "finished")


def parse_cell(key: str, text: str, where: str) -> Any:
    """Return a cell of requests.csv as text, int, float or None."""
    if not text or key in ("id", "outcome"):
        return text or None
    return parse_number(text, int if key in ("prompt", "output", "evictions") else float, f"{where}: {key}")


def parse_number(text: str, kind: Callable[[str], Any], where: str) -> Any:
    """Return a number in the text of a cell."""
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not abs(value) <= MAX_RESULT or (kind is int and value < 0):
        expected = "a whole number of at least 0" if kind is int else "a number"
        raise BadInput(f"{where}: expected {expected}, got {quote(text)}")
    return value


def read_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the position and the value of each line of JSON."""
    for number, line in enumerate(read_text(path).splitlines(), 1):
        yield f"{path}:{number}", parse_json(path, line, number)


def read_decisions(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a decision log."""
    lines = []
    for where, line in read_lines(path):
        validate(DecisionLine, line, where)
        lines.append(line)
    return lines


def read_sent(path: Path) -> list[Request]:
    """Return the requests of sent.jsonl, in their state before the run."""
    requests, ids = [], set()
    for where, line in read_lines(path):
        sent = validate(SentLine, line, where)
        if sent.id in ids:
            raise BadInput(f"{where}: id: expected every id once, got {quote(sent.id)} twice")
        ids.add(sent.id)
        requests.append(Request(**{key: getattr(sent, key) for key in SENT_KEYS}))
    return requests


def read_steps(path: Path) -> list[ModelCall]:
    """Return the measured calls of steps.csv."""
    calls = []
    for number, cells in enumerate(read_csv(path, STEP_COLUMNS), 2):
        where = f"{path}:{number}"
        start, called, end = (parse_number(cells[key], float, f"{where}: {key}") for key in STEP_COLUMNS[:3])
        if end < start:
            raise BadInput(f"{where}: end: expected at least the start, {start:g}, got {end:g}")
        sizes = (parse_number(cells[key], int, f"{where}: {key}") for key in Shape._fields)
        calls.append(ModelCall(start, called, end, Shape(*sizes)))
    return calls
