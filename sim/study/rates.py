"""Request rates of a sweep: which rates run, and the curve and the capacity of every configuration.

Every configuration runs at several rates, with the same requests. With `precision`, further rates per configuration
find its capacity by bisection: the highest rate that meets the constraints. Whether a rate meets them is decided by the
means of the replications. A rate does not meet them if a run fails or gets stuck, if requests stay unserved that the
baseline serves at a light load, or if the backlog grows: then the latencies depend on the length of the run. A rate can
also be too low, for a constraint such as `request_throughput >= 30`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import NamedTuple, Optional

from servesim.core.limits import MAX_RATE, MIN_RATE
from servesim.runs.request_rate import format_rate, round_rate
from servesim.statistics.constraints import Bound, describe_miss

from .experiment import Experiment
from .grid import Assignment
from .pilot_runs import MIN_TURNOVER
from .ranking import CANNOT_WIN, CONFIRM_REPLICATION_OFFSET, Row
from .replications import find_invalid
from .single_run import Record, RunKey, Task

MAX_DOUBLINGS = 12  # of the highest rate, and halvings of the lowest one, in a bisection
COARSE = 1.1  # tested rates that differ by a larger factor: print both


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
    problems: Mapping[str, str]  # why it does not meet the constraints: metric or other name, and text

    @property
    def good(self) -> bool:
        """Whether it meets the constraints."""
        return not self.problems

    @property
    def problem(self) -> str:
        """Why it does not meet the constraints; empty if it does."""
        return ", ".join(self.problems.values())

    @property
    def is_short(self) -> bool:
        """Whether too large a part of the requests of a run is in the server at the same time (Little's law)."""
        requests = self.row.mean("completed") + self.row.mean("failed")
        return MIN_TURNOVER * self.rate * self.row.mean("mean_e2el_ms") / 1e3 > requests


class Capacity(NamedTuple):
    """The highest request rate that meets the constraints."""

    rate: float  # the highest tested rate that meets them, below all higher ones that miss them; 0 if there is none
    missed_at: Optional[float] = None  # the lowest tested rate above it that misses them
    reason: str = ""  # why it misses them
    upper_bound: bool = False  # the runs are too short: longer ones may have a lower capacity
    missed_below: Optional[float] = None  # the highest tested rate that is too low to meet them
    reason_below: str = ""

    @property
    def misses(self) -> str:
        """The tested rates next to those that meet the constraints, and why they miss them."""
        pairs = ((self.missed_at, self.reason), (self.missed_below, self.reason_below))
        return "; ".join(f"at {format_rate(rate)}: {reason}" for rate, reason in pairs if rate is not None)

    @property
    def text(self) -> str:
        """The rate, both rates if the next tested one is much higher, or its limit if all rates meet or miss."""
        if not self.rate and self.missed_below is not None:
            low = f"above {format_rate(self.missed_below)}"
            return low if self.missed_at is None else f"none {low} and below {format_rate(self.missed_at)}"
        if self.missed_at is None:
            return f"at least {format_rate(self.rate)}"
        if not self.rate:
            return f"below {format_rate(self.missed_at)}"
        if self.missed_at > COARSE * self.rate:
            return f"{format_rate(self.rate)} (misses at {self.missed_at:.10g})"
        return f"{format_rate(self.rate)}{' (upper bound)' * self.upper_bound}"


@dataclass
class Curve:
    """The results of a configuration over the rate."""

    config: int
    assignment: Assignment
    label: str
    points: Sequence[RatePoint]  # in rising order of the rate
    bounds: Sequence[Bound]
    refused: Sequence[str] = ()  # why the real engine does not start with these settings: then it has no points
    outcome: str = CANNOT_WIN.outcome  # by the capacity: best | equal | worse | cannot win
    rank: int = 0

    @property
    def is_baseline(self) -> bool:
        return self.config == 0

    @property
    def role(self) -> str:
        """Whether it is the baseline or the winner; empty for other configurations."""
        return "baseline" if self.is_baseline else "winner" if self.outcome == "best" else ""

    @property
    def title(self) -> str:
        """The role and the settings."""
        return f"{self.role}: {self.label}" if self.role else self.label

    @cached_property
    def capacity(self) -> Optional[Capacity]:
        """The capacity, None without constraints."""
        if not self.bounds or not self.points:
            return None
        numbers = range(len(self.points))
        good = [index for index in numbers if self.points[index].good]
        start = good[0] if good else len(list(takewhile(self._is_too_low, numbers)))
        end = next((index for index in numbers[start:] if not self.points[index].good), None)
        best = self.points[(len(self.points) if end is None else end) - 1] if good else None
        above = None if end is None else self.points[end]
        below = self.points[start - 1] if start else None
        return Capacity(
            0.0 if best is None else best.rate,
            None if above is None else above.rate,
            "" if above is None else above.problem,
            best is not None and best.is_short,
            None if below is None else below.rate,
            "" if below is None else below.problem,
        )

    def _is_too_low(self, index: int) -> bool:
        """Whether a rate misses only lower bounds of metrics that are higher at the next higher rate."""
        point = self.points[index]
        bounds = {bound.metric for bound in point.row.missed if bound.sign == ">="}
        if len(self.points) < 2 or not point.problems.keys() <= bounds:
            return False
        low = min(index, len(self.points) - 2)
        one, other = self.points[low].row, self.points[low + 1].row
        return all(one.mean(metric) < other.mean(metric) for metric in point.problems)

    def values(self, metric: str) -> list[tuple[RatePoint, float]]:
        """Return the points that have a metric, with its means."""
        pairs = [(point, point.row.mean(metric)) for point in self.points]
        return [(point, value) for point, value in pairs if not math.isnan(value)]


def build_curves(experiment: Experiment, records: Mapping[RunKey, Record]) -> list[Curve]:
    """Return the curve of every configuration from the records of all rates."""
    runs: dict[int, dict[float, list[Record]]] = {}
    for record in records.values():
        if record.get("draw") is None and record["replication"] < CONFIRM_REPLICATION_OFFSET:
            runs.setdefault(record["config"], {}).setdefault(record["rate"], []).append(record)
    curves = []
    for config, assignment in enumerate(experiment.configs):
        label, points = experiment.label(config), []
        for rate, group in sorted(runs.get(config, {}).items()):
            row = Row(config, assignment, label, sorted(group, key=lambda run: int(run["replication"])))
            points.append(rate_point(rate, row, experiment.subject_to, experiment.unserved))
        refused = points[0].row.refused if points else ()
        curves.append(Curve(config, assignment, label, [] if refused else points, experiment.subject_to, refused))
    return curves


def rate_point(rate: float, row: Row, bounds: Sequence[Bound], unserved: float) -> RatePoint:
    """Return a configuration at one rate, with the constraints that it misses."""
    row.find_missed(bounds)
    return RatePoint(rate, row, find_problems(row, unserved))


def find_problems(row: Row, unserved: float) -> dict[str, str]:
    """Return why a configuration does not meet the constraints at one rate; empty if it does."""
    if problem := find_invalid(row.runs):
        return problem
    if row.mean("failed") > unserved:
        return {"unserved": f"leaves {row.mean('failed'):g} requests unserved"}
    missed = {bound.metric: describe_miss(bound, row.mean(bound.metric)) for bound in row.missed}
    return missed | ({"saturated": "saturated: the backlog grows"} if row.is_saturated else {})


def plan_bisection(experiment: Experiment, records: Mapping[RunKey, Record]) -> Iterator[list[Task]]:
    """Yield the tasks of the next rates of every configuration, until all capacities are precise.

    A round uses only the results of earlier rounds, even if `records` has later ones: a resumed sweep plans the same.
    """
    count = experiment.runs_per_config
    planned = {(config, rate) for config in range(len(experiment.configs)) for rate in experiment.rates}
    while True:
        known = {key: run for key, run in records.items() if (run["config"], run["rate"]) in planned}
        curves = build_curves(experiment, known)
        rates = [
            (curve.config, rate)
            for curve in curves
            if (rate := next_rate(curve, experiment.rates, experiment.precision))
        ]
        if not rates:
            return
        planned.update(rates)
        yield [experiment.at_rate(rate).task(config, number) for config, rate in rates for number in range(count)]


def next_rate(curve: Curve, rates: Sequence[float], precision: Optional[float]) -> Optional[float]:
    """Return the next rate of a bisection: inside the interval of the capacity, or outside the first `rates`."""
    capacity = curve.capacity
    if capacity is None or precision is None:
        return None
    low, high, rate = capacity.rate or capacity.missed_below, capacity.missed_at, None
    if high is None and low is not None:
        rate = 2 * low if low < rates[-1] * 2**MAX_DOUBLINGS else None
    elif low is None and high is not None:
        rate = high / 2 if high > rates[0] / 2**MAX_DOUBLINGS else None
    elif low is not None and high is not None and high > low * (1 + precision):
        rate = math.sqrt(low * high)
    if rate is None or not MIN_RATE <= rate <= MAX_RATE:
        return None
    rate = round_rate(rate, max(4, 2 - math.floor(math.log10(precision))))
    return None if any(point.rate == rate for point in curve.points) else rate
