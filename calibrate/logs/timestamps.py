"""Request times from logs of real runs: CSV files, results of load generators, performance_serving's log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from servesim.core import BadInput
from servesim.files.csv_rows import CsvRow, parse_csv
from servesim.files.read import read_text
from servesim.traces.read.benchmark_results import match_send_times, parse_log, read_results
from servesim.traces.read.source import Source

Array = NDArray[np.float64]

# Accepted column names, and their unit in seconds.
INDEX = ("idx", "index")
SENT = {"arrival_s": 1.0, "arrival": 1.0, "arrival_ms": 1e-3}
TTFT = {"ttft_s": 1.0, "ttft": 1.0, "ttft_ms": 1e-3}
E2E = {"e2e_s": 1.0, "e2e": 1.0, "e2el": 1.0, "latency": 1.0, "e2e_ms": 1e-3, "e2el_ms": 1e-3, "latency_ms": 1e-3}
FIRST = {"first_token": 1.0}  # absolute times, as in requests.csv of servesim
FINISH = {"finish": 1.0}
ROUNDING_S = 0.01  # a log may round the columns of one request differently


class RequestTimes(NamedTuple):
    """Times of the finished requests."""

    request_index: NDArray[np.int64]  # in send order
    arrivals: Mapping[int, float]  # send times by request index, if the log has them; also of unfinished requests
    ttft: Array
    e2e: Array
    figures: Mapping[str, float] = {}  # means and quantiles instead, if single requests cannot be compared


def read_times(path: Path) -> RequestTimes:
    """Read a log; the format is detected."""
    if not path.is_file():
        raise BadInput(f"{path}: no such log")
    text = read_text(path)
    if text.lstrip()[:1] == "{":
        return from_benchmark(path)
    if " - " in text.split("\n", 1)[0]:
        return from_log(path)
    return from_table(text, path)


def from_benchmark(path: Path) -> RequestTimes:
    """Read the result file of a load generator. Failed requests are not part of its trace."""
    results = read_results(Source(path))
    done = [result for result in results.requests if not result.failed]
    if not done:
        raise BadInput(f"{path}: expected at least one finished request, got none")
    if results.figures:  # the send times or the lengths are drawn
        return RequestTimes(np.empty(0, np.int64), {}, np.empty(0), np.empty(0), results.figures)
    arrival, ttft, e2e = (np.array(column) for column in zip(*((r.arrival, r.ttft, r.e2e) for r in done)))
    return RequestTimes(np.arange(len(done)), dict(enumerate(arrival)), ttft, e2e)


def from_table(text: str, path: Path) -> RequestTimes:
    """Read a CSV with latencies, or with absolute times. Without an index, requests are numbered by send time."""
    rows = parse_csv(str(path), text)
    if not rows:
        raise BadInput(f"{path}: expected a header and at least one request, got {text[:40].strip()!r}")
    sent, first, end = (column(rows, names) for names in (SENT, TTFT, E2E))
    starts = [0.0] * len(rows)
    if first is None or end is None:
        first, end, starts = column(rows, FIRST), column(rows, FINISH), sent
    if first is None or end is None or starts is None:
        raise BadInput(
            f"{path}: row 1: expected columns ttft_s and e2e_s (or arrival, first_token and finish), "
            f"got {', '.join(rows[0].cells)}"
        )
    index = request_indices(rows, sent or [0.0] * len(rows))
    finished = []
    for row, k, start, one, last in zip(rows, index, starts, first, end):
        if one is None or last is None:  # it did not finish
            continue
        if one < start - ROUNDING_S or last < one - ROUNDING_S:
            times = f"{one:g} s, {last:g} s, sent at {start:g} s"
            raise BadInput(f"{row.where}: expected a first token after the send time and an end after it, got {times}")
        finished.append((k, max(0.0, one - start), max(0.0, last - start)))
    if not finished:
        raise BadInput(f"{path}: expected at least one finished request, got none")
    request_index, ttft, e2e = zip(*finished)
    return RequestTimes(np.array(request_index, np.int64), dict(zip(index, sent or ())), np.array(ttft), np.array(e2e))


def column(rows: Sequence[CsvRow], names: Mapping[str, float]) -> Any:
    """Return the first of these columns that a table has, in seconds, None if it has none.

    A latency is None if its cell is empty; a send time must not be.
    """
    name = next((name for name in names if name in rows[0].cells), None)
    if name is None:
        return None
    return [None if names is not SENT and not row[name].strip() else row.number(name) * names[name] for row in rows]


def request_indices(rows: Sequence[CsvRow], sent: Sequence[float]) -> list[int]:
    """Return the index of every request: of the table, or its place in the order of the send times."""
    name = next((name for name in INDEX if name in rows[0].cells), None)
    if name is None:
        order = sorted(range(len(sent)), key=sent.__getitem__)
        return sorted(range(len(sent)), key=order.__getitem__)
    index = [row.whole(name) for row in rows]
    seen: set[int] = set()
    for row, k in zip(rows, index):
        if k in seen:
            raise BadInput(f"{row.where}: expected every index once, got {k} again")
        seen.add(k)
    return index


def from_log(path: Path) -> RequestTimes:
    """Read performance_serving's log. The k-th send line is request k; a response belongs to the nearest send time."""
    sent, responses = parse_log(Source(path))
    if not sent or not responses:
        raise BadInput(f"{path}: expected send lines and response lines, got {len(sent)} and {len(responses)}")
    responses.sort(key=lambda response: response.sent)
    index_at = {time: k for k, time in enumerate(sent)}
    send_times = match_send_times([response.sent for response in responses], sent)
    timed = [(response, time) for response, time in zip(responses, send_times) if response.row.has("first_token_time")]
    firsts = [response.row.seconds("first_token_time", 1.0) for response, _ in timed]
    table = [
        (index_at[time], time - sent[0], first, response.duration)
        for first, (response, time) in zip(firsts, timed)
        if time in index_at
    ]
    if not table:
        raise BadInput(f"{path}: expected responses with a first_token_time, got none")
    index, arrival, ttft, e2e = zip(*table)
    return RequestTimes(np.array(index, np.int64), dict(zip(index, arrival)), np.array(ttft), np.array(e2e))
