"""A test bench: one configuration, one replication, in; a record of its figures out. This is what workers run.

Random numbers come from (scenario.seed, replication) alone: all configurations of a worker share one trace.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, Optional

import numpy as np
from servesim.config.overrides import Tree
from servesim.config.registry import blamed
from servesim.config.scenario import Scenario, scenario_from
from servesim.core import BadInput
from servesim.costs.device_profile import Profile, load_profile
from servesim.runs.simulate import Run, load_trace, simulate
from servesim.runs.steady_state import saturated, steady
from servesim.traces.edit import scale
from servesim.traces.trace import Trace

from .grid import assigned
from .objective import FIGURES

Record = dict[str, Any]
KEPT = 400_000  # requests of traces that a worker keeps, about 250 MB


class Task(NamedTuple):
    """One run: a configuration by its number and what it sets, and the replication."""

    config: int
    replication: int
    assignment: Mapping[str, Any]
    rate: Optional[float] = None  # times as many requests a second
    requests: Optional[int] = None  # only the first so many


def seed_of(seed: int, replication: int) -> int:
    """Return the seed of a replication: the scenario's own for the first, then one for each that no other has."""
    if replication == 0:
        return seed
    return int(np.random.SeedSequence(seed, spawn_key=(replication,)).generate_state(1, np.uint64)[0] >> 1)


@dataclass
class Bench:
    """What all runs of an experiment share, and what a worker keeps between them."""

    base: Tree
    cut: Optional[tuple[float, float]] = None  # warm-up and drain of steady-state runs
    _traces: OrderedDict[str, Trace] = field(default_factory=OrderedDict)
    _profiles: dict[str, Profile] = field(default_factory=dict)

    def run(self, task: Task) -> Record:
        """Return the record of a run; what fails is a record too."""
        record: Record = {"config": task.config, "replication": task.replication}
        try:
            scenario = self.scenario(task)
            run = simulate(scenario, self.trace(scenario, task), profile=self.profile(scenario))
            return {**record, "seed": scenario.seed, **self.figures(run)}
        except BadInput as bad:
            return {**record, "error": str(bad)}
        except Exception as error:  # a fault in one configuration must not end the sweep
            place = blamed(error)
            return {**record, "error": f"{type(error).__name__}: {error}{f' ({place})' if place else ''}"}

    def scenario(self, task: Task) -> Scenario:
        """Return what a task runs."""
        scenario = scenario_from(assigned(self.base, task.assignment), f"configuration {task.config}")
        return scenario.model_copy(update={"seed": seed_of(scenario.seed, task.replication)})

    def trace(self, scenario: Scenario, task: Task) -> Trace:
        """Return the requests, made once for all configurations that meet them."""
        source = scenario.workload if scenario.trace is None else scenario.trace.model_dump()
        seed = None if scenario.trace is not None else scenario.seed
        key = json.dumps([source, seed, task.rate, task.requests], sort_keys=True, default=str)
        found = self._traces.get(key)
        if found is None:
            found = shaped(load_trace(scenario), task)
            self._traces[key] = found
            while len(self._traces) > 1 and sum(len(trace) for trace in self._traces.values()) > KEPT:
                self._traces.popitem(last=False)
        self._traces.move_to_end(key)
        return found

    def profile(self, scenario: Scenario) -> Profile:
        """Return the step costs, read once."""
        key = json.dumps(scenario.profile, sort_keys=True, default=str)
        if key not in self._profiles:
            self._profiles[key] = load_profile(scenario.profile)
        return self._profiles[key]

    def figures(self, run: Run) -> Record:
        """Return what is kept of a run."""
        result = run.result()
        if self.cut is not None and run.requests:
            inside = steady(run.requests, run.scenario.slo.seconds(), *self.cut)
            result = {k: v for k, v in result.items() if not k.endswith("_itl_ms")} | inside
        elif run.measures.good is not None:
            result["attainment"] = run.measures.good / max(1, len(run.requests))
        return {
            "figures": {key: result[key] for key in FIGURES if result.get(key) is not None},
            "where": result["mean_seconds"],
            "saturated": saturated(run.requests),
            "outside": result["outside_profile"],
            "stuck": result["stuck"],
        }


def shaped(trace: Trace, task: Task) -> Trace:
    """Return a trace at another rate, or only the beginning of it."""
    if task.requests is not None and task.requests < len(trace):
        trace = Trace(trace.requests[: task.requests], trace.source, trace.format)
    return trace if task.rate is None else scale(trace, rate=task.rate)


@lru_cache(maxsize=4)
def bench(setup: str) -> Bench:
    """Return this process's bench for an experiment, given as the JSON of its base and cut."""
    given = json.loads(setup)
    return Bench(given["base"], tuple(given["cut"]) if given["cut"] else None)


def setup_of(base: Tree, cut: Optional[tuple[float, float]] = None) -> str:
    """Return what `bench` reads."""
    return json.dumps({"base": base, "cut": cut}, sort_keys=True)


def run_tasks(setup: str, tasks: list[Task]) -> list[Record]:
    """Run some tasks in this process."""
    return [bench(setup).run(task) for task in tasks]
