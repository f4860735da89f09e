"""Metrics of a run, as `vllm bench serve` defines them, and the time breakdown.

Latencies are those that the client sees: ttft, e2el, tpot = (e2el - ttft) / (output - 1), and itl, pooled over all gaps
between tokens. Values are seconds; `as_result` returns milliseconds under vLLM's keys.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Union

import numpy as np
import numpy.typing as npt
from servesim.core import Request
from servesim.engine.step import TokenGaps

from .metric_table import GROUPS, PERCENTILES, metrics_in, percentile_metrics, percentile_name
from .request_rows import group_requests, total_seconds
from .run_requests import RunRequests

Array = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int32]
Times = tuple[Array, Array]  # when requests were sent, and when their clients saw the end (NaN: they did not)
PART = 1 << 13  # values that are converted at once; they fit into the cache
BIN_SHIFT = 44  # of the 64 bits of a float; the values of a bin then differ by at most 0.4 %
LAST_BIN = 1 << 12  # bins for 16 powers of 2
MAX_GROUPS = 16  # priorities or sessions that have metrics of their own


def time_per_token(ttft: Any, e2el: Any, output: Any) -> Any:
    """Return the tpot of requests given as arrays; requests with one token have none, and means skip them."""
    return (e2el - ttft) / np.maximum(output - 1, 1)


def makespan(sent: Array, ended: Array) -> float:
    """Return the seconds from the first request to the last end."""
    ends = ended[~np.isnan(ended)]
    return float(ends.max() - sent.min()) if len(ends) else 0.0


def summary(values: Array, percentiles: Sequence[float] = PERCENTILES) -> dict[str, float]:
    """Return mean, median, standard deviation and percentiles; 50 is one of them."""
    if not len(values):
        return {}
    ordered = np.sort(values)
    found = {q: percentile(ordered, q) for q in percentiles}
    return named_statistics(float(values.mean()), float(values.std()), found)


def percentile(ordered: Union[Array, Sequence[float]], q: float) -> float:
    """Return a percentile of sorted values, with the bits of np.percentile, which takes three times as long."""
    if math.isnan(ordered[-1]):  # NaN is sorted to the end
        return math.nan
    position = (len(ordered) - 1) * (q / 100)
    low = int(position)
    below, above = float(ordered[low]), float(ordered[min(low + 1, len(ordered) - 1)])
    part = position - low
    return below + (above - below) * part if part < 0.5 else above - (above - below) * (1 - part)


def named_statistics(mean: float, std: float, percentiles: Mapping[float, float]) -> dict[str, float]:
    """Return statistics under their names."""
    result = {"mean": mean, "median": percentiles[50], "std": std}
    return {**result, **{percentile_name(q): value for q, value in percentiles.items()}}


def pooled_stats(gaps: TokenGaps, percentiles: Sequence[float] = PERCENTILES) -> dict[str, float]:
    """Return the same statistics of token gaps, each weighted by its count.

    A long run has millions of gaps, so arrays are created late, dropped early and changed in place.
    """
    seconds = np.array(gaps.seconds)
    if not len(seconds):
        return {}
    counts = np.asarray(gaps.counts, dtype=np.int32)
    count = int(counts.sum())
    positions = [(count - 1) * q / 100 for q in percentiles]
    low, high = [math.floor(position) for position in positions], [math.ceil(position) for position in positions]
    below, above = np.split(weighted_order_statistics(seconds, counts, np.array(low + high)), 2)
    found = below + (above - below) * (np.array(positions) - np.array(low))
    mean = weighted_sum(seconds, counts) / count
    seconds -= mean
    seconds **= 2
    std = math.sqrt(weighted_sum(seconds, counts) / count)
    return named_statistics(mean, std, dict(zip(percentiles, found.tolist())))


def weighted_sum(values: Array, counts: Counts) -> float:
    """Return the sum of counts * values of at least 0, with the same bits for every order of them.

    Values are added as whole numbers, which is exact: first in units so small that the sum of a part just fits into
    64 bits, then the rest in 2**30 times smaller units.
    """
    exponent = min(62 - math.frexp(float(values.max()) * int(counts.max()) * PART)[1], 1000)
    total = 0
    for start in range(0, len(values), PART):
        units = values[start : start + PART] * counts[start : start + PART]
        units *= 2.0**exponent
        whole = units.astype(np.int64)
        units -= whole
        units *= 2.0**30
        total += (int(whole.sum()) << 30) + int(units.astype(np.int64).sum())
    return math.ldexp(float(total), -exponent - 30)


def weighted_order_statistics(values: Array, counts: Counts, indices: npt.NDArray[np.int64]) -> Array:
    """Return the elements at these indices of the sorted values, each value repeated `counts` times.

    Sorting all values would take most of the time of the metrics. So they are counted in bins, and only the bins of the
    wanted elements are sorted. A bin has the values with equal leading bits: floats of at least 0 sort as their bits.
    """
    first = (int(values.max().view(np.int64)) >> BIN_SHIFT) - LAST_BIN
    bins, in_bins = np.empty(len(values), dtype=np.int16), np.zeros(LAST_BIN + 1)
    for start in range(0, len(values), PART):  # in parts, because this needs 16 bytes per value
        part = (values[start : start + PART].view(np.int64) >> BIN_SHIFT) - first
        np.maximum(part, 0, out=part)  # the first bin has all smaller values
        bins[start : start + PART] = part
        in_bins += np.bincount(part, counts[start : start + PART], LAST_BIN + 1)
    chosen = np.searchsorted(np.cumsum(in_bins), indices, side="right")
    is_chosen = np.zeros(len(in_bins), dtype=bool)
    is_chosen[chosen] = True
    inside = np.flatnonzero(is_chosen[bins])
    order = inside[np.argsort(values[inside])]
    skipped = np.cumsum(np.where(is_chosen, 0.0, in_bins))  # elements of other bins, up to each bin
    places = np.searchsorted(np.cumsum(counts[order]), indices - skipped[chosen], side="right")
    result: Array = values[order[places]]
    return result


class Metrics:
    """The metrics of one run, or of some of its requests."""

    def __init__(
        self, requests: Sequence[Request], gaps: TokenGaps, slo: Mapping[str, float] | None = None, chosen: Any = None
    ) -> None:
        """`chosen`: rows of these requests; None: all of them."""
        self.percentiles: tuple[float, ...] = PERCENTILES
        self.itl = pooled_stats(gaps)  # first: it needs the most memory
        self._gaps = gaps
        self._slo = slo or {}
        self.requests = table = RunRequests.of(requests)
        self.rows = np.arange(len(table)) if chosen is None else np.asarray(chosen, dtype=np.int64)
        self.done = done = self.rows[table.finished[self.rows]]  # rows of the finished requests
        self.times: Times = (table.column("sent")[self.rows], table.column("client_end")[self.rows])
        sent, output = table.column("sent")[done], table.column("written")[done]
        self.ttft: Array = table.column("first_token")[done] - sent
        self.e2el: Array = table.column("client_end")[done] - sent
        self.tpot_of: Array = time_per_token(self.ttft, self.e2el, output)
        self.tpot: Array = self.tpot_of[output > 1]
        self.outputs = int(table.column("generated")[done].sum())
        self.inputs = int(table.column("prompt")[done].sum())
        self.makespan = makespan(*self.times)
        met = np.ones(len(self.done), dtype=bool)
        for name, bound in self._slo.items():
            met &= {"ttft": self.ttft, "tpot": self.tpot_of, "e2el": self.e2el}[name] <= bound
        self.good = int(met.sum()) if self._slo else None  # requests that met all bounds

    def add_percentiles(self, percentiles: Sequence[float]) -> None:
        """Add percentiles to the result; those of PERCENTILES stay."""
        if set(percentiles) <= set(self.percentiles):
            return
        self.percentiles = tuple(sorted({*self.percentiles, *percentiles}))
        self.itl = pooled_stats(self._gaps, self.percentiles)

    def rate(self, count: float) -> float:
        """Return a count per second of makespan."""
        return count / self.makespan if self.makespan > 0 else 0.0

    def time_breakdown(self) -> dict[str, float]:
        """Return the mean seconds of a finished request in each state."""
        total = total_seconds(self.requests, self.done)
        return {state: seconds / max(1, len(self.done)) for state, seconds in total.items()}

    def outcomes(self) -> dict[str, int]:
        """Count requests by outcome."""
        return {outcome or "unfinished": count for outcome, count in Counter(self.requests.outcomes()).items()}

    @property
    def attainment(self) -> float | None:
        """The fraction of all requests that met all bounds."""
        return None if self.good is None else self.good / max(1, len(self.rows))

    def of_groups(self) -> dict[str, Any]:
        """Return the metrics of each priority and of each session, if there are several, but not too many."""
        names = (*metrics_in("groups"), *percentile_metrics(self.percentiles))
        result = {}
        for field in GROUPS:
            for value, rows in group_requests(self.requests, field, self.rows, MAX_GROUPS).items():
                inside = Metrics(self.requests, TokenGaps(), self._slo, rows)
                inside.percentiles = self.percentiles
                metrics = inside.as_result()
                result.update({f"{name}[{field}={value}]": metrics[name] for name in names if name in metrics})
        return result

    def as_result(self) -> dict[str, Any]:
        """Return the metrics under the keys of vLLM's benchmark result."""
        result: dict[str, Any] = {
            "duration": self.makespan,
            "completed": len(self.done),
            "failed": len(self.rows) - len(self.done),
            "total_input_tokens": self.inputs,
            "total_output_tokens": self.outputs,
            "request_throughput": self.rate(len(self.done)),
            "request_goodput": None if self.good is None else self.rate(self.good),
            "attainment": self.attainment,
            "output_throughput": self.rate(self.outputs),
            "total_token_throughput": self.rate(self.outputs + self.inputs),
        }
        ttft, tpot, e2el = (summary(values, self.percentiles) for values in (self.ttft, self.tpot, self.e2el))
        values = {"ttft": ttft, "tpot": tpot, "itl": self.itl, "e2el": e2el}
        for name, statistics in values.items():
            for kind, seconds in statistics.items():
                result[f"{kind}_{name}_ms"] = seconds * 1e3
        return result
