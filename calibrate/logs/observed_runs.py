"""Read runs.yaml: runs of a real server with their scenarios and logs, and the parameters to fit.

Every run has a scenario, merged over a common one. It also has a `log` with the times of each request, or only a
`total` in seconds, or `reported` means and quantiles. A log is a CSV, requests.csv of servesim, the result of a load
generator (vLLM bench, guidellm, aiperf), or performance_serving's log.

    data: ../logs                         # folder of logs and traces, relative to this file
    scenario: {engine: {...}, policy: {...}}
    cost: {kind: linear, ...}             # start values
    free: [prefill, decode_row]           # parameters to fit, or {context: 0.1}: with a prior width of 10 %
    front_end: {seconds: 0.01}            # start values of the front end; those that are not free stay
    runs:
    - {name: a, scenario: {...}, log: a.csv.gz, cold: true}
    - {name: b, scenario: {...}, total: 788.1, fit: false}
    - {name: c, scenario: {...}, reported: {mean_ttft_ms: 94.5, p90_e2el_ms: 6100}}

Times are seconds since the first request was sent. A parameter is a term of the cost model (`decode_live`, or
`decode.live` of one in parts) or a point of one of its curves: `decode.rows.64` is the time of 64 rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
from servesim.config.layers import Layer, Tree, assemble
from servesim.config.scenario import Scenario, scenario_from
from servesim.core import BadInput, StepCost
from servesim.costs.mapping import cost_from
from servesim.files.checked import (
    Flag,
    Keys,
    Maybe,
    Positive,
    Text,
    expected_error,
    expects,
    first_error,
    invalid_error,
)
from servesim.files.yaml_reader import read_yaml
from servesim.runs.metric_table import PERCENTILES
from servesim.runs.metrics import Metrics
from servesim.runs.simulate import load_trace
from servesim.traces.trace import Trace

from .parameters import FRONT_END_PRIORS, front_end_key, value_of
from .timestamps import RequestTimes, read_times

FIGURE = re.compile(r"(mean|median|p\d{1,2}(?:\.\d{1,3})?)_(ttft|tpot|itl|e2el)_ms")
SPREADS = {"ttft": 0.03, "tpot": 0.01, "itl": 0.01, "e2el": 0.01}  # relative difference of two runs of one setting
TAIL_SPREAD = 3.0  # times the spread: of quantiles other than the median
Array = NDArray[np.float64]
SPREAD = 0.005  # relative difference between reported totals of one setting, timed by two people
Printed = Annotated[str, BeforeValidator(str)]  # a name may look like a number


def figure_names(value: Any) -> Any:
    """Check the names of figures; `e2e` is another name of `e2el`."""
    if not isinstance(value, Mapping):
        return value
    figures = {re.sub(r"_e2e_ms$", "_e2el_ms", str(name)): number for name, number in value.items()}
    for name in figures:
        if not FIGURE.fullmatch(name):
            raise invalid_error(
                f"unknown figure {name[:40]!r}: expected mean, median or p1 to p99 of ttft, tpot, itl or e2el, for "
                "example mean_ttft_ms or p90_e2el_ms"
            )
        if name.endswith("_itl_ms") and name.split("_")[0] not in ("mean", "median", *(f"p{q}" for q in PERCENTILES)):
            raise invalid_error(f"{name}: expected mean, median or one of {', '.join(f'p{q}' for q in PERCENTILES)}")
    return figures


Figures = Annotated[
    dict[str, Positive], expects("figures in milliseconds, like {mean_ttft_ms: 94.5}"), BeforeValidator(figure_names)
]
FiguresByStage = Annotated[list[Figures], BeforeValidator(lambda value: value if isinstance(value, list) else [value])]


@dataclass(frozen=True)
class Reported:
    """Figures of the requests that were sent in a period of time."""

    figures: Mapping[str, float]  # milliseconds
    window: Optional[tuple[float, float]] = None  # seconds since the first request; None: all requests
    name: str = ""  # of the stage

    def compare(self, metrics: Metrics) -> dict[str, tuple[float, float]]:
        """Return every figure, measured and predicted, in milliseconds."""
        return {name: (value, self._predicted(name, metrics)) for name, value in self.figures.items()}

    def _predicted(self, name: str, metrics: Metrics) -> float:
        statistic, latency, _ = name.split("_")
        if latency == "itl":
            return 1e3 * metrics.itl.get(statistic, math.nan)
        values = {"ttft": metrics.ttft, "tpot": metrics.tpot_of, "e2el": metrics.e2el}[latency]
        chosen = np.ones(len(values), bool)
        if self.window is not None:
            sent = metrics.requests.column("sent")[metrics.done] - metrics.times[0].min()
            chosen = (sent >= self.window[0]) & (sent < self.window[1])
        if latency == "tpot":
            chosen &= metrics.requests.column("written")[metrics.done] > 1
        values = values[chosen]
        if not len(values):
            return math.nan
        if statistic == "mean":
            return 1e3 * float(values.mean())
        return 1e3 * float(np.percentile(values, 50.0 if statistic == "median" else float(statistic[1:])))


def relative_spread(name: str, least: float = 0.0) -> float:
    """Return the relative standard deviation of a figure; `least`: of a mean."""
    statistic, latency, _ = name.split("_")
    return max(least, SPREADS[latency]) * (1.0 if statistic in ("mean", "median") else TAIL_SPREAD)


def reported_parts(value: Sequence[Mapping[str, float]], workload: Any, where: str) -> list[Reported]:
    """Return the figures of a run: one mapping for all requests, or one per stage of the workload."""
    if len(value) < 2:
        return [Reported(figures) for figures in value]
    stages: Sequence[Any] = (workload or {}).get("stages") or ()
    if len(stages) != len(value):
        raise BadInput(
            f"{where}.reported: expected one entry per stage of the workload ({len(stages)}), got {len(value)}"
        )
    if any(name.endswith("_itl_ms") for figures in value for name in figures):
        raise BadInput(f"{where}.reported: expected itl for the whole run only, got it for a stage")
    ends = np.cumsum([float(stage["seconds"]) for stage in stages]).tolist()
    windows = zip([0.0, *ends[:-1]], [*ends[:-1], math.inf])
    return [Reported(figures, window, f"stage {k}") for k, (figures, window) in enumerate(zip(value, windows))]


def free_parameters(value: Any) -> Any:
    """Return the parameters to fit with their prior widths; names in a list have the width 1."""
    is_list = isinstance(value, list) and all(isinstance(name, str) for name in value)
    return dict.fromkeys(value, 1.0) if is_list else value


def parse_cost(value: Any) -> StepCost:
    if not isinstance(value, Mapping):
        raise expected_error("keys and values")
    return cost_from(value, "cost")


class FrontEndTimes(Keys):
    """Start values of the front end."""

    seconds: Maybe[Positive] = None
    per_request: Maybe[Positive] = None
    per_token: Maybe[Positive] = None


class RunEntry(Keys):
    """One run of runs.yaml."""

    name: Text
    scenario: Optional[Tree] = None  # merged over that of the file
    log: Maybe[Text] = None  # file with request times
    interval: Maybe[Positive] = None  # seconds between two requests, if the log has no send times
    total: Maybe[Positive] = None  # makespan in seconds
    reported: FiguresByStage = Field(default_factory=list)  # of all requests, or of each stage of the workload
    cold: Flag = False
    fit: Flag = True
    note: Printed = ""

    @model_validator(mode="after")
    def _check_times(self) -> RunEntry:
        if self.log is None and self.total is None and not any(self.reported):
            raise invalid_error("expected a log or a total, or reported figures, got none")
        return self


class RunsFile(Keys):
    """The keys of runs.yaml."""

    name: Optional[Printed] = None
    about: Optional[Tree] = None
    data: Printed = "."
    scenario: Optional[Tree] = None
    cost: Annotated[StepCost, PlainValidator(parse_cost)]
    free: Annotated[
        dict[str, Positive],
        Field(min_length=1),
        BeforeValidator(free_parameters),
        expects("a list of parameters to fit"),
    ]
    front_end: FrontEndTimes = FrontEndTimes()
    spread: Positive = SPREAD
    runs: Annotated[list[RunEntry], Field(min_length=1), expects("a list of runs")]

    @field_validator("free")
    @classmethod
    def _check_parameters(cls, free: dict[str, float], info: ValidationInfo) -> dict[str, float]:
        for name in free if "cost" in info.data else ():
            if not front_end_key(name):
                value_of(info.data["cost"], name)
        return free

    @field_validator("runs")
    @classmethod
    def _check_any_fit(cls, runs: list[RunEntry]) -> list[RunEntry]:
        if not any(run.fit for run in runs):
            raise invalid_error("expected at least one run with fit: true")
        return runs


@dataclass(frozen=True)
class ObservedRun:
    """One run with its measured times."""

    name: str
    scenario: Scenario
    trace: Trace
    makespan: Optional[float]  # from the first send time to the last end; None if it is not known
    index: NDArray[np.int64]  # requests of the trace that have times
    first: Array  # times of their first tokens
    end: Array  # ends of their streams
    cold: bool = False  # with a cold start: its seconds are parameters of the fit
    fit: bool = True  # False: predicted only
    reported: Sequence[Reported] = ()

    def sent_times(self) -> Array:
        """Return the send times of the requests that have times, since the first send time of the run."""
        start = min(request.arrival for request in self.trace.requests)
        return np.array([self.trace.requests[k].arrival for k in self.index]) - start

    @property
    def has_request_times(self) -> bool:
        """Whether the times of requests are known."""
        return len(self.index) > 0


@dataclass(frozen=True)
class Runs:
    """The content of runs.yaml."""

    name: str
    runs: list[ObservedRun]
    cost: StepCost  # start values
    free: dict[str, float]  # parameters to fit, with the relative width of their priors
    spread: float = SPREAD
    about: Mapping[str, Any] = field(default_factory=dict)
    front_end: Mapping[str, float] = field(default_factory=dict)  # start values, also of times that are not free


def read_runs(path: Path) -> Runs:
    """Read runs.yaml."""
    return runs_from(read_yaml(path), str(path), path.parent, path.stem)


def runs_from(tree: Mapping[str, Any], where: str, folder: Path = Path(), name: str = "fit") -> Runs:
    """Return the runs of a tree like that of runs.yaml; its paths start in the folder."""
    try:
        file = RunsFile.model_validate(tree)
    except ValidationError as error:
        raise BadInput(f"{where}: {first_error(error)}") from None
    data = folder / file.data
    runs = [read_run(run, file.scenario or {}, data, f"{where}: runs[{k}]") for k, run in enumerate(file.runs)]
    front_end = {key: FRONT_END_PRIORS[key] for key in map(front_end_key, file.free) if key}
    front_end |= file.front_end.model_dump(exclude_none=True)
    return Runs(file.name or name, runs, file.cost, file.free, file.spread, file.about or {}, front_end)


def read_run(run: RunEntry, common: Tree, folder: Path, where: str) -> ObservedRun:
    """Read the log and the trace of one run."""
    tree = assemble([Layer(common, folder=folder), Layer(run.scenario or {}, folder=folder)])
    times = None
    if run.log is not None:
        times = read_times(folder / run.log)
        if "trace" not in tree and "workload" not in tree:
            tree["trace"] = {"path": str(folder / run.log)}
    scenario = scenario_from(tree, where)
    trace = load_trace(scenario)
    last = -1 if times is None else max([*times.request_index, *times.arrivals], default=-1)
    if last >= len(trace.requests):
        count = len(trace.requests)
        raise BadInput(f"{where}.log: it has a request with index {last}, but the scenario has {count} requests")
    set_arrivals(trace, times, run.interval)
    figures = {} if times is None else {k: v for k, v in times.figures.items() if FIGURE.fullmatch(k)}
    reported = reported_parts(run.reported or [figures] * bool(figures), scenario.workload, where)
    index, first, end, makespan = np.empty(0, np.int64), np.empty(0), np.empty(0), run.total
    if times is not None and not times.figures:
        index = times.request_index
        sent = trace.arrivals[index] - min(request.arrival for request in trace.requests)
        first, end = sent + times.ttft, sent + times.e2e
        makespan = float(end.max()) if makespan is None else makespan
    return ObservedRun(run.name, scenario, trace, makespan, index, first, end, run.cold, run.fit, reported)


def set_arrivals(trace: Trace, times: Optional[RequestTimes], interval: Optional[float]) -> None:
    """Set the arrival times of a trace: from the log, or at a fixed interval."""
    trace.requests = list(trace.requests)
    if times is not None and times.arrivals:
        for k, arrival in times.arrivals.items():
            trace.requests[k].arrival = float(arrival)
    elif interval is not None:
        for k, request in enumerate(trace.requests):
            request.arrival = k * interval
