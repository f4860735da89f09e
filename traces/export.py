"""Write a trace as servesim CSV or JSONL, Mooncake JSONL or vLLM timed_trace. Notes list what a format cannot hold."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, NamedTuple

from servesim.core import BadInput
from servesim.core.content import Content
from servesim.files.read import PathLike
from servesim.files.write import write_rows, write_text

from .contents import MOONCAKE_BLOCK, format_name, format_pieces, hash_ids_of, id_size
from .samplings import sampling_columns
from .trace import DEFAULTS, Trace, has_field


class Export(NamedTuple):
    """An output format."""

    about: str
    write: Callable[[Trace, list[str]], str]  # trace, notes to add to -> text


SERVESIM_COLUMNS = {  # column of the servesim format -> field of a request
    "arrival_s": "arrival", "prompt_tokens": "prompt", "output_tokens": "output", "id": "id", "limit_tokens": "limit",
    "priority": "priority", "session_id": "session", "follows": "follows",
    "think_time_s": "think_time", "fails_at_token": "fails_at_token", "acceptance": "acceptance",
}  # fmt: skip


def export(trace: Trace, path: PathLike, format: str = "servesim") -> list[str]:
    """Write a trace to a file, gzipped if its name ends in .gz; return notes about lost information."""
    text, notes = to_text(trace, format, lines=".jsonl" in str(path))
    write_text(path, text, parents=False)
    return notes


def to_text(trace: Trace, format: str = "servesim", lines: bool = False) -> tuple[str, list[str]]:
    """Return a trace as text, and notes about lost information; `lines` selects JSONL for the servesim format."""
    if format not in EXPORTS:
        raise BadInput(f"to: expected one of {', '.join(EXPORTS)}, got {format!r}")
    notes: list[str] = []
    write = _servesim_jsonl if format == "servesim" and lines else EXPORTS[format].write
    return write(trace, notes), notes


def _servesim_csv(trace: Trace, notes: list[str]) -> str:
    columns = _columns(trace, format_pieces, format_name, json.dumps)
    buffer = io.StringIO()
    # The csv writer does not quote a carriage return in a name, but every reader takes it as the end of a row.
    quoted = any("\r" in str(name) for key in ("id", "session_id", "follows") for name in columns.get(key, ()))
    rows = zip(*([_format_cell(value) for value in values] for values in columns.values()))
    write_rows(buffer, [columns], rows, quoting=csv.QUOTE_NONNUMERIC if quoted else csv.QUOTE_MINIMAL)
    return buffer.getvalue()


def _format_cell(value: Any) -> Any:
    if value is None:
        return ""
    return " ".join(map(str, value)) if isinstance(value, (tuple, list)) else value


def _servesim_jsonl(trace: Trace, notes: list[str]) -> str:
    columns = _columns(trace, lambda content: content.pieces, lambda name: name, lambda values: values)
    rows = (dict(zip(columns, values)) for values in zip(*columns.values()))
    return _to_jsonl({key: value for key, value in row.items() if value is not None} for row in rows)


def _columns(
    trace: Trace,
    write_pieces: Callable[[Content], Any],
    write_name: Callable[[Hashable], Any],
    write_list: Callable[[Any], Any],
) -> dict[str, list[Any]]:
    """Return the columns of the servesim format, without empty and default ones."""
    requests = trace.requests
    columns = {column: [getattr(request, name) for request in requests] for column, name in SERVESIM_COLUMNS.items()}
    omitted = {
        column for column, name in SERVESIM_COLUMNS.items() if name in DEFAULTS and not has_field(requests, name)
    }
    if not trace.timed:
        omitted.add("arrival_s")
    if columns["id"] == list(range(len(requests))):
        omitted.add("id")
    if columns["limit_tokens"] == columns["output_tokens"]:
        omitted.add("limit_tokens")
    kept = {column: values for column, values in columns.items() if column not in omitted}
    kept.update(sampling_columns([request.sampling for request in requests], write_list))
    if not trace.contents:
        return kept
    contents = [request.content for request in requests]
    if id_size(trace.contents) is not None:
        return {**kept, "hash_ids": [None if content is None else list(content.names) for content in contents]}
    kept["content"] = [None if content is None else write_pieces(content) for content in contents]
    answers = [None if content is None else content.answer for content in contents]
    if any(answer is not None for answer in answers):
        kept["answer"] = [None if answer is None else write_name(answer) for answer in answers]
    return kept


VLLM_BLOCK = 16  # default tokens per hash id in timed_trace


def _mooncake_jsonl(trace: Trace, notes: list[str]) -> str:
    """Mooncake rows; in the extended form if the trace has sessions, think times or priorities."""
    rows, rounded, unlinked = [], 0, 0
    block = id_size(trace.contents) or MOONCAKE_BLOCK
    hash_ids, generated = hash_ids_of(trace.requests, block)
    ids = iter(hash_ids)
    last: dict[str, Any] = {}  # session -> id of its latest request
    for request in trace.requests:
        row: dict[str, Any] = {}
        if request.follows is not None and request.session is not None and last.get(request.session) == request.follows:
            row["delay"] = _drop_zero_fraction(request.think_time * 1000)
        else:
            row["timestamp"] = round(request.arrival * 1000)
            rounded += abs(row["timestamp"] - request.arrival * 1000) > 1e-6
            unlinked += request.follows is not None
        row["input_length"], row["output_length"], row["hash_ids"] = request.prompt, request.output, next(ids)
        if request.session is not None:
            row["session_id"] = request.session
            last[request.session] = request.id
        if request.priority:
            row["extra"] = {"priority": request.priority}
        rows.append(row)
    if rounded:
        notes.append(f"arrivals of {rounded} requests rounded to whole milliseconds")
    if generated:
        notes.append(f"hash ids generated for {generated} requests: readers such as guidellm expect one per block")
    if block != MOONCAKE_BLOCK:
        notes.append(f"one hash id is {block} tokens, not {MOONCAKE_BLOCK}: set the block size of the reader")
    _note_unsupported(trace, notes, unlinked, {})
    return _to_jsonl(rows)


def _drop_zero_fraction(value: float) -> float | int:
    """Return an int if the number is one within 1e-9."""
    return round(value) if abs(value - round(value)) < 1e-9 else value


def _timed_trace_jsonl(trace: Trace, notes: list[str]) -> str:
    """vLLM rows. vLLM generates the prompt from the hash ids, so every block needs one."""
    block = id_size(trace.contents) or VLLM_BLOCK
    hash_ids, generated = hash_ids_of(trace.requests, block)
    rows = []
    for request, ids in zip(trace.requests, hash_ids):
        lengths = {"input_length": request.prompt, "output_length": request.output}
        rows.append({"timestamp": float(request.arrival), **lengths, "hash_ids": ids})
    if generated:
        notes.append(f"hash ids generated for {generated} requests: without them vLLM would send empty prompts")
    notes.append(f"replay with --dataset-name timed_trace --self-timed --timed-trace-chunk-hash-size {block}")
    chained = sum(request.follows is not None for request in trace.requests)
    _note_unsupported(trace, notes, chained, {"sessions": "session", "priorities": "priority"})
    return _to_jsonl(rows)


def _note_unsupported(trace: Trace, notes: list[str], unlinked: int, fields: Mapping[str, str]) -> None:
    """Add notes about fields that neither Mooncake nor vLLM can hold, and about further ones, by their names."""
    fields = {**fields, "failures": "fails_at_token", "several answers": "sampling"}
    counts = {name: sum(bool(getattr(request, field)) for request in trace.requests) for name, field in fields.items()}
    counts["limits"] = sum(request.limit != request.output for request in trace.requests)
    notes += [f"this format cannot hold the {name} of {count} requests" for name, count in counts.items() if count]
    if unlinked:
        notes.append(f"{unlinked} requests start after another one ends: written with their earliest possible arrival")


def _to_jsonl(rows: Iterable[dict[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


EXPORTS: dict[str, Export] = {
    "servesim": Export("servesim CSV, or JSONL if the file name ends in .jsonl", _servesim_csv),
    "mooncake": Export("Mooncake JSONL, milliseconds", _mooncake_jsonl),
    "timed-trace": Export("vLLM bench timed_trace JSONL, seconds", _timed_trace_jsonl),
}
