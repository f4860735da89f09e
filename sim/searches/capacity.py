"""Find the capacity of a scenario: the highest request rate that meets all bounds, by bisection.

Every rate uses the same requests; only their arrival times are scaled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

from servesim.config.overrides import Tree
from servesim.config.scenario import scenario_from
from servesim.core import BadInput
from servesim.execution.executor import Executor
from servesim.execution.single_run import Record, Task, context_json
from servesim.files.terminal import PLAIN, Screen, align_columns
from servesim.runs.request_rate import format_rate, rate_key_value, request_rate, round_rate
from servesim.runs.run_warnings import backend_notes
from servesim.statistics.constraints import Bound, describe_bounds, missed_bounds
from servesim.statistics.intervals import Interval, interval
from servesim.statistics.number_format import format_mean
from servesim.statistics.objective import METRICS

MIN_PRECISION = 1e-6  # a finer search never ends: rates are floats
MAX_DOUBLINGS = 12  # stop doubling (or halving) the rate after this many attempts


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
        self.rate = request_rate(tree)  # of the scenario
        scenario = scenario_from(tree)
        self.profile = scenario.profile
        if not scenario.varies:
            self.replications = 1

    def try_rate(self, rate: float) -> Trial:
        """Run the scenario at a request rate."""
        factor = rate / self.rate
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
                f"{describe_bounds(self.bounds)}: the run has no {', '.join(missing)}; "
                "request_goodput and attainment need `slo` (or --goodput)"
            )
        missed = list(missed_bounds(self.bounds, {name: value.mean for name, value in metrics.items()}))
        trial = Trial(factor, rate, metrics, missed, failure)
        self.trials.append(trial)
        return trial

    def find_rate(self, precision: float) -> Optional[Trial]:
        """Return the highest rate that meets the bounds, to a relative precision; None if no rate meets them."""
        digits = max(4, 2 - math.floor(math.log10(precision)))  # the printed rate is the one that ran
        first = self.rate if rate_key_value(self.tree) is not None else round_rate(self.rate, digits)
        good = bad = self.try_rate(first)
        for _ in range(MAX_DOUBLINGS):
            if good.good != bad.good:
                break
            if good.good:
                good, bad = bad, self.try_rate(round_rate(bad.rate * 2, digits))
                good = good if bad.good is False else bad
            else:
                good = bad = self.try_rate(round_rate(good.rate / 2, digits))
                if good.good:
                    bad = min((t for t in self.trials if not t.good), key=lambda trial: trial.rate)
        if not good.good:
            return None
        if bad.good:
            return bad  # every rate meets the bounds
        while bad.rate / good.rate > 1 + precision:
            middle = self.try_rate(round_rate(math.sqrt(good.rate * bad.rate), digits))
            good, bad = (middle, bad) if middle.good else (good, middle)
        return good

    def first_miss(self, best: Trial) -> Optional[Trial]:
        """Return the lowest rate above the best one that misses a bound."""
        above = [trial for trial in self.trials if not trial.good and trial.factor > best.factor]
        return min(above, key=lambda trial: trial.factor, default=None)


def format_result(search: CapacitySearch, best: Optional[Trial], screen: Screen = PLAIN) -> str:
    """Return the highest rate, its metrics, the first rate that misses a bound, and all rates that were tried."""
    first, *notes = describe_result(search, best)
    lines = (
        [] if best is None else [f"{name}: {format_mean(best.metrics[name], name)}" for name in shown_metrics(search)]
    )
    texts = [first, *(f"  {line}" for line in [*lines, *notes]), *format_trials(search, screen)]
    return "\n".join([*texts, *(f"note: {note}" for note in backend_notes([search.profile]))])


def describe_result(search: CapacitySearch, best: Optional[Trial]) -> list[str]:
    """Return the highest rate in words, and where the bounds are missed."""
    bounds = describe_bounds(search.bounds)
    if best is None:
        lowest = min(search.trials, key=lambda trial: trial.rate)
        return [f"no tested rate meets {bounds}: at {format_rate(lowest.rate)}, {describe_misses(lowest)}"]
    miss = search.first_miss(best)
    note = "every tested rate meets the bounds"
    if miss is not None:
        note = f"not met at {format_rate(miss.rate)}: {describe_misses(miss)}"
    return [f"highest rate that meets {bounds}: {format_rate(best.rate)}", note]


def shown_metrics(search: CapacitySearch) -> list[str]:
    """Return the metrics of every table of rates: throughput and what the bounds are about."""
    names = dict.fromkeys(["request_throughput", "request_goodput", *(bound.metric for bound in search.bounds)])
    return [name for name in names if any(name in trial.metrics for trial in search.trials)]


def format_trials(search: CapacitySearch, screen: Screen = PLAIN) -> list[str]:
    """Return the table of all rates that were tried, in rising order."""
    lines = [[f"  {line[0]}", *line[1:]] for line in trial_cells(search)]
    return [f"{len(search.trials)} rates tried:", *align_columns(lines, screen)]


def trial_cells(search: CapacitySearch) -> list[list[str]]:
    """Return the cells of the table of rates; the first line is its head."""
    names = shown_metrics(search)
    lines = [["rate", "meets", *names]]
    for trial in sorted(search.trials, key=lambda trial: trial.rate):
        cells = [format_mean(trial.metrics[name], name) if name in trial.metrics else "" for name in names]
        lines.append([format_rate(trial.rate), "yes" if trial.good else "no", *cells])
    return lines


def describe_misses(trial: Trial) -> str:
    """Return the failure of a rate, or the metrics that miss their bounds."""
    if trial.failure:
        return trial.failure
    return ", ".join(f"{b.metric} is {format_mean(trial.metrics[b.metric], b.metric)}" for b in trial.missed)
