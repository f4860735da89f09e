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

Instants are seconds since the first request was sent. A parameter to fit is named by a term of the cost model
(`decode_live`), or by a point of one of its tables, its place on the axis (`decode_gears.64` is the base of the gear of
64 rows, `prefill.4096` the curve at 4096 tokens).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Optional

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    BeforeValidator,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from servesim.config.overrides import Tree, merge
from servesim.config.scenario import Scenario, scenario_from
from servesim.core import BadInput, StepCost
from servesim.costs.mapping import COSTS, cost_from
from servesim.files.checked import Flag, Keys, Maybe, Positive, Text, expected, first_fault, says, wrong
from servesim.files.yaml_reader import read_yaml
from servesim.runs.simulate import load_trace
from servesim.traces.trace import Trace

from .timestamps import Times, read_times

Array = NDArray[np.float64]

SPREAD = 0.005  # by how much reported totals of one setting differ, as a part: two people timing the same server
Printed = Annotated[str, BeforeValidator(str)]  # a name may look like a number


def freed(given: Any) -> Any:
    """Return the parameters to fit with the width of each one's prior; in a list they have the widest."""
    listed = isinstance(given, list) and all(isinstance(name, str) for name in given)
    return dict.fromkeys(given, 1.0) if listed else given


def costs(given: Any) -> StepCost:
    if not isinstance(given, Mapping):
        raise expected("keys and values")
    return cost_from(given, "cost")


class RunEntry(Keys):
    """One run, as the file has it."""

    name: Text
    scenario: Optional[Tree] = None  # over that of the file
    log: Maybe[Text] = None  # file of times
    interval: Maybe[Positive] = None  # seconds from one sending to the next, where the log has no times of sending
    dataset: Maybe[Text] = None  # whose prompts the log names its requests by
    total: Maybe[Positive] = None  # seconds
    cold: Flag = False
    fit: Flag = True
    note: Printed = ""

    @model_validator(mode="after")
    def _told(self) -> RunEntry:
        if self.log is None and self.total is None:
            raise wrong("expected a log or a total, got neither")
        return self


class RunsFile(Keys):
    """A file of runs, as it is written."""

    name: Optional[Printed] = None
    about: Optional[Tree] = None
    data: Printed = "."
    scenario: Optional[Tree] = None
    cost: Annotated[StepCost, PlainValidator(costs)]
    free: Annotated[
        dict[str, Positive], Field(min_length=1), BeforeValidator(freed), says("a list of parameters to fit")
    ]
    spread: Positive = SPREAD
    runs: Annotated[list[RunEntry], Field(min_length=1), says("a list of runs")]

    @field_validator("free")
    @classmethod
    def _parameters(cls, free: dict[str, float], info: ValidationInfo) -> dict[str, float]:
        for name in free if "cost" in info.data else ():
            value_of(info.data["cost"], name)
        return free

    @field_validator("runs")
    @classmethod
    def _any_fit(cls, runs: list[RunEntry]) -> list[RunEntry]:
        if not any(run.fit for run in runs):
            raise wrong("expected at least one with fit: true")
        return runs


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
    try:
        file = RunsFile.model_validate(read_yaml(path))
    except ValidationError as error:
        raise BadInput(f"{path}: {first_fault(error)}") from None
    folder = path.parent / file.data
    runs = [observed(run, file.scenario or {}, folder, f"{path}: runs[{k}]") for k, run in enumerate(file.runs)]
    return Runs(file.name or path.stem, runs, file.cost, file.free, file.spread, file.about or {})


def observed(run: RunEntry, common: Tree, folder: Path, where: str) -> Observed:
    """Return one run of the file."""
    tree = merge(common, run.scenario or {})
    times = None
    if run.log is not None:
        times = read_times(folder / run.log, folder / run.dataset if run.dataset is not None else None)
        if "trace" not in tree and "workload" not in tree:
            tree["trace"] = {"path": run.log}
    scenario = scenario_from(placed(tree, folder), where)
    trace = load_trace(scenario)
    if times is not None and len(times.which) and times.which.max() >= len(trace.requests):
        raise BadInput(f"{where}.log: it tells of request {times.which.max()}, the scenario has {len(trace.requests)}")
    send(trace, times, run.interval)
    return seen(run, scenario, trace, times)


def seen(run: RunEntry, scenario: Scenario, trace: Trace, times: Optional[Times]) -> Observed:
    """Put a run together: times since its first sending."""
    start = min(request.arrival for request in trace.requests)
    index, first, end, makespan = np.empty(0, np.int64), np.empty(0), np.empty(0), run.total
    if times is not None:
        index = times.which
        sent = np.array([trace.requests[k].arrival for k in index]) - start
        first, end = sent + times.ttft, sent + times.e2e
        makespan = float(end.max()) if makespan is None else makespan
    assert makespan is not None
    return Observed(run.name, scenario, trace, makespan, index, first, end, run.cold, run.fit)


def send(trace: Trace, times: Optional[Times], interval: Optional[float]) -> None:
    """Put the moments of sending into a trace: as the log has them, else evenly if an interval is given."""
    if times is not None and times.arrival is not None:
        for k, arrival in zip(times.which, times.arrival):
            trace.requests[k].arrival = float(arrival)
    elif interval is not None:
        for k, request in enumerate(trace.requests):
            request.arrival = k * interval


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


def value_of(cost: StepCost, name: str) -> float:
    """Return a parameter's value."""
    term, _, place = name.partition(".")
    known = [f.name for kind in COSTS.values() if type(cost) is kind for f in fields(kind) if f.name[0] != "_"]
    if term not in known:
        raise BadInput(f"free: unknown parameter {name!r}; known: {', '.join(known)}")
    found: Any = getattr(cost, term)
    if not isinstance(found, (list, tuple)):
        if place or isinstance(found, bool) or found is None:
            raise BadInput(f"free: {name!r}: expected a term that is a number")
        return float(found)
    for point in found:
        if f"{point[0]:g}" == place:
            return float(point[1])
    places = ", ".join(f"{term}.{point[0]:g}" for point in found)
    raise BadInput(f"free: {name!r}: expected a point of the table: {places}")


def with_values(cost: StepCost, names: Sequence[str], values: Sequence[float]) -> StepCost:
    """Return the cost model with some parameters changed."""
    changes: dict[str, Any] = {}
    for name, value in zip(names, values):
        term, _, place = name.partition(".")
        if not place:
            changes[term] = float(value)
            continue
        points = changes.get(term, getattr(cost, term))
        changes[term] = [
            (point[0], float(value), *point[2:]) if f"{point[0]:g}" == place else tuple(point) for point in points
        ]
    if hasattr(cost, "_lines"):
        changes["_lines"] = {}  # what it remembers is of the old values
    return replace(cost, **changes)  # type: ignore[type-var]
