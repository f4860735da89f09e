"""Result files with one list per field, or only a summary: `vllm bench serve` and `sglang.bench_serving`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from heapq import heapify, heapreplace
from typing import Any, NamedTuple, Optional

import numpy as np
from servesim.core import BadInput
from servesim.core.limits import MAX_INT, MAX_RATE, MAX_REQUESTS, MIN_RATE
from servesim.files.read import quote
from servesim.traces.trace import stream

from .nested import Row, read_rows
from .source import Source, Table

KEYS = ("input_lens", "output_lens", "ttfts", "itls")
NO_RATE = ("inf", "Infinity", math.inf)  # requests are sent at once, or as `max_concurrency` lets them
SGLANG_LATENCIES = {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "e2el": "e2e_latency"}
SGLANG_FIGURES = {
    **{f"{kind}_{ours}_ms": f"{kind}_{theirs}_ms"
       for ours, theirs in SGLANG_LATENCIES.items() for kind in ("mean", "median", "std", "p95", "p99")},
    "duration": "duration", "makespan": "duration", "completed": "completed",
    "total_input_tokens": "total_input_tokens", "total_output_tokens": "total_output_tokens",
    "request_throughput": "request_throughput", "output_throughput": "output_throughput",
    "total_token_throughput": "total_throughput",
}  # fmt: skip


class RequestResult(NamedTuple):
    """The measured times of one request, in seconds."""

    id: str
    arrival: float  # when the client sent it
    prompt: int
    output: int
    ttft: float = 0.0
    e2e: float = 0.0
    gaps: Sequence[float] = ()  # between tokens, if the file has them
    failed: str = ""  # reason; then the times are unknown


class Results(NamedTuple):
    """The content of a result file."""

    requests: list[RequestResult]
    figures: Mapping[str, float] = {}  # metrics that the file reports, if single requests cannot be compared
    is_summary: bool = False  # the file has no single requests: their lengths are drawn, their latencies unknown
    notes: Sequence[str] = ()  # assumptions, for the user


def read_vllm(source: Source, benchmark: Optional[int] = None) -> Results:
    """Read the JSON file of `vllm bench serve --save-result --save-detailed`."""
    [row] = read_rows(source)[:1]
    requests = column_requests(row, "--save-detailed")
    return Results([request._replace(arrival=time) for request, time in zip(requests, vllm_starts(row, requests))])


def column_requests(row: Row, option: str) -> list[RequestResult]:
    """Return the requests of an object with one list per field; `option` of the load generator adds these lists."""
    columns = {key: list_of(row, key, option) for key in KEYS}
    count = len(columns["input_lens"])
    for key, values in columns.items():
        if len(values) != count:
            raise row.error(key, f"{count} entries, as many as input_lens")
    errors = row.values.get("errors")
    reasons = (
        [(str(error or "").strip().splitlines() or [""])[-1][:40] for error in errors]  # a reason ends a traceback
        if isinstance(errors, list) and len(errors) == count
        else [""] * count
    )
    return [
        column_request(row, k, reason, *values) for k, (reason, *values) in enumerate(zip(reasons, *columns.values()))
    ]


def column_request(row: Row, index: int, reason: str, prompt: Any, output: Any, ttft: Any, itls: Any) -> RequestResult:
    """Return one request of the columns; its end is the last gap after the first token."""
    request = Row(
        row.source, row.number, {"prompt": prompt, "output": output, "ttft": ttft, "itls": itls}, f"request {index}"
    )
    lengths = request.tokens("prompt"), request.tokens("output")
    if reason or not lengths[1]:
        return RequestResult(str(index), 0.0, *lengths, failed=reason or "no output")
    gaps = numbers(request, "itls")
    first = request.seconds("ttft", 1.0)
    return RequestResult(str(index), 0.0, *lengths, first, first + sum(gaps), gaps)


def vllm_starts(row: Row, requests: Sequence[RequestResult]) -> list[float]:
    """Return the send times: as recorded, or of a closed loop, where a request starts when another one ends."""
    starts = row.values.get("start_times")
    if isinstance(starts, list) and len(starts) == len(requests):
        return numbers(row, "start_times")
    rate = row.values.get("request_rate", "inf")
    if rate not in NO_RATE:
        raise BadInput(
            f"{row.source.name}: expected start_times: requests were sent at a rate of {quote(rate)}, and this version "
            "of vLLM does not record their send times"
        )
    return limit_open([0.0] * len(requests), requests, row.values.get("max_concurrency"))


def limit_open(arrivals: Sequence[float], requests: Sequence[RequestResult], concurrency: Any) -> list[float]:
    """Return when requests are sent of which at most `concurrency` are open: the others wait for an end."""
    if type(concurrency) is not int or not 1 <= concurrency < len(requests):
        return list(arrivals)
    starts = list(arrivals[:concurrency])
    ends = [start + request.e2e for start, request in zip(starts, requests)]
    heapify(ends)
    for arrival, request in zip(arrivals[concurrency:], requests[concurrency:]):
        start = max(arrival, ends[0])
        starts.append(start)
        heapreplace(ends, start + request.e2e)
    return starts


def read_sglang(source: Source, benchmark: Optional[int] = None) -> Results:
    """Read the file of `sglang.bench_serving`: one line per benchmark. It has no send times.

    Without `--output-details`, a line has no single requests: they are drawn.
    """
    row = choose(source, read_rows(source), benchmark)
    is_summary, rate, notes = not row.has("input_lens"), sglang_rate(row), []
    requests = summary_requests(row) if is_summary else column_requests(row, "--output-details")
    if is_summary:
        lengths = "lengths are drawn from the range of the data set" if is_random(row) else "each has the mean lengths"
        notes.append(f"the file has no single requests (--output-details adds them): {lengths}")
    arrivals = [0.0] * len(requests)
    if rate is not None:
        arrivals = drawn_arrivals(row, requests, rate)
        notes.append(
            f"the file has no send times: Poisson arrivals at {rate:g} requests/s are drawn, so compare means and "
            "quantiles, not single requests"
        )
    starts = limit_open(arrivals, requests, row.values.get("max_concurrency"))
    requests = [request._replace(arrival=start) for request, start in zip(requests, starts)]
    return Results(requests, reported_figures(row) if notes else {}, is_summary, notes)


def choose(source: Source, benchmarks: Sequence[Row], benchmark: Optional[int]) -> Row:
    """Return one of the benchmarks in a file, counted from 0."""
    if benchmark is None and len(benchmarks) > 1:
        raise BadInput(
            f"{source.name}: expected one benchmark, got {len(benchmarks)}; choose one with --benchmark of "
            "`sim calibrate import results`"
        )
    if not 0 <= (benchmark or 0) < len(benchmarks):
        raise BadInput(f"{source.name}: --benchmark: expected 0 to {len(benchmarks) - 1}, got {benchmark}")
    return benchmarks[benchmark or 0]


def sglang_rate(row: Row) -> Optional[float]:
    """Return the requests per second; None: no rate."""
    rate: Any = row.values.get("request_rate")
    if rate in NO_RATE:
        return None
    if rate == "trace":
        raise row.error("request_rate", "a rate or Infinity: the send times are in the trace that was sent, use that")
    if type(rate) not in (int, float) or not MIN_RATE <= rate <= MAX_RATE:
        raise row.error("request_rate", f"{MIN_RATE:g} to {MAX_RATE:g} requests per second or Infinity")
    return float(rate)


def drawn_arrivals(row: Row, requests: Sequence[RequestResult], rate: float) -> list[float]:
    """Return Poisson arrivals, scaled so that the last request ends at the end of the benchmark."""
    gaps = stream(row.source.seed, "arrivals").exponential(1 / rate, max(0, len(requests) - 1))
    arrivals = np.concatenate([[0.0], np.cumsum(gaps)])[: len(requests)]
    if row.has("max_concurrency") or not row.has("duration"):
        return list(map(float, arrivals))
    left = row.seconds("duration", 1.0) - np.array([request.e2e for request in requests])
    scale = min((left[1:] / arrivals[1:]).tolist(), default=1.0)
    return list(map(float, arrivals * (scale if 0 < scale < math.inf else 1.0)))


def summary_requests(row: Row) -> list[RequestResult]:
    """Return the requests of a summary; each has the mean latency, for the send times of a closed loop."""
    count = row.tokens("completed")
    if not 1 <= count <= MAX_REQUESTS:
        raise row.error("completed", "at least 1 request")
    e2e = row.seconds("mean_e2e_latency_ms", 1e-3)
    lengths = zip(summary_lengths(row, "input", count), summary_lengths(row, "output", count))
    return [RequestResult(str(k), 0.0, *both, e2e=e2e) for k, both in enumerate(lengths)]


def summary_lengths(row: Row, side: str, count: int) -> list[int]:
    """Return lengths of the range of the data set `random`, or equal ones; their sum is about the reported total."""
    lengths = np.ones(count)
    if is_random(row):
        longest = max(1, row.tokens(f"random_{side}_len"))
        shortest = max(1, int(row.values["random_range_ratio"] * longest))
        lengths = stream(row.source.seed, side).integers(shortest, longest, count, endpoint=True).astype(float)
    scaled = lengths * row.tokens(f"total_{side}_tokens") / lengths.sum()
    return [max(1, round(length)) for length in scaled.tolist()]


def is_random(row: Row) -> bool:
    """Return whether the lengths of a benchmark are uniform in a range that its line names."""
    ratio: Any = row.values.get("random_range_ratio")
    is_ratio = type(ratio) in (int, float) and 0 <= ratio <= 1
    return is_ratio and str(row.values.get("dataset_name")).startswith("random")


def reported_figures(row: Row) -> dict[str, float]:
    """Return the metrics of a line under servesim's names."""
    values: dict[str, Any] = {ours: row.values.get(theirs) for ours, theirs in SGLANG_FIGURES.items()}
    return {ours: value for ours, value in values.items() if type(value) in (int, float) and 0 < value <= MAX_INT}


def list_of(row: Row, key: str, option: str = "") -> list[Any]:
    """Return a list inside an object; `option` of the load generator adds it."""
    values = row.values.get(key)
    if not isinstance(values, list):
        raise row.error(key, f"a list, as with {option}" if option else "a list")
    return values


def numbers(row: Row, key: str) -> list[float]:
    """Return a list of times of at least 0."""
    values = list_of(row, key)
    return Table(row.source.name, {key: values}, [row.number] * len(values), typed=True).seconds(key)
