"""The trace formats that can be read: how each is recognised, and which column of it holds what."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from servesim.core import BadInput
from servesim.traces.trace import Columns

from . import chats, performance_serving
from .columns import Names, flat, ours
from .servegen import FIRST, is_servegen, servegen
from .source import OBJECTS, Source
from .table import MOST_TOKENS, Table


class Format(NamedTuple):
    """One way to write a trace down."""

    about: str  # whose it is, for the help
    fits: Callable[[Source], bool]  # whether the content looks like it
    read: Callable[[Source], Columns]
    order: str = "sort"  # rows out of order are sorted, or refused
    shift: bool = False  # times are of the calendar: count from the first


def recognised(source: Source) -> str:
    """Return the name of the first format that fits."""
    for name, format in FORMATS.items():
        if format.fits(source):
            return name
    if source.columns:
        return "servesim"
    has = ", ".join(sorted(source.header))[:120]
    separated = next((f" (separated by {mark!r}?)" for mark in ";\t|" if mark in has), "")
    raise BadInput(
        f"{source.name}: row 1: no known trace format has {has!r}{separated}: expected arrival_s, prompt_tokens, "
        "output_tokens, or say which of your columns they are: --column arrival=... --column prompt=... --column "
        f"output=...; known formats: {', '.join(FORMATS)}"
    )


def table_with(*columns: str) -> Callable[[Source], bool]:
    """Return a test for a table, CSV or Parquet, that has these columns."""
    return lambda source: source.kind in ("csv", "parquet") and source.header >= set(columns)


def json_with(*keys: str) -> Callable[[Source], bool]:
    """Return a test for JSON, or Parquet made of it, whose objects have these keys."""
    return lambda source: source.kind in OBJECTS and source.header >= set(keys)


def columns_of(unit: float = 1.0, block: int | None = None, **fields: Names) -> Callable[[Source], Columns]:
    """Return a reader of rows that hold a field in a column each."""
    return lambda source: flat(source, fields, unit, block)


def _ours(source: Source) -> bool:
    return source.header >= {"prompt_tokens", "output_tokens"} or source.header >= {"prompt", "output"}


def _servegen(source: Source) -> bool:
    return is_servegen(source.path) or (source.kind == "csv" and FIRST.match(source.text) is not None)


def _sampled(source: Source) -> Columns:
    source.fixed()
    return servegen(source.path, source.seed, *source.window)


AIPERF = {"session_id", "delay", "delay_ms", "turns", "text_input", "messages", "payload", "text", "texts", "extra"}


def _aiperf(source: Source) -> bool:
    prompt = {"input_length", "turns", "text_input", "messages", "payload", "text", "texts"}
    return source.kind in OBJECTS and bool(source.header & prompt) and bool(source.header & AIPERF)


def _milliseconds(source: Source) -> bool:
    """Whether all stamps are whole numbers: Mooncake's milliseconds are, seconds written by others are not."""
    return all(type(record.get("timestamp")) is int for record in source.records)


MOONCAKE: Mapping[str, Names] = {
    "arrival": "timestamp",
    "prompt": "input_length",
    "output": "output_length",
    "prefix": "hash_ids",
    "priority": "priority",
}


def _burstgpt(source: Source) -> Columns:
    fields = {"arrival": "Timestamp", "prompt": "Request tokens", "output": "Response tokens", "session": "Session ID"}
    columns = flat(source, fields)
    columns.unusable.update((i, "failed: no response tokens") for i, n in enumerate(columns.output) if n == 0)
    return columns


def _bailian(source: Source) -> Columns:
    """Chats that name the chat they continue: the first of a chain is the session of all."""
    columns = flat(source, {**MOONCAKE, "id": "chat_id"})
    parents = source.table.integers("parent_chat_id", least=-1)
    sessions: dict[Any, str] = {}
    for id, parent in zip(columns.id or (), parents):
        sessions[id] = str(id) if parent == -1 else sessions.get(parent, str(parent))
    columns.session = [sessions[id] for id in columns.id or ()]
    return columns


def _splitwise(source: Source) -> Columns:
    columns = flat(
        source, {"arrival": "arrival_timestamp", "prompt": "prompt_size", "output": "token_size", "id": "request_id"}
    )
    table = source.table
    if "batch_size" in table:
        for i, size in enumerate(table.integers("batch_size")):
            if size != 1:
                raise table.bad(i, "batch_size", "1: requests that arrive as a batch are not supported")
    return columns


BLIS_BLOCK = 16  # tokens an id of ours stands for where BLIS only says which group shares a prefix


def _blis(source: Source) -> Columns:
    """BLIS replays a request at the moment it was sent; a group's shared prefix comes before the row's own tokens."""
    table, unit = source.table, source.seconds(1e-6)
    fields = {"arrival": "arrival_time_us", "prompt": "input_tokens", "output": "output_tokens", "id": "request_id"}
    columns = flat(source, {**fields, "session": "session_id", "priority": "vllm_priority"}, unit)
    sent = [value or 0.0 for value in table.optional("send_time_us", lambda part, name: part.seconds(name, unit))]
    columns.arrival = [moment or arrival for moment, arrival in zip(sent, columns.arrival or sent)]
    counted = table.optional("server_input_tokens", Table.tokens)
    groups = table.optional("prefix_group", Table.text)
    shared = table.optional("prefix_length", Table.tokens)
    first: dict[str, int] = {}  # group -> the first of its hash ids
    columns.prefix = []
    for i, (group, length) in enumerate(zip(groups, shared)):
        if group and length:
            start = first.setdefault(group, MOST_TOKENS * len(first))
            columns.prompt[i] += length
            columns.prefix.append(tuple(range(start, start + length // BLIS_BLOCK)))
        else:
            columns.prompt[i] = counted[i] or columns.prompt[i]
            columns.prefix.append(())
    if any(columns.prefix):
        columns.block = BLIS_BLOCK
    else:
        columns.prefix = None
    for i, status in enumerate(table.columns.get("status", ())):
        if status not in ("", "ok", None):
            columns.unusable[i] = f"status {str(status)[:40]}"
    return columns


def _blis_header(source: Source) -> bool:
    return source.kind == "csv" and re.match(r"trace_version:", source.text) is not None


def _beside_header(source: Source) -> Columns:
    """Read the CSV that belongs to a BLIS header file."""
    stem = re.sub(r"[_.-]?header$", "", source.path.stem)
    beside = source.path.with_name(f"{stem}.csv")
    if not beside.exists():
        raise BadInput(f"{source.name}: row 1: the header of a BLIS trace: expected its CSV beside it as {beside.name}")
    return _blis(Source(beside, source.columns, source.unit))


# Tried in this order: a format with fewer keys comes after the one that has those and more.
FORMATS: dict[str, Format] = {
    "servegen": Format("ServeGen client descriptions (a folder, or one client's file)", _servegen, _sampled),
    "servesim": Format("our own CSV or JSONL", _ours, ours, order="refuse"),
    "vidur": Format(
        "Vidur trace_replay",
        table_with("arrived_at", "num_prefill_tokens", "num_decode_tokens"),
        columns_of(arrival="arrived_at", prompt="num_prefill_tokens", output="num_decode_tokens"),
    ),
    "vidur-lengths": Format(
        "Vidur length pairs",
        table_with("num_prefill_tokens", "num_decode_tokens"),
        columns_of(arrival="arrival_time", prompt="num_prefill_tokens", output="num_decode_tokens"),
    ),
    "azure": Format(
        "Azure LLM inference traces 2023 and 2024, LMM 2025",
        table_with("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
        columns_of(arrival="TIMESTAMP", prompt="ContextTokens", output="GeneratedTokens"),
    ),
    "burstgpt": Format("BurstGPT, v1 to v3", table_with("Timestamp", "Request tokens", "Response tokens"), _burstgpt),
    "splitwise": Format("splitwise-sim", table_with("arrival_timestamp", "prompt_size", "token_size"), _splitwise),
    "blis": Format(
        "BLIS inference-sim trace v2", table_with("arrival_time_us", "input_tokens", "output_tokens"), _blis
    ),
    "blis-header": Format("header of a BLIS trace, its CSV beside it", _blis_header, _beside_header),
    "bailian": Format("Qwen-Bailian", json_with("chat_id", "parent_chat_id", "timestamp", "input_length"), _bailian),
    "llmservingsim": Format(
        "LLMServingSim 2, single requests and sessions", json_with("arrival_time_ns"), chats.llmservingsim
    ),
    "apex": Format(
        "APEX+",
        json_with("StartTimeOffset", "ContextTokens", "GeneratedTokens"),
        columns_of(1e-9, arrival="StartTimeOffset", prompt="ContextTokens", output="GeneratedTokens", id="RequestID"),
    ),
    "dynamo": Format(
        "Dynamo request trace",
        lambda source: (
            source.kind in OBJECTS and (source.header >= {"event"} or source.header >= {"schema", "request"})
        ),
        chats.dynamo,
        shift=True,
    ),
    "evalscope": Format("evalscope workload_trace", json_with("body", "timestamp"), chats.evalscope, shift=True),
    "aiperf": Format("aiperf, and Mooncake's extended form: sessions, delays, text", _aiperf, chats.aiperf),
    "mooncake": Format(
        "Mooncake (milliseconds)",
        lambda source: json_with("timestamp", "input_length", "output_length")(source) and _milliseconds(source),
        lambda source: flat(source, MOONCAKE, 1e-3),
    ),
    "timed-trace": Format(
        "vLLM bench timed_trace (seconds)",
        json_with("timestamp", "input_length", "output_length", "hash_ids"),
        lambda source: flat(source, MOONCAKE),
    ),
    "guidellm": Format(
        "guidellm trace_synthetic (seconds)",
        lambda source: source.header >= {"timestamp", "input_length", "output_length"},
        lambda source: flat(source, MOONCAKE),
    ),
    "sharegpt": Format("ShareGPT conversations", json_with("conversations"), chats.sharegpt),
    "custom": Format("vLLM bench custom", json_with("prompt"), chats.custom),
    "performance-serving-result": Format(
        "performance_serving result file", json_with("input", "resp_text", "res_time"), performance_serving.result
    ),
    "performance-serving-log": Format(
        "performance_serving log", lambda source: source.kind == "log", performance_serving.log
    ),
}
