"""The result of a sweep: means with intervals, paired differences from the baseline, ranks, labels, the winner.

A configuration is eligible to win if it leaves no more requests unserved than the baseline, never gets stuck, and
meets the constraints by the means of its replications. The winner is the best one by the first objective. If others
are tied with it, the next objectives decide, then the fewest changes from the baseline. So the winner's mean is not
always the best one: the verdict names the configuration with the best mean if the difference is not decided.

Draw k of the cost model is the same for every configuration.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from operator import le
from typing import Any, Optional

from servesim.statistics.constraints import Bound, describe_miss
from servesim.statistics.intervals import Interval, paired_difference, with_draws
from servesim.statistics.objective import Objective
from servesim.statistics.ties import Relation, break_ties, relate

from .experiment import Experiment
from .grid import Assignment
from .replications import Replications
from .single_run import Record, RunKey

CANNOT_WIN = Relation("cannot win")
INCOMPLETE = {  # label -> why such configurations cannot win
    "failed": "failed", "stuck": "got stuck", "serves fewer": "serves fewer requests than the baseline",
    "does not start": "is refused by the real engine at its start",
}  # fmt: skip
CONFIRM_REPLICATION_OFFSET = 1_000_000  # replications from here on only confirm the winner, they do not choose it


@dataclass
class Row(Replications):
    """A configuration and its results."""

    config: int
    assignment: Assignment
    label: str
    runs: Sequence[Record]  # in order of replication
    means: dict[str, Interval] = field(default_factory=dict)  # by objective
    differences: dict[str, Interval] = field(default_factory=dict)  # by objective: paired, from the baseline
    labels: list[str] = field(default_factory=list)
    complete: bool = True  # no run failed or got stuck, and it serves as many requests as the baseline
    missed: dict[Bound, float] = field(default_factory=dict)  # constraints that it misses: violation as a fraction
    on_pareto_front: bool = False
    relation: Relation = CANNOT_WIN  # to the best configuration by the first objective
    rank: int = 0
    draws: Sequence[Record] = ()  # runs with random cost models
    draws_won: int = 0  # draws in which it is the best configuration

    def find_missed(self, bounds: Sequence[Bound]) -> dict[Bound, float]:
        """Return the constraints that its means miss, and keep them."""
        self.missed = {bound: size for bound in bounds if (size := bound.violation(self.mean(bound.metric)))}
        return self.missed

    @property
    def eligible(self) -> bool:
        """Whether it can win."""
        return self.complete and self.feasible

    @property
    def feasible(self) -> bool:
        """Whether it meets all constraints."""
        return not self.missed

    @property
    def violation(self) -> float:
        """The largest violation of a constraint, as a fraction of the bound; 0 if it meets all."""
        return max(self.missed.values(), default=0.0)

    @property
    def misses(self) -> list[str]:
        """The constraints that it misses, as text."""
        return [describe_miss(bound, self.mean(bound.metric)) for bound in self.missed]


class Summary:
    """The rows of an experiment, best first. `records` are the runs by (configuration, replication[, draw])."""

    def __init__(self, experiment: Experiment, records: Mapping[RunKey, Record]) -> None:
        self.experiment = experiment
        by_config: dict[int, list[Record]] = {}
        self._confirm: dict[int, list[Record]] = {}
        self._draws: dict[int, list[Record]] = {}
        for (config, replication, *draw), record in sorted(records.items(), key=lambda item: item[0]):
            group = by_config if replication < CONFIRM_REPLICATION_OFFSET else self._confirm
            group = self._draws if draw else group
            group.setdefault(config, []).append(record)
        rows = [self._row(config, by_config.get(config, [])) for config in range(len(experiment.configs))]
        self.baseline = rows[0]
        for row in rows:
            row.draws = self._draws.get(row.config, ())
        for row in rows:
            self._add_intervals(row)
            self._add_labels(row)
        self.rows = sorted(rows, key=self._sort_key)
        self.best_mean: Optional[Row] = None  # the eligible row with the best mean of the first objective
        self.decided_by: list[Optional[int]] = []  # objectives that separate the winner from ties; None: fewest changes
        self._choose_winner()
        for rank, row in enumerate(self.rows, 1):
            row.rank = rank
        self._mark_front()
        self._count_wins()

    @property
    def winner(self) -> Row | None:
        """The best eligible configuration; the baseline if nothing beats it."""
        return self.rows[0] if self.rows and self.rows[0].eligible else None

    def confirm_difference(self, metric: str) -> Interval:
        """Return the winner's paired difference from the baseline on the confirming replications (n is 0 without them).

        These replications run after the choice of the winner, so they are free of selection bias.
        """
        winner = self.winner
        if winner is None or winner.config not in self._confirm or 0 not in self._confirm:
            return Interval(math.nan, None, 0)
        row, base = (self._row(config, self._confirm[config]) for config in (winner.config, 0))
        return self.difference(row, base, metric)

    def confirm_baseline_mean(self, metric: str) -> float:
        """Return the baseline's mean on the confirming replications."""
        return self._row(0, self._confirm.get(0, [])).mean(metric)

    @property
    def run_count(self) -> int:
        """The number of runs, with the confirming ones and the draws; configurations that do not start have none."""
        started = [row for row in self.rows if not row.refused]
        return sum(len(row.runs) + len(row.draws) for row in started) + sum(map(len, self._confirm.values()))

    @property
    def failures(self) -> list[Record]:
        """The runs that ended with an error; a stuck engine is not an error."""
        return [run for row in self.rows for run in (*row.runs, *row.draws) if "error" in run]

    def _row(self, config: int, runs: Sequence[Record]) -> Row:
        return Row(config, self.experiment.configs[config], self.experiment.label(config), runs)

    def _add_intervals(self, row: Row) -> None:
        for metric, _ in self.experiment.objectives:
            mean, _ = self.without_draws(row, metric)
            row.means[metric] = with_draws(mean, list(row.effects(metric).values()), self.experiment.confidence)
            row.differences[metric] = self.difference(row, self.baseline, metric)

    def without_draws(self, row: Row, metric: str) -> tuple[Interval, Interval]:
        """Return the mean and the difference from the baseline with intervals of the replications only."""
        return row.interval(metric, self.experiment.confidence), self._paired(row, self.baseline, metric)

    def difference(self, row: Row, base: Row, metric: str) -> Interval:
        """Return the paired difference of two rows, over the replications and draws that both have."""
        effects, others = row.effects(metric), base.effects(metric)
        changes = [effects[draw] - others[draw] for draw in effects if draw in others]
        return with_draws(self._paired(row, base, metric), changes, self.experiment.confidence)

    def _paired(self, row: Row, base: Row, metric: str) -> Interval:
        """Return the paired difference of two rows, over the replications that both have."""
        values, others = row.metric(metric), base.metric(metric)
        both = [replication for replication in values if replication in others]
        return paired_difference([values[r] for r in both], [others[r] for r in both], self.experiment.confidence)

    def _add_labels(self, row: Row) -> None:
        applies = {
            "baseline": row is self.baseline,
            "failed": any("error" in run for run in row.runs),
            "stuck": any(run.get("stuck") for run in row.runs),
            "serves fewer": row.mean("failed") > self._max_unserved,  # tables print "more unserved"
            "saturated": row.is_saturated,
            "outside profile": row.is_outside_profile,
            "does not start": bool(row.refused),
        }
        no_value = any(math.isnan(mean.mean) for mean in row.means.values())
        row.complete = not no_value and not any(applies[label] for label in INCOMPLETE)
        row.find_missed(self.experiment.subject_to)
        row.labels = [*(label for label, true in applies.items() if true), *row.misses]

    @property
    def _max_unserved(self) -> float:
        """Mean number of requests that the baseline leaves unserved; a row with more is not eligible."""
        failed = self.baseline.mean("failed")
        stuck = any(run.get("stuck") for run in self.baseline.runs)
        return math.inf if math.isnan(failed) or stuck else failed

    def _sort_key(self, row: Row) -> tuple[Any, ...]:
        """Rank by the objectives; configurations that miss a constraint by their violation, incomplete ones last."""
        scores = [self._score(row, objective) for objective in self.experiment.objectives]
        return (not row.complete, row.violation if row.complete else 0.0, *scores, row.config)

    def _score(self, row: Row, objective: Objective) -> float:
        """Return an objective to minimise: the paired difference if there is one, as rows can have different runs."""
        value = row.differences[objective.metric].mean
        value = row.means[objective.metric].mean if math.isnan(value) else value
        return math.inf if math.isnan(value) else objective.sign * value

    def _choose_winner(self) -> None:
        """Relate all configurations to the best one, and put the winner first."""
        rows = [row for row in self.rows if row.eligible]
        if not rows:
            return
        objectives, best = self.experiment.objectives, rows[0]
        self.best_mean = best
        for row in rows:
            row.relation = Relation("best") if row is best else self.relate(row, best, 0)
        scores = [partial(self._score, objective=objective) for objective in objectives]
        winner, self.decided_by = break_ties(
            [row for row in rows if row is best or row.relation.tied],
            scores,
            lambda row, other, number: self.relate(row, other, number).tied,
            lambda row: len(self.experiment.changed_keys(row.config)),
        )
        if winner is not best:  # both are tied: name the winner the best one
            best.relation, winner.relation = winner.relation, best.relation
        self.rows.sort(key=lambda row: row is not winner)

    def relate(self, row: Row, best: Row, number: int) -> Relation:
        """Compare a configuration with the best one by an objective."""
        metric = self.experiment.objectives[number].metric
        margin = self.experiment.indifference * abs(best.means[metric].mean)
        sampling = self._paired(row, best, metric) if row.draws else None
        return relate(self.difference(row, best, metric), margin, sampling, self.experiment.confidence)

    def _mark_front(self) -> None:
        rows = [row for row in self.rows if row.eligible]
        signs = [(objective.metric, objective.sign) for objective in self.experiment.objectives]
        points = [[sign * row.means[metric].mean for metric, sign in signs] for row in rows]
        for index in pareto_front(points):
            rows[index].on_pareto_front = True

    def _count_wins(self) -> None:
        """Count in how many draws each configuration is the best one by the first objective."""
        metric, sign = self.experiment.objectives[0].metric, self.experiment.objectives[0].sign
        rows = [row for row in self.rows if row.eligible and row.draws]
        scores = [sign * row.differences[metric].mean for row in rows]
        effects = [{draw: sign * effect for draw, effect in row.effects(metric).items()} for row in rows]
        wins, self.draw_count = count_wins(scores, effects)
        for row, count in zip(rows, wins):
            row.draws_won = count


def pareto_front(points: Sequence[Sequence[float]]) -> list[int]:
    """Return the indices of the points that no other dominates; all objectives are minimised, equal points stay.

    In the order of the points, one that dominates another comes before it: only the other objectives decide.
    """
    front: list[int] = []
    lowest: list[tuple[float, ...]] = []  # other objectives of points on the front; none is below another
    places = [tuple(point) for point in points]
    for (_, *others), equal in groupby(sorted(range(len(places)), key=lambda i: places[i]), lambda i: places[i]):
        if not any(all(map(le, low, others)) for low in lowest):
            front += equal
            lowest = [low for low in lowest if not all(map(le, others, low))] + [tuple(others)]
    return sorted(front)


def count_wins(scores: Sequence[float], effects: Sequence[Mapping[int, float]]) -> tuple[list[int], int]:
    """Return how often each configuration has the smallest score (equal ones all win), and the number of draws."""
    common = set(effects[0]).intersection(*effects) if effects else set()
    wins = [0] * len(scores)
    for draw in common:
        values = [score + effect[draw] for score, effect in zip(scores, effects)]
        best = min(values)
        wins = [count + (value == best) for count, value in zip(wins, values)]
    return wins, len(common)
