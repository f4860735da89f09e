"""Read the step log of an engine: one row per step, as CSV or JSON lines, with its start time and its batch.

    {"step": 7, "start": 0.4821, "end": 0.5061, "batch": [["a", 1, 331, true], ["b", 512, 0, false]]}
    step,start,prefill_tokens,decode_rows,context

The duration of a step is `seconds`, or the time until the next step starts. A log may contain a sample of the steps:
then `step` tells which rows are adjacent, and only their durations are known. Host time is part of a duration.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np
from servesim.core import BadInput, Shape
from servesim.core.limits import MAX_COST, MAX_NUMBER, MAX_SECONDS, is_number
from servesim.files.read import parse_csv, parse_json, quote, read_text

# Accepted names of each field; `--column FIELD=NAME` adds one.
NAMES: Mapping[str, tuple[str, ...]] = {
    "step": ("step", "id", "step_id", "iteration"),
    "start": ("start", "start_s", "scheduled_s", "time", "timestamp"),
    "end": ("end", "end_s", "returned_s"),
    "seconds": ("seconds", "duration", "duration_s"),
    "waiting": ("waiting",),
    "batch": ("batch",),
    "prefill_rows": ("prefill_rows", "prefill_requests"),
    "prefill_tokens": ("prefill_tokens",),
    "prefill_cached": ("prefill_cached",),
    "decode_rows": ("decode_rows", "decode_requests"),
    "context": ("context", "context_tokens"),
}
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
IDLE_GAPS = 5.0  # a gap between two steps of more than this many median gaps: the engine had nothing to do


class LoggedStep(NamedTuple):
    """One row of a step log."""

    number: int
    start: Optional[float]
    end: Optional[float]
    seconds: Optional[float]
    waiting: Optional[int]  # requests in the queue after the decision
    requests: frozenset[str]  # empty if the log has only counts
    shape: Shape


class TimedStep(NamedTuple):
    """A step whose duration is known."""

    shape: Shape
    seconds: float


def read_step_log(path: Path, columns: Mapping[str, str] | None = None, unit: str = "s") -> list[TimedStep]:
    """Return the steps of a log whose durations are known, in order."""
    names = {field: ((columns[field],) if columns and field in columns else names) for field, names in NAMES.items()}
    steps = [parse_step(row, names, UNITS[unit], where) for row, where in read_rows(path)]
    for one, two in zip(steps, steps[1:]):
        if one.start is not None and two.start is not None and two.start < one.start:
            raise BadInput(
                f"{path}: step {two.number}: expected start times in order, got {two.start:g} s after {one.start:g} s"
            )
    timed = list(durations(steps))
    if not timed:
        raise BadInput(f"{path}: expected seconds, or two adjacent steps with start times; no duration is known")
    return timed


def read_rows(path: Path) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yield every row of a CSV file or of JSON lines, with its position for messages."""
    text = read_text(path)
    if text.lstrip()[0] != "{":
        yield from ((row, f"{path}: row {number}") for number, row in enumerate(parse_csv(str(path), text), 2))
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            row = parse_json(path, line, number)
            if not isinstance(row, dict):
                raise BadInput(f"{path}: row {number}: expected a JSON object per step, got {quote(row)}")
            yield row, f"{path}: row {number}"


def parse_step(row: Mapping[str, Any], names: Mapping[str, Sequence[str]], unit: float, where: str) -> LoggedStep:
    """Return one row as a step."""
    known = {
        field: name for field, choices in names.items() for name in choices[::-1] if row.get(name) not in (None, "")
    }

    def number(field: str, minimum: float, maximum: float) -> Optional[float]:
        return (
            None
            if field not in known
            else parse_number(row[known[field]], f"{where}: {known[field]}", minimum, maximum)
        )

    times = [number(field, -MAX_SECONDS / unit, MAX_SECONDS / unit) for field in ("start", "end")]
    seconds = number("seconds", 0.0, MAX_COST / unit)
    if seconds is None and times[0] is None:
        raise BadInput(f"{where}: expected seconds, or the start time of the step as {' or '.join(names['start'])}")
    step, waiting = number("step", 0, MAX_NUMBER), number("waiting", 0, MAX_NUMBER)
    if "batch" in known:
        requests, shape = parse_batch(row[known["batch"]], f"{where}: {known['batch']}")
    else:
        counts = {
            field: int(number(field, 0, MAX_NUMBER) or 0) for field in NAMES if field.startswith(("pre", "de", "con"))
        }
        requests, shape = frozenset(), counted_shape(counts, where)
    scaled = [None if time is None else time * unit for time in (*times, seconds)]
    if scaled[1] is not None and scaled[0] is not None and scaled[1] < scaled[0]:
        raise BadInput(
            f"{where}: expected the end of the step after its start, got {scaled[1]:g} s and {scaled[0]:g} s"
        )
    index = int(where.rpartition(" ")[2]) if step is None else int(step)
    return LoggedStep(
        index, scaled[0], scaled[1], scaled[2], None if waiting is None else int(waiting), requests, shape
    )


def parse_number(value: Any, where: str, minimum: float, maximum: float) -> float:
    """Return a number from a cell."""
    try:
        number = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError):
        number = math.nan
    if not is_number(number, minimum, maximum):
        raise BadInput(f"{where}: expected a number from {minimum:g} to {maximum:g}, got {quote(value)}")
    return number


def parse_batch(batch: Any, where: str) -> tuple[frozenset[str], Shape]:
    """Return the requests and the shape of a batch: [request, tokens, cached tokens, ...] of each row.

    A row of one token after cached ones is a decode.
    """
    rows = batch if isinstance(batch, list) else None
    if not rows or any(not isinstance(row, list) or len(row) < 3 for row in rows):
        raise BadInput(f"{where}: expected a list of [request, tokens, cached tokens], got {quote(batch)}")
    sizes = [
        (int(parse_number(row[1], where, 1, MAX_NUMBER)), int(parse_number(row[2], where, 0, MAX_NUMBER)))
        for row in rows
    ]
    chunks = [(tokens, cached) for tokens, cached in sizes if tokens > 1 or not cached]
    contexts = [cached for tokens, cached in sizes if tokens == 1 and cached]
    tokens = sum(tokens for tokens, _ in chunks)
    shape = Shape(
        len(chunks), tokens, tokens, sum(t * t for t, _ in chunks), sum(t * cached for t, cached in chunks),
        len(contexts), len(contexts), sum(contexts),
    )  # fmt: skip
    return frozenset(str(row[0]) for row in rows), shape


def counted_shape(counts: Mapping[str, int], where: str) -> Shape:
    """Return the shape of a step from its counts. Chunks are taken as equally long."""
    tokens, decodes = counts["prefill_tokens"], counts["decode_rows"]
    rows = counts["prefill_rows"] or min(1, tokens)
    if bool(rows) != bool(tokens) or not rows <= tokens:
        raise BadInput(f"{where}: expected at least one prefill token per prefill row, got {tokens} and {rows}")
    if not tokens and not decodes:
        raise BadInput(f"{where}: expected prefill_tokens or decode_rows above 0")
    squares, cross = (round(tokens**2 / rows), round(tokens * counts["prefill_cached"] / rows)) if rows else (0, 0)
    return Shape(rows, tokens, tokens, squares, cross, decodes, decodes, counts["context"])


def durations(steps: Sequence[LoggedStep]) -> Iterator[TimedStep]:
    """Yield the steps whose durations are known."""
    pairs = [*zip(steps, steps[1:]), *([(steps[-1], None)] if steps else [])]
    adjacent = [(one, two) for one, two in pairs if two is not None and two.number == one.number + 1]
    gaps = [two.start - one.end for one, two in adjacent if two.start is not None and one.end is not None]
    host = float(np.median(gaps)) if gaps else 0.0  # from the end of a step to the start of the next one
    for one, two in pairs:
        seconds = one.seconds
        follows = two is not None and two.number == one.number + 1 and two.start is not None
        if seconds is None and one.start is not None:
            if one.end is not None:
                gap = two.start - one.end if follows else host  # type: ignore[union-attr,operator]
                seconds = one.end - one.start + (gap if gap <= IDLE_GAPS * host else host)
            elif follows and was_busy(one, two):  # type: ignore[arg-type]
                seconds = two.start - one.start  # type: ignore[union-attr,operator]
        if seconds is not None and seconds > 0:
            yield TimedStep(one.shape, seconds)


def was_busy(one: LoggedStep, two: LoggedStep) -> bool:
    """Whether the engine started the second step right after the first one, as far as the log tells."""
    if one.requests or two.requests:
        return bool(one.requests & two.requests) or bool(one.waiting)
    return two.shape.decode_rows > 0 or bool(one.waiting)
