"""Request rates of a sweep: which rates run, and the curve and the capacity of every configuration.

Every configuration runs at several rates, with the same requests. `rates: auto` chooses rates from a light load to more
than the baseline can serve. With `precision`, further rates per configuration find its capacity by bisection: the
highest rate that meets the constraints. Whether a rate meets them is decided by the means of the replications. A rate
at which a run fails, gets stuck or leaves more requests unserved than the baseline at the lowest rate does not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Optional

from servesim.core import BadInput
from servesim.core.limits import MAX_RATE, MAX_RUNS, MIN_RATE
from servesim.runs.request_rate import format_rate, round_rate
from servesim.statistics.constraints import Bound, missed_bounds

from .executor import Executor
from .experiment import Experiment, load_experiment
from .experiment_file import EXPERIMENT_FILE
from .grid import Assignment
from .ranking import CANNOT_WIN, CONFIRM_REPLICATION_OFFSET, Row
from .single_run import Record, RunKey, Task, context_json

AUTO_RATES = (0.1, 0.3, 0.5, 0.7, 0.9, 1.1, 1.5)  # times the throughput of the baseline at overload
OVERLOAD = 1e6  # times the rate of the scenario: all requests arrive at about the same time
MAX_DOUBLINGS = 12  # of the highest rate, and halvings of the lowest one, in a bisection
COARSE = 1.1  # tested rates that differ by a larger factor: print the estimate between them too


class RateRecords(Mapping[RunKey, Record]):
    """The records of one rate, by the keys of an experiment without rates. It shows later records too."""

    def __init__(self, records: Mapping[RunKey, Record], rate: float) -> None:
        self._records, self._rate = records, (rate,)

    def __getitem__(self, key: RunKey) -> Record:
        return self._records[(*key, self._rate)]

    def __iter__(self) -> Iterator[RunKey]:
        return (key[:-1] for key in self._records if key[-1] == self._rate)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class RatePoint(NamedTuple):
    """A configuration at one rate."""

    rate: float  # requests per second
    row: Row
    problem: str  # why it does not meet the constraints; empty if it does

    @property
    def good(self) -> bool:
        """Whether it meets the constraints."""
        return not self.problem


class Capacity(NamedTuple):
    """The highest request rate that meets the constraints."""

    rate: float  # the highest tested rate below all that miss them; 0 if the lowest one misses them
    estimate: float  # interpolated between this rate and the next one
    missed_at: Optional[float] = None  # the lowest tested rate that misses them
    reason: str = ""  # why it misses them

    @property
    def text(self) -> str:
        """The rate with its estimate, or its limit if no tested rate misses or meets the constraints."""
        if self.missed_at is None:
            return f"at least {format_rate(self.rate)}"
        if not self.rate:
            return f"below {format_rate(self.missed_at)}"
        coarse = self.missed_at > COARSE * self.rate
        return f"{format_rate(self.rate)}{f' (about {self.estimate:.3g})' if coarse else ''}"


@dataclass
class Curve:
    """The results of a configuration over the rate."""

    config: int
    assignment: Assignment
    label: str
    points: Sequence[RatePoint]  # in rising order of the rate
    bounds: Sequence[Bound]
    outcome: str = CANNOT_WIN.outcome  # by the capacity: best | equal | worse | cannot win
    rank: int = 0

    @property
    def is_baseline(self) -> bool:
        return self.config == 0

    @property
    def role(self) -> str:
        """Whether it is the baseline or the winner; empty for other configurations."""
        return "baseline" if self.is_baseline else "winner" if self.outcome == "best" else ""

    @cached_property
    def capacity(self) -> Optional[Capacity]:
        """The capacity, None without constraints."""
        if not self.bounds or not self.points:
            return None
        missed = next((index for index, point in enumerate(self.points) if not point.good), None)
        if missed is None:
            return Capacity(self.points[-1].rate, self.points[-1].rate)
        bad = self.points[missed]
        if missed == 0:
            return Capacity(0.0, 0.0, bad.rate, bad.problem)
        good = self.points[missed - 1]
        return Capacity(good.rate, interpolate(good, bad), bad.rate, bad.problem)

    def values(self, metric: str) -> list[tuple[RatePoint, float]]:
        """Return the points that have a metric, with its means."""
        pairs = [(point, point.row.mean(metric)) for point in self.points]
        return [(point, value) for point, value in pairs if not math.isnan(value)]


def interpolate(good: RatePoint, bad: RatePoint) -> float:
    """Return the rate between two points at which the first constraint is missed, on a straight line.

    Latencies rise ever faster with the rate, so the line is above the curve and the estimate is too low.
    """
    crossings = []
    for bound in bad.row.missed:
        low, high = good.row.mean(bound.metric), bad.row.mean(bound.metric)
        part = (bound.value - low) / (high - low) if high != low else 0.0
        crossings.append(min(1.0, max(0.0, part)) if math.isfinite(part) else 0.0)
    return good.rate + (bad.rate - good.rate) * min(crossings, default=0.0)


def build_curves(experiment: Experiment, records: Mapping[RunKey, Record]) -> list[Curve]:
    """Return the curve of every configuration from the records of all rates."""
    runs: dict[int, dict[float, list[Record]]] = {}
    for record in records.values():
        if record.get("draw") is None and record["replication"] < CONFIRM_REPLICATION_OFFSET:
            runs.setdefault(record["config"], {}).setdefault(record["rate"], []).append(record)
    lowest = min(runs.get(0, {}), default=None)
    baseline = [] if lowest is None else runs[0][lowest]
    failed = [run["metrics"].get("failed", math.inf) for run in baseline if "metrics" in run and not run.get("stuck")]
    unserved = math.fsum(failed) / len(failed) if failed else math.inf
    curves = []
    for config, assignment in enumerate(experiment.configs):
        label, points = experiment.label(config), []
        for rate, group in sorted(runs.get(config, {}).items()):
            row = Row(config, assignment, label, sorted(group, key=lambda run: int(run["replication"])))
            row.missed = missed_bounds(
                experiment.subject_to, {bound.metric: row.mean(bound.metric) for bound in experiment.subject_to}
            )
            points.append(RatePoint(rate, row, describe_problem(row, unserved)))
        curves.append(Curve(config, assignment, label, points, experiment.subject_to))
    return curves


def describe_problem(row: Row, unserved: float) -> str:
    """Return why a configuration does not meet the constraints at one rate; empty if it does."""
    error = next((run["error"] for run in row.runs if "error" in run), None)
    if error is not None:
        return f"a run failed: {error}"
    if any(run.get("stuck") for run in row.runs):
        return "the engine gets stuck"
    if row.mean("failed") > unserved:
        return f"leaves {row.mean('failed'):g} requests unserved"
    return ", ".join(row.misses)


def with_rates(experiment: Experiment, folder: Path, executor: Executor) -> Experiment:
    """Choose the rates of `rates: auto`; a folder that holds the experiment keeps its rates."""
    if not experiment.auto_rates:
        return experiment
    stored = load_experiment(folder).rates if (folder / EXPERIMENT_FILE).is_file() else ()
    rates = stored or choose_rates(experiment, executor)
    runs = len(experiment.configs) * (experiment.replications + experiment.intervals) * len(rates)
    if runs > MAX_RUNS:
        raise BadInput(f"rates: auto: expected at most {MAX_RUNS} runs, got {runs}; list fewer rates")
    return replace(experiment, rates=rates, auto_rates=False)


def choose_rates(experiment: Experiment, executor: Executor) -> list[float]:
    """Return rates around the highest throughput of the baseline, which is that of a run at overload."""
    task = Task(0, 0, experiment.configs[0], rate_factor=OVERLOAD)
    ((_, record),) = executor.run(context_json(experiment.base), [task])
    if "error" in record:  # other rates would fail too
        raise BadInput(f"{experiment.name}: {record['error']}")
    throughput = record.get("metrics", {}).get("request_throughput", 0.0)
    problem = record.get("stuck") or ("" if throughput else "it serves no request")
    if problem:
        raise BadInput(f"rates: auto: the baseline cannot run at overload: {problem}; list the rates")
    rates = [min(MAX_RATE, max(MIN_RATE, round_rate(factor * throughput, 2))) for factor in AUTO_RATES]
    return sorted(set(rates))


def plan_bisection(experiment: Experiment, records: Mapping[RunKey, Record]) -> Iterator[list[Task]]:
    """Yield the tasks of the next rates of every configuration, until all capacities are precise.

    A round uses only the results of earlier rounds, even if `records` has later ones: a resumed sweep plans the same.
    """
    count = experiment.replications if experiment.is_random else 1
    planned = {(config, rate) for config in range(len(experiment.configs)) for rate in experiment.rates}
    while True:
        known = {key: run for key, run in records.items() if (run["config"], run["rate"]) in planned}
        curves = build_curves(experiment, known)
        rates = [(curve.config, rate) for curve in curves if (rate := next_rate(curve, experiment)) is not None]
        if not rates:
            return
        planned.update(rates)
        yield [experiment.at_rate(rate).task(config, number) for config, rate in rates for number in range(count)]


def next_rate(curve: Curve, experiment: Experiment) -> Optional[float]:
    """Return the next rate of a bisection: inside the interval of the capacity, or outside the rates of the sweep."""
    capacity, precision = curve.capacity, experiment.precision
    if capacity is None or precision is None:
        return None
    rate = None
    if capacity.missed_at is None:
        rate = 2 * capacity.rate if capacity.rate < experiment.rates[-1] * 2**MAX_DOUBLINGS else None
    elif not capacity.rate:
        rate = capacity.missed_at / 2 if capacity.missed_at > experiment.rates[0] / 2**MAX_DOUBLINGS else None
    elif capacity.missed_at > capacity.rate * (1 + precision):
        rate = math.sqrt(capacity.rate * capacity.missed_at)
    if rate is None or not MIN_RATE <= rate <= MAX_RATE:
        return None
    rate = round_rate(rate, max(4, 2 - math.floor(math.log10(precision))))
    return None if any(point.rate == rate for point in curve.points) else rate
