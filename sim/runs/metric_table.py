"""The table of all metrics: unit, better direction, and the lists that show each one.

A new metric needs one line here, besides the code that computes it. A metric of the list `groups` is also computed for
the requests of one priority or one session, under a name such as `p99_ttft_ms[priority=0]`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

LATENCIES = ("ttft", "tpot", "itl", "e2el")
PERCENTILES = (50, 90, 95, 99)
Goal = Literal["min", "max"]
Listing = Literal[
    "summary",  # in summary.csv, JSON and frames
    "table",  # in every printed table of a sweep if a run has more than 0 of it
    "intervals",  # has an interval in result.json
    "main",  # printed with its interval
    "compare",  # default of `sim compare`
    "verify",  # in verify.json
    "checked",  # default of `sim verify --metrics`
    "ranked",  # compared between scenarios by their order
    "groups",  # computed for each priority and each session
]


class Metric(NamedTuple):
    """One metric of a run."""

    name: str
    unit: str  # empty for counts and fractions
    goal: Goal  # the better direction
    lists: Sequence[Listing] = ()
    title: str = ""  # of an axis; empty: name and unit
    is_percentage: bool = False  # a fraction that is printed in percent
    needs: Literal["", "peak", "power"] = ""  # key of a profile


def percentile_name(q: float) -> str:
    """Return the name of a percentile in vLLM's keys: p99, p99.9."""
    return f"p{q:g}"


STATISTICS = ("mean", "median", "std", *map(percentile_name, PERCENTILES))


def percentile_metrics(percentiles: Sequence[float]) -> list[str]:
    """Return the names of these percentiles of all latencies."""
    return [f"{percentile_name(q)}_{name}_ms" for name in LATENCIES for q in percentiles]


def latency(name: str, statistic: str) -> Metric:
    """Return one statistic of a latency."""
    metric = f"{statistic}_{name}_ms"
    lists: list[Listing] = [] if statistic == "std" else ["intervals"]
    if name != "itl" and statistic != "std":  # gaps between tokens are pooled over all requests
        lists.append("groups")
    if name != "itl" and statistic in ("mean", "p99"):
        lists += ["summary", "main"]
    if name != "itl" and statistic == "mean":
        lists.append("compare")
    if statistic in ("mean", "median", "p90", "p99"):
        lists.append("verify")
    if metric in ("mean_ttft_ms", "mean_tpot_ms", "p99_e2el_ms"):
        lists += ["checked", "ranked"]
    return Metric(metric, "ms", "min", lists)


TABLE = (
    Metric("makespan", "s", "min", ("summary", "intervals", "main", "compare", "verify", "checked", "ranked")),
    Metric("duration", "s", "min"),
    Metric("request_throughput", "req/s", "max", ("summary", "intervals", "verify"), "requests/s"),
    Metric("request_goodput", "req/s", "max", ("summary", "intervals"), "good requests/s"),
    Metric("output_throughput", "tok/s", "max", ("summary", "intervals", "main", "compare", "verify", "checked"),
           "output tokens/s per device"),
    Metric("total_token_throughput", "tok/s", "max", ("intervals",), "tokens/s (prompt and output)"),
    Metric("attainment", "", "max", ("groups",)),
    *(latency(name, statistic) for name in LATENCIES for statistic in STATISTICS),
    Metric("preemptions", "", "min", ("summary", "intervals", "verify")),
    Metric("completed", "", "max", ("summary", "groups")),
    Metric("failed", "", "min", ("summary", "groups")),
    Metric("model_calls", "", "min", ("intervals", "verify")),
    Metric("busy_s", "s", "min"),
    Metric("prompt_tokens_computed", "", "min"),
    Metric("padded_prompt_tokens", "", "min"),
    Metric("padded_decode_rows", "", "min"),
    Metric("mean_kv_usage", "", "min", ("summary",), is_percentage=True),
    Metric("peak_kv_usage", "", "min", ("summary",), is_percentage=True),
    Metric("kv_fragmentation", "", "min", ("summary",), is_percentage=True),
    Metric("peak_kv_blocks", "", "min"),
    Metric("mean_kv_tokens", "", "min"),
    Metric("kv_sharing", "", "max", is_percentage=True),
    Metric("waiting_slots", "", "min", is_percentage=True),
    Metric("waiting_budget", "", "min", is_percentage=True),
    Metric("waiting_blocks", "", "min", is_percentage=True),
    Metric("prefix_hit_rate", "", "max", ("summary", "table"), is_percentage=True),
    Metric("prefix_cache_queries", "", "min"),
    Metric("prefix_cache_hits", "", "max"),
    Metric("prefix_cache_evictions", "", "min"),
    Metric("saved_prefill_s", "s", "max"),
    Metric("host_cache_hits", "", "max"),
    Metric("host_copy_s", "s", "min"),
    Metric("mfu", "", "max", ("summary", "table"), is_percentage=True, needs="peak"),
    Metric("mbu", "", "max", ("summary", "table"), is_percentage=True, needs="peak"),
    Metric("energy", "J/1k tok", "min", ("summary",), needs="power"),
)  # fmt: skip
BY_NAME = {metric.name: metric for metric in TABLE}
METRICS = tuple(BY_NAME)


def metrics_in(listing: Listing) -> tuple[str, ...]:
    """Return the metrics of a list, in the order of the table."""
    return tuple(metric.name for metric in TABLE if listing in metric.lists)


GROUPS = ("priority", "session")  # fields of a request
GROUP_NAME = re.compile(rf"([\w.]+)\[({'|'.join(GROUPS)})=([^\[\]<>]+)\]")


def whole_metric(name: str) -> str:
    """Return the name of the same metric of all requests: p99_ttft_ms of p99_ttft_ms[priority=0]."""
    match = GROUP_NAME.fullmatch(name)
    return match[1] if match else name


def is_metric(name: str) -> bool:
    """Whether an objective or a bound may have this name."""
    whole = whole_metric(name)
    return whole in BY_NAME and (whole == name or "groups" in BY_NAME[whole].lists)


def metric_named(name: str) -> Metric:
    """Return a metric; other names are further percentiles of latencies (p99.9_ttft_ms)."""
    return (BY_NAME.get(whole_metric(name)) or Metric(name, "ms", "min"))._replace(name=name)
