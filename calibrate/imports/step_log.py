"""Read the steps in the log of an engine.

A step log has one row per step, as CSV or JSON lines, with its start time and its batch:

    {"step": 7, "start": 0.4821, "end": 0.5061, "batch": [["a", 1, 331, true], ["b", 512, 0, false]]}
    step,start,prefill_tokens,decode_rows,context

The duration of a step is `seconds`, or the time until the next step starts. A log may contain a sample of the steps:
then `step` tells which rows are adjacent, and only their durations are known. Host time is part of a duration. Steps
that start at the same time, because stamps are rounded, share the time until the next stamp. With asynchronous
scheduling, a step starts before the end of the one before: then its duration is the time between the two ends.

The recorder of vLLM (calibrate/adapter/vllm_recorder.py) writes such a log: `batch` has the prompt chunks, and
`decode_rows` and `context` the other rows. Its first line is a `header` with the settings of the server.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np
from servesim.core import BadInput, Shape
from servesim.core.limits import MAX_COST, MAX_NUMBER, is_number
from servesim.files.csv_rows import parse_csv
from servesim.files.read import parse_json, quote, read_text

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
COUNTS = ("prefill_rows", "prefill_tokens", "prefill_cached", "decode_rows", "context")  # without a batch, or beside it
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
    timed = list(durations(read_logged_steps(path, columns, unit)))
    if not timed:
        raise BadInput(f"{path}: expected seconds, or two adjacent steps with start times; no duration is known")
    return timed


def read_logged_steps(path: Path, columns: Mapping[str, str] | None = None, unit: str = "s") -> list[LoggedStep]:
    """Return all steps of a log, in order."""
    names = {field: ((columns[field],) if columns and field in columns else names) for field, names in NAMES.items()}
    steps = [parse_step(row, names, UNITS[unit], where) for row, where in read_rows(path) if "header" not in row]
    for one, two in zip(steps, steps[1:]):
        if one.start is not None and two.start is not None and two.start < one.start:
            raise BadInput(
                f"{path}: step {two.number}: expected start times in order, got {two.start:g} s after {one.start:g} s"
            )
    return steps


def read_rows(path: Path) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yield every row of a CSV file, of JSON lines or of a JSON list, with its position for messages."""
    text = read_text(path)
    start = text.lstrip()[0]
    if start not in "{[":
        yield from ((row.cells, row.where) for row in parse_csv(str(path), text))
        return
    rows: Iterable[tuple[int, Any]]
    if start == "[":
        rows = enumerate(parse_json(path, text), 1)
    else:
        last = text.rpartition("\n")[2]
        if not last.endswith("}"):  # of a program that was killed
            text = text.removesuffix(last)
        lines = enumerate(text.splitlines(), 1)
        rows = ((number, parse_json(path, line, number)) for number, line in lines if line.strip())
    for number, row in rows:
        if not isinstance(row, dict):
            raise BadInput(f"{path}: row {number}: expected a JSON object per step, got {quote(row)}")
        yield row, f"{path}: row {number}"


def parse_step(row: Mapping[str, Any], names: Mapping[str, Sequence[str]], unit: float, where: str) -> LoggedStep:
    """Return one row as a step; its times become seconds."""
    filled = {key for key, value in row.items() if value not in (None, "")}
    known = {field: next(filter(filled.__contains__, choices), "") for field, choices in names.items()}

    def number(field: str, minimum: float, maximum: float, scale: float = 1.0) -> Optional[float]:
        name = known[field]
        return parse_number(row[name], f"{where}: {name}", minimum / scale, maximum / scale) * scale if name else None

    start, end = (number(field, -MAX_NUMBER, MAX_NUMBER, unit) for field in ("start", "end"))  # also since 1970
    seconds = number("seconds", 0.0, MAX_COST, unit)
    if seconds is None and start is None:
        raise BadInput(f"{where}: expected seconds, or the start time of the step as {' or '.join(names['start'])}")
    if start is not None and end is not None and end < start:
        raise BadInput(f"{where}: expected the end of the step after its start, got {end:g} s and {start:g} s")
    counts = {field: int(number(field, 0, MAX_NUMBER) or 0) for field in COUNTS}
    if known["batch"] and (row[known["batch"]] or not counts["decode_rows"]):
        requests, shape = parse_batch(row[known["batch"]], f"{where}: {known['batch']}")
        rows = shape.decode_rows + counts["decode_rows"]  # those that the batch leaves out
        shape = shape._replace(decode_rows=rows, decode_live=rows, context=shape.context + counts["context"])
    else:
        requests, shape = frozenset(), counted_shape(counts, where)
    step, waiting = number("step", 0, MAX_NUMBER), number("waiting", 0, MAX_NUMBER)
    position = int(where.rpartition(" ")[2]) if step is None else int(step)
    return LoggedStep(position, start, end, seconds, None if waiting is None else int(waiting), requests, shape)


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
    host = host_gap(steps)
    for first, last in same_stamps(steps):
        before, after = steps[first - 1] if first else None, steps[last + 1] if last + 1 < len(steps) else None
        seconds = duration(steps[last], before, after, host) or 0.0
        if seconds > 0:
            yield from (TimedStep(step.shape, seconds / (last + 1 - first)) for step in steps[first : last + 1])


def same_stamps(steps: Sequence[LoggedStep]) -> list[tuple[int, int]]:
    """Return the first and last position of every run of steps with one stamp. Most runs have one step."""
    runs: list[tuple[int, int]] = []
    for k, step in enumerate(steps):
        before = steps[k - 1] if k else None
        stamped = step.start is not None and step.end is None and step.seconds is None
        if stamped and before is not None and before.start == step.start and follows(before, step):
            runs[-1] = runs[-1][0], k
        else:
            runs.append((k, k))
    return runs


def follows(one: LoggedStep, two: Optional[LoggedStep]) -> bool:
    """Whether the second step is the next one of the engine and has a start time."""
    return two is not None and two.number == one.number + 1 and two.start is not None


def host_gap(steps: Sequence[LoggedStep]) -> float:
    """Return the median time from the end of a step to the start of the next one; 0 if it starts before, or no ends."""
    pairs = [(one.end, two.start) for one, two in zip(steps, steps[1:]) if follows(one, two)]
    gaps = [start - end for end, start in pairs if end is not None and start is not None]
    return max(0.0, float(np.median(gaps))) if gaps else 0.0


def duration(one: LoggedStep, before: Optional[LoggedStep], two: Optional[LoggedStep], host: float) -> Optional[float]:
    """Return the seconds of a step, from its own times or from the start of the next one; None if not known."""
    if one.seconds is not None or one.start is None:
        return one.seconds
    next_start = two.start if two is not None and follows(one, two) else None
    if one.end is not None:
        start = one.start
        if before is not None and before.end is not None and follows(before, one):
            start = max(start, before.end)  # asynchronous: the device first ends that step
        gap = host if next_start is None else max(0.0, next_start - one.end)
        return one.end - start + (gap if gap <= IDLE_GAPS * host else host)
    if two is None or next_start is None or not was_busy(one, two):
        return None
    return next_start - one.start


def was_busy(one: LoggedStep, two: LoggedStep) -> bool:
    """Whether the engine started the second step right after the first one, as far as the log tells."""
    if one.requests or two.requests:
        return bool(one.requests & two.requests) or bool(one.waiting)
    return two.shape.decode_rows > 0 or bool(one.waiting)
