"""Find the capacity of a scenario: the highest request rate that meets all bounds, by bisection.

Every rate uses the same requests; only their arrival times are scaled.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

from servesim.config.overrides import Tree, set_key
from servesim.config.scenario import scenario_from
from servesim.core import BadInput

from .executor import Executor
from .intervals import Interval, interval
from .number_format import format_mean
from .objective import METRICS
from .single_run import Record, RunContext, Task, context_json

MAX_DOUBLINGS = 12  # stop doubling (or halving) the rate after this many attempts
COMPARISONS: dict[str, Callable[[float, float], bool]] = {"<=": operator.le, ">=": operator.ge}


class Bound(NamedTuple):
    """An upper or lower bound of a metric."""

    metric: str
    sign: str  # <= | >=
    value: float

    def __str__(self) -> str:
        return f"{self.metric}{self.sign}{self.value:g}"


def parse_bound(text: str) -> Bound:
    """Read p99_ttft_ms<=500."""
    match = re.fullmatch(r"\s*(\w+)\s*(<=|>=)\s*([-+.\deE]+)\s*", text)
    try:
        assert match is not None
        bound = Bound(match[1], match[2], float(match[3]))
    except (AssertionError, ValueError):
        raise BadInput(f"--meet {text}: expected METRIC<=VALUE or METRIC>=VALUE, e.g. p99_ttft_ms<=500") from None
    if bound.metric not in METRICS:
        raise BadInput(f"--meet {text}: no metric {bound.metric!r}; known: {', '.join(METRICS)}")
    return bound


@dataclass(frozen=True)
class Trial:
    """The result of one rate."""

    factor: float  # multiple of the scenario's rate
    rate: float  # requests per second
    metrics: dict[str, Interval]
    missed: Sequence[Bound]
    failure: Optional[str] = None  # error message, or why the engine got stuck

    @property
    def good(self) -> bool:
        """Whether the rate meets every bound."""
        return not self.missed and self.failure is None


class CapacitySearch:
    """Simulates one scenario at several rates."""

    def __init__(
        self, tree: Tree, bounds: Sequence[Bound], replications: int, executor: Executor,
        steady_window: Optional[tuple[float, float]] = None,
    ) -> None:  # fmt: skip
        self.tree, self.bounds, self.replications, self.executor = tree, bounds, replications, executor
        self.context = context_json(tree, steady_window)
        self.trials: list[Trial] = []
        scenario = scenario_from(tree)
        trace = RunContext(tree).trace(scenario, Task(0, 0, {}))
        if any(request.follows is not None for request in trace.requests) or not trace.span > 0:
            raise BadInput(
                "scenario: expected requests with a rate, but they wait for each other or all arrive at once"
            )
        self.rate = (len(trace) - 1) / trace.span
        if not scenario.varies:
            self.replications = 1

    def try_rate(self, factor: float) -> Trial:
        """Run the scenario at a multiple of its rate."""
        tasks = [Task(0, replication, {}, rate_factor=factor) for replication in range(self.replications)]
        records: list[Record] = [record for _, record in self.executor.run(self.context, tasks)]
        failure = next((r.get("error") or r.get("stuck") for r in records if r.get("error") or r.get("stuck")), None)
        metrics = {
            name: interval([r["figures"][name] for r in records])
            for name in METRICS
            if all(name in r.get("figures", {}) for r in records)
        }
        missing = [str(b.metric) for b in self.bounds if b.metric not in metrics and not failure]
        if missing:
            raise BadInput(
                f"--meet: the run has no {', '.join(missing)}; request_goodput and attainment need --goodput or `slo`"
            )
        means = {name: value.mean for name, value in metrics.items()}
        missed = [b for b in self.bounds if b.metric not in means or not COMPARISONS[b.sign](means[b.metric], b.value)]
        trial = Trial(factor, self.rate * factor, metrics, missed, failure)
        self.trials.append(trial)
        return trial

    def find_rate(self, precision: float) -> Optional[Trial]:
        """Return the highest rate that meets the bounds, to a relative precision; None if no rate meets them."""
        good = bad = self.try_rate(1.0)
        for _ in range(MAX_DOUBLINGS):
            if good.good != bad.good:
                break
            if good.good:
                good, bad = bad, self.try_rate(bad.factor * 2)
                good = good if bad.good is False else bad
            else:
                good = bad = self.try_rate(good.factor / 2)
                if good.good:
                    bad = min((t for t in self.trials if not t.good), key=lambda trial: trial.factor)
        if not good.good:
            return None
        if bad.good:
            return bad  # every rate meets the bounds
        while bad.factor / good.factor > 1 + precision:
            middle = self.try_rate((good.factor * bad.factor) ** 0.5)
            good, bad = (middle, bad) if middle.good else (good, middle)
        return good

    def first_miss(self, best: Trial) -> Optional[Trial]:
        """Return the lowest rate above the best one that misses a bound."""
        above = [trial for trial in self.trials if not trial.good and trial.factor > best.factor]
        return min(above, key=lambda trial: trial.factor, default=None)


def scenario_at_rate(tree: Tree, trial: Trial) -> Optional[Tree]:
    """Return the scenario with the rate of a trial, None if its workload has no rate key."""
    workload: Any = tree.get("workload") or {}
    contest = workload.get("contest")
    if contest:
        faster = float(contest["X"]) * trial.factor
        tree = set_key(tree, "workload.contest.X", faster)
        return set_key(tree, "workload.contest.T", float(contest["X"]) * float(contest["T"]) / faster)
    if "rate" in (workload.get("arrivals") or {}):
        return set_key(tree, "workload.arrivals.rate", workload["arrivals"]["rate"] * trial.factor)
    return None


def format_result(search: CapacitySearch, best: Optional[Trial]) -> str:
    """Return the highest rate, its metrics, and the first rate that misses a bound."""
    bounds = ", ".join(map(str, search.bounds))
    if best is None:
        lowest = min(search.trials, key=lambda trial: trial.factor)
        return f"no tested rate meets {bounds}: at {lowest.rate:.4g} req/s, {describe_misses(lowest)}"
    names = dict.fromkeys(["request_throughput", "request_goodput", *(b.metric for b in search.bounds)])
    lines = [f"  {name}: {format_mean(best.metrics[name], name)}" for name in names if name in best.metrics]
    miss = search.first_miss(best)
    last = "  every tested rate meets the bounds"
    if miss is not None:
        last = f"  not met at {miss.rate:.4g} req/s: {describe_misses(miss)}"
    return "\n".join([f"highest rate that meets {bounds}: {best.rate:.4g} req/s", *lines, last])


def describe_misses(trial: Trial) -> str:
    """Return the failure of a rate, or the metrics that miss their bounds."""
    if trial.failure:
        return trial.failure
    return ", ".join(f"{b.metric} is {format_mean(trial.metrics[b.metric], b.metric)}" for b in trial.missed)
