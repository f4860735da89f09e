"""Request times from logs of real runs: CSV files, results of load generators, performance_serving's files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np
from numpy.typing import NDArray
from servesim.core import BadInput
from servesim.files.read import parse_csv, parse_json, read_text
from servesim.traces.read.benchmark_results import read_results
from servesim.traces.read.performance_serving import match_send_times, parse_log
from servesim.traces.read.source import Source

Array = NDArray[np.float64]

# Accepted column names; times are seconds.
INDEX = ("idx", "index")
SENT = ("arrival_s", "arrival")
TTFT = ("ttft_s", "ttft")
E2E = ("e2e_s", "e2e", "e2el", "latency")
FIRST = ("first_token",)  # absolute times, as in requests.csv of servesim
FINISH = ("finish",)


class RequestTimes(NamedTuple):
    """Times of the finished requests."""

    request_index: NDArray[np.int64]  # in send order
    arrival: Optional[Array]  # send time, if the log has it
    ttft: Array
    e2e: Array


def read_times(path: Path, dataset: Optional[Path] = None) -> RequestTimes:
    """Read a log; the format is detected. A performance_serving result file needs the data set that was sent."""
    if not path.is_file():
        raise BadInput(f"{path}: no such log")
    text = read_text(path)
    if text.lstrip()[:1] == "[":
        return from_result(text, path, dataset)
    if text.lstrip()[:1] == "{":
        return from_benchmark(path)
    if " - " in text.split("\n", 1)[0]:
        return from_log(path)
    return from_table(text, path)


def from_benchmark(path: Path) -> RequestTimes:
    """Read the result file of vLLM bench, guidellm or aiperf. Failed requests are not part of its trace."""
    done = [result for result in read_results(Source(path)) if not result.failed]
    if not done:
        raise BadInput(f"{path}: expected at least one finished request, got none")
    arrival, ttft, e2e = (np.array(column) for column in zip(*((r.arrival, r.ttft, r.e2e) for r in done)))
    return RequestTimes(np.arange(len(done)), arrival, ttft, e2e)


def from_table(text: str, path: Path) -> RequestTimes:
    """Read a CSV with latencies, or with absolute times."""
    rows = parse_csv(str(path), text)
    header = list(rows[0]) if rows else []
    sent, ttft, e2e = column(header, SENT), column(header, TTFT), column(header, E2E)
    first, finish = column(header, FIRST), column(header, FINISH)
    if not ((ttft and e2e) or (sent and first and finish)):
        raise BadInput(
            f"{path}: row 1: expected columns {TTFT[0]} and {E2E[0]} (or arrival, first_token and finish), "
            f"got {', '.join(header) or 'nothing'}"
        )
    index_column = column(header, INDEX)
    table = []
    for k, row in enumerate(rows):
        names = (index_column, sent, *((ttft, e2e) if ttft and e2e else (first, finish)))
        numbers = [parse_number(row.get(name), f"{path}: row {k + 2}: {name}") if name else None for name in names]
        if numbers[2] is None or numbers[3] is None:
            continue  # not finished
        table.append((k if numbers[0] is None else int(numbers[0]), *numbers[1:]))
    if not table:
        raise BadInput(f"{path}: expected at least one finished request, got none")
    index, arrival, first_times, end_times = zip(*table)
    arrivals = None if sent is None else np.array(arrival, float)
    start = np.zeros(len(table)) if ttft or arrivals is None else arrivals
    latencies = (np.array(times, float) - start for times in (first_times, end_times))
    return RequestTimes(np.array(index, np.int64), arrivals, *latencies)


def column(header: Sequence[str], names: Sequence[str]) -> Optional[str]:
    """Return the first of these columns that the table has."""
    return next((name for name in names if name in header), None)


def parse_number(text: Optional[str], where: str) -> Optional[float]:
    """Parse a number; None if the cell is empty."""
    if text is None or not text.strip():
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise BadInput(f"{where}: expected a number, got {text[:40]!r}")
    return value


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
    return RequestTimes(np.array(index, np.int64), np.array(arrival), np.array(ttft), np.array(e2e))


def from_result(text: str, path: Path, dataset: Optional[Path]) -> RequestTimes:
    """Read performance_serving's result file. It has no order: the index of a request is that of its prompt."""
    if dataset is None:
        raise BadInput(
            f"{path}: a result file does not record the request order; set `dataset` to the data set that was sent"
        )
    index_of = prompt_index(dataset)
    table = []
    try:
        for response in parse_json(path, text):
            k = index_of.get(str(response["input"]))
            if k is not None:
                table.append((k, float(response["first_token_time"]), float(response["res_time"])))
    except BadInput:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{path}: expected responses with input, first_token_time, res_time: {error!r}") from None
    if not table:
        raise BadInput(f"{path}: no prompt of this file is in {dataset}")
    index, ttft, e2e = zip(*sorted(table))
    return RequestTimes(np.array(index, np.int64), None, np.array(ttft), np.array(e2e))


def prompt_index(dataset: Path) -> Mapping[str, int]:
    """Return the first index of each prompt in an Alpaca data set; prompts are built as the client builds them."""
    try:
        records: Sequence[Mapping[str, Any]] = parse_json(dataset, read_text(dataset))
        prompts = [f"{r['instruction']}:{r['input']}" if r.get("input") else str(r["instruction"]) for r in records]
    except BadInput:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{dataset}: expected a list of instruction, input, output: {error!r}") from None
    return {prompt: k for k, prompt in reversed(list(enumerate(prompts)))}
