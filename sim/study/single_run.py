"""Run one replication of one configuration and return its metrics as a record. Workers run this code.

The random numbers depend only on (scenario.seed, replication), so all configurations use the same trace.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, Optional

import numpy as np
from servesim.config.overrides import Tree
from servesim.config.scenario import Scenario, scenario_from
from servesim.config.user_code import code_access, describe_error, error_text, use_access
from servesim.core import BadInput, PolicyError
from servesim.costs.device_profile import Profile, load_profile
from servesim.runs.simulate import Run, load_trace, simulate
from servesim.runs.steady_state import is_saturated, steady_metrics
from servesim.traces.edit import scale
from servesim.traces.trace import Trace

from .grid import apply_assignment
from .objective import METRICS

Record = dict[str, Any]
MAX_CACHED_REQUESTS = 400_000  # in the traces that a worker keeps, about 250 MB


class Task(NamedTuple):
    """One run: a configuration (number and parameter values) and a replication."""

    config: int
    replication: int
    assignment: Mapping[str, Any]
    rate_factor: Optional[float] = None  # multiplies the request rate
    max_requests: Optional[int] = None  # use only the first N requests


def replication_seed(seed: int, replication: int) -> int:
    """Return the seed of a replication: the scenario's seed for replication 0, a distinct one for each other."""
    if replication == 0:
        return seed
    return int(np.random.SeedSequence(seed, spawn_key=(replication,)).generate_state(1, np.uint64)[0] >> 1)


@dataclass
class RunContext:
    """The base scenario of an experiment, with cached traces and profiles."""

    base: Tree
    steady_window: Optional[tuple[float, float]] = None  # warm-up and drain of steady-state runs
    code: Optional[Sequence[Any]] = None  # permission of the parent process to load user files
    _traces: OrderedDict[str, Trace] = field(default_factory=OrderedDict)
    _profiles: dict[str, Profile] = field(default_factory=dict)

    def run(self, task: Task) -> Record:
        """Return the record of a run; after an error it holds the message."""
        record: Record = {"config": task.config, "replication": task.replication}
        try:
            scenario = self.scenario(task)
            run = simulate(scenario, self.trace(scenario, task), profile=self.profile(scenario))
            return {**record, "seed": scenario.seed, **self.record(run)}
        except (BadInput, PolicyError) as bad:
            return {**record, "error": str(bad)}
        except Exception as error:  # an error in one configuration must not end the sweep
            return {**record, "error": describe_error(error) or error_text(error)}

    def scenario(self, task: Task) -> Scenario:
        """Return the scenario of a task."""
        scenario = scenario_from(apply_assignment(self.base, task.assignment), f"configuration {task.config}")
        return scenario.model_copy(update={"seed": replication_seed(scenario.seed, task.replication)})

    def trace(self, scenario: Scenario, task: Task) -> Trace:
        """Return the requests of a task; configurations with the same workload share them."""
        source = scenario.workload if scenario.trace is None else scenario.trace.model_dump()
        seed = None if scenario.trace is not None else scenario.seed
        key = json.dumps([source, seed, task.rate_factor, task.max_requests], sort_keys=True, default=str)
        trace = self._traces.get(key)
        if trace is None:
            trace = resize_trace(load_trace(scenario), task)
            self._traces[key] = trace
            while len(self._traces) > 1 and sum(map(len, self._traces.values())) > MAX_CACHED_REQUESTS:
                self._traces.popitem(last=False)
        self._traces.move_to_end(key)
        return trace

    def profile(self, scenario: Scenario) -> Profile:
        """Return the profile of a scenario, read once."""
        key = json.dumps(scenario.profile, sort_keys=True, default=str)
        if key not in self._profiles:
            self._profiles[key] = load_profile(scenario.profile)
        return self._profiles[key]

    def record(self, run: Run) -> Record:
        """Return the metrics and flags of a run, with the keys of runs.jsonl."""
        result = run.result()
        if self.steady_window is not None and run.requests:
            steady = steady_metrics(run.requests, run.scenario.slo.seconds(), *self.steady_window)
            result = {k: v for k, v in result.items() if not k.endswith("_itl_ms")} | steady
        elif run.measures.good is not None:
            result["attainment"] = run.measures.good / max(1, len(run.requests))
        return {
            "figures": {key: result[key] for key in METRICS if result.get(key) is not None},
            "where": result["mean_seconds"],
            "saturated": is_saturated(run.requests),
            "outside": result["outside_profile"],
            "stuck": result["stuck"],
        }


def resize_trace(trace: Trace, task: Task) -> Trace:
    """Return the trace with the request count and the rate of a task."""
    if task.max_requests is not None and task.max_requests < len(trace):
        trace = Trace(trace.requests[: task.max_requests], trace.source, trace.format)
    return trace if task.rate_factor is None else scale(trace, rate=task.rate_factor)


@lru_cache(maxsize=4)
def run_context(context: str) -> RunContext:
    """Return the run context of this process for the JSON of `context_json`."""
    data = json.loads(context)
    window = data["steady_window"]
    return RunContext(data["base"], tuple(window) if window else None, data["code"])


def context_json(base: Tree, steady_window: Optional[tuple[float, float]] = None) -> str:
    """Return the input of `run_context`."""
    return json.dumps({"base": base, "steady_window": steady_window, "code": code_access()}, sort_keys=True)


def run_tasks(context: str, tasks: list[Task]) -> list[Record]:
    """Run tasks in this process, one after the other. A worker may load the user files that its parent may load."""
    runs = run_context(context)
    with use_access(runs.code):
        return [runs.run(task) for task in tasks]
