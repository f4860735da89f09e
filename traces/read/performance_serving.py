"""What performance_serving's test client leaves behind: a log of what it sent and got back, and a file of results.

The log alone has times of sending. It never says which answer belongs to which sending, so answers are matched by
when they must have been sent: the moment they were logged, less what they took.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from servesim.core import BadInput
from servesim.files.read import shown
from servesim.traces.trace import Columns

from .nested import Found, Row, gathered, rows_of
from .source import Source
from .tokens import BOS

LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) - \S+ - [A-Z]+ - (.*)")
SENT = re.compile(r"poisson random interval time is \d")


class Answer(NamedTuple):
    """One answer in a log."""

    row: Row
    logged: float  # seconds, when the client wrote it down
    took: float  # seconds from sending to the end of the stream

    @property
    def sent(self) -> float:
        """When it must have been sent."""
        return self.logged - self.took


def result(source: Source) -> Columns:
    """A result file: prompts and answers in order of completion, no times of sending."""
    found = [Found(row, *_lengths(row)) for row in rows_of(source)]
    return gathered(source, found, text=True)


def _lengths(row: Row) -> tuple[int, int]:
    return BOS + row.text_tokens("input"), row.text_tokens("resp_text")


def log(source: Source) -> Columns:
    """A log: a request for every answer, at the moment the client sent it."""
    sent, answers = read(source)
    if not sent:
        raise BadInput(f"{source.name}: row 1: no line says when a request was sent")
    source.fixed()
    answers.sort(key=lambda answer: answer.sent)
    arrivals = matched([answer.sent for answer in answers], sent)
    found = [Found(answer.row, *_lengths(answer.row), arrival - sent[0]) for answer, arrival in zip(answers, arrivals)]
    lost = len(sent) - len(answers)
    notes = [f"{lost} of {len(sent)} requests sent have no answer in the log: left out"] if lost > 0 else []
    return gathered(source, found, notes=notes, text=True)


def read(source: Source) -> tuple[list[float], list[Answer]]:
    """Return the moments of sending and the answers of a log, in file order."""
    sent, answers = [], []
    for number, line in enumerate(source.text.split("\n"), 1):
        match = LINE.match(line)
        if match is None:
            continue  # progress bars and what the server's libraries print
        stamp, message = match.groups()
        if SENT.match(message):
            sent.append(_seconds(source, number, stamp))
        elif message.startswith("{'input'"):
            row = Row(source, number, _literal(source, number, message.rstrip()))
            answers.append(Answer(row, _seconds(source, number, stamp), row.seconds("res_time", 1.0)))
    return sent, answers


def _seconds(source: Source, number: int, stamp: str) -> float:
    try:
        moment = datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S,%f")
    except ValueError:
        raise BadInput(f"{source.name}: row {number}: expected a date that exists, got {shown(stamp)}") from None
    return (moment - datetime(1970, 1, 1)).total_seconds()  # local time: only differences are used


def _literal(source: Source, number: int, text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        raise BadInput(f"{source.name}: row {number}: expected a Python dictionary, got {shown(text)}") from None


def matched(wanted: Sequence[float], sent: Sequence[float]) -> list[float]:
    """Return for each wanted moment (rising) the moment of sending nearest to it, in order, none used twice.

    With more answers than sendings (a log cut at the front) the wanted moments stand as they are.
    """
    if len(wanted) > len(sent):
        return list(wanted)
    chosen, k = [], 0
    for i, moment in enumerate(wanted):
        last = len(sent) - (len(wanted) - i)  # those after this must find one too
        while k < last and abs(sent[k + 1] - moment) <= abs(sent[k] - moment):
            k += 1
        chosen.append(sent[k])
        k += 1
    return chosen
