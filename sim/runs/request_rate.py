"""The request rate of a scenario: read it, and return the scenario at another rate or with more requests.

Another rate keeps the requests and scales only their arrival times. The client of the contest has its own times: it
rounds its gaps to 10 ms. A rate is not a setting of the server, so it cannot be a parameter of a sweep.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Optional

from servesim.config.layers import Tree, apply_assignment, set_key, value_at
from servesim.config.scenario import scenario_from
from servesim.core import BadInput
from servesim.traces.edit import arrivals_advice

from .simulate import load_trace

EXACT_DIGITS = 12  # removes the rounding error of a factor
RATE_KEYS = ("workload.arrivals.rate", "workload.contest.X", "trace.rate")


def request_rate(tree: Tree) -> float:
    """Return requests per second: the rate that the scenario sets, else the mean rate of its requests."""
    trace = load_trace(scenario_from(apply_assignment(tree, {})))
    if any(request.follows is not None for request in trace.requests) or not trace.span > 0:
        advice = f"; {arrivals_advice(trace, 1.0)}" if tree.get("trace") and not trace.span > 0 else ""
        problem = "expected requests with a rate, but they wait for each other or all arrive at once"
        raise BadInput(f"scenario: {problem}{advice}")
    return rate_key_value(tree) or (len(trace) - 1) / trace.span


def rate_key_value(tree: Mapping[str, Any]) -> Optional[float]:
    """Return the rate that a scenario sets, None if it has no such key."""
    values = [value_at(tree, key) for key in RATE_KEYS]
    return next((float(value) for value in values if value is not None), None)


def scenario_at_rate(tree: Tree, rate: float, factor: float) -> Optional[Tree]:
    """Return the scenario at a rate, which is `factor` times its own; None if its workload has no key for it."""
    workload: Any = tree.get("workload") or {}
    trace = tree.get("trace")
    if is_contest(workload):
        return contest_at_rate(tree, factor)
    if isinstance(workload.get("arrivals"), Mapping) and "rate" in workload["arrivals"]:
        tree = set_key(tree, "workload.arrivals.rate", rate)
        duration = workload.get("duration")
        return tree if duration is None else set_key(tree, "workload.duration", duration / factor)
    if trace is not None:
        return {**tree, "trace": {**(trace if isinstance(trace, Mapping) else {"path": trace}), "rate": rate}}
    return None


def longer_scenario(tree: Tree, times: int) -> Tree:
    """Return the scenario with `times` as many requests: more copies of a trace, or more requests of a workload."""
    trace, workload = tree.get("trace"), tree.get("workload")
    if times == 1 or (trace is None and workload is None):
        return tree
    if trace is None:
        from servesim.traces.make.workload import longer_workload

        return {**tree, "workload": longer_workload(workload, times)}
    keys = trace if isinstance(trace, Mapping) else {"path": trace}
    return {**tree, "trace": {**keys, "repeat": times * keys.get("repeat", 1)}}


def is_contest(workload: Optional[Mapping[str, Any]]) -> bool:
    """Whether the client of the contest sends the requests."""
    return bool(workload and workload.get("contest"))


def contest_at_rate(tree: Tree, factor: float) -> Optional[Tree]:
    """Return a scenario of the contest with `factor` times its rate; None for other scenarios.

    The client sends int(T * X) requests: their number stays the same.
    """
    workload: Any = tree.get("workload")
    if not is_contest(workload):
        return None
    X, T = float(workload["contest"]["X"]), float(workload["contest"]["T"])
    rate, requests = round_rate(X * factor, EXACT_DIGITS), int(X * T)
    seconds = requests / rate
    if int(seconds * rate) != requests:
        seconds = math.nextafter(seconds, math.inf)
    return set_key(set_key(tree, "workload.contest.X", rate), "workload.contest.T", seconds)


def round_rate(rate: float, digits: int = 4) -> float:
    """Return a rate with few digits, so that the printed rate is exactly the simulated one."""
    return float(f"{rate:.{digits}g}")


def format_rate(rate: float) -> str:
    """Return a rate as it is printed."""
    return f"{rate:.10g} req/s"
