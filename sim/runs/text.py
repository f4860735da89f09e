"""A run as text: the block that users of `vllm bench serve` know, then what only a simulator knows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .metrics import WHERE

if TYPE_CHECKING:
    from .simulate import Run

WIDTH = 58
PLACES = {"front_end": "in the front end", "queued": "queued", "prefill": "in its own prefill",
          "stalled": "stalled behind others", "decoding": "decoding", "swapped": "swapped out"}  # fmt: skip
TITLES = {"ttft": "Time to First Token", "tpot": "Time per Output Token (excl. 1st token)",
          "itl": "Inter-token Latency", "e2el": "End-to-end Latency"}  # fmt: skip


def line(label: str, value: Any) -> str:
    text = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label}{text:>{WIDTH - len(label)}}"


def rule(title: str, fill: str = "-") -> str:
    return f"{title:{fill}^{WIDTH}}" if title else fill * WIDTH


def show_run(run: Run) -> str:
    lines = [rule(" Serving Benchmark Result (simulated) ", "="), *benchmark(run)]
    lines += [rule(" What only a simulator knows "), *inside(run)]
    lines.append("=" * WIDTH)
    if run.outside:
        lines.append(f"outside the profile's measured grid: {'; '.join(run.outside)}")
    if run.stuck:
        lines.append(str(run.stuck))
    return "\n".join(lines)


def benchmark(run: Run) -> list[str]:
    """Return the block of vLLM's benchmark."""
    measures, result = run.measures, run.measures.as_result()
    lines = [
        line("Successful requests:", result["completed"]),
        line("Failed requests:", result["failed"]),
        line("Benchmark duration (s):", result["duration"]),
        line("Total input tokens:", result["total_input_tokens"]),
        line("Total generated tokens:", result["total_output_tokens"]),
        line("Request throughput (req/s):", result["request_throughput"]),
    ]
    if measures.good is not None:
        lines.append(line("Request goodput (req/s):", result["request_goodput"]))
    lines += [
        line("Output token throughput (tok/s):", result["output_throughput"]),
        line("Total token throughput (tok/s):", result["total_token_throughput"]),
    ]
    for name, title in TITLES.items():
        if f"mean_{name}_ms" in result:
            lines.append(rule(title))
            for kind in ("mean", "median", "p90", "p99"):
                label = f"{kind.capitalize() if kind[0] != 'p' else kind.upper()} {name.upper()} (ms):"
                lines.append(line(label, result[f"{kind}_{name}_ms"]))
    return lines


def inside(run: Run) -> list[str]:
    """Return what happened inside the server."""
    result = run.result()
    lines = [
        line("Policy:", run.scenario.policy["name"]),
        line("Profile:", run.profile.name),
        line("Model calls:", run.calls),
        line("Device busy (%):", 100 * run.busy / run.end if run.end > 0 else 0.0),
        line("Evictions:", result["evictions"]),
        line("Prompt tokens computed:", run.server.computed),
        line("  padding beside them:", run.padded_tokens),
        line("Decode rows of padding:", run.padded_rows),
    ]
    lines += [line(f"Requests {name}:", count) for name, count in result["outcomes"].items() if name != "finished"]
    where = result["mean_seconds"]
    lines.append("Where a request's time went (mean s):")
    lines += [line(f"  {PLACES[name]}:", float(where[name])) for name in WHERE]
    return lines
