"""The result of a sweep over rates: the ranking at each rate, a curve per configuration, and the winner by capacity.

The winner is the configuration with the highest capacity. If several are tied (within `indifference`, or within the
precision of the bisection), the ranking at the highest rate that all of them meet decides. Without constraints there is
no capacity, and each rate has its own winner. `sim capacity` sweeps one configuration, which has nothing to win.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Optional, Union

from servesim.config.layers import Tree

from .experiment import Experiment
from .ranking import Summary
from .rates import Curve, RateRecords, build_curves
from .single_run import Record, RunKey


class RateSummary:
    """The result of an experiment with rates. `records` are all its runs."""

    def __init__(self, experiment: Experiment, records: Mapping[RunKey, Record]) -> None:
        self.experiment = experiment
        self.rates = list(experiment.rates)
        self.by_rate = {rate: Summary(experiment.at_rate(rate), RateRecords(records, rate)) for rate in self.rates}
        self.run_count = sum("refused" not in record for record in records.values())
        self.failures = [record for record in records.values() if "error" in record]
        self.winner: Optional[Curve] = None  # by capacity
        self.decided_at: Optional[float] = None  # the rate whose ranking chooses the winner of equal capacities
        self.curves = build_curves(experiment, records)
        self._choose_winner()
        for rank, curve in enumerate(self.curves, 1):
            curve.rank = rank

    @property
    def baseline(self) -> Curve:
        """The curve of the baseline."""
        return next(curve for curve in self.curves if curve.is_baseline)

    @property
    def is_single(self) -> bool:
        """Whether there is only one configuration, as in `sim capacity`."""
        return len(self.curves) == 1

    @property
    def main_metric(self) -> str:
        """The metric that tables and charts show: that of the first constraint, or the first objective."""
        bounds = self.experiment.subject_to
        return bounds[0].metric if bounds else self.experiment.objectives[0].metric

    def scenario(self, config: int, rate: float) -> Tree:
        """Return the scenario of a configuration at a rate; BadInput if its workload has no key for the rate."""
        return self.experiment.at_rate(rate).scenario(config)

    def rate_of(self, curve: Curve) -> float:
        """Return the capacity that ranks a configuration; 0 without one."""
        return 0.0 if curve.capacity is None else curve.capacity.rate

    def _choose_winner(self) -> None:
        """Compare the capacities, and sort the curves: the winner first."""
        if not self.experiment.subject_to:
            return
        best = max(map(self.rate_of, self.curves))
        for curve in self.curves:
            rate = self.rate_of(curve)
            curve.outcome = "cannot win" if not rate else "equal" if rate >= best * (1 - self.margin) else "worse"
        tied = [curve for curve in self.curves if curve.outcome == "equal"]
        if tied:
            lowest = min(curve.capacity.rate for curve in tied if curve.capacity is not None)
            rate = max((rate for rate in self.rates if rate <= lowest), default=self.rates[0])
            ranks = {row.config: row.rank for row in self.by_rate[rate].rows}
            self.winner = min(tied, key=lambda curve: ranks[curve.config])
            self.winner.outcome = "best"
            self.decided_at = rate
        violations = {curve.config: curve.points[0].row.violation for curve in self.curves if curve.points}
        self.curves.sort(key=lambda c: (c is not self.winner, -self.rate_of(c), violations.get(c.config, 0.0)))

    @property
    def margin(self) -> float:
        """Capacities that differ by less, as a fraction, are equal."""
        return max(self.experiment.indifference, self.experiment.precision or 0.0)


Result = Union[Summary, RateSummary]  # of a sweep or a search, with or without rates


def summarise(experiment: Experiment, records: Mapping[RunKey, Record]) -> Result:
    """Return the result of an experiment."""
    return RateSummary(experiment, records) if experiment.rates else Summary(experiment, records)
