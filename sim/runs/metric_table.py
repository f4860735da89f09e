"""The table of all metrics: title, unit, better direction, the lists that show each one; and the text of a value.

A new metric needs one line here, besides the code that computes it. A metric of the list `groups` is also computed for
the requests of one priority or one session, under a name such as `p99_ttft_ms[priority=0]`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, Optional

LATENCY_TITLES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "end-to-end latency"}
LATENCIES = tuple(LATENCY_TITLES)
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
    title: str  # as people call it: in sentences, on pages and axes
    unit: str  # of a value; empty for counts and fractions
    goal: Goal  # the better direction
    lists: Sequence[Listing] = ()
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
    return Metric(metric, latency_title(metric), "ms", "min", lists)


def latency_title(metric: str) -> str:
    """Return the title of a statistic of a latency; other names are their own title."""
    statistic, _, name = metric.removesuffix("_ms").partition("_")
    words = {"mean": "Mean", "median": "Median", "std": "Standard deviation of"}
    return f"{words.get(statistic, statistic.upper())} {LATENCY_TITLES[name]}" if name in LATENCY_TITLES else metric


TABLE = (
    Metric("makespan", "Makespan", "s", "min",
           ("summary", "intervals", "main", "compare", "verify", "checked", "ranked")),
    Metric("duration", "Duration", "s", "min"),
    Metric("request_throughput", "Request throughput", "req/s", "max", ("summary", "intervals", "verify")),
    Metric("request_goodput", "Goodput", "req/s", "max", ("summary", "intervals")),
    Metric("output_throughput", "Output throughput", "tok/s", "max",
           ("summary", "intervals", "main", "compare", "verify", "checked")),
    Metric("total_token_throughput", "Total token throughput", "tok/s", "max", ("intervals",)),
    Metric("attainment", "SLO attainment", "", "max", ("groups",)),
    *(latency(name, statistic) for name in LATENCIES for statistic in STATISTICS),
    Metric("preemptions", "Preemptions", "", "min", ("summary", "intervals", "verify")),
    Metric("completed", "Finished requests", "", "max", ("summary", "groups")),
    Metric("failed", "Failed requests", "", "min", ("summary", "groups")),
    Metric("model_calls", "Model calls", "", "min", ("intervals", "verify")),
    Metric("busy_s", "Time in model calls", "s", "min"),
    Metric("prompt_tokens_computed", "Computed prompt tokens", "", "min"),
    Metric("padded_prompt_tokens", "Padding tokens of prompts", "", "min"),
    Metric("padded_decode_rows", "Padding rows of decodes", "", "min"),
    Metric("mean_kv_usage", "Mean KV cache usage", "", "min", ("summary",), is_percentage=True),
    Metric("peak_kv_usage", "Peak KV cache usage", "", "min", ("summary",), is_percentage=True),
    Metric("kv_fragmentation", "KV cache fragmentation", "", "min", ("summary",), is_percentage=True),
    Metric("peak_kv_blocks", "Peak KV blocks", "", "min"),
    Metric("mean_kv_tokens", "Mean KV tokens", "", "min"),
    Metric("kv_sharing", "KV blocks saved by sharing", "", "max", is_percentage=True),
    Metric("waiting_slots", "Waiting for a slot", "", "min", is_percentage=True),
    Metric("waiting_budget", "Waiting for the budget of a step", "", "min", is_percentage=True),
    Metric("waiting_blocks", "Waiting for KV blocks", "", "min", is_percentage=True),
    Metric("prefix_hit_rate", "Prefix cache hit rate", "", "max", ("summary", "table"), is_percentage=True),
    Metric("prefix_cache_queries", "Prefix cache queries", "", "min"),
    Metric("prefix_cache_hits", "Prefix cache hits", "", "max"),
    Metric("prefix_cache_evictions", "Evicted blocks", "", "min"),
    Metric("saved_prefill_s", "Saved prefill time", "s", "max"),
    Metric("host_cache_hits", "Tokens copied from the host", "", "max"),
    Metric("host_copy_s", "Time of copies from the host", "s", "min"),
    Metric("accepted_tokens_per_step", "Tokens per step with drafts", "", "max", ("summary", "table")),
    Metric("draft_acceptance_rate", "Accepted drafts", "", "max", ("summary", "table"), is_percentage=True),
    Metric("wasted_tokens", "Wasted drafts", "", "min", ("summary",)),
    Metric("busy_imbalance", "Imbalance of busy time", "", "min", ("summary", "table")),
    Metric("request_imbalance", "Imbalance of requests", "", "min"),
    Metric("transfers", "KV transfers", "", "min"),
    Metric("transfer_s", "Time of KV transfers", "s", "min"),
    Metric("transfer_bytes", "Bytes of KV transfers", "", "min"),
    Metric("mfu", "MFU", "", "max", ("summary", "table"), is_percentage=True, needs="peak"),
    Metric("mbu", "MBU", "", "max", ("summary", "table"), is_percentage=True, needs="peak"),
    Metric("energy", "Energy", "J/1k tok", "min", ("summary",), needs="power"),
    Metric("cost_per_million_tokens", "Cost per million output tokens", "", "min", ("summary", "table", "intervals")),
    Metric("cost_per_million_total_tokens", "Cost per million tokens", "", "min", ("summary", "intervals")),
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
    whole = whole_metric(name)
    return (BY_NAME.get(whole) or Metric(name, latency_title(whole), "ms", "min"))._replace(name=name)


def metric_title(name: str) -> str:
    """Return a metric as people call it: `P99 TTFT`, `Mean end-to-end latency, priority 0`."""
    match = GROUP_NAME.fullmatch(name)
    return metric_named(name).title + (f", {match[2]} {match[3]}" if match else "")


def title_inside(name: str) -> str:
    """Return a metric as people call it inside of a sentence: `mean TTFT`, but `P99 TTFT`."""
    title = metric_title(name)
    return title[0].lower() + title[1:] if title[1:2].islower() else title


def short_metric(name: str) -> str:
    """Return the name of a metric without its unit, for heads of tables that have one: p99_ttft, e2el[priority=0]."""
    return name.replace("_ms", "", 1)


class Unit(NamedTuple):
    """The unit in which people read values of a metric."""

    name: str  # empty for counts
    divisor: float = 1.0  # of a value of the metric

    def after(self, title: str) -> str:
        """Return the head of a column or the title of an axis: `P99 TTFT (ms)`."""
        return f"{title} ({self.name})" if self.name else title


MIN_SECONDS, MIN_DIGITS = 1000, 10  # milliseconds


def unit_of(name: str, values: Iterable[Optional[float]]) -> Unit:
    """Return one unit for all these values of a metric: seconds from 1,000 ms on, unless one is shorter than 10 ms."""
    metric = metric_named(name)
    if metric.is_percentage:
        return Unit("%", 0.01)
    sizes = [abs(value) for value in values if value is not None and math.isfinite(value) and value]
    in_seconds = metric.unit == "ms" and sizes and max(sizes) >= MIN_SECONDS and min(sizes) >= MIN_DIGITS
    return Unit("s", 1000.0) if in_seconds else Unit(metric.unit)


def format_number(value: float) -> str:
    """Return a number with its significant digits and thousands separators."""
    if math.isnan(value):
        return "–"
    size = abs(value)
    if size >= 1000 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.{1 if size >= 100 else 2 if size >= 1 else 3}f}" if size >= 0.001 else f"{value:.2g}"


def digits_of(width: float) -> int:
    """Return how many decimals show two digits of an interval."""
    return min(6, max(0, 1 - math.floor(math.log10(width)))) if width > 0 else 2


def format_quantity(value: float, half_width: Optional[float], unit: Unit, sign: bool = False) -> str:
    """Return a value of a metric in a unit, without its name: 8.29 ± 0.29, with two digits of the half-width."""
    number, plus = value / unit.divisor, "+" if sign and value > 0 else ""
    if half_width is None or math.isnan(number):
        return plus + format_number(number)
    width = half_width / unit.divisor
    if width <= 1e-9 * abs(number):  # only rounding errors
        return f"{plus}{format_number(number)} ± 0"
    digits = digits_of(width)
    return f"{plus}{number:,.{digits}f} ± {width:,.{digits}f}"
