"""The metrics that lead for a load: in results, comparisons, and sweeps without objectives.

Users of a server feel its latency if the requests arrive at a rate: a faster server does not end such a run much
earlier. A backlog, a closed loop and the contest are a fixed amount of work: the time that it takes is the result.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from servesim.config.layers import as_section
from servesim.config.scenario import Scenario
from servesim.core import BadInput
from servesim.files.read import OPEN_PIPES

from .simulate import load_trace

BESIDE = "p99_ttft_ms"  # beside the leading metric of requests that arrive at a rate
FIXED_WORK = ("makespan", "mean_ttft_ms")
FIXED_WORK_STEADY = ("mean_e2el_ms", "output_throughput")  # steady state has no makespan
FIXED_ARRIVALS = ("burst", "closed", "contest")
ENOUGH_ROWS = 1000  # of a trace, to see whether all requests arrive at once


def leading_metrics(
    scenario: Mapping[str, Any], steady: bool = False, arrivals: Iterable[float] = ()
) -> tuple[str, str]:
    """Return the metric that leads, and the one beside it; `arrivals` are those of a run without known requests."""
    if not arrive_at_rate(scenario, arrivals):
        return FIXED_WORK_STEADY if steady else FIXED_WORK
    slo: Any = scenario.get("slo")
    has_slo = isinstance(slo, Mapping) and any(slo.values())
    return "request_goodput" if has_slo else "mean_e2el_ms", BESIDE


def arrive_at_rate(scenario: Mapping[str, Any], arrivals: Iterable[float] = ()) -> bool:
    """Whether the requests of a scenario arrive at a rate, not all at once, nor as others end."""
    trace, workload = scenario.get("trace"), scenario.get("workload")
    if trace is not None:
        return trace_has_rate(json.dumps(as_section("trace", trace), sort_keys=True), scenario.get("seed") or 0)
    return len(set(arrivals)) > 1 if workload is None else workload_has_rate(workload)


def workload_has_rate(workload: Any) -> bool:
    """Whether the requests of a workload arrive at a rate; of a mix, those of any part."""
    keys = workload if isinstance(workload, Mapping) else {}
    if "mix" in keys:
        return any(map(workload_has_rate, keys["mix"]))
    arrivals = keys.get("arrivals")
    kind = arrivals.get("kind") if isinstance(arrivals, Mapping) else None
    return "stages" in keys or (kind is not None and kind not in FIXED_ARRIVALS)


@lru_cache(maxsize=16)  # `sim explore` asks again for every result
def trace_has_rate(section: str, seed: int) -> bool:
    """Whether the requests of a trace arrive at a rate; a file that cannot be read now counts as such a trace."""
    keys = json.loads(section)
    path = str(keys.get("path"))
    if keys.get("rate") is not None or path == "-" or path.startswith(OPEN_PIPES):
        return True
    try:
        scenario = Scenario.model_validate({"trace": {**keys, "limit": keys.get("limit") or ENOUGH_ROWS}, "seed": seed})
        return len({request.arrival for request in load_trace(scenario).requests if request.follows is None}) > 1
    except (BadInput, OSError, ValueError):
        return True
