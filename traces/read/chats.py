"""Formats that hold text or nested turns: ShareGPT, vLLM custom, aiperf, evalscope, LLMServingSim, Dynamo."""

from __future__ import annotations

from typing import Any, Optional

from servesim.files.read import shown
from servesim.traces.trace import Columns

from .columns import date
from .nested import Found, Row, gathered, rows_of
from .source import Source

VLLM_OUTPUT = 256  # what `vllm bench serve` asks for where a custom data set names no length
MOONCAKE_BLOCK = 512


def sharegpt(source: Source) -> Columns:
    """The first two turns of each conversation: what was asked and what was answered."""
    found = []
    for row in rows_of(source):
        turns = row.values.get("conversations")
        if type(turns) is not list:
            raise row.bad("conversations", "a list of turns")
        if len(turns) < 2:
            found.append(Found(row, 0, 0, unusable="fewer than two turns"))
            continue
        asked, answered = row.rows("conversations")[:2]
        found.append(Found(row, asked.text_tokens("value"), answered.text_tokens("value")))
    return gathered(source, found, text=True)


def custom(source: Source) -> Columns:
    """A prompt a line, with the output tokens to ask for."""
    found, unknown = [], 0
    for row in rows_of(source):
        known = row.has("output_tokens")
        unknown += not known
        found.append(Found(row, row.text_tokens("prompt"), row.tokens("output_tokens") if known else VLLM_OUTPUT))
    notes = [f"{unknown} rows name no output_tokens: {VLLM_OUTPUT} taken, as vLLM does"] if unknown else []
    return gathered(source, found, notes=notes, text=True)


def evalscope(source: Source) -> Columns:
    """A request body a line with the moment it was sent, in seconds or as a date."""
    found: list[Found] = []
    unit = source.seconds(1.0)
    for row in rows_of(source):
        prompt, limit = row.row("body").body()
        output = row.tokens("completion_tokens") if row.has("completion_tokens") else limit
        found.append(Found(row, prompt, output, _moment(row, unit), limit or None))
    return gathered(source, found, text=True)


def _moment(row: Row, unit: float) -> float:
    """Return seconds since 1970, or since whatever the file counts from."""
    stamp = row.values.get("timestamp")
    if type(stamp) is not str:
        return row.seconds("timestamp", unit)
    moment = date(stamp)
    if moment is None:
        raise row.bad("timestamp", "a number or a date as 2025-01-01T00:00:00Z")
    return moment


def aiperf(source: Source) -> Columns:
    """Mooncake rows in their extended form, and aiperf's own: sessions whose next turn follows the last by a delay."""
    found: list[Found] = []
    unit = source.seconds(1e-3)
    last: dict[Optional[str], int] = {}  # session -> its latest request
    context: dict[Optional[str], int] = {}  # session -> tokens of what was said so far
    for row in rows_of(source):
        session = row.name("session_id")
        if row.has("turns"):
            # A conversation in one row: each turn is sent with all that was said before.
            session = session if session is not None else f"row-{row.number}"
            for turn in row.rows("turns"):
                _turn(found, turn, session, last, context, unit, grows=True)
        else:
            _turn(found, row, session, last, context, unit, grows=row.values.get("message_mode") == "delta")
    text = not all("input_length" in record for record in source.records)
    block = MOONCAKE_BLOCK if any(request.prefix for request in found) else None
    return gathered(source, found, block, text=text)


def _turn(
    found: list[Found],
    row: Row,
    session: Optional[str],
    last: dict[Optional[str], int],
    context: dict[Optional[str], int],
    unit: float,
    grows: bool,
) -> None:
    prompt, output = _aiperf_lengths(row)
    if grows:
        prompt += context.get(session, 0)
        context[session] = prompt + (output or 0)
    arrival = row.seconds("timestamp", unit) if row.has("timestamp") else None
    delay = next((row.seconds(key, unit) for key in ("delay", "delay_ms") if row.has(key)), 0.0)
    after = last.get(session) if session is not None and arrival is None else None
    priority = row.row("extra").values.get("priority", 0) if row.has("extra") else row.values.get("priority", 0)
    priority = priority if type(priority) is int else 0
    delay = delay if after is not None else 0.0
    found.append(Found(row, prompt, output, arrival, None, priority, session, row.ids("hash_ids"), after, delay))
    if session is not None:
        last[session] = len(found) - 1


def _aiperf_lengths(row: Row) -> tuple[int, Optional[int]]:
    """Return prompt and output: of the four ways to give a prompt one must be there."""
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
    raise row.bad("input_length", "one of input_length, text_input, messages, payload, text, texts")


def llmservingsim(source: Source) -> Columns:
    """Single requests, and sessions whose next call follows the last by the time its tool takes."""
    found: list[Found] = []
    unit = source.seconds(1e-9)
    for row in rows_of(source):
        arrival, session = row.seconds("arrival_time_ns", unit), row.name("session_id")
        if not row.has("sub_requests"):
            found.append(Found(row, row.tokens("input_toks"), row.tokens("output_toks"), arrival, session=session))
            continue
        after, tool = None, 0.0
        for call in row.rows("sub_requests"):
            prompt, output = call.tokens("input_toks"), call.tokens("output_toks")
            start = arrival if after is None else None
            found.append(Found(call, prompt, output, start, session=session, after=after, delay=tool))
            after = len(found) - 1
            tool = call.seconds("tool_duration_ns", unit) if call.has("tool_duration_ns") else 0.0
    return gathered(source, found)


def dynamo(source: Source) -> Columns:
    """Dynamo's request trace: what a front end wrote down when a request ended; its tool events are passed over."""
    found: list[Found] = []
    unit = source.seconds(1e-3)
    blocks: set[Any] = set()
    others = 0
    for record in rows_of(source):
        event = record.row("event") if record.has("event") else record
        if event.values.get("event_type") != "request_end":
            others += 1
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
        found.append(Found(record, prompt, output, arrival, session=session, prefix=prefix))
    if len(blocks) > 1:
        raise record.bad("trace_block_size", f"one size in the whole file, not {shown(sorted(blocks))}")
    notes = [f"{others} events are not the end of a request"] if others else []
    return gathered(source, found, block=blocks.pop() if blocks else None, notes=notes)
