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
from servesim.config.overrides import Tree, apply_assignment
from servesim.config.scenario import Scenario, scenario_from
from servesim.config.user_code import code_access, describe_error, error_text, use_access
from servesim.core import BadInput, PolicyError
from servesim.costs.device_profile import Profile, load_profile
from servesim.runs.intervals import Draw
from servesim.runs.request_rate import contest_at_rate, is_contest
from servesim.runs.simulate import Run, gc_disabled, load_trace, simulate
from servesim.runs.steady_state import is_saturated, steady_metrics
from servesim.statistics.objective import METRICS, percentile_metrics
from servesim.traces.edit import scale
from servesim.traces.request_table import table_of
from servesim.traces.trace import Trace

from .shared_trace import SharedTraces, read_shared

Record = dict[str, Any]
MAX_CACHED_REQUESTS = 400_000  # in the traces that a worker keeps: 13 MB of arrays, more if prompts have hash ids


class Task(NamedTuple):
    """One run: a configuration (number and parameter values) and a replication."""

    config: int
    replication: int
    assignment: Mapping[str, Any]
    rate_factor: Optional[float] = None  # multiplies the request rate
    max_requests: Optional[int] = None  # use only the first N requests
    draw: Optional[Draw] = None  # run with a random cost model
    load: Optional[float] = None  # the request rate, of an experiment with loads

    @property
    def key(self) -> RunKey:
        """The key of its record."""
        return run_key(self.config, self.replication, None if self.draw is None else self.draw.number, self.load)


RunKey = tuple[Any, ...]  # configuration, replication, the number of a draw, and (LOAD,) of an experiment with loads


def run_key(config: int, replication: int, draw: Optional[int], load: Optional[float]) -> RunKey:
    """Return what identifies a run of an experiment."""
    key = (config, replication) if draw is None else (config, replication, draw)
    return key if load is None else (*key, (load,))


def record_key(record: Record) -> RunKey:
    """Return the key of a record."""
    return run_key(record["config"], record["replication"], record.get("draw"), record.get("load"))


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
    shared_trace: Optional[str] = None  # path of the trace's arrays, see SharedTraces
    percentiles: Sequence[float] = ()  # of the latencies, besides those of METRICS
    _traces: OrderedDict[str, Trace] = field(default_factory=OrderedDict)
    _profiles: dict[str, Profile] = field(default_factory=dict)
    _drawn: dict[str, list[Profile]] = field(default_factory=dict)  # for the draws of a profile

    @gc_disabled()  # until the requests are freed: otherwise the collector scans them all at the end of `simulate`
    def run(self, task: Task) -> Record:
        """Return the record of a run; after an error it holds the message."""
        record: Record = {"config": task.config, "replication": task.replication}
        draw = task.draw
        if draw is not None:
            record["draw"] = draw.number
        if task.load is not None:
            record["load"] = task.load
        try:
            scenario = self.scenario(task)
            trace, profile = self.trace(scenario, task), self.profile(scenario)
            run = simulate(scenario, trace, profile=profile) if draw is None else self._simulate(scenario, trace, draw)
            return {**record, "seed": scenario.seed, **self.record(run)}
        except (BadInput, PolicyError) as bad:
            return {**record, "error": str(bad)}
        except Exception as error:  # an error in one configuration must not end the sweep
            return {**record, "error": describe_error(error) or error_text(error)}

    def scenario(self, task: Task) -> Scenario:
        """Return the scenario of a task."""
        tree = apply_assignment(self.base, task.assignment)
        if task.rate_factor is not None:
            tree = contest_at_rate(tree, task.rate_factor) or tree
        scenario = scenario_from(tree, f"configuration {task.config}")
        return scenario.model_copy(update={"seed": replication_seed(scenario.seed, task.replication)})

    def trace(self, scenario: Scenario, task: Task) -> Trace:
        """Return the requests of a task; configurations with the same workload share them."""
        source = scenario.workload if scenario.trace is None else scenario.trace.model_dump()
        seed = None if scenario.trace is not None else scenario.seed
        key = json.dumps([source, seed, task.rate_factor, task.max_requests], sort_keys=True, default=str)
        trace = self._traces.get(key)
        if trace is None:
            trace = resize_trace(self._load_trace(scenario, task), scenario, task)
            trace.requests = table_of(trace.requests)
            self._traces[key] = trace
            while len(self._traces) > 1 and sum(map(len, self._traces.values())) > MAX_CACHED_REQUESTS:
                self._traces.popitem(last=False)
        self._traces.move_to_end(key)
        return trace

    def _load_trace(self, scenario: Scenario, task: Task) -> Trace:
        """Return the whole trace of a task. All replications share a file, read with the seed of replication 0."""
        if scenario.trace is None:
            return load_trace(scenario)
        shared = read_shared(self.shared_trace, scenario)
        return load_trace(self.scenario(task._replace(replication=0))) if shared is None else shared

    def profile(self, scenario: Scenario) -> Profile:
        """Return the profile of a scenario, read once."""
        key = json.dumps(scenario.profile, sort_keys=True, default=str)
        if key not in self._profiles:
            self._profiles[key] = load_profile(scenario.profile)
        return self._profiles[key]

    def _simulate(self, scenario: Scenario, trace: Trace, draw: Draw) -> Run:
        """Simulate with the cost model of a draw."""
        key = json.dumps([scenario.profile, draw.total], sort_keys=True, default=str)
        if key not in self._drawn:
            self._drawn[key] = self.profile(scenario).representatives(draw.total)
        return simulate(draw.scenario(scenario), trace, profile=self._drawn[key][draw.number])

    def record(self, run: Run) -> Record:
        """Return the metrics and flags of a run, with the keys of runs.jsonl."""
        run.measures.add_percentiles(self.percentiles)
        result = run.result()
        if self.steady_window is not None and run.requests:
            steady = steady_metrics(run.requests, run.scenario.slo.seconds(), *self.steady_window)
            result = {k: v for k, v in result.items() if not k.endswith("_itl_ms")} | steady
        elif run.measures.good is not None:
            result["attainment"] = run.measures.good / max(1, len(run.requests))
        names = dict.fromkeys([*METRICS, *percentile_metrics(self.percentiles)])
        return {
            "figures": {key: result[key] for key in names if result.get(key) is not None},
            "where": result["mean_seconds"],
            "saturated": is_saturated(run.requests, run.measures.times),
            "outside": result["outside_profile"],
            "stuck": result["stuck"],
        }


def resize_trace(trace: Trace, scenario: Scenario, task: Task) -> Trace:
    """Return the trace with the request count and the rate of a task."""
    if task.max_requests is not None and task.max_requests < len(trace):
        trace = Trace(trace.requests[: task.max_requests], trace.source, trace.format)
    if task.rate_factor is None or is_contest(scenario.workload):  # the contest's client already has the rate
        return trace
    return scale(trace, rate=task.rate_factor)


@lru_cache(maxsize=4)
def run_context(context: str) -> RunContext:
    """Return the run context of this process for the JSON of `context_json`."""
    data = json.loads(context)
    window = data["steady_window"]
    return RunContext(
        data["base"], tuple(window) if window else None, data["code"], data.get("shared_trace"), data["percentiles"]
    )


def context_json(
    base: Tree, steady_window: Optional[tuple[float, float]] = None, percentiles: Sequence[float] = ()
) -> str:
    """Return the input of `run_context`."""
    options = {"steady_window": steady_window, "percentiles": list(percentiles), "code": code_access()}
    return json.dumps({"base": base, **options}, sort_keys=True)


def with_shared_trace(context: str, traces: SharedTraces) -> str:
    """Return the input of `run_context` for workers on this machine."""
    data = json.loads(context)
    return json.dumps({**data, "shared_trace": traces.share(data["base"])}, sort_keys=True)


def run_tasks(context: str, tasks: list[Task]) -> list[Record]:
    """Run tasks in this process, one after the other. A worker may load the user files that its parent may load."""
    runs = run_context(context)
    with use_access(runs.code):
        return [runs.run(task) for task in tasks]
