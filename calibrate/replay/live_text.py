"""The text of a measured run: its metrics, its device, and what happened to its requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from servesim.runs.device_counters import describe_counters
from servesim.runs.text import SHOWN_PERCENTILES, benchmark, title_line, utilisation_lines

from .live_run import MeasuredRun


def describe_live(live: MeasuredRun, title: str, percentiles: Sequence[float] = SHOWN_PERCENTILES) -> list[str]:
    """Return the lines that `sim replay` prints for a measured run."""
    lines = [title_line(f" {title} (measured) ", "="), *benchmark(live, percentiles)]
    if live.model_calls:
        percent = 100 * live.result()["host_s"] / max(live.busy_seconds, 1e-9)
        lines.append(f"model calls: {len(live.model_calls)}, host overhead: {percent:.1f} % of their time")
    lines += [*describe_device(live), *describe_requests(live)]
    if live.stopped:
        lines.append("stopped early; these are the results so far")
    return [*lines, *([str(live.stuck)] if live.stuck else [])]


def describe_device(live: MeasuredRun) -> Iterator[str]:
    """Yield MFU, MBU, energy, and the counters of the device."""
    yield from utilisation_lines(live.result())
    if live.device is not None:
        yield describe_counters(live.device)
        if str(live.backend.get("device", "")).lower().startswith("cpu"):
            yield "the model ran on a CPU: these counters and the energy are of another device"


def describe_requests(live: MeasuredRun) -> Iterator[str]:
    """Yield the requests that did not finish, and how the load generator sent them."""
    yield from (f"requests {name}: {n}" for name, n in live.measures.outcomes().items() if name != "finished")
    if late := live.extra.get("lateness_ms"):
        yield f"send lateness: mean {late['mean']:.2f} ms, max {late['max']:.2f} ms"
        yield f"max open streams: {live.extra['most_open']}"
    if prompts := live.extra.get("prompt_tokens"):
        yield describe_prompts(prompts)
        yield f"prompt seed: {live.settings['prompt_seed']}"
    yield from (f"{count} x {reason}" for reason, count in live.extra.get("reasons", {}).items())


def describe_prompts(prompts: Mapping[str, int]) -> str:
    """Return the line about the prompt lengths: requested, and as the server counts them."""
    if not prompts["requests_counted"]:
        return "prompt tokens: the server does not report how many it counted"
    text = f"prompt tokens: {prompts['requested']} requested, {prompts['served']} counted by the server"
    different = prompts["requests_different"]
    return text + (f" (different in {different} of {prompts['requests_counted']} requests)" if different else "")
