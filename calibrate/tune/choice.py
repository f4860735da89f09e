"""Choose what to measure next: how likely each leading configuration is the best, and what a measurement can gain.

The order of the leaders is simulated with random cost models that agree with the measurements so far. Draw k is the
same cost model for every configuration, so the comparison is paired. Each configuration also has a random factor of its
own in every draw, as wide as measured / predicted scatters: a cost model does not explain all of it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from servesim.costs.device_profile import Profile, write_profile
from servesim.costs.parts import PartsCost
from servesim.costs.uncertainty import with_parameters
from servesim.files.scratch import ScratchFolder
from servesim.study.executor import Executor
from servesim.study.experiment import Experiment
from servesim.study.ranking import Row, Summary
from servesim.study.single_run import Task, metric_of
from servesim.study.sweep import Records

from .correction import FIT_KEYS, Factors, root_mean_square
from .journal import Measurement
from .step_times import scaled_parts

PRIOR_SPREAD = Factors(0.05, 0.05)  # of the step times of a profile that was not checked on the device
MIN_CANDIDATES = 8
TIE = 0.002  # relative difference of an objective below which the order of two configurations does not matter
OPEN_GAIN = 0.005  # a measurement that can gain more than this keeps a tuning run going
Values = Mapping[int, Sequence[float]]  # configuration -> objective in every draw; smaller is better
Ratios = dict[int, dict[str, float]]  # configuration -> metric -> measured / predicted


class Scatter(NamedTuple):
    """Relative standard deviations of an objective."""

    predicted: float = 0.0  # of measured / predicted, between configurations
    noise: float = 0.0  # of one measurement


@dataclass(frozen=True)
class Candidate:
    """A leading configuration and the value of its measurement."""

    config: int
    wins: int  # draws in which it is the best
    gain: float  # expected improvement if it is the best, as a fraction of the leader's objective
    twins: frozenset[int] = frozenset()  # see `find_twins`
    seconds: float = math.nan  # expected device time

    @property
    def gain_per_second(self) -> float:
        return self.gain / max(self.seconds, 1e-3)


def leading_rows(summary: Summary, top: int) -> list[Row]:
    """Return the rows that can become leaders, best first, and the baseline."""
    rows = [row for row in summary.rows if row.eligible][: max(MIN_CANDIDATES, 2 * top)]
    return rows if summary.baseline in rows else [*rows, summary.baseline]


def drawn_costs(profile: Profile, parts: PartsCost, spread: Factors, count: int) -> list[PartsCost]:
    """Return random cost models: stored draws of the parameters, a factor of the session, and one per kind of step."""
    stored, session = profile.uncertainty.draws, profile.uncertainty.session
    result = []
    for k in range(count):
        rng = random.Random(k)
        drawn = with_parameters(parts, stored[k % len(stored)]) if stored and profile.cost is parts else parts
        assert isinstance(drawn, PartsCost)
        common = rng.gauss(0.0, session)
        prefill, decode = (math.exp(common + rng.gauss(0.0, width)) for width in spread)
        result.append(scaled_parts(drawn, prefill, decode))
    return result


def simulate_draws(
    experiment: Experiment, rows: Sequence[Row], profile: Profile, costs: Sequence[PartsCost], executor: Executor
) -> tuple[dict[int, list[float]], list[str]]:
    """Return the first objective of every row with every cost model, and why runs have none.

    A maximised objective has the other sign. The value of a run that failed or got stuck is infinite.
    """
    objective = experiment.objectives[0]
    about = {key: value for key, value in profile.about.items() if key not in FIT_KEYS or key == "noise"}
    with ScratchFolder() as folder:
        tasks = []
        for k, cost in enumerate(costs):
            path = Path(folder) / str(k)
            write_profile(path, about, cost)
            tasks += [Task(row.config, 0, {**row.assignment, "profile": str(path)}) for row in rows]
        results = dict(executor.run(experiment.context, tasks))
    values: dict[int, list[float]] = {}
    failures = []
    for index, task in enumerate(tasks):
        run = results[index]
        value = metric_of(run, objective.metric)
        if value is None or run.get("stuck"):
            failures.append(f"config{task.config}: {run.get('error') or run.get('stuck') or f'no {objective.metric}'}")
            value = objective.sign * math.inf
        values.setdefault(task.config, []).append(objective.sign * value)
    return values, failures


def scaled_values(values: Values, ratios: Ratios, metric: str) -> dict[int, list[float]]:
    """Return simulated values of a metric, scaled to the measured ones."""
    return {c: [value * ratios.get(c, {}).get(metric, 1.0) for value in own] for c, own in values.items()}


def scattered(
    values: Values, scatter: Scatter, runs: Mapping[int, int], twins: Mapping[int, frozenset[int]]
) -> dict[int, list[float]]:
    """Return the values times a random factor per draw and configuration; `runs`: how often each was measured.

    A measured configuration has its measured value, so only the noise of its measurements is left. Twins share them.
    """
    result = {}
    for config, own in values.items():
        count = sum(runs.get(twin, 0) for twin in twins[config])
        width = scatter.noise / math.sqrt(count) if count else scatter.predicted
        rng = random.Random(min(twins[config]))
        result[config] = [value * math.exp(rng.gauss(0.0, width)) for value in own]
    return result


def rate(values: Values, leader: int, twins: Mapping[int, frozenset[int]]) -> list[Candidate]:
    """Return how often each configuration is the best, and the expected gain of measuring it.

    Measuring another configuration gains where it beats the leader. Measuring the leader gains where another beats it.
    """
    own_leader = values[leader]
    scale = abs(sum(own_leader) / len(own_leader)) or 1.0
    best = [min(column) for column in zip(*values.values(), strict=True)]
    candidates = []
    for config, own in values.items():
        other = best if config == leader else own
        gain = sum(max(0.0, high - low) for high, low in zip(own_leader, other, strict=True)) / len(best)
        wins = sum(value <= lowest for value, lowest in zip(own, best, strict=True))
        candidates.append(Candidate(config, wins, gain / scale if math.isfinite(gain) else 1.0, twins[config]))
    return candidates


def with_twins(known: Sequence[int], candidates: Sequence[Candidate]) -> set[int]:
    """Return the measured configurations and those that behave in the same way."""
    return {*known, *(c.config for c in candidates if c.twins & set(known))}


def choose(candidates: Sequence[Candidate], required: Sequence[int], known: Sequence[int], top: int) -> list[int]:
    """Return the configurations to measure: required ones, then `top` in all with the most gain per device second."""
    done = with_twins(known, candidates)
    chosen = [config for config in dict.fromkeys(required) if config not in done]
    for candidate in sorted(candidates, key=lambda c: (-c.gain_per_second, c.config)):
        done = with_twins([*known, *chosen], candidates)
        if len([c for c in chosen if c != 0]) < top and candidate.gain > 0 and candidate.config not in done:
            chosen.append(candidate.config)
    return chosen


def same_order(before: Sequence[int], after: Mapping[int, float], top: int) -> bool:
    """Whether the leaders keep their order. `after` are the objectives now, smaller is better; close values tie."""
    margin = TIE * abs(min(after.values()))
    values = [after.get(config, math.inf) for config in before[:top]]
    swapped = any(low - high > margin for k, low in enumerate(values) for high in values[k + 1 :])
    others = [value for config, value in after.items() if config not in before[:top]]
    return not swapped and (not others or max(values) - min(others) <= margin)


def find_twins(records: Records) -> dict[int, frozenset[int]]:
    """Return the twins of each configuration, itself included: the simulator cannot tell them apart.

    All metrics of the run that was measured, or would be, are equal. So they share the measured values, and one
    measurement is enough.
    """
    groups: dict[Any, list[int]] = {}
    for config in {key[0] for key in records}:
        metrics = records.get((config, 0), {}).get("metrics")
        groups.setdefault(tuple(sorted(metrics.items())) if metrics else config, []).append(config)
    return {config: frozenset(group) for group in groups.values() for config in group}


def measured_ratios(records: Records, measurements: Sequence[Measurement]) -> Ratios:
    """Return measured / predicted metrics of every configuration, for the run that was measured or would be.

    A configuration that was not measured gets the ratios of its twins, or else the mean of all ratios.
    """
    ratios = {config: mean_ratios(own) for config, own in ratios_by_config(records, measurements).items()}
    common = mean_ratios(list(ratios.values()))
    result: Ratios = {}
    for config, twins in find_twins(records).items():
        shared = mean_ratios([ratios[twin] for twin in sorted(twins) if twin in ratios])
        result[config] = ratios.get(config) or shared or common
    return result


def ratios_by_config(records: Records, measurements: Sequence[Measurement]) -> dict[int, list[dict[str, float]]]:
    """Return measured / predicted metrics of every measurement, by configuration."""
    ratios: dict[int, list[dict[str, float]]] = {}
    for measurement in measurements:
        predicted = records.get((measurement.config, 0), {}).get("metrics", {})
        known = {name: value for name, value in measurement.metrics.items() if predicted.get(name, 0) > 0 and value > 0}
        if known:
            own = {name: value / predicted[name] for name, value in known.items()}
            ratios.setdefault(measurement.config, []).append(own)
    return ratios


def scatter_of(metric: str, records: Records, measurements: Sequence[Measurement]) -> Scatter:
    """Return how much measured / predicted of a metric scatters; predicted with the newest profile, and before a run.

    In the first round, the profile is of no measurement of this run. Its error counts only if nothing else is known.
    """
    found = ratios_by_config(records, measurements)
    logs = [[math.log(own[metric]) for own in runs if metric in own] for runs in found.values()]
    logs = [own for own in logs if own]
    means = [sum(own) / len(own) for own in logs]
    common = sum(means) / len(means) if means else 0.0
    known = [m for m in measurements if m.metrics.get(metric, 0) > 0 and m.predicted.get(metric, 0) > 0]
    errors = [(m.round, math.log(m.metrics[metric] / m.predicted[metric])) for m in known]
    between = root_mean_square([mean - common for mean in means], len(means) - 1)
    later = root_mean_square([error for number, error in errors if number > 1])
    predicted = max(between, later) or root_mean_square([error for _, error in errors])
    repeated = [log - mean for own, mean in zip(logs, means) for log in own]
    freedom = len(repeated) - len(means)
    return Scatter(predicted, root_mean_square(repeated, freedom) if freedom else predicted)


def prefer_measured(summary: Summary, known: Container[int], twins: Mapping[int, frozenset[int]]) -> None:
    """If the winner was not measured, let an equally good twin win that was."""
    winner = summary.winner
    if winner is None or winner.config in known:
        return
    for row in summary.rows:
        if row.eligible and row.config in known and row.config in twins[winner.config] and row.means == winner.means:
            row.relation, winner.relation = winner.relation, row.relation
            row.rank, winner.rank = winner.rank, row.rank
            summary.rows.sort(key=lambda other: other.rank)
            return


def mean_ratios(ratios: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the geometric mean of each metric that all have."""
    names = set.intersection(*(set(own) for own in ratios)) if ratios else set()
    return {name: math.exp(sum(math.log(own[name]) for own in ratios) / len(ratios)) for name in names}


def adjusted(records: Records, ratios: Ratios) -> Records:
    """Return the records with scaled metrics, in all replications."""
    result = dict(records)
    for key, record in records.items():
        if "metrics" in record and (own := ratios.get(key[0])):
            result[key] = {**record, "metrics": {m: value * own.get(m, 1.0) for m, value in record["metrics"].items()}}
    return result
