"""Metrics of a run, as `vllm bench serve` defines them, and the time breakdown.

Latencies are those that the client sees: ttft, e2el, tpot = (e2el - ttft) / (output - 1), and itl, pooled over all gaps
between tokens. Values are seconds; `as_result` returns milliseconds under vLLM's keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from servesim.core import Request
from servesim.engine.step import TokenGaps

Array = npt.NDArray[np.float64]
PERCENTILES = (50, 90, 95, 99)
COLUMNS = (
    "id", "arrival", "first_token", "finish", "prompt", "output", "evictions",
    "queued", "prefill", "stalled", "decoding", "swapped", "front_end", "outcome",
)  # fmt: skip
STATES = ("front_end", "queued", "prefill", "stalled", "decoding", "swapped")


def row(request: Request) -> tuple[Any, ...]:
    """Return the row of a request in requests.csv, in the order of COLUMNS."""
    arrival, start, end, client_end = request.sent, request.visible_at, request.finish, request.client_end
    queued, prefilling, decoding, swapped = request.queued, request.prefilling, request.decoding, request.swapped
    start = arrival if start is None else start
    last = request.state_since if end is None else end
    stalled = last - start - queued - prefilling - decoding - swapped  # in the batch, but not part of the step
    end = start if end is None else end
    return (
        request.id, arrival, request.first_token, client_end, request.prompt, request.written, request.preemptions,
        queued, prefilling, stalled if stalled > 0 else 0.0, decoding, swapped,
        (start - arrival) + ((client_end or end) - end), request.outcome,
    )  # fmt: skip


def time_per_token(ttft: Any, e2el: Any, output: Any) -> Any:
    """Return the tpot of requests given as arrays; requests with one token have none, and means skip them."""
    return (e2el - ttft) / np.maximum(output - 1, 1)


def mark_client_timeouts(requests: Sequence[Request], after: float) -> None:
    """Mark the requests whose client gave up after this many seconds."""
    for request in requests:
        if (
            request.client_end is not None
            and request.outcome == "finished"
            and request.client_end - request.sent > after
        ):
            request.outcome = "lost"
            request.reason = f"the client gave up after {after:g} s"
            request.client_end = request.sent + after


def summary(values: Array) -> dict[str, float]:
    """Return mean, median, standard deviation and percentiles."""
    if not len(values):
        return {}
    median, *percentiles = np.percentile(values, (50, *PERCENTILES)).tolist()
    result = {"mean": float(values.mean()), "median": median, "std": float(values.std())}
    return {**result, **{f"p{q}": value for q, value in zip(PERCENTILES, percentiles, strict=True)}}


def pooled_stats(gaps: TokenGaps) -> dict[str, float]:
    """Return the same statistics of token gaps, each weighted by its count."""
    seconds, counts = expand_gaps(gaps)
    if not len(seconds):
        return {}
    order = np.argsort(seconds)
    seconds, counts = seconds[order], counts[order]
    last = np.cumsum(counts)  # index after the copies of each value
    count = int(last[-1])
    mean = float((seconds * counts).sum() / count)
    variance = float((counts * (seconds - mean) ** 2).sum() / count)

    def quantile(q: float) -> float:
        position = (count - 1) * q / 100
        low, high = math.floor(position), math.ceil(position)
        below, above = seconds[np.searchsorted(last, [low, high], side="right")]
        return float(below + (above - below) * (position - low))

    result = {"mean": mean, "median": quantile(50), "std": math.sqrt(variance)}
    return {**result, **{f"p{q}": quantile(q) for q in PERCENTILES}}


def expand_gaps(gaps: TokenGaps) -> tuple[Array, npt.NDArray[np.int64]]:
    """Return all gaps and their counts, with the linear sequences expanded."""
    seconds, counts = np.array(gaps.seconds, dtype=np.float64), np.array(gaps.counts, dtype=np.int64)
    if not len(gaps.linear):
        return seconds, counts
    fixed, slope, context, live, count = np.array(gaps.linear).reshape(-1, 5).T
    each = count.astype(np.int64)
    ahead = np.arange(1, each.sum() + 1) - np.repeat(np.cumsum(each) - each, each)  # 1, 2, 3... in every sequence
    contexts = np.repeat(context, each) + np.repeat(live, each) * ahead
    further = np.repeat(fixed, each) + np.repeat(slope, each) * contexts
    return np.concatenate([seconds, further]), np.concatenate([counts, np.repeat(live, each).astype(np.int64)])


class Metrics:
    """The metrics of one run."""

    def __init__(self, requests: Sequence[Request], gaps: TokenGaps, slo: Mapping[str, float] | None = None) -> None:
        self.requests = requests
        done = [request for request in requests if request.outcome == "finished"]
        self.done = done
        arrival = np.array([request.sent for request in done], dtype=np.float64)
        first = np.array([request.first_token for request in done], dtype=np.float64)
        end = np.array([request.client_end for request in done], dtype=np.float64)
        output = np.array(
            [request._written for request in done], dtype=np.int64
        )  # finished requests have left the cohort
        self.ttft: Array = first - arrival
        self.e2el: Array = end - arrival
        self.tpot_of: Array = time_per_token(self.ttft, self.e2el, output)
        self.tpot: Array = self.tpot_of[output > 1]
        self.itl = pooled_stats(gaps)
        self.outputs = int(output.sum())
        self.inputs = sum([request.prompt for request in done])
        start = min([request.sent for request in requests], default=0.0)
        self.makespan = max([r.client_end for r in requests if r.client_end is not None], default=start) - start
        self.good = self._good(slo or {})

    def _good(self, slo: Mapping[str, float]) -> int | None:
        """Return the number of requests that met all bounds (seconds)."""
        if not slo:
            return None
        met = np.ones(len(self.done), dtype=bool)
        for name, bound in slo.items():
            met &= {"ttft": self.ttft, "tpot": self.tpot_of, "e2el": self.e2el}[name] <= bound
        return int(met.sum())

    def rate(self, count: float) -> float:
        """Return a count per second of makespan."""
        return count / self.makespan if self.makespan > 0 else 0.0

    def time_breakdown(self) -> dict[str, float]:
        """Return the mean seconds of a finished request in each state."""
        rows = [row(request) for request in self.done]
        columns = [COLUMNS.index(name) for name in STATES]
        count = max(1, len(rows))
        return {name: sum(row[column] for row in rows) / count for name, column in zip(STATES, columns, strict=True)}

    def outcomes(self) -> dict[str, int]:
        """Count requests by outcome."""
        counts: dict[str, int] = {}
        for request in self.requests:
            counts[request.outcome or "unfinished"] = counts.get(request.outcome or "unfinished", 0) + 1
        return counts

    def as_result(self) -> dict[str, Any]:
        """Return the metrics under the keys of vLLM's benchmark result."""
        result: dict[str, Any] = {
            "duration": self.makespan,
            "completed": len(self.done),
            "failed": len(self.requests) - len(self.done),
            "total_input_tokens": self.inputs,
            "total_output_tokens": self.outputs,
            "request_throughput": self.rate(len(self.done)),
            "request_goodput": None if self.good is None else self.rate(self.good),
            "output_throughput": self.rate(self.outputs),
            "total_token_throughput": self.rate(self.outputs + self.inputs),
        }
        values = {"ttft": summary(self.ttft), "tpot": summary(self.tpot), "itl": self.itl, "e2el": summary(self.e2el)}
        for name, statistics in values.items():
            for kind, seconds in statistics.items():
                result[f"{kind}_{name}_ms"] = seconds * 1e3
        return result
