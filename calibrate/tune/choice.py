"""Choose what to measure next: how likely each leading configuration is the best, and what a measurement can gain.

The order of the leaders is simulated with random cost models that agree with the measurements so far. Draw k is the
same cost model for every configuration, so the comparison is paired.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from servesim.costs.device_profile import Profile, write_profile
from servesim.costs.parts import PartsCost
from servesim.costs.uncertainty import with_parameters
from servesim.files.scratch import ScratchFolder
from servesim.study.executor import Executor
from servesim.study.experiment import Experiment
from servesim.study.ranking import Row, Summary
from servesim.study.single_run import Record, Task
from servesim.study.sweep import Records

from .correction import FIT_KEYS, Factors
from .journal import Measurement
from .step_times import scaled_parts

PRIOR_SPREAD = Factors(0.05, 0.05)  # of the step times of a profile that was not checked on the device
MIN_CANDIDATES = 8
TIE = 0.002  # relative difference of an objective below which the order of two configurations does not matter
OPEN_GAIN = 0.005  # a measurement that can gain more than this keeps a tuning run going
Values = Mapping[int, Sequence[float]]  # configuration -> objective in every draw; smaller is better
Ratios = dict[int, dict[str, float]]  # configuration -> metric -> measured / predicted


@dataclass(frozen=True)
class Candidate:
    """A leading configuration and the value of its measurement."""

    config: int
    wins: int  # draws in which it is the best
    gain: float  # expected improvement if it is the best, as a fraction of the leader's objective
    twins: frozenset[int] = frozenset()  # configurations with the same results in all draws, itself included
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
) -> dict[int, list[float]]:
    """Return the first objective of every row with every cost model; a maximised one has the other sign."""
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
    for index, task in enumerate(tasks):
        value = results[index].get("metrics", {}).get(objective.metric)
        values.setdefault(task.config, []).append(math.inf if value is None else objective.sign * value)
    return values


def rate(values: Values, leader: int, simulated: Optional[Values] = None) -> list[Candidate]:
    """Return how often each configuration is the best, and the expected gain of measuring it.

    Measuring another configuration gains where it beats the leader. Measuring the leader gains where another beats it.
    Twins have equal `simulated` values; the other values may include measurements.
    """
    simulated = values if simulated is None else simulated
    own_leader = values[leader]
    scale = abs(sum(own_leader) / len(own_leader)) or 1.0
    best = [min(column) for column in zip(*values.values(), strict=True)]
    candidates = []
    for config, own in values.items():
        other = best if config == leader else own
        gain = sum(max(0.0, high - low) for high, low in zip(own_leader, other, strict=True)) / len(best)
        wins = sum(value <= lowest for value, lowest in zip(own, best, strict=True))
        twins = frozenset(c for c, others in simulated.items() if others == simulated[config])
        candidates.append(Candidate(config, wins, gain / scale if math.isfinite(gain) else 1.0, twins))
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


def measured_ratios(records: Records, measurements: Sequence[Measurement]) -> Ratios:
    """Return measured / predicted metrics of every configuration, for the run that was measured or would be."""
    ratios: Ratios = {}
    for measurement in measurements:
        predicted = records.get((measurement.config, 0), {}).get("metrics", {})
        known = {name: value for name, value in measurement.metrics.items() if predicted.get(name, 0) > 0 and value > 0}
        if known:
            ratios[measurement.config] = {name: value / predicted[name] for name, value in known.items()}
    common = mean_ratios(list(ratios.values()))
    return {config: ratios.get(config, common) for config, _ in records}


def mean_ratios(ratios: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the geometric mean of each metric that all have."""
    names = set.intersection(*(set(own) for own in ratios)) if ratios else set()
    return {name: math.exp(sum(math.log(own[name]) for own in ratios) / len(ratios)) for name in names}


def adjusted(records: Records, ratios: Ratios) -> Records:
    """Return the records with scaled metrics, in all replications."""
    return {key: _scaled(record, ratios.get(key[0], {})) for key, record in records.items()}


def _scaled(record: Record, ratios: dict[str, float]) -> Record:
    if not ratios or "metrics" not in record:
        return record
    return {**record, "metrics": {name: value * ratios.get(name, 1.0) for name, value in record["metrics"].items()}}
