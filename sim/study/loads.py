"""The loads of a sweep: every configuration runs at several request rates, with the same requests.

`loads: auto` chooses rates from a light load to more than the baseline can serve. With `precision`, further rates per
configuration find its capacity by bisection.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Optional

from servesim.core import BadInput
from servesim.core.limits import MAX_RATE, MAX_RUNS, MIN_RATE
from servesim.execution.executor import Executor
from servesim.execution.single_run import Record, RunKey, Task, context_json
from servesim.runs.request_rate import round_rate

from .curves import Curve, build_curves
from .experiment import Experiment, load_experiment
from .experiment_file import EXPERIMENT_FILE

AUTO_LOADS = (0.1, 0.3, 0.5, 0.7, 0.9, 1.1, 1.5)  # times the throughput of the baseline at overload
OVERLOAD = 1e6  # times the rate of the scenario: all requests arrive at about the same time
MAX_DOUBLINGS = 6  # of the highest load, and halvings of the lowest one, in a bisection


class LoadRecords(Mapping[RunKey, Record]):
    """The records of one load, by the keys of an experiment without loads. It shows later records too."""

    def __init__(self, records: Mapping[RunKey, Record], load: float) -> None:
        self._records, self._load = records, (load,)

    def __getitem__(self, key: RunKey) -> Record:
        return self._records[(*key, self._load)]

    def __iter__(self) -> Iterator[RunKey]:
        return (key[:-1] for key in self._records if key[-1] == self._load)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def with_loads(experiment: Experiment, folder: Path, executor: Executor) -> Experiment:
    """Choose the loads of `loads: auto`; a folder that holds the experiment keeps its loads."""
    if not experiment.auto_loads:
        return experiment
    stored = load_experiment(folder).loads if (folder / EXPERIMENT_FILE).is_file() else ()
    loads = stored or choose_loads(experiment, executor)
    runs = len(experiment.configs) * (experiment.replications + experiment.intervals) * len(loads)
    if runs > MAX_RUNS:
        raise BadInput(f"loads: auto: expected at most {MAX_RUNS} runs, got {runs}; list fewer loads")
    return replace(experiment, loads=loads, auto_loads=False)


def choose_loads(experiment: Experiment, executor: Executor) -> list[float]:
    """Return loads around the highest throughput of the baseline, which is that of a run at overload."""
    task = Task(0, 0, experiment.configs[0], rate_factor=OVERLOAD)
    ((_, record),) = executor.run(context_json(experiment.base), [task])
    throughput = record.get("figures", {}).get("request_throughput", 0.0)
    problem = record.get("error") or record.get("stuck") or ("" if throughput else "it serves no request")
    if problem:
        raise BadInput(f"loads: auto: the baseline cannot run at overload: {problem}; list the loads")
    rates = [min(MAX_RATE, max(MIN_RATE, round_rate(factor * throughput, 2))) for factor in AUTO_LOADS]
    return sorted(set(rates))


def plan_bisection(experiment: Experiment, records: Mapping[RunKey, Record]) -> Iterator[list[Task]]:
    """Yield the tasks of the next loads of every configuration, until all capacities are precise.

    A round uses only the results of earlier rounds, even if `records` has later ones: a resumed sweep plans the same.
    """
    count = experiment.replications if experiment.is_random else 1
    planned = {(config, load) for config in range(len(experiment.configs)) for load in experiment.loads}
    while True:
        known = {key: run for key, run in records.items() if (run["config"], run["load"]) in planned}
        curves = build_curves(experiment, known)
        loads = [(curve.config, load) for curve in curves if (load := next_load(curve, experiment)) is not None]
        if not loads:
            return
        planned.update(loads)
        yield [experiment.at_load(load).task(config, number) for config, load in loads for number in range(count)]


def next_load(curve: Curve, experiment: Experiment) -> Optional[float]:
    """Return the next load of a bisection: inside the interval of the capacity, or outside the loads of the sweep."""
    capacity, precision = curve.capacity, experiment.precision
    if capacity is None or precision is None:
        return None
    load = None
    if capacity.missed_at is None:
        load = 2 * capacity.rate if capacity.rate < experiment.loads[-1] * 2**MAX_DOUBLINGS else None
    elif not capacity.rate:
        load = capacity.missed_at / 2 if capacity.missed_at > experiment.loads[0] / 2**MAX_DOUBLINGS else None
    elif capacity.missed_at > capacity.rate * (1 + precision):
        load = math.sqrt(capacity.rate * capacity.missed_at)
    if load is None or not MIN_RATE <= load <= MAX_RATE:
        return None
    load = round_rate(load, max(4, 2 - math.floor(math.log10(precision))))
    return None if any(point.load == load for point in curve.points) else load
