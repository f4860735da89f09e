"""Read a trace file: the formats, how each is detected, and the column of each field."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Optional

from servesim.core import BadInput
from servesim.core.content import content_of_pieces
from servesim.files.read import PathLike
from servesim.traces.contents import BAILIAN_BLOCK, own_text
from servesim.traces.edit import as_conversations, slice_time
from servesim.traces.trace import Columns, Trace, build_trace, gc_disabled

from . import benchmark_results, chats
from .columns import Names, read_columns, servesim_columns
from .servegen import FIRST_ROW, is_servegen, servegen
from .source import OBJECTS, Source, Table
from .tokens import Tokenizer, token_counter


class Format(NamedTuple):
    """A trace format."""

    about: str  # origin, for the help
    fits: Callable[[Source], bool]  # whether the content has this format
    read: Callable[[Source], Columns]
    order: str = "sort"  # "sort" or "refuse" rows that are out of order
    shift: bool = False  # True: times since 1970, counted from the first arrival


def detect_format(source: Source) -> str:
    """Return the name of the first format that fits."""
    for name, format in FORMATS.items():
        if format.fits(source):
            return name
    if source.columns:
        return "servesim"
    available = ", ".join(sorted(source.header))[:120]
    separated = next((f" (separated by {mark!r}?)" for mark in ";\t|" if mark in available), "")
    raise BadInput(
        f"{source.name}: row 1: no known trace format has {available!r}{separated}: expected arrival_s, prompt_tokens, "
        "output_tokens, or name your columns with --column arrival=... --column prompt=... --column "
        f"output=...; known formats: {', '.join(FORMATS)}"
    )


def table_with(*columns: str) -> Callable[[Source], bool]:
    """Return a test for a CSV or Parquet table with these columns."""
    return lambda source: source.kind in ("csv", "parquet") and source.header >= set(columns)


def json_with(*keys: str) -> Callable[[Source], bool]:
    """Return a test for JSON or Parquet rows with these keys."""
    return lambda source: source.kind in OBJECTS and source.header >= set(keys)


def column_reader(unit: float = 1.0, **fields: Names) -> Callable[[Source], Columns]:
    """Return a reader of rows with one column per field."""
    return lambda source: read_columns(source, fields, unit)


def _is_servesim(source: Source) -> bool:
    return source.header >= {"prompt_tokens", "output_tokens"} or source.header >= {"prompt", "output"}


def _is_servegen(source: Source) -> bool:
    return is_servegen(source.path) or (source.kind == "csv" and FIRST_ROW.match(source.text) is not None)


def _read_servegen(source: Source) -> Columns:
    source.reject_columns()
    return servegen(source.path, source.seed, *source.window)


AIPERF_KEYS = {
    "session_id", "delay", "delay_ms", "turns", "text_input", "messages", "payload", "text", "texts", "extra",
}  # fmt: skip


def _is_aiperf(source: Source) -> bool:
    prompt = {"input_length", "turns", "text_input", "messages", "payload", "text", "texts"}
    return source.kind in OBJECTS and bool(source.header & prompt) and bool(source.header & AIPERF_KEYS)


def _has_whole_timestamps(source: Source) -> bool:
    """Return whether all time stamps are whole numbers: true for Mooncake's milliseconds, not for seconds."""
    return all(type(record.get("timestamp")) is int for record in source.records)


MOONCAKE_FIELDS: Mapping[str, Names] = {
    "arrival": "timestamp",
    "prompt": "input_length",
    "output": "output_length",
    "hash_ids": "hash_ids",
    "priority": "priority",
}


def _read_burstgpt(source: Source) -> Columns:
    fields = {"arrival": "Timestamp", "prompt": "Request tokens", "output": "Response tokens", "session": "Session ID"}
    columns = read_columns(source, fields)
    columns.unusable.update((i, "failed: no response tokens") for i, n in enumerate(columns.output) if n == 0)
    return columns


def _read_bailian(source: Source) -> Columns:
    """Read Qwen-Bailian. A chat may continue an earlier one; the first chat of a chain is the session id."""
    columns = read_columns(source, {**MOONCAKE_FIELDS, "id": "chat_id"}, id_sizes=(BAILIAN_BLOCK,))
    parents = source.table.integers("parent_chat_id", minimum=-1)
    sessions: dict[Any, str] = {}
    for id, parent in zip(columns.id or (), parents):
        sessions[id] = str(id) if parent == -1 else sessions.get(parent, str(parent))
    columns.session = [sessions[id] for id in columns.id or ()]
    return columns


def _read_splitwise(source: Source) -> Columns:
    columns = read_columns(
        source, {"arrival": "arrival_timestamp", "prompt": "prompt_size", "output": "token_size", "id": "request_id"}
    )
    table = source.table
    if "batch_size" in table:
        for i, size in enumerate(table.integers("batch_size")):
            if size != 1:
                raise table.error(i, "batch_size", "1: requests that arrive as a batch are not supported")
    return columns


def _read_blis(source: Source) -> Columns:
    """Read BLIS. It replays requests at their send times; the prefix of a group is added to the row's tokens."""
    table, unit = source.table, source.seconds(1e-6)
    fields = {"arrival": "arrival_time_us", "prompt": "input_tokens", "output": "output_tokens", "id": "request_id"}
    columns = read_columns(source, {**fields, "session": "session_id", "priority": "vllm_priority"}, unit)
    send_times = table.optional("send_time_us", lambda subset, name: subset.seconds(name, unit))
    arrivals = columns.arrival or [0.0] * len(table)
    columns.arrival = [send_time or arrival for send_time, arrival in zip(send_times, arrivals)]
    server_counts = table.optional("server_input_tokens", Table.tokens)
    groups = table.optional("prefix_group", Table.text)
    prefix_lengths = table.optional("prefix_length", Table.tokens)
    columns.content = [None] * len(table)
    for i, (id, group, length) in enumerate(zip(columns.id or range(len(table)), groups, prefix_lengths)):
        if group and length:
            own = columns.prompt[i]
            columns.prompt[i] += length
            columns.content[i] = content_of_pieces([(f"prefix:{group}", length), (own_text(id), own)])
        else:
            columns.prompt[i] = server_counts[i] or columns.prompt[i]
    for i, status in enumerate(table.columns.get("status", ())):
        if status not in ("", "ok", None):
            columns.unusable[i] = f"status {str(status)[:40]}"
    return columns


def _is_blis_header(source: Source) -> bool:
    return source.kind == "csv" and re.match(r"trace_version:", source.text) is not None


def _read_blis_csv(source: Source) -> Columns:
    """Read the CSV that belongs to a BLIS header file."""
    stem = re.sub(r"[_.-]?header$", "", source.path.stem)
    csv_path = source.path.with_name(f"{stem}.csv")
    if not csv_path.exists():
        raise BadInput(f"{source.name}: row 1: header of a BLIS trace: expected {csv_path.name} in the same folder")
    return _read_blis(Source(csv_path, source.columns, source.unit))


def _results(name: str) -> tuple[Callable[[Source], bool], Callable[[Source], Columns]]:
    """Return the test and the reader of a load generator's result file."""
    return lambda source: benchmark_results.results_format(source) == name, benchmark_results.read_columns


# Tried in this order: a format comes before those whose keys are a subset of its own keys.
FORMATS: dict[str, Format] = {
    "servegen": Format("ServeGen client descriptions (a folder, or one client's file)", _is_servegen, _read_servegen),
    "servesim": Format("servesim CSV or JSONL", _is_servesim, servesim_columns, order="refuse"),
    "vidur": Format(
        "Vidur trace_replay",
        table_with("arrived_at", "num_prefill_tokens", "num_decode_tokens"),
        column_reader(arrival="arrived_at", prompt="num_prefill_tokens", output="num_decode_tokens"),
    ),
    "vidur-lengths": Format(
        "Vidur length pairs",
        table_with("num_prefill_tokens", "num_decode_tokens"),
        column_reader(arrival="arrival_time", prompt="num_prefill_tokens", output="num_decode_tokens"),
    ),
    "azure": Format(
        "Azure LLM inference traces 2023 and 2024, LMM 2025",
        table_with("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
        column_reader(arrival="TIMESTAMP", prompt="ContextTokens", output="GeneratedTokens"),
    ),
    "burstgpt": Format(
        "BurstGPT, v1 to v3", table_with("Timestamp", "Request tokens", "Response tokens"), _read_burstgpt
    ),
    "splitwise": Format("splitwise-sim", table_with("arrival_timestamp", "prompt_size", "token_size"), _read_splitwise),
    "blis": Format(
        "BLIS inference-sim trace v2", table_with("arrival_time_us", "input_tokens", "output_tokens"), _read_blis
    ),
    "blis-header": Format("header of a BLIS trace, with its CSV in the same folder", _is_blis_header, _read_blis_csv),
    "bailian": Format(
        "Qwen-Bailian", json_with("chat_id", "parent_chat_id", "timestamp", "input_length"), _read_bailian
    ),
    "llmservingsim": Format(
        "LLMServingSim 2, single requests and sessions", json_with("arrival_time_ns"), chats.llmservingsim
    ),
    "apex": Format(
        "APEX+",
        json_with("StartTimeOffset", "ContextTokens", "GeneratedTokens"),
        column_reader(
            1e-9, arrival="StartTimeOffset", prompt="ContextTokens", output="GeneratedTokens", id="RequestID"
        ),
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
    "aiperf": Format("aiperf, and Mooncake's extended form: sessions, delays, text", _is_aiperf, chats.aiperf),
    "mooncake": Format(
        "Mooncake (milliseconds)",
        lambda source: (
            json_with("timestamp", "input_length", "output_length")(source) and _has_whole_timestamps(source)
        ),
        lambda source: read_columns(source, MOONCAKE_FIELDS, 1e-3),
    ),
    "timed-trace": Format(
        "vLLM bench timed_trace (seconds)",
        json_with("timestamp", "input_length", "output_length", "hash_ids"),
        lambda source: read_columns(source, MOONCAKE_FIELDS),
    ),
    "guidellm": Format(
        "guidellm trace_synthetic (seconds)",
        lambda source: source.header >= {"timestamp", "input_length", "output_length"},
        lambda source: read_columns(source, MOONCAKE_FIELDS),
    ),
    "sglang-bench": Format("result of sglang.bench_serving (one benchmark)", *_results("sglang-bench")),
    "vllm-bench": Format("result of vllm bench serve --save-detailed", *_results("vllm-bench")),
    "guidellm-results": Format("report of guidellm (one benchmark)", *_results("guidellm-results"), shift=True),
    "aiperf-results": Format("profile_export.jsonl of aiperf", *_results("aiperf-results"), shift=True),
    "sharegpt": Format("ShareGPT conversations", json_with("conversations"), chats.sharegpt),
    "custom": Format("vLLM bench custom", json_with("prompt"), chats.custom),
    "performance-serving-result": Format(
        "performance_serving result file", json_with("input", "resp_text", "res_time"), benchmark_results.read_result
    ),
    "performance-serving-log": Format(
        "performance_serving log", lambda source: source.kind == "log", benchmark_results.read_log
    ),
}


def load(
    path: PathLike,
    format: Optional[str] = None,
    columns: Optional[Mapping[str, str]] = None,
    limit: Optional[int] = None,
    tokenizer: Optional[Tokenizer] = None,
    *,
    unit: Optional[str] = None,
    sort: bool = False,
    seed: int = 0,
    window: tuple[float, float] = (0.0, math.inf),
    conversations: bool = False,
) -> Trace:
    """Return the trace in a file; without `format`, the content is used to detect it.

    `columns`: field -> column name (`{"prompt": "tokens_in"}`). `unit`: unit of times (s, ms, us, ns). `limit`:
    maximum number of requests. `window`: first and last second to keep. `sort`: sort rows of a servesim file by
    arrival instead of refusing it. `seed`: for formats that are sampled. `conversations`: the prompts of a session
    contain its earlier turns.
    """
    if format is not None and format not in FORMATS:
        raise BadInput(f"format: expected one of {', '.join(FORMATS)}, got {format!r}")
    if limit is not None and limit < 1:
        raise BadInput(f"limit: expected at least 1 request, got {limit}")
    source = Source(path, columns, unit, token_counter(tokenizer), seed, window)
    with gc_disabled():
        name = format or detect_format(source)
        chosen = FORMATS[name]
        trace = build_trace(chosen.read(source), source.name, name, "sort" if sort else chosen.order, chosen.shift)
    if conversations:
        trace = as_conversations(trace)
    if window != (0.0, math.inf) and name != "servegen":
        trace = slice_time(trace, *window)
    if limit is not None:
        trace.requests = trace.requests[:limit]
    return trace
