"""Result files of load generators, request by request: detection, guidellm, aiperf and performance_serving."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, Optional

from servesim.core import BadInput
from servesim.files.read import quote
from servesim.traces.trace import Columns

from .column_results import RequestResult, Results, choose, numbers, read_sglang, read_vllm
from .nested import ParsedRequest, Row, read_rows, to_columns
from .source import Source
from .tokens import BOS


def read_guidellm(source: Source, benchmark: Optional[int] = None) -> Results:
    """Read the JSON report of guidellm. It may hold several benchmarks; `benchmark` chooses one, counted from 0."""
    [report] = read_rows(source)[:1]
    groups = choose(source, report.rows("benchmarks"), benchmark).row("requests")
    kinds = {"successful": "", "errored": "errored", "incomplete": "incomplete"}
    return Results([
        guidellm_request(row, failed)
        for kind, failed in kinds.items()
        if groups.values.get(kind)
        for row in groups.rows(kind)
    ])  # fmt: skip


def guidellm_request(row: Row, failed: str = "") -> RequestResult:
    """Return one request; the names of its times differ between versions."""
    id, start = row.name("request_id") or "", known_seconds(row, "request_start_time", "start_time")
    if failed:
        prompt, output = (row.tokens(key) if row.has(key) else 0 for key in ("prompt_tokens", "output_tokens"))
        return RequestResult(id, start, prompt, output, failed=failed)
    if row.has("request_latency"):
        e2e = row.seconds("request_latency", 1.0)
    else:
        e2e = known_seconds(row, "request_end_time", "end_time") - start
    first = row.seconds("time_to_first_token_ms", 1e-3)
    return RequestResult(id, start, row.tokens("prompt_tokens"), row.tokens("output_tokens"), first, e2e)


def read_aiperf(source: Source, benchmark: Optional[int] = None) -> Results:
    """Read aiperf's profile_export.jsonl: one record per request."""
    return Results([aiperf_request(row) for row in read_rows(source)])


def aiperf_request(row: Row) -> RequestResult:
    """Return one record. Latencies are milliseconds, stamps are nanoseconds since 1970."""
    about, metrics = row.row("metadata"), row.row("metrics")
    id = about.name("x_request_id") or about.name("session_num") or ""
    start = about.seconds("request_start_ns", 1e-9)
    values = {key: value.get("value") for key, value in metrics.values.items() if isinstance(value, dict)}
    metric = Row(row.source, row.number, values, "metrics")
    if row.has("error") or about.values.get("was_cancelled"):
        error = row.values.get("error")
        reason = str(error.get("type"))[:40] if isinstance(error, dict) else "cancelled"
        return RequestResult(id, start, metric.tokens("error_isl") if metric.has("error_isl") else 0, 0, failed=reason)
    output = "output_sequence_length" if metric.has("output_sequence_length") else "output_token_count"
    gaps = [gap / 1e3 for gap in numbers(metric, "inter_chunk_latency")] if metric.has("inter_chunk_latency") else []
    ttft, e2e = (metric.seconds(key, 1e-3) for key in ("time_to_first_token", "request_latency"))
    return RequestResult(id, start, metric.tokens("input_sequence_length"), metric.tokens(output), ttft, e2e, gaps)


def known_seconds(row: Row, *keys: str) -> float:
    """Return the first of these times that the row has."""
    return row.seconds(next((key for key in keys if row.has(key)), keys[0]), 1.0)


RESULTS: Mapping[str, tuple[set[str], Callable[[Source, Optional[int]], Results]]] = {  # keys of the file, reader
    "sglang-bench": ({"request_rate", "mean_e2e_latency_ms"}, read_sglang),
    "vllm-bench": ({"input_lens", "output_lens", "ttfts"}, read_vllm),
    "guidellm-results": ({"benchmarks"}, read_guidellm),
    "aiperf-results": ({"metadata", "metrics"}, read_aiperf),
}


def results_format(source: Source) -> Optional[str]:
    """Return which load generator wrote a file; None: another format."""
    if source.kind != "json":
        return None
    return next((name for name, (keys, _) in RESULTS.items() if source.header >= keys), None)


def read_results(source: Source, benchmark: Optional[int] = None) -> Results:
    """Return the requests of a result file, counted from the first one that was sent."""
    format = results_format(source)
    if format is None:
        raise BadInput(
            f"{source.name}: expected a result file of `vllm bench serve --save-detailed`, sglang.bench_serving, "
            "guidellm or aiperf (profile_export.jsonl)"
        )
    results = RESULTS[format][1](source, benchmark)
    requests = sorted(results.requests, key=lambda request: request.arrival)
    start = requests[0].arrival if requests else 0.0
    # Turns of a conversation may share an id, and a request may have none.
    unique = len({request.id for request in requests} | {""}) > len(requests)
    requests = [
        request._replace(arrival=request.arrival - start, id=request.id if unique else str(k))
        for k, request in enumerate(requests)
    ]
    return results._replace(requests=requests)


def read_columns(source: Source) -> Columns:
    """Read a result file as a trace: the requests that were sent, without those that failed."""
    source.reject_columns()
    results = read_results(source)
    requests = results.requests
    return Columns(
        [request.prompt for request in requests],
        [request.output for request in requests],
        [request.arrival for request in requests],
        [request.id for request in requests],
        unusable={k: f"failed: {request.failed}" for k, request in enumerate(requests) if request.failed},
        notes=list(results.notes),
    )


# performance_serving: only its log has send times. It does not say which response belongs to which request, so they
# are matched by the estimated send time: log time minus duration.
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
    return BOS + row.text_piece("input")[1], row.text_piece("resp_text")[1]


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
