"""A run as text: the table of `vllm bench serve`, then simulator-only metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from servesim.config.validation import describe_policies

from .intervals import describe_intervals, format_interval
from .leading import leading_metrics
from .metric_table import format_quantity, metric_title, metrics_in, percentile_name, unit_of
from .notes import note
from .pools import scenarios_of
from .prices import COSTS
from .replicas import replica_lines
from .request_rows import STATES
from .run_warnings import source_notes
from .saturation import estimated_load

if TYPE_CHECKING:
    from .simulate import Run

WIDTH = 58
STATE_LABELS = {"front_end": "front end", "queued": "queued", "prefill": "prefill",
                "stalled": "stalled by other requests", "decoding": "decoding", "swapped": "swapped out"}  # fmt: skip
TITLES = {"ttft": "Time to First Token", "tpot": "Time per Output Token (excl. 1st token)",
          "itl": "Inter-token Latency", "e2el": "End-to-end Latency"}  # fmt: skip
SHOWN_PERCENTILES = (90, 99)
# Lines: label -> key of the result. With (%) in the label, the value is a fraction.
CLIENT = {
    "Successful requests:": "completed", "Failed requests:": "failed", "Benchmark duration (s):": "duration",
    "Total input tokens:": "total_input_tokens", "Total generated tokens:": "total_output_tokens",
    "Request throughput (req/s):": "request_throughput", "Request goodput (req/s):": "request_goodput",
    "Output token throughput (tok/s):": "output_throughput",
    "Total token throughput (tok/s):": "total_token_throughput",
}  # fmt: skip
FLEET = {"Busiest replica / mean, time in calls:": "busy_imbalance",
         "Most requests of a replica / mean:": "request_imbalance"}  # fmt: skip
SERVER = {"Preemptions:": "preemptions", "Prompt tokens computed:": "prompt_tokens_computed",
          "  padding tokens:": "padded_prompt_tokens", "Padding rows of decodes:": "padded_decode_rows"}  # fmt: skip
BLOCKS = {"KV cache fragmentation (%):": "kv_fragmentation", "KV blocks saved by sharing (%):": "kv_sharing"}
CACHE = {
    "Prefix cache hits (% of prompt tokens):": "prefix_hit_rate", "  saved prefill time (s):": "saved_prefill_s",
    "  evicted blocks:": "prefix_cache_evictions", "  tokens copied from the host:": "host_cache_hits",
    "  time of these copies (s):": "host_copy_s",
}  # fmt: skip
DRAFTS = {"Tokens per step with drafts:": "accepted_tokens_per_step", "  accepted drafts (%):": "draft_acceptance_rate",
          "  wasted drafts:": "wasted_tokens"}  # fmt: skip
PRICES = {"Energy per 1,000 output tokens (J):": "energy", **{f"{metric_title(name)}:": name for name in COSTS}}


def line(label: str, value: Any) -> str:
    text = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label}{text:>{WIDTH - len(label)}}"


def lines_of(table: Mapping[str, str], result: Mapping[str, Any]) -> list[str]:
    """Return the lines of a table that have a value."""
    values = {label: result[key] for label, key in table.items() if result.get(key) is not None}
    return [line(label, 100 * value if "(%" in label else value) for label, value in values.items()]


def title_line(title: str, fill: str = "-") -> str:
    return f"{title:{fill}^{WIDTH}}" if title else fill * WIDTH


def show_run(run: Run, percentiles: Sequence[float] = SHOWN_PERCENTILES) -> str:
    result, arrivals = run.result(), run.measures.requests.column("arrival").tolist()
    leading = leading_metrics(run.scenario.model_dump(mode="json"), arrivals=arrivals)
    lines = [title_line(" Serving Benchmark Result (simulated) ", "="), *benchmark(run, percentiles)]
    lines += [title_line(" Simulator-only metrics "), *simulator_metrics(run, result)]
    if run.scenario.fleet is not None and run.replicas is not None:
        lines += [title_line(" Replicas "), *fleet_lines(result, run.scenario.fleet.router["name"])]
    if run.intervals is not None:
        limits = run.intervals["metrics"]
        lines.append(title_line(f" {100 * run.intervals['confidence']:g} % intervals "))
        for name in dict.fromkeys([*leading, *metrics_in("main")]):
            if name in limits:
                lines.append(line(metric_title(name), format_interval(name, result[name], *limits[name])))
    lines += ["=" * WIDTH, *filter(None, [leading_line(leading, result), result.get("limit_text")])]
    if run.intervals is not None:
        lines += describe_intervals(run.intervals, names(profile.name for profile in run.profiles))
    elif load := estimated_load(run):
        lines.append(load.describe_estimate())
    if run.outside_profile:
        lines.append(note("outside range", sizes="; ".join(run.outside_profile)).text)
    lines += [f"note: {found.text}" for found in source_notes(run.profiles)]
    lines.append(f"policy validated against: {describe_policies(scenarios_of(run.scenario))}")
    if run.stuck:
        lines.append(str(run.stuck))
    return "\n".join(lines)


def benchmark(run: Run, percentiles: Sequence[float] = SHOWN_PERCENTILES) -> list[str]:
    """Return the table of vLLM's benchmark, with these percentiles of the latencies."""
    measures, result = run.measures, run.measures.as_result()
    lines = lines_of(CLIENT, result)
    for name, title in TITLES.items():
        if f"mean_{name}_ms" in result:
            lines.append(title_line(title))
            for kind in ("mean", "median", *map(percentile_name, percentiles)):
                label = f"{kind.capitalize() if kind[0] != 'p' else kind.upper()} {name.upper()} (ms):"
                lines.append(line(label, result[f"{kind}_{name}_ms"]))
    return [*lines, *priority_lines(measures.of_groups())]


def priority_lines(groups: Mapping[str, Any]) -> list[str]:
    """Return latencies of each priority, if requests have several."""
    priorities = [name[len("completed[priority=") : -1] for name in groups if name.startswith("completed[priority=")]
    lines = [title_line("By Priority")] if priorities else []
    for value in priorities:
        lines.append(line(f"Successful requests, priority {value}:", groups[f"completed[priority={value}]"]))
        for kind, name in (("mean", "ttft"), ("p99", "ttft"), ("mean", "tpot"), ("p99", "e2el")):
            label = f"{kind.capitalize()} {name.upper()}, priority {value} (ms):"
            number = groups.get(f"{kind}_{name}_ms[priority={value}]")
            lines += [] if number is None else [line(label, number)]
    return lines


def leading_line(leading: Sequence[str], result: Mapping[str, Any]) -> str:
    """Return the leading metrics in one line; empty if the run has none of them."""
    texts = []
    for name in leading:
        if result.get(name) is not None:
            unit = unit_of(name, [result[name]])
            texts.append(f"{metric_title(name)} {format_quantity(result[name], None, unit)} {unit.name}")
    return f"result: {', '.join(texts)}" if texts else ""


def fleet_lines(result: Mapping[str, Any], router: str) -> list[str]:
    """Return the metrics of a fleet, and a table of its replicas."""
    return [
        line("Replicas:", len(result["replicas"])),
        line("Router:", router),
        *lines_of(FLEET, result),
        *transfer_lines(result),
        *replica_lines(result["replicas"]),
    ]


def transfer_lines(result: Mapping[str, Any]) -> list[str]:
    """Return the copies of KV blocks from prefill to decode replicas."""
    if not result.get("transfers"):
        return []
    mean = 1e3 * result["transfer_s"] / result["transfers"]
    return [line("KV transfers:", result["transfers"]), line("  mean time (ms):", mean),
            line("  size (GB):", result["transfer_bytes"] / 1e9)]  # fmt: skip


def cache_lines(result: Mapping[str, Any]) -> list[str]:
    """Return what a prefix cache has saved."""
    if not result.get("prefix_cache_hits"):
        return []
    return lines_of(CACHE, {**result, "saved_prefill_s": result["saved_prefill_s"] or None})  # 0 without a profile


def utilisation_lines(result: Mapping[str, Any]) -> list[str]:
    """Return MFU, MBU, energy and costs of a run, and MFU and MBU of each kind of step."""
    lines = []
    if result["mfu"] is not None:
        kinds = result["utilisation"]
        lines += [line("MFU / MBU (%):", percentages(result))]
        lines += [line(f"  {kind} steps:", percentages(row)) for kind, row in kinds.items() if row["mfu"] is not None]
    return lines + lines_of(PRICES, result)


def percentages(row: Mapping[str, Any]) -> str:
    return f"{100 * row['mfu']:.2f} / {100 * row['mbu']:.2f}"


def names(values: Iterable[str]) -> str:
    """Return the different ones of these names."""
    return ", ".join(dict.fromkeys(values))


def simulator_metrics(run: Run, result: Mapping[str, Any]) -> list[str]:
    """Return metrics that a client cannot see."""
    lines = [
        line("Policy:", names(own.policy["name"] for own in scenarios_of(run.scenario))),
        line("Profile:", names(profile.name for profile in run.profiles)),
        line("Model calls:", run.calls),
        line("Time in model calls (%):", 100 * run.busy_seconds / run.end if run.end > 0 else 0.0),
        *lines_of(SERVER, result),
    ]
    if "mean_kv_usage" in result:
        usage = f"{100 * result['mean_kv_usage']:.2f} / {100 * result['peak_kv_usage']:.2f}"
        lines.append(line("KV cache usage, mean / peak (%):", usage))
    lines += [*lines_of(BLOCKS, result), *cache_lines(result), *lines_of(DRAFTS, result), *utilisation_lines(result)]
    lines += [line(f"Requests {name}:", count) for name, count in result["outcomes"].items() if name != "finished"]
    seconds = result["mean_seconds"]
    lines.append("Time breakdown (mean s):")
    lines += [line(f"  {STATE_LABELS[name]}:", float(seconds[name])) for name in STATES]
    return lines
