"""What a run amounts to, in the terms of `vllm bench serve`, and what only a simulator knows.

ttft, tpot = (e2el - ttft) / (output - 1), itl pooled over all gaps, e2el: as the client sees them. Seconds here;
`as_result` gives milliseconds under vLLM's keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from servesim.core import Request
from servesim.engine.step import Gaps

Array = npt.NDArray[np.float64]
PERCENTILES = (50, 90, 95, 99)
COLUMNS = (
    "id", "arrival", "first_token", "finish", "prompt", "output", "evictions",
    "queued", "prefill", "stalled", "decoding", "swapped", "front_end", "outcome",
)  # fmt: skip
WHERE = ("front_end", "queued", "prefill", "stalled", "decoding", "swapped")


def row(request: Request) -> tuple[Any, ...]:
    """Return a request's line of requests.csv, in the order of COLUMNS."""
    arrival, start, end, seen = request.arrival, request.visible, request.finish, request.seen
    queued, prefilling, decoding, swapped = request.queued, request.prefilling, request.decoding, request.swapped
    start = arrival if start is None else start
    last = request.since if end is None else end
    stalled = last - start - queued - prefilling - decoding - swapped  # it sat in memory while a step ran without it
    end = start if end is None else end
    return (
        request.id, arrival, request.first_token, seen, request.prompt, request.written, request.evictions,
        queued, prefilling, stalled if stalled > 0 else 0.0, decoding, swapped,
        (start - arrival) + ((seen or end) - end), request.outcome,
    )  # fmt: skip


def time_per_token(ttft: Any, e2el: Any, output: Any) -> Any:
    """Return the tpot of requests given as arrays; those with one token have none, and means leave them out."""
    return (e2el - ttft) / np.maximum(output - 1, 1)


def lose(requests: Sequence[Request], after: float) -> None:
    """Mark the requests whose client gave up: their streams broke after so many seconds."""
    for request in requests:
        if request.seen is not None and request.outcome == "finished" and request.seen - request.arrival > after:
            request.outcome = "lost"
            request.reason = f"its stream broke after {after:g} s"
            request.seen = request.arrival + after


def summary(values: Array) -> dict[str, float]:
    """Return mean, median, sd and percentiles."""
    if not len(values):
        return {}
    median, *further = np.percentile(values, (50, *PERCENTILES)).tolist()
    found = {"mean": float(values.mean()), "median": median, "std": float(values.std())}
    return {**found, **{f"p{q}": value for q, value in zip(PERCENTILES, further, strict=True)}}


def pooled(gaps: Gaps) -> dict[str, float]:
    """Return the same over gaps that count as often as they were seen."""
    seconds, seen = written_out(gaps)
    if not len(seconds):
        return {}
    order = np.argsort(seconds)
    seconds, seen = seconds[order], seen[order]
    last = np.cumsum(seen)  # index past each value's copies, were they written out
    count = int(last[-1])
    mean = float((seconds * seen).sum() / count)
    variance = float((seen * (seconds - mean) ** 2).sum() / count)

    def quantile(q: float) -> float:
        place = (count - 1) * q / 100
        low, high = math.floor(place), math.ceil(place)
        below, above = seconds[np.searchsorted(last, [low, high], side="right")]
        return float(below + (above - below) * (place - low))

    found = {"mean": mean, "median": quantile(50), "std": math.sqrt(variance)}
    return {**found, **{f"p{q}": quantile(q) for q in PERCENTILES}}


def written_out(gaps: Gaps) -> tuple[Array, npt.NDArray[np.int64]]:
    """Return every value and how many saw it, those on lines included."""
    seconds, seen = np.array(gaps.seconds, dtype=np.float64), np.array(gaps.seen, dtype=np.int64)
    if not len(gaps.lines):
        return seconds, seen
    fixed, slope, context, live, count = np.array(gaps.lines).reshape(-1, 5).T
    each = count.astype(np.int64)
    ahead = np.arange(1, each.sum() + 1) - np.repeat(np.cumsum(each) - each, each)  # 1, 2, 3... on every line
    contexts = np.repeat(context, each) + np.repeat(live, each) * ahead
    further = np.repeat(fixed, each) + np.repeat(slope, each) * contexts
    return np.concatenate([seconds, further]), np.concatenate([seen, np.repeat(live, each).astype(np.int64)])


class Measures:
    """The figures of one run."""

    def __init__(self, requests: Sequence[Request], gaps: Gaps, slo: Mapping[str, float] | None = None) -> None:
        self.requests = requests
        done = [request for request in requests if request.outcome == "finished"]
        self.done = done
        arrival = np.array([request.arrival for request in done], dtype=np.float64)
        first = np.array([request.first_token for request in done], dtype=np.float64)
        seen = np.array([request.seen for request in done], dtype=np.float64)
        output = np.array([request._written for request in done], dtype=np.int64)  # they are in no cohort any more
        self.ttft: Array = first - arrival
        self.e2el: Array = seen - arrival
        self.tpot_of: Array = time_per_token(self.ttft, self.e2el, output)
        self.tpot: Array = self.tpot_of[output > 1]
        self.itl = pooled(gaps)
        self.outputs = int(output.sum())
        self.inputs = sum([request.prompt for request in done])
        start = min([request.arrival for request in requests], default=0.0)
        self.makespan = max([r.seen for r in requests if r.seen is not None], default=start) - start
        self.good = self._good(slo or {})

    def _good(self, slo: Mapping[str, float]) -> int | None:
        """Return how many met every objective (seconds)."""
        if not slo:
            return None
        met = np.ones(len(self.done), dtype=bool)
        for name, bound in slo.items():
            met &= {"ttft": self.ttft, "tpot": self.tpot_of, "e2el": self.e2el}[name] <= bound
        return int(met.sum())

    def rate(self, count: float) -> float:
        """Return a count per second of makespan."""
        return count / self.makespan if self.makespan > 0 else 0.0

    def where(self) -> dict[str, float]:
        """Return the mean seconds that finished requests spent in each state."""
        rows = [row(request) for request in self.done]
        places = [COLUMNS.index(name) for name in WHERE]
        count = max(1, len(rows))
        return {name: sum(line[place] for line in rows) / count for name, place in zip(WHERE, places, strict=True)}

    def outcomes(self) -> dict[str, int]:
        """Count requests by what became of them."""
        counts: dict[str, int] = {}
        for request in self.requests:
            counts[request.outcome or "unfinished"] = counts.get(request.outcome or "unfinished", 0) + 1
        return counts

    def as_result(self) -> dict[str, Any]:
        """Return the figures under the keys of vLLM's benchmark result."""
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
        for name, figures in values.items():
            for kind, seconds in figures.items():
                result[f"{kind}_{name}_ms"] = seconds * 1e3
        return result
