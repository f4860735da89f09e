"""The result file of a load generator as a measured run: its folder is like that of a replay."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Optional

from servesim.config.scenario import scenario_from
from servesim.core import BadInput, Request
from servesim.costs.device_profile import Profile
from servesim.costs.linear import LinearCost
from servesim.traces.read.benchmark_results import RequestResult, read_results, results_format
from servesim.traces.read.source import Source

from .live_run import MeasuredRun, run_from_result

UNKNOWN = ("evictions", "model_calls", "busy_s", "prompt_tokens_computed")  # metrics that no client can measure


def benchmark_run(path: Path, benchmark: Optional[int] = None) -> MeasuredRun:
    """Read a result file. `benchmark` chooses one of several in a file, counted from 0."""
    source = Source(path)
    results = read_results(source, benchmark)
    if all(result.failed for result in results):
        raise BadInput(f"{path}: expected at least one successful request, got none")
    requests = [Request(r.id, r.arrival, max(1, r.prompt), max(1, r.output)) for r in results]
    gaps = [gap for result in results for gap in result.gaps]
    measured = {
        "requests": [request_row(result) for result in results],
        "gaps": [gaps, [1] * len(gaps)],
        "end": max(result.arrival + result.e2e for result in results),
        "backend": {"results": path.name, "format": results_format(source)},
        "calls": [], "work": {}, "stuck": None, "stopped": False, "decisions": [], "host": [0.0, 0.0], "late": 0.0,
        "blocks_left": None, "blocks": None,
    }  # fmt: skip
    scenario = scenario_from({"trace": {"path": str(path)}}, str(path))
    run = run_from_result(scenario, Profile("none", LinearCost()), requests, measured)
    run.extra = {**run.extra, **dict.fromkeys(UNKNOWN)}
    return run


def request_row(result: RequestResult) -> list[Any]:
    """Return the times of a request in the order of the live driver's result."""
    sent = result.arrival
    if result.failed:
        return [0, sent, sent, *[None] * 5, *[0.0] * 4, 0, "failed", result.failed]
    first, end = sent + result.ttft, sent + result.e2e
    return [result.output, sent, sent, None, first, end, end, end, *[0.0] * 4, 0, "finished", None]
