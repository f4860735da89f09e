"""Runs of a real server that were written down: what it was asked, how it was set up, and when its answers came.

A file of runs is YAML. Every run is a scenario laid over a common one, with what was seen of it: `log`, times of each
request (a CSV, performance_serving's log or result file, our own requests.csv), or just `total`, the seconds of it all.

    data: ../logs                         # where logs and traces lie, from this file
    scenario: {engine: {...}, policy: {...}}
    cost: {kind: linear, ...}             # start values
    free: [prefill, decode_row]           # what to fit, or {context: 0.1}: with a prior, a tenth of its start value
    runs:
    - {name: a, scenario: {...}, log: a.csv.gz, cold: true}
    - {name: b, scenario: {...}, total: 788.1, fit: false}

Instants are seconds since the first request was sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import numpy as np
from numpy.typing import NDArray
from servesim.config.scenario import Scenario, merge, scenario_from
from servesim.core import BadInput, StepCost
from servesim.costs.mapping import cost_from
from servesim.files.yaml_reader import read_yaml
from servesim.runs.simulate import load_trace
from servesim.traces.make.section import Section
from servesim.traces.trace import Trace

from .parameters import value_of
from .timestamps import Times, read_times

Array = NDArray[np.float64]

KEYS = ("name", "scenario", "log", "interval", "dataset", "total", "cold", "fit", "note")
FILE = ("name", "about", "data", "scenario", "cost", "free", "spread", "runs")
SPREAD = 0.005  # by how much reported totals of one setting differ, as a part: two people timing the same server


@dataclass(frozen=True)
class Observed:
    """One run."""

    name: str
    scenario: Scenario
    trace: Trace
    makespan: float  # from the first sending to the last end seen
    index: NDArray[np.int64]  # which requests of the trace the times below are of
    first: Array  # when their first tokens came
    end: Array  # when their streams ended
    cold: bool = False  # its first calls compiled: how long that took is a parameter
    fit: bool = True  # False: predicted only
    note: str = ""

    @property
    def detailed(self) -> bool:
        """Whether the times of single requests are known."""
        return len(self.index) > 0


@dataclass(frozen=True)
class Runs:
    """All that a file of runs holds."""

    name: str
    runs: list[Observed]
    cost: StepCost  # start values
    free: dict[str, float]  # what to fit, and how far from its start it may be, as a part of that
    spread: float = SPREAD
    about: Mapping[str, Any] = field(default_factory=dict)


def read_runs(path: Path) -> Runs:
    """Read a file of runs."""
    tree = read_yaml(path)
    section = Section(tree, str(path))
    section.only(FILE)
    cost = cost_from(section.section("cost").values, f"{path}: cost")
    free = freed(tree.get("free"), f"{path}: free")
    for name in free:
        value_of(cost, name, f"{path}: free")
    listed = tree.get("runs")
    if not isinstance(listed, list) or not listed:
        raise BadInput(f"{path}: runs: expected a list of runs, got {listed!r}")
    folder = path.parent / str(tree.get("data", "."))
    common = tree.get("scenario") or {}
    runs = [observed(Section(run, f"{path}: runs[{k}]"), common, folder) for k, run in enumerate(listed)]
    if not any(run.fit for run in runs):
        raise BadInput(f"{path}: runs: expected at least one with fit: true")
    spread = section.positive("spread", SPREAD)
    return Runs(str(tree.get("name", path.stem)), runs, cost, free, spread, tree.get("about") or {})


def freed(given: Any, where: str) -> dict[str, float]:
    """Return the parameters to fit and the width of each one's prior."""
    if isinstance(given, list) and given and all(isinstance(name, str) for name in given):
        return dict.fromkeys(given, 1.0)
    if isinstance(given, Mapping) and given:
        section = Section(given, where)
        return {str(name): section.positive(name) for name in given}
    raise BadInput(f"{where}: expected a list of parameters to fit, got {given!r}")


def observed(run: Section, common: Mapping[str, Any], folder: Path) -> Observed:
    """Return one run of the file."""
    run.only(KEYS)
    name = run.text("name")
    if "log" not in run and "total" not in run:
        raise BadInput(f"{run.where}: expected a log or a total, got neither")
    tree = merge(dict(common), run.values.get("scenario") or {})
    times = None
    if "log" in run:
        times = read_times(folder / run.text("log"), folder / run.text("dataset") if "dataset" in run else None)
        if "trace" not in tree and "workload" not in tree:
            tree["trace"] = {"path": run.text("log")}
    scenario = scenario_from(placed(tree, folder), run.where)
    trace = load_trace(scenario)
    if times is not None and len(times.which) and times.which.max() >= len(trace.requests):
        raise BadInput(
            f"{run.where}.log: it tells of request {times.which.max()}, the scenario has {len(trace.requests)}"
        )
    interval = run.positive("interval") if "interval" in run else None
    send(trace, times, interval)
    flags = {key: run.values.get(key, default) for key, default in (("cold", False), ("fit", True))}
    for key, flag in flags.items():
        if not isinstance(flag, bool):
            raise run.bad(key, "true or false")
    total = run.positive("total") if "total" in run else None
    return seen(name, scenario, trace, times, total, str(run.values.get("note", "")), **flags)


def seen(
    name: str, scenario: Scenario, trace: Trace, times: Optional[Times], total: Optional[float], note: str,
    cold: bool, fit: bool,
) -> Observed:  # fmt: skip
    """Put a run together: times since its first sending."""
    start = min(request.arrival for request in trace.requests)
    if times is None:
        assert total is not None
        nothing = np.empty(0)
        return Observed(name, scenario, trace, total, np.empty(0, np.int64), nothing, nothing, cold, fit, note)
    sent = np.array([trace.requests[k].arrival for k in times.which]) - start
    first, end = sent + times.ttft, sent + times.e2e
    makespan = float(end.max()) if total is None else total
    return Observed(name, scenario, trace, makespan, times.which, first, end, cold, fit, note)


def send(trace: Trace, times: Optional[Times], interval: Optional[float]) -> None:
    """Put the moments of sending into a trace: as the log has them, else evenly if an interval is given."""
    if times is not None and times.arrival is not None:
        for k, arrival in zip(times.which, times.arrival):
            trace.requests[k].arrival = trace.requests[k].since = float(arrival)
    elif interval is not None:
        for k, request in enumerate(trace.requests):
            request.arrival = request.since = k * interval


def placed(tree: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the tree with the files of its trace and its contest's lengths found in the data folder."""
    tree = dict(tree)
    trace, workload = tree.get("trace"), tree.get("workload")
    if isinstance(trace, str):
        trace = {"path": trace}
    if isinstance(trace, Mapping):
        tree["trace"] = {**trace, "path": str(folder / str(trace["path"]))}
    if isinstance(workload, Mapping) and isinstance(workload.get("contest"), Mapping):
        contest = dict(workload["contest"])
        if "lengths" in contest:
            contest["lengths"] = str(folder / str(contest["lengths"]))
        tree["workload"] = {"contest": contest}
    return tree
