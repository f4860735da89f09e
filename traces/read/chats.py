"""Formats that hold text or nested turns: ShareGPT, vLLM custom, aiperf, evalscope, LLMServingSim, Dynamo."""

from __future__ import annotations

from typing import Any, Optional

from servesim.core.content import content_of_pieces
from servesim.files.read import quote
from servesim.traces.contents import CONVERSATION_NOTE, ID_SIZES, Pieces, TokenTexts, own_answer, own_text
from servesim.traces.trace import Columns

from .columns import parse_date
from .nested import ParsedRequest, Row, read_rows, to_columns, total_tokens
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
        text = question.text_piece("value")
        requests.append(ParsedRequest(row, text[1], answer.text_piece("value")[1], content=content_of_pieces([text])))
    return to_columns(source, requests, text=True)


def custom(source: Source) -> Columns:
    """Read a vLLM custom data set: one prompt per line, optionally with output tokens."""
    requests, missing = [], 0
    for row in read_rows(source):
        has_output = row.has("output_tokens")
        missing += not has_output
        output = row.tokens("output_tokens") if has_output else VLLM_DEFAULT_OUTPUT
        text = row.text_piece("prompt")
        requests.append(ParsedRequest(row, text[1], output, content=content_of_pieces([text])))
    notes = [f"{missing} rows have no output_tokens: {VLLM_DEFAULT_OUTPUT} used, as in vLLM"] if missing else []
    return to_columns(source, requests, notes=notes, text=True)


def evalscope(source: Source) -> Columns:
    """Read evalscope: one request body per line, with its send time in seconds or as a date."""
    requests: list[ParsedRequest] = []
    unit = source.seconds(1.0)
    for row in read_rows(source):
        pieces, limit = row.row("body").body()
        output = row.tokens("completion_tokens") if row.has("completion_tokens") else limit
        arrival, content = _timestamp(row, unit), content_of_pieces(pieces)
        requests.append(ParsedRequest(row, total_tokens(pieces), output, arrival, limit or None, content=content))
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
    last: dict[str, int] = {}  # session -> index of its last request
    conversation = False
    for row in read_rows(source):
        session = row.name("session_id")
        if row.has("turns"):
            # A conversation in one row: the prompt of a turn includes all earlier turns.
            session = session if session is not None else f"row-{row.number}"
            for turn in row.rows("turns"):
                _add_turn(requests, turn, session, last, unit, cumulative=True)
            conversation = True
        else:
            delta = row.values.get("message_mode") == "delta"
            _add_turn(requests, row, session, last, unit, delta)
            conversation |= delta
    text = not all("input_length" in record for record in source.records)
    return to_columns(source, requests, notes=[CONVERSATION_NOTE] if conversation else [], text=text)


def _add_turn(
    requests: list[ParsedRequest], row: Row, session: Optional[str], last: dict[str, int], unit: float, cumulative: bool
) -> None:
    id, previous = len(requests), None if session is None else last.get(session)
    pieces, output = _aiperf_prompt(row, id)
    prefix = row.ids("hash_ids")
    if cumulative and previous is not None:
        before = requests[previous]
        earlier = before.content.pieces if before.content else [(own_text(previous), before.prompt)]
        pieces = [*earlier, (own_answer(previous), before.output or 0), *pieces]
    content = None if prefix else content_of_pieces(pieces, own_answer(id) if cumulative else None)
    arrival = row.seconds("timestamp", unit) if row.has("timestamp") else None
    delay = next((row.seconds(key, unit) for key in ("delay", "delay_ms") if row.has(key)), 0.0)
    after = previous if arrival is None else None
    priority = row.row("extra").values.get("priority", 0) if row.has("extra") else row.values.get("priority", 0)
    priority = priority if type(priority) is int else 0
    delay = delay if after is not None else 0.0
    prompt = total_tokens(pieces)
    requests.append(ParsedRequest(row, prompt, output, arrival, None, priority, session, prefix, after, delay, content))
    if session is not None:
        last[session] = id


def _aiperf_prompt(row: Row, id: int) -> tuple[Pieces, Optional[int]]:
    """Return prompt and output length; the row must hold one of the known prompt keys."""
    output = row.tokens("output_length") if row.has("output_length") else None
    if row.has("input_length"):
        return [(own_text(id), row.tokens("input_length"))], output
    if row.has("payload"):
        prompt, limit = row.row("payload").body()
        return prompt, limit if output is None else output
    if row.has("messages"):
        return row.message_pieces(), output
    for key in ("text_input", "text", "texts"):
        if row.has(key):
            return [row.text_piece(key)], output
    raise row.error("input_length", "one of input_length, text_input, messages, payload, text, texts")


def llmservingsim(source: Source) -> Columns:
    """Read LLMServingSim: single requests, and sessions whose calls follow each other after the tool time."""
    requests: list[ParsedRequest] = []
    texts = TokenTexts()
    unit = source.seconds(1e-9)
    for row in read_rows(source):
        arrival, session = row.seconds("arrival_time_ns", unit), row.name("session_id")
        if not row.has("sub_requests"):
            requests.append(_llmservingsim_call(row, texts, arrival=arrival, session=session))
            continue
        after, tool = None, 0.0
        for call in row.rows("sub_requests"):
            start = arrival if after is None else None
            request = _llmservingsim_call(call, texts, arrival=start, session=session, follows=after, think_time=tool)
            requests.append(request)
            after = len(requests) - 1
            tool = call.seconds("tool_duration_ns", unit) if call.has("tool_duration_ns") else 0.0
    return to_columns(source, requests)


def _llmservingsim_call(row: Row, texts: TokenTexts, **fields: Any) -> ParsedRequest:
    """Return one call; its token ids, if the file has them, are its content."""
    prompt, output = row.tokens("input_toks"), row.tokens("output_toks")
    tokens, answer = row.ids("input_tok_ids"), row.ids("output_tok_ids")
    if not tokens:
        return ParsedRequest(row, prompt, output, **fields)
    if len(tokens) != prompt or len(answer) not in (0, output):
        reason = "token ids do not fit the length: expected one per token"
        return ParsedRequest(row, prompt, output, **fields, unusable=reason)
    return ParsedRequest(row, prompt, output, **fields, content=texts.add(tokens, answer))


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
            blocks.add(replay.tokens("trace_block_size", minimum=1))
        output = request.tokens("output_tokens") if request.has("output_tokens") else None
        context = event.row("agent_context") if event.has("agent_context") else None
        session = None if context is None else context.name("session_id")
        arrival = request.seconds("request_received_ms", unit)
        requests.append(ParsedRequest(record, prompt, output, arrival, session=session, hash_ids=prefix))
    if len(blocks) > 1:
        raise record.error("trace_block_size", f"one size in the whole file, not {quote(sorted(blocks))}")
    notes = [f"{other_events} events skipped: not the end of a request"] if other_events else []
    return to_columns(source, requests, tuple(blocks) or ID_SIZES, notes)
