"""The highest request rate at which a server still meets its objectives, found by bisection.

Every rate has the same requests; only their arrivals are scaled.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

from servesim.config.overrides import Tree, put
from servesim.config.scenario import scenario_from
from servesim.core import BadInput

from .executor import Executor
from .intervals import Interval, interval
from .number_format import spread
from .objective import FIGURES
from .single_run import Bench, Record, Task, setup_of

DOUBLINGS = 12  # of the rate before it is called unbounded, or hopeless
SIGNS: dict[str, Callable[[float, float], bool]] = {"<=": operator.le, ">=": operator.ge}


class Bound(NamedTuple):
    """A figure that must stay on one side of a value."""

    metric: str
    sign: str  # <= | >=
    value: float

    def __str__(self) -> str:
        return f"{self.metric}{self.sign}{self.value:g}"


def bound(given: str) -> Bound:
    """Read p99_ttft_ms<=500."""
    match = re.fullmatch(r"\s*(\w+)\s*(<=|>=)\s*([-+.\deE]+)\s*", given)
    try:
        assert match is not None
        found = Bound(match[1], match[2], float(match[3]))
    except (AssertionError, ValueError):
        raise BadInput(f"--meet {given}: expected FIGURE<=VALUE or FIGURE>=VALUE, e.g. p99_ttft_ms<=500") from None
    if found.metric not in FIGURES:
        raise BadInput(f"--meet {given}: no figure {found.metric!r}; known: {', '.join(FIGURES)}")
    return found


@dataclass(frozen=True)
class Trial:
    """What came of one rate."""

    factor: float  # of the scenario's own rate
    rate: float  # requests a second
    figures: dict[str, Interval]
    missed: Sequence[Bound]
    trouble: Optional[str] = None

    @property
    def good(self) -> bool:
        """Whether every bound holds."""
        return not self.missed and self.trouble is None


class Ladder:
    """Tries rates of one scenario."""

    def __init__(
        self, tree: Tree, bounds: Sequence[Bound], replications: int, executor: Executor,
        cut: Optional[tuple[float, float]] = None,
    ) -> None:  # fmt: skip
        self.tree, self.bounds, self.replications, self.executor = tree, bounds, replications, executor
        self.setup = setup_of(tree, cut)
        self.trials: list[Trial] = []
        scenario = scenario_from(tree)
        trace = Bench(tree).trace(scenario, Task(0, 0, {}))
        if any(request.after is not None for request in trace.requests) or not trace.span > 0:
            raise BadInput("scenario: its requests have no rate: they wait for each other, or all arrive at once")
        self.rate = (len(trace) - 1) / trace.span
        if not scenario.varies:
            self.replications = 1

    def try_rate(self, factor: float) -> Trial:
        """Run the scenario at a multiple of its rate."""
        tasks = [Task(0, replication, {}, rate=factor) for replication in range(self.replications)]
        records: list[Record] = [record for _, record in self.executor.run(self.setup, tasks)]
        trouble = next((r.get("error") or r.get("stuck") for r in records if r.get("error") or r.get("stuck")), None)
        figures = {
            name: interval([r["figures"][name] for r in records])
            for name in FIGURES
            if all(name in r.get("figures", {}) for r in records)
        }
        missing = [str(b.metric) for b in self.bounds if b.metric not in figures and not trouble]
        if missing:
            raise BadInput(f"--meet: the run has no {', '.join(missing)} (request_goodput and attainment need a slo)")
        means = {name: found.mean for name, found in figures.items()}
        missed = [b for b in self.bounds if b.metric not in means or not SIGNS[b.sign](means[b.metric], b.value)]
        trial = Trial(factor, self.rate * factor, figures, missed, trouble)
        self.trials.append(trial)
        return trial

    def climb(self, precision: float) -> Optional[Trial]:
        """Return the highest rate that meets the bounds, to a part of itself; None when none does."""
        good = bad = self.try_rate(1.0)
        for _ in range(DOUBLINGS):
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
            return bad  # no rate is too high
        while bad.factor / good.factor > 1 + precision:
            middle = self.try_rate((good.factor * bad.factor) ** 0.5)
            good, bad = (middle, bad) if middle.good else (good, middle)
        return good

    def first_miss(self, best: Trial) -> Optional[Trial]:
        """Return the lowest rate above the best that missed."""
        above = [trial for trial in self.trials if not trial.good and trial.factor > best.factor]
        return min(above, key=lambda trial: trial.factor, default=None)


def at_rate(tree: Tree, trial: Trial) -> Optional[Tree]:
    """Return the scenario at that rate, where its workload names one."""
    workload: Any = tree.get("workload") or {}
    contest = workload.get("contest")
    if contest:
        faster = float(contest["X"]) * trial.factor
        tree = put(tree, ["workload", "contest", "X"], faster)
        return put(tree, ["workload", "contest", "T"], float(contest["X"]) * float(contest["T"]) / faster)
    if "rate" in (workload.get("arrivals") or {}):
        return put(tree, ["workload", "arrivals", "rate"], workload["arrivals"]["rate"] * trial.factor)
    return None


def told(ladder: Ladder, best: Optional[Trial]) -> str:
    """Say what was found."""
    bounds = ", ".join(map(str, ladder.bounds))
    if best is None:
        lowest = min(ladder.trials, key=lambda trial: trial.factor)
        return f"no rate meets {bounds}: at {lowest.rate:.4g} req/s {misses(lowest)}"
    names = dict.fromkeys(["request_throughput", "request_goodput", *(b.metric for b in ladder.bounds)])
    lines = [f"  {name}: {spread(best.figures[name], name)}" for name in names if name in best.figures]
    miss = ladder.first_miss(best)
    last = "  no rate tried was too high" if miss is None else f"  at {miss.rate:.4g} req/s {misses(miss)}"
    return "\n".join([f"highest rate that meets {bounds}: {best.rate:.4g} req/s", *lines, last])


def misses(trial: Trial) -> str:
    """Say which bounds a rate does not meet."""
    if trial.trouble:
        return trial.trouble
    return ", ".join(f"{b.metric} is {spread(trial.figures[b.metric], b.metric)}" for b in trial.missed)
