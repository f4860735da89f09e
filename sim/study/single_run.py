"""Run one replication of one configuration and return its metrics as a record. Workers run this code.

The random numbers depend only on (scenario.seed, replication), so all configurations use the same trace.

Every worker reads the trace file of an experiment once, and generates a workload from the seed.
"""

from __future__ import annotations

import errno
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, Optional

import numpy as np
from servesim.config.exported import refusals_of
from servesim.config.layers import Tree, apply_assignment
from servesim.config.scenario import Scenario, scenario_from
from servesim.config.user_code import code_access, describe_error, error_text, use_access
from servesim.core import BadInput, PolicyError
from servesim.costs.device_profile import Profile, load_profile
from servesim.engine.notices import Observer
from servesim.runs.intervals import Draw
from servesim.runs.metric_table import METRICS, percentile_metrics
from servesim.runs.prices import costs_per_million
from servesim.runs.request_rate import contest_at_rate, is_contest, longer_scenario
from servesim.runs.simulate import Run, load_trace, simulate
from servesim.runs.steady_state import is_saturated, steady_metrics
from servesim.traces.edit import scale
from servesim.traces.trace import Trace, gc_disabled, table_of

Record = dict[str, Any]
MACHINE = "machine"  # key of a record: the machine had no memory, disk space or file handles left for the run
MACHINE_ERRORS = (errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.EIO)
MAX_CACHED_REQUESTS = 400_000  # in the traces that a worker keeps: 13 MB of arrays, more if prompts have hash ids


class Task(NamedTuple):
    """One run: a configuration (number and parameter values) and a replication."""

    config: int
    replication: int
    assignment: Mapping[str, Any]
    rate_factor: Optional[float] = None  # multiplies the request rate
    max_requests: Optional[int] = None  # use only the first N requests
    draw: Optional[Draw] = None  # run with a random cost model
    rate: Optional[float] = None  # requests per second, of an experiment with rates

    @property
    def key(self) -> RunKey:
        """The key of its record."""
        return record_key(self.record)

    @property
    def record(self) -> Record:
        """The first keys of its record, which say what ran."""
        further = {"draw": None if self.draw is None else self.draw.number, "rate": self.rate}
        known = {key: value for key, value in further.items() if value is not None}
        return {"config": self.config, "replication": self.replication, **known}


RunKey = tuple[Any, ...]  # configuration, replication, the number of a draw, and (RATE,) of an experiment with rates


def record_key(record: Record) -> RunKey:
    """Return what identifies a run of an experiment."""
    draw, rate = record.get("draw"), record.get("rate")
    key = (record["config"], record["replication"], *([] if draw is None else [draw]))
    return key if rate is None else (*key, (rate,))


def metric_of(record: Record, name: str) -> Optional[float]:
    """Return a metric of a run; None if it has none."""
    value: Optional[float] = record.get("metrics", {}).get(name)
    return value


def replication_seed(seed: int, replication: int) -> int:
    """Return the seed of a replication: the scenario's seed for replication 0, a distinct one for each other."""
    if replication == 0:
        return seed
    return int(np.random.SeedSequence(seed, spawn_key=(replication,)).generate_state(1, np.uint64)[0] >> 1)


def is_machine_error(error: Optional[BaseException]) -> bool:
    """Whether a run failed because of the machine: it may succeed later, or on another one. The cause counts too."""
    while error is not None:
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in MACHINE_ERRORS):
            return True
        error = error.__cause__ or error.__context__
    return False


def is_repeated(record: Record) -> bool:
    """Whether a resumed experiment runs this record again. An error of the scenario would be the same again."""
    return bool(record.get(MACHINE))


@dataclass
class RunContext:
    """The base scenario of an experiment, with cached traces and profiles."""

    base: Tree
    steady_window: Optional[Sequence[float]] = None  # warm-up and drain of steady-state runs
    code: Optional[Sequence[Any]] = None  # permission of the parent process to load user files
    percentiles: Sequence[float] = ()  # of the latencies, besides those of METRICS
    length: int = 1  # times as many requests as the scenario has
    _traces: OrderedDict[str, Trace] = field(default_factory=OrderedDict)
    _profiles: dict[str, Profile] = field(default_factory=dict)
    _drawn: dict[str, list[Profile]] = field(default_factory=dict)  # for the draws of a profile

    @gc_disabled()  # until the requests are freed: otherwise the collector scans them all at the end of `simulate`
    def run(
        self, task: Task, observers: Sequence[Observer] = (), details: Callable[[Run], Record] = lambda _: {}
    ) -> Record:
        """Return the record of a run with its `details`; after an error it holds the message."""
        record, draw = task.record, task.draw
        try:
            scenario = self.scenario(task)
            trace = self.trace(scenario, task)
            drawn = scenario if draw is None else draw.scenario(scenario)
            profile = self.profile(scenario) if draw is None else self._drawn_profile(scenario, draw)
            run = simulate(drawn, trace, observers, profile=profile)
            return {**record, "seed": scenario.seed, **self.record(run), **details(run)}
        except Exception as error:  # an error in one configuration must not end the sweep
            own = isinstance(error, (BadInput, PolicyError))
            text = str(error) if own else describe_error(error) or error_text(error)
            return {**record, "error": text, **({MACHINE: True} if is_machine_error(error) else {})}

    def refusals(self, task: Task) -> list[str]:
        """Return why the real engine does not start with the settings of a task; an error shows in its run."""
        with suppress(Exception):  # also one of a user's policy
            scenario = self.scenario(task)
            return refusals_of(scenario) if scenario.policy_is_loadable else []
        return []

    def scenario(self, task: Task) -> Scenario:
        """Return the scenario of a task."""
        tree = longer_scenario(apply_assignment(self.base, task.assignment), self.length)
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
            trace = self._load_trace(scenario, task)
            trace.requests = table_of(trace.requests)
            self._traces[key] = trace
            while len(self._traces) > 1 and sum(map(len, self._traces.values())) > MAX_CACHED_REQUESTS:
                self._traces.popitem(last=False)
        self._traces.move_to_end(key)
        return trace

    def _load_trace(self, scenario: Scenario, task: Task) -> Trace:
        """Return the requests of a task. All replications share a trace file, read with the seed of replication 0."""
        whole = task._replace(replication=0, rate_factor=None, max_requests=None)
        if scenario.trace is None or task == whole:
            return resize_trace(load_trace(scenario), scenario, task)
        return resize_trace(self.trace(self.scenario(whole), whole), scenario, task)

    def profile(self, scenario: Scenario) -> Profile:
        """Return the profile of a scenario, read once."""
        key = json.dumps(scenario.profile, sort_keys=True, default=str)
        if key not in self._profiles:
            self._profiles[key] = load_profile(scenario.profile)
        return self._profiles[key]

    def _drawn_profile(self, scenario: Scenario, draw: Draw) -> Profile:
        """Return the profile with the cost model of a draw."""
        key = json.dumps([scenario.profile, draw.total], sort_keys=True, default=str)
        if key not in self._drawn:
            self._drawn[key] = self.profile(scenario).representatives(draw.total)
        return self._drawn[key][draw.number]

    def record(self, run: Run) -> Record:
        """Return the metrics and flags of a run, with the keys of runs.jsonl."""
        run.measures.add_percentiles(self.percentiles)
        result = run.result()
        if self.steady_window is not None and run.requests:
            warm_up, drain = self.steady_window
            steady = steady_metrics(run.requests, run.scenario.slo.seconds(), warm_up, drain)
            result = {name: value for name, value in result.items() if "[" not in name} | steady
            result |= costs_per_million(run.price_per_second, steady)
        groups = [key for key in result if "[" in key]  # of one priority or session
        names = dict.fromkeys([*METRICS, *percentile_metrics(self.percentiles), *groups])
        return {
            "metrics": {key: result[key] for key in names if result.get(key) is not None},
            "time_breakdown": result["mean_seconds"],
            "saturated": is_saturated(run.requests),
            "outside_profile": result["outside_profile"],
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
    return RunContext(**json.loads(context))


def context_json(
    base: Tree, steady_window: Optional[tuple[float, float]] = None, percentiles: Sequence[float] = (), length: int = 1
) -> str:
    """Return the input of `run_context`."""
    fields = {"base": base, "steady_window": steady_window, "code": code_access(), "percentiles": list(percentiles)}
    return json.dumps({**fields, "length": length}, sort_keys=True)


def run_tasks(context: str, tasks: list[Task]) -> list[Record]:
    """Run tasks in this process, one after the other. A worker may load the user files that its parent may load."""
    runs = run_context(context)
    with use_access(runs.code):
        return [runs.run(task) for task in tasks]
