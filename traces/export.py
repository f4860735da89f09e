"""Write a trace down: our CSV or JSONL, Mooncake JSONL, vLLM timed_trace. A note says what a format cannot hold."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from servesim.core import BadInput
from servesim.files.read import PathLike, write_text

from .trace import Trace


class Export(NamedTuple):
    """A format that can be written."""

    about: str
    write: Callable[[Trace, list[str]], str]  # trace, notes to add to -> text


OURS = {  # column of our own format -> field of a request
    "arrival_s": "arrival", "prompt_tokens": "prompt", "output_tokens": "output", "id": "id", "limit_tokens": "limit",
    "priority": "priority", "session_id": "session", "hash_ids": "prefix", "after": "after", "delay_s": "delay",
    "fail_at": "fails",
}  # fmt: skip
UNUSUAL = ("priority", "session_id", "hash_ids", "delay_s", "fail_at")  # left out where nothing is in them


def export(trace: Trace, path: PathLike, format: str = "servesim") -> list[str]:
    """Write a trace to a file, gzipped if its name ends in .gz, and return what could not be written."""
    text, notes = exported(trace, format, lines=".jsonl" in str(path))
    write_text(path, text)
    return notes


def exported(trace: Trace, format: str = "servesim", lines: bool = False) -> tuple[str, list[str]]:
    """Return a trace as text, and what could not be written; `lines` makes our own format JSON lines."""
    if format not in EXPORTS:
        raise BadInput(f"to: expected one of {', '.join(EXPORTS)}, got {format!r}")
    notes: list[str] = []
    write = _ours_lines if format == "servesim" and lines else EXPORTS[format].write
    return write(trace, notes), notes


def _ours(trace: Trace, notes: list[str]) -> str:
    columns = _columns(trace)
    buffer = io.StringIO()
    # The writer takes a carriage return in a name for nothing special, every reader for the end of a row.
    returns = any("\r" in str(name) for key in ("id", "session_id", "after") for name in columns.get(key, ()))
    writer = csv.writer(buffer, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC if returns else csv.QUOTE_MINIMAL)
    writer.writerow(columns)
    writer.writerows(zip(*([_cell(value) for value in values] for values in columns.values())))
    return buffer.getvalue()


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    return " ".join(map(str, value)) if isinstance(value, (tuple, list)) else value


def _ours_lines(trace: Trace, notes: list[str]) -> str:
    columns = _columns(trace)
    rows = (dict(zip(columns, values)) for values in zip(*columns.values()))
    return _lines({key: value for key, value in row.items() if value is not None} for row in rows)


def _columns(trace: Trace) -> dict[str, list[Any]]:
    """Return the columns of our own format; those in which no request says anything are left out."""
    requests = trace.requests
    columns = {column: [getattr(request, name) for request in requests] for column, name in OURS.items()}
    silent = {column for column in UNUSUAL if not any(columns[column])}
    if not trace.timed:
        silent.add("arrival_s")
    if columns["id"] == list(range(len(requests))):
        silent.add("id")
    if columns["limit_tokens"] == columns["output_tokens"]:
        silent.add("limit_tokens")
    if all(after is None for after in columns["after"]):
        silent.add("after")
    return {column: values for column, values in columns.items() if column not in silent}


def _mooncake(trace: Trace, notes: list[str]) -> str:
    """Mooncake's rows, in the extended form where sessions, delays or priorities ask for it."""
    rows, rounded, loose = [], 0, 0
    last: dict[str, Any] = {}  # session -> id of its latest request
    for request in trace.requests:
        row: dict[str, Any] = {}
        if request.after is not None and request.session is not None and last.get(request.session) == request.after:
            row["delay"] = _short(request.delay * 1000)
        else:
            row["timestamp"] = round(request.arrival * 1000)
            rounded += abs(row["timestamp"] - request.arrival * 1000) > 1e-6
            loose += request.after is not None
        row["input_length"], row["output_length"] = request.prompt, request.output
        if request.prefix:
            row["hash_ids"] = list(request.prefix)
        if request.session is not None:
            row["session_id"] = request.session
            last[request.session] = request.id
        if request.priority:
            row["extra"] = {"priority": request.priority}
        rows.append(row)
    if rounded:
        notes.append(f"arrivals of {rounded} requests rounded to whole milliseconds")
    _lost(trace, notes, loose)
    return _lines(rows)


def _short(value: float) -> float | int:
    """Return a number without a fraction where it has none worth keeping."""
    return round(value) if abs(value - round(value)) < 1e-9 else value


VLLM_CHUNK = 16  # tokens a hash id stands for in timed_trace, unless a flag says otherwise


def _timed_trace(trace: Trace, notes: list[str]) -> str:
    """vLLM's rows: it makes a prompt of its hash ids, so every block of it needs one."""
    block = trace.block or VLLM_CHUNK
    unused = 1 + max((max(request.prefix) for request in trace.requests if request.prefix), default=-1)
    rows, made = [], 0
    for request in trace.requests:
        missing = -(-request.prompt // block) - len(request.prefix)
        ids = [*request.prefix, *range(unused, unused + missing)]
        unused += max(missing, 0)
        made += missing > 0
        lengths = {"input_length": request.prompt, "output_length": request.output}
        rows.append({"timestamp": float(request.arrival), **lengths, "hash_ids": ids})
    if made:
        notes.append(f"hash ids made up for {made} requests: without them vLLM would send empty prompts")
    notes.append(f"replay with --dataset-name timed_trace --self-timed --timed-trace-chunk-hash-size {block}")
    chained = sum(request.after is not None for request in trace.requests)
    for name, count in (("sessions", _count(trace, "session")), ("priorities", _count(trace, "priority"))):
        if count:
            notes.append(f"{name} of {count} requests cannot be held by this format")
    _lost(trace, notes, chained)
    return _lines(rows)


def _count(trace: Trace, name: str) -> int:
    return sum(bool(getattr(request, name)) for request in trace.requests)


def _lost(trace: Trace, notes: list[str], loose: int) -> None:
    """Say what neither Mooncake nor vLLM can hold."""
    limits = sum(request.limit != request.output for request in trace.requests)
    for name, count in (("limits", limits), ("failures", _count(trace, "fails"))):
        if count:
            notes.append(f"{name} of {count} requests cannot be held by this format")
    if loose:
        notes.append(f"{loose} requests wait for another's end: their earliest possible arrival is written instead")


def _lines(rows: Iterable[dict[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


EXPORTS: dict[str, Export] = {
    "servesim": Export("our own CSV, or JSONL if the file is named so", _ours),
    "mooncake": Export("Mooncake JSONL, milliseconds", _mooncake),
    "timed-trace": Export("vLLM bench timed_trace JSONL, seconds", _timed_trace),
}
