"""Formats that hold text or nested turns: ShareGPT, vLLM custom, aiperf, evalscope, LLMServingSim, Dynamo."""

from __future__ import annotations

from typing import Any, Optional

from servesim.files.read import quote
from servesim.traces.trace import MOONCAKE_BLOCK, Columns

from .columns import parse_date
from .nested import ParsedRequest, Row, read_rows, to_columns
from .source import Source

VLLM_DEFAULT_OUTPUT = 256  # output length of `vllm bench serve` if a custom data set has none


def sharegpt(source: Source) -> Columns:
    """Read ShareGPT: the first two turns of each conversation are prompt and output."""
    requests = []
    for row in read_rows(source):
        turns = row.values.get("conversations")
        if type(turns) is not list:
            raise row.error("conversations", "a list of turns")
        if len(turns) < 2:
            requests.append(ParsedRequest(row, 0, 0, unusable="fewer than two turns"))
            continue
        question, answer = row.rows("conversations")[:2]
        requests.append(ParsedRequest(row, question.text_tokens("value"), answer.text_tokens("value")))
    return to_columns(source, requests, text=True)


def custom(source: Source) -> Columns:
    """Read a vLLM custom data set: one prompt per line, optionally with output tokens."""
    requests, missing = [], 0
    for row in read_rows(source):
        has_output = row.has("output_tokens")
        missing += not has_output
        output = row.tokens("output_tokens") if has_output else VLLM_DEFAULT_OUTPUT
        requests.append(ParsedRequest(row, row.text_tokens("prompt"), output))
    notes = [f"{missing} rows have no output_tokens: {VLLM_DEFAULT_OUTPUT} used, as in vLLM"] if missing else []
    return to_columns(source, requests, notes=notes, text=True)


def evalscope(source: Source) -> Columns:
    """Read evalscope: one request body per line, with its send time in seconds or as a date."""
    requests: list[ParsedRequest] = []
    unit = source.seconds(1.0)
    for row in read_rows(source):
        prompt, limit = row.row("body").body()
        output = row.tokens("completion_tokens") if row.has("completion_tokens") else limit
        requests.append(ParsedRequest(row, prompt, output, _timestamp(row, unit), limit or None))
    return to_columns(source, requests, text=True)


def _timestamp(row: Row, unit: float) -> float:
    """Return the send time in seconds, since 1970 or since the file's own start."""
    stamp = row.values.get("timestamp")
    if type(stamp) is not str:
        return row.seconds("timestamp", unit)
    time = parse_date(stamp)
    if time is None:
        raise row.error("timestamp", "a number or a date as 2025-01-01T00:00:00Z")
    return time


def aiperf(source: Source) -> Columns:
    """Read Mooncake's extended form and aiperf: in a session, each turn follows the last one after a delay."""
    requests: list[ParsedRequest] = []
    unit = source.seconds(1e-3)
    last: dict[Optional[str], int] = {}  # session -> index of its last request
    context: dict[Optional[str], int] = {}  # session -> context tokens so far
    for row in read_rows(source):
        session = row.name("session_id")
        if row.has("turns"):
            # A conversation in one row: the prompt of a turn includes all earlier turns.
            session = session if session is not None else f"row-{row.number}"
            for turn in row.rows("turns"):
                _add_turn(requests, turn, session, last, context, unit, cumulative=True)
        else:
            _add_turn(requests, row, session, last, context, unit, cumulative=row.values.get("message_mode") == "delta")
    text = not all("input_length" in record for record in source.records)
    block = MOONCAKE_BLOCK if any(request.prefix_hashes for request in requests) else None
    return to_columns(source, requests, block, text=text)


def _add_turn(
    requests: list[ParsedRequest],
    row: Row,
    session: Optional[str],
    last: dict[Optional[str], int],
    context: dict[Optional[str], int],
    unit: float,
    cumulative: bool,
) -> None:
    prompt, output = _aiperf_lengths(row)
    if cumulative:
        prompt += context.get(session, 0)
        context[session] = prompt + (output or 0)
    arrival = row.seconds("timestamp", unit) if row.has("timestamp") else None
    delay = next((row.seconds(key, unit) for key in ("delay", "delay_ms") if row.has(key)), 0.0)
    after = last.get(session) if session is not None and arrival is None else None
    priority = row.row("extra").values.get("priority", 0) if row.has("extra") else row.values.get("priority", 0)
    priority = priority if type(priority) is int else 0
    delay = delay if after is not None else 0.0
    prefix = row.ids("hash_ids")
    requests.append(ParsedRequest(row, prompt, output, arrival, None, priority, session, prefix, after, delay))
    if session is not None:
        last[session] = len(requests) - 1


def _aiperf_lengths(row: Row) -> tuple[int, Optional[int]]:
    """Return prompt and output length; the row must hold one of the known prompt keys."""
    output = row.tokens("output_length") if row.has("output_length") else None
    if row.has("input_length"):
        return row.tokens("input_length"), output
    if row.has("payload"):
        prompt, limit = row.row("payload").body()
        return prompt, limit if output is None else output
    if row.has("messages"):
        return row.message_tokens(), output
    for key in ("text_input", "text", "texts"):
        if row.has(key):
            return row.text_tokens(key), output
    raise row.error("input_length", "one of input_length, text_input, messages, payload, text, texts")


def llmservingsim(source: Source) -> Columns:
    """Read LLMServingSim: single requests, and sessions whose calls follow each other after the tool time."""
    requests: list[ParsedRequest] = []
    unit = source.seconds(1e-9)
    for row in read_rows(source):
        arrival, session = row.seconds("arrival_time_ns", unit), row.name("session_id")
        if not row.has("sub_requests"):
            prompt, output = row.tokens("input_toks"), row.tokens("output_toks")
            requests.append(ParsedRequest(row, prompt, output, arrival, session=session))
            continue
        after, tool = None, 0.0
        for call in row.rows("sub_requests"):
            prompt, output = call.tokens("input_toks"), call.tokens("output_toks")
            start = arrival if after is None else None
            requests.append(ParsedRequest(call, prompt, output, start, session=session, follows=after, think_time=tool))
            after = len(requests) - 1
            tool = call.seconds("tool_duration_ns", unit) if call.has("tool_duration_ns") else 0.0
    return to_columns(source, requests)


def dynamo(source: Source) -> Columns:
    """Read Dynamo's request trace: one event per finished request; other events are skipped."""
    requests: list[ParsedRequest] = []
    unit = source.seconds(1e-3)
    blocks: set[Any] = set()
    other_events = 0
    for record in read_rows(source):
        event = record.row("event") if record.has("event") else record
        if event.values.get("event_type") != "request_end":
            other_events += 1
            continue
        request = event.row("request")
        replay = request.row("replay") if request.has("replay") else None
        prompt = request.tokens("input_tokens") if replay is None else replay.tokens("input_length")
        prefix = () if replay is None else replay.ids("input_sequence_hashes")
        if replay is not None and replay.has("trace_block_size"):
            blocks.add(replay.tokens("trace_block_size"))
        output = request.tokens("output_tokens") if request.has("output_tokens") else None
        context = event.row("agent_context") if event.has("agent_context") else None
        session = None if context is None else context.name("session_id")
        arrival = request.seconds("request_received_ms", unit)
        requests.append(ParsedRequest(record, prompt, output, arrival, session=session, prefix_hashes=prefix))
    if len(blocks) > 1:
        raise record.error("trace_block_size", f"one size in the whole file, not {quote(sorted(blocks))}")
    notes = [f"{other_events} events skipped: not the end of a request"] if other_events else []
    return to_columns(source, requests, block=blocks.pop() if blocks else None, notes=notes)
