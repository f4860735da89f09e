"""When answers came, as a log of a real run tells it: one request a row, in any of the forms such logs have."""

from __future__ import annotations

import csv
import gzip
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np
from numpy.typing import NDArray
from servesim.core import BadInput
from servesim.traces.read.performance_serving import matched, read
from servesim.traces.read.source import Source

Array = NDArray[np.float64]

# What a column may be called; times are seconds.
INDEX = ("idx", "index")
SENT = ("arrival_s", "arrival")
TTFT = ("ttft_s", "ttft")
E2E = ("e2e_s", "e2e", "e2el", "latency")
FIRST = ("first_token",)  # instants, as in our own requests.csv
FINISH = ("finish",)


class Times(NamedTuple):
    """Times of the requests that were answered."""

    which: NDArray[np.int64]  # which request, counted in the order they were sent
    arrival: Optional[Array]  # when it was sent, if the log says so
    ttft: Array
    e2e: Array


def read_times(path: Path, dataset: Optional[Path] = None) -> Times:
    """Read a log, by what it looks like; a performance_serving result file needs the data set it was made with."""
    if not path.is_file():
        raise BadInput(f"{path}: no such log")
    text = text_of(path)
    if text.lstrip()[:1] == "[":
        return from_result(text, path, dataset)
    if " - " in text.split("\n", 1)[0]:
        return from_log(path)
    return from_table(text, path)


def text_of(path: Path) -> str:
    """Return a file's text, unpacked if need be."""
    try:
        raw = path.read_bytes()
        return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: cannot be read: {error}") from None


def from_table(text: str, path: Path) -> Times:
    """Read a CSV: durations since each was sent, or instants."""
    rows = list(csv.DictReader(text.splitlines()))
    header = list(rows[0]) if rows else []
    sent, ttft, e2e = column(header, SENT), column(header, TTFT), column(header, E2E)
    first, finish = column(header, FIRST), column(header, FINISH)
    if not ((ttft and e2e) or (sent and first and finish)):
        raise BadInput(
            f"{path}: row 1: expected columns {TTFT[0]} and {E2E[0]} (or arrival, first_token and finish), "
            f"got {', '.join(header) or 'nothing'}"
        )
    place = column(header, INDEX)
    table = []
    for k, row in enumerate(rows):
        wanted = (place, sent, *((ttft, e2e) if ttft and e2e else (first, finish)))
        numbers = [number(row.get(name), f"{path}: row {k + 2}: {name}") if name else None for name in wanted]
        if numbers[2] is None or numbers[3] is None:
            continue  # never answered
        table.append((k if numbers[0] is None else int(numbers[0]), *numbers[1:]))
    if not table:
        raise BadInput(f"{path}: expected at least one answered request, got none")
    index, arrival, begin, end = zip(*table)
    sending = None if sent is None else np.array(arrival, float)
    start = np.zeros(len(table)) if ttft or sending is None else sending
    return Times(np.array(index, np.int64), sending, np.array(begin, float) - start, np.array(end, float) - start)


def column(header: Sequence[str], names: Sequence[str]) -> Optional[str]:
    """Return the first of these columns that the table has."""
    return next((name for name in names if name in header), None)


def number(text: Optional[str], where: str) -> Optional[float]:
    """Return a number, or None where the cell is empty."""
    if text is None or not text.strip():
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise BadInput(f"{where}: expected a number, got {text[:40]!r}")
    return value


def from_log(path: Path) -> Times:
    """Read performance_serving's log: the k-th sending is request k, an answer belongs to the sending nearest to it."""
    sent, answers = read(Source(path))
    if not sent or not answers:
        raise BadInput(f"{path}: expected lines of sendings and of answers, got {len(sent)} and {len(answers)}")
    answers.sort(key=lambda answer: answer.sent)
    place = {moment: k for k, moment in enumerate(sent)}
    chosen = matched([answer.sent for answer in answers], sent)
    timed = [(answer, moment) for answer, moment in zip(answers, chosen) if answer.row.has("first_token_time")]
    firsts = [answer.row.seconds("first_token_time", 1.0) for answer, _ in timed]
    table = [
        (place[moment], moment - sent[0], first, answer.took)
        for first, (answer, moment) in zip(firsts, timed)
        if moment in place
    ]
    if not table:
        raise BadInput(f"{path}: expected answers with a first_token_time, got none")
    index, arrival, ttft, e2e = zip(*table)
    return Times(np.array(index, np.int64), np.array(arrival), np.array(ttft), np.array(e2e))


def from_result(text: str, path: Path, dataset: Optional[Path]) -> Times:
    """Read performance_serving's result file: no order, no sendings; a prompt's place in the data set is its index."""
    if dataset is None:
        raise BadInput(f"{path}: a result file has no order: name the data set its prompts are of, as `dataset`")
    places = prompts(dataset)
    table = []
    try:
        for answer in json.loads(text):
            place = places.get(str(answer["input"]))
            if place is not None:
                table.append((place, float(answer["first_token_time"]), float(answer["res_time"])))
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{path}: expected answers with input, first_token_time, res_time: {error!r}") from None
    if not table:
        raise BadInput(f"{path}: none of its prompts is in {dataset}")
    index, ttft, e2e = zip(*sorted(table))
    return Times(np.array(index, np.int64), None, np.array(ttft), np.array(e2e))


def prompts(dataset: Path) -> Mapping[str, int]:
    """Return where each prompt of an Alpaca data set first stands, put together as the client does."""
    try:
        records: Sequence[Mapping[str, Any]] = json.loads(text_of(dataset))
        whole = [f"{r['instruction']}:{r['input']}" if r.get("input") else str(r["instruction"]) for r in records]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{dataset}: expected a list of instruction, input, output: {error!r}") from None
    return {prompt: k for k, prompt in reversed(list(enumerate(whole)))}
