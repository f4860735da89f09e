"""Files of performance_serving's test client: its log of sent requests and responses, and its result file.

Only the log has send times. It does not say which response belongs to which request, so responses are matched by
their estimated send time: log time minus duration.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from servesim.core import BadInput
from servesim.files.read import quote
from servesim.traces.trace import Columns

from .nested import ParsedRequest, Row, read_rows, to_columns
from .source import Source
from .tokens import BOS

LOG_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) - \S+ - [A-Z]+ - (.*)")
SEND_MESSAGE = re.compile(r"poisson random interval time is \d")


class Response(NamedTuple):
    """One response in a log."""

    row: Row
    logged: float  # seconds, when the client logged it
    duration: float  # seconds from sending to the end of the stream

    @property
    def sent(self) -> float:
        """Estimated send time."""
        return self.logged - self.duration


def read_result(source: Source) -> Columns:
    """Read a result file: prompts and responses in order of completion, without send times."""
    requests = [ParsedRequest(row, *_lengths(row)) for row in read_rows(source)]
    return to_columns(source, requests, text=True)


def _lengths(row: Row) -> tuple[int, int]:
    return BOS + row.text_tokens("input"), row.text_tokens("resp_text")


def read_log(source: Source) -> Columns:
    """Read a log: one request per response, at its send time."""
    sent, responses = parse_log(source)
    if not sent:
        raise BadInput(f"{source.name}: row 1: expected lines with send times, found none")
    source.reject_columns()
    responses.sort(key=lambda response: response.sent)
    arrivals = match_send_times([response.sent for response in responses], sent)
    requests = [
        ParsedRequest(response.row, *_lengths(response.row), arrival - sent[0])
        for response, arrival in zip(responses, arrivals)
    ]
    unanswered = len(sent) - len(responses)
    notes = [f"{unanswered} of {len(sent)} requests have no response in the log: skipped"] if unanswered > 0 else []
    return to_columns(source, requests, notes=notes, text=True)


def parse_log(source: Source) -> tuple[list[float], list[Response]]:
    """Return the send times and the responses of a log, in file order."""
    sent, responses = [], []
    for number, line in enumerate(source.text.split("\n"), 1):
        match = LOG_LINE.match(line)
        if match is None:
            continue  # progress bars and output of the server's libraries
        stamp, message = match.groups()
        if SEND_MESSAGE.match(message):
            sent.append(_seconds(source, number, stamp))
        elif message.startswith("{'input'"):
            row = Row(source, number, _literal(source, number, message.rstrip()))
            responses.append(Response(row, _seconds(source, number, stamp), row.seconds("res_time", 1.0)))
    return sent, responses


def _seconds(source: Source, number: int, stamp: str) -> float:
    try:
        time = datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S,%f")
    except ValueError:
        raise BadInput(f"{source.name}: row {number}: expected a date that exists, got {quote(stamp)}") from None
    return (time - datetime(1970, 1, 1)).total_seconds()  # local time: only differences are used


def _literal(source: Source, number: int, text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        raise BadInput(f"{source.name}: row {number}: expected a Python dictionary, got {quote(text)}") from None


def match_send_times(estimates: Sequence[float], sent: Sequence[float]) -> list[float]:
    """Return the nearest send time for each estimate (ascending), in order, each send time used at most once.

    With more responses than send times (a log without its start), the estimates are returned unchanged.
    """
    if len(estimates) > len(sent):
        return list(estimates)
    chosen, k = [], 0
    for i, estimate in enumerate(estimates):
        last = len(sent) - (len(estimates) - i)  # leave one send time for each later estimate
        while k < last and abs(sent[k + 1] - estimate) <= abs(sent[k] - estimate):
            k += 1
        chosen.append(sent[k])
        k += 1
    return chosen
