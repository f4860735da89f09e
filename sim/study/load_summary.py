"""The result of a sweep over loads: the ranking at each load, a curve per configuration, and the winner by capacity.

The winner is the configuration with the highest capacity. If several are tied (within `indifference`, or within the
precision of the bisection), the ranking at the highest load that all of them meet decides. Without constraints there is
no capacity, and each load has its own winner.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Optional, Union

from servesim.execution.single_run import Record, RunKey
from servesim.runs.request_rate import format_rate
from servesim.statistics.constraints import describe_bounds

from .curves import Curve, build_curves
from .experiment import Experiment
from .loads import LoadRecords
from .ranking import Summary
from .sweep import read_records
from .table import changed_settings, format_count
from .verdict import Verdict, verdict_of


class LoadSummary:
    """The result of an experiment with loads. `records` are all its runs."""

    def __init__(self, experiment: Experiment, records: Mapping[RunKey, Record]) -> None:
        self.experiment = experiment
        self.loads = list(experiment.loads)
        self.by_load = {load: Summary(experiment.at_load(load), LoadRecords(records, load)) for load in self.loads}
        self.run_count = len(records)
        self.failures = [record for record in records.values() if "error" in record]
        self.winner: Optional[Curve] = None  # by capacity
        self.curves = build_curves(experiment, records)
        self._choose_winner()
        for rank, curve in enumerate(self.curves, 1):
            curve.rank = rank

    @property
    def baseline(self) -> Curve:
        """The curve of the baseline."""
        return next(curve for curve in self.curves if curve.is_baseline)

    def settings(self, curve: Curve) -> str:
        """Return the settings of a configuration that differ from the baseline."""
        summary = self.by_load[self.loads[0]]
        return changed_settings(next(row for row in summary.rows if row.config == curve.config), summary)

    def rate_of(self, curve: Curve) -> float:
        """Return the capacity that ranks a configuration; 0 without one."""
        return 0.0 if curve.capacity is None else curve.capacity.estimate

    def _choose_winner(self) -> None:
        """Compare the capacities, and sort the curves: the winner first."""
        if not self.experiment.subject_to:
            return
        best = max(map(self.rate_of, self.curves))
        margin = max(self.experiment.indifference, self.experiment.precision or 0.0)
        for curve in self.curves:
            rate = self.rate_of(curve)
            curve.outcome = "cannot win" if not rate else "equal" if rate >= best * (1 - margin) else "worse"
        tied = [curve for curve in self.curves if curve.outcome == "equal"]
        if tied:
            lowest = min(curve.capacity.rate for curve in tied if curve.capacity is not None)
            load = max((load for load in self.loads if load <= lowest), default=self.loads[0])
            ranks = {row.config: row.rank for row in self.by_load[load].rows}
            self.winner = min(tied, key=lambda curve: ranks[curve.config])
            self.winner.outcome = "best"
        self.curves.sort(key=lambda curve: (curve is not self.winner, -self.rate_of(curve), self._violation(curve)))

    def _violation(self, curve: Curve) -> float:
        """Return the violation of the constraints at the lowest load."""
        return curve.points[0].row.violation if curve.points else 0.0

    @property
    def verdict(self) -> Verdict:
        """The winner by capacity, or the winner at each load."""
        bounds = describe_bounds(self.experiment.subject_to)
        if not bounds:
            return self._verdict_per_load()
        if self.winner is None:
            return self._verdict_without_winner()
        equal = sum(curve.outcome == "equal" for curve in self.curves)
        tied = f"; {format_count(equal, 'other')} with an equal capacity" if equal else ""
        assert self.winner.capacity is not None
        rate = self.winner.capacity.text
        if self.winner.is_baseline:
            return Verdict(
                "baseline", f"No winner: nothing beats the baseline, which meets {bounds} up to {rate}{tied}."
            )
        base = self.baseline.capacity
        versus = "" if base is None else f"; the baseline up to {base.text}"
        return Verdict("winner", f"Winner: {self.settings(self.winner)}: meets {bounds} up to {rate}{versus}{tied}.")

    def _verdict_without_winner(self) -> Verdict:
        """Name the configuration that is nearest to the constraints at the lowest load."""
        summary = self.by_load[self.loads[0]]
        nearest = verdict_of(summary).nearest
        text = f"No winner: no configuration meets {describe_bounds(self.experiment.subject_to)} at a tested load."
        if nearest is None:
            return Verdict("failed", text)
        name = "the baseline" if nearest is summary.baseline else changed_settings(nearest, summary)
        at = f"at {format_rate(self.loads[0])}"
        return Verdict("infeasible", f"{text} Nearest {at}: {name}, {', '.join(nearest.misses)}.", nearest)

    def _verdict_per_load(self) -> Verdict:
        """Name the winner at each load."""
        names = []
        for load, summary in self.by_load.items():
            verdict = verdict_of(summary)
            settings = "" if summary.winner is None else changed_settings(summary.winner, summary)
            name = {"winner": settings, "baseline": "nothing beats the baseline"}.get(verdict.kind, "no winner")
            names.append((load, name))
        found = any(summary.winner is not None for summary in self.by_load.values())
        text = "; ".join(f"{rates}: {name}" for rates, name in join_loads(names))
        return Verdict("loads" if found else "failed", f"Winner per load: {text}.")


def join_loads(texts: Iterable[tuple[float, str]]) -> list[tuple[str, str]]:
    """Return (loads, text): neighbouring loads with the same text are joined."""
    groups = [(text, [load for load, _ in group]) for text, group in groupby(texts, key=itemgetter(1))]
    return [(f"{loads[0]:.10g} to " * (len(loads) > 1) + format_rate(loads[-1]), text) for text, loads in groups]


Result = Union[Summary, LoadSummary]


def summarise(experiment: Experiment, records: Mapping[RunKey, Record]) -> Result:
    """Return the result of an experiment."""
    return LoadSummary(experiment, records) if experiment.loads else Summary(experiment, records)


def load_result(folder: Union[str, Path]) -> Result:
    """Return the result of an experiment folder."""
    return summarise(*read_records(Path(folder)))
