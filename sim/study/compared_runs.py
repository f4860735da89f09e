"""The runs of A or of B in a comparison: simulated now, or read from the folder of a run or a sweep.

A pair is a replication with the same requests. For single runs it is a batch of consecutive arrivals. Runs with other
requests have no pairs: they are two independent samples.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional, Union

from servesim.config.layers import Tree, read_scenario_file
from servesim.config.scenario import Scenario, scenario_from
from servesim.config.user_code import use_access
from servesim.core import BadInput
from servesim.runs.metric_table import METRICS, PERCENTILES, percentile_metrics
from servesim.runs.pools import scenarios_of
from servesim.runs.request_rate import format_rate
from servesim.runs.run_folder import RESULT, latencies_of, read_run
from servesim.statistics.two_samples import BATCHES, RUN, TwoSamples

from .executor import Executor, run_all
from .experiment import planned_draws
from .experiment_file import EXPERIMENT_FILE
from .ranking import Row, Summary
from .replications import Replications
from .single_run import Record, Task, context_json
from .sweep import load_summary

BATCH_COUNT = 20  # of consecutive arrivals: enough for an interval
RequestRows = Sequence[Mapping[str, Any]]  # of requests.csv


@dataclass
class ComparedRuns(Replications):
    """The runs of A or of B."""

    name: str
    runs: Sequence[Record]
    draws: Sequence[Record] = ()
    requests: RequestRows = ()  # of a single run
    scenario: Tree = field(default_factory=dict)  # empty: unknown, the folder of a run without it
    simulated: bool = False  # for this comparison; the others are stored runs

    @property
    def servers(self) -> list[Scenario]:
        """The scenario of one server of each pool; none if the scenario is not known."""
        return scenarios_of(Scenario.model_validate(self.scenario)) if self.scenario else []

    @property
    def profiles(self) -> list[Any]:
        """The profile of each of them."""
        return [server.profile for server in self.servers]

    def variation(self, metric: str) -> tuple[str, list[float]]:
        """Return the values of a metric that show its variation: of replications, of batches, or one value."""
        values = self.values(metric)
        batches = batch_means(finished(self.requests)).get(metric, []) if len(values) == 1 else []
        if len(batches) > 1:
            return BATCHES, batches
        return ("replications", values) if len(values) > 1 else (RUN, values or [math.nan])


def two_samples(a: ComparedRuns, b: ComparedRuns, metric: str) -> TwoSamples:
    """Return the values of A and B: in pairs if both have the same requests."""
    values_a, values_b = a.metric(metric, "seed"), b.metric(metric, "seed")
    seeds = [seed for seed in values_a if seed in values_b]
    if len(seeds) > 1:
        return TwoSamples([values_a[seed] for seed in seeds], [values_b[seed] for seed in seeds], True)
    single, same = len(a.measured) == len(b.measured) == 1, have_same_requests(a, b)
    others = {row["id"]: row for row in finished(b.requests)}
    both = [row for row in finished(a.requests) if row["id"] in others]  # in order of arrival at A
    sides = (both, [others[row["id"]] for row in both]) if same else ()
    batches = [batch_means(rows).get(metric, []) for rows in sides]
    if single and same and len(batches[0]) > 1:
        return TwoSamples(batches[0], batches[1], True, (BATCHES, BATCHES))
    (unit_a, first), (unit_b, second) = a.variation(metric), b.variation(metric)
    if single and same:
        first, second, unit_a, unit_b = [a.mean(metric)], [b.mean(metric)], RUN, RUN
    return TwoSamples(first, second, single and same, (unit_a, unit_b))


def have_same_requests(a: ComparedRuns, b: ComparedRuns) -> bool:
    """Whether A and B serve the same requests, by their scenarios or, for stored runs, by their requests."""
    if not (a.requests and b.requests):
        return not (a.scenario and b.scenario) or request_source(a.scenario) == request_source(b.scenario)
    rows = {row["id"]: row for row in b.requests}
    if rows.keys() != {row["id"] for row in a.requests}:
        return False
    pairs = [(row, rows[row["id"]]) for row in a.requests]
    times = [float(row["arrival"]) for row in a.requests]
    gap, seen = (max(times) - min(times)) / len(times), set()
    for one, other in pairs:
        lengths = ["prompt", "output"] if one["outcome"] == other["outcome"] == "finished" else ["prompt"]
        follows = one["session"] in seen  # the next request of a session waits for the answer to the last one
        late = not follows and abs(float(one["arrival"]) - float(other["arrival"])) > gap  # of a live client
        if late or any(one[key] != other[key] for key in lengths):
            return False
        seen |= {one["session"]} - {None, ""}
    return True


def request_source(tree: Tree) -> str:
    """Return a text that is equal for scenarios with the same requests."""
    seed = tree.get("seed") if tree.get("trace") is None or tree.get("noise") else None
    return json.dumps([tree.get("workload"), tree.get("trace"), seed], sort_keys=True, default=str)


def paired_draws(a: ComparedRuns, b: ComparedRuns, metric: str) -> list[tuple[float, float]]:
    """Return the changes of A and B in every draw of the cost model that both have."""
    if not a.draws or len(a.draws) != len(b.draws):  # another number of draws has other cost models
        return []
    changes_a, changes_b = a.effects(metric), b.effects(metric)
    return [(changes_a[draw], changes_b[draw]) for draw in changes_a if draw in changes_b]


def load_runs(
    sources: Sequence[str], settings: Sequence[str], replications: int, executor: Executor, draws: int = 0,
    percentiles: Sequence[float] = (),
) -> list[ComparedRuns]:  # fmt: skip
    """Load or simulate A and B: FILE.yaml, the folder of a run, or DIR[:CONFIG][@RATE] of a sweep, else its winner.

    `percentiles` of the latencies are added; the runs of a sweep have those of METRICS only.
    """
    sides: list[Union[ComparedRuns, Tree]] = []
    for source in sources:  # all of them are checked before the first run
        sides.append(from_folder(source, percentiles) or read_scenario_file(source, settings))
        if isinstance(sides[-1], dict):
            scenario_from(sides[-1], source)
    return [
        from_scenario(side, source, replications, executor, draws, percentiles) if isinstance(side, dict) else side
        for side, source in zip(sides, sources)
    ]


@use_access(None)  # reading a folder executes nothing
def from_folder(source: str, percentiles: Sequence[float] = ()) -> Optional[ComparedRuns]:
    """Return the runs of a folder, None if the source is not a folder."""
    name, _, rate = source.rpartition("@")
    name, at = (name, parse_rate(rate)) if name and parse_rate(rate) is not None else (source, None)
    head, colon, number = name.rpartition(":")
    if colon and number.isdigit() and (Path(head) / EXPERIMENT_FILE).is_file():
        return from_sweep(Path(head), int(number), at, percentiles)
    if (Path(name) / EXPERIMENT_FILE).is_file():
        return from_sweep(Path(name), None, at, percentiles)
    return from_run(Path(source), percentiles) if Path(source).is_dir() else None


def parse_rate(text: str) -> Optional[float]:
    """Return a request rate, None if the text is not a number."""
    try:
        return float(text)
    except ValueError:
        return None


def from_scenario(
    tree: Tree, name: str, replications: int, executor: Executor, draws: int = 0, percentiles: Sequence[float] = ()
) -> ComparedRuns:
    """Run the replications of a scenario, and `draws` random cost models."""
    scenario = scenario_from(tree, name)
    count = replications if scenario.varies else 1
    tasks = [Task(0, replication, {}) for replication in range(count)]
    tasks += [Task(0, replication, {}, draw=draw) for replication, draw in planned_draws(draws, count)]
    records = run_all(executor, context_json(tree, percentiles=percentiles), tasks)
    if failed := [record["error"] for record in records if "error" in record]:
        raise BadInput(f"{name}: {failed[0]}")
    of_scenario = scenario.model_dump(mode="json")
    return ComparedRuns(name, records[:count], records[count:], scenario=of_scenario, simulated=True)


def from_sweep(
    folder: Path, config: Optional[int], rate: Optional[float], percentiles: Sequence[float]
) -> ComparedRuns:
    """Return the runs of a configuration of a sweep; without a number, of its winner."""
    for name in percentile_metrics(percentiles):
        if name not in METRICS:
            known = ", ".join(map(str, PERCENTILES))
            raise BadInput(f"{folder}: expected percentiles that the runs of a sweep have ({known}), got {name}")
    summary = load_summary(folder, rate)
    row = summary.winner if config is None else next((row for row in summary.rows if row.config == config), None)
    if row is None:
        known = f"no configuration {config}, only 0 to {len(summary.rows) - 1}"
        raise BadInput(f"{folder}: {'has no winner; choose a configuration, e.g. DIR:0' if config is None else known}")
    at = "" if rate is None else f" at {format_rate(rate)}"
    return from_row(summary, row, f"{folder}: {row.label}{at}")


def from_row(summary: Summary, row: Row, name: str) -> ComparedRuns:
    """Return the runs of a configuration of a sweep."""
    scenario = {"profile": summary.experiment.profile, **summary.experiment.tree(row.config)}
    return ComparedRuns(name, row.runs, row.draws, scenario=scenario)


def from_run(folder: Path, percentiles: Sequence[float]) -> ComparedRuns:
    """Return a run that `sim run -o` or `sim replay -o` wrote."""
    if not (folder / RESULT).is_file():
        raise BadInput(f"{folder}: expected a folder of `sim run -o` or `sim sweep`; it has no {RESULT}")
    data = read_run(folder)
    further = {name: data.metric(name) for name in percentile_metrics(percentiles)}
    metrics = {**data.result, **further}
    scenario = {} if data.scenario is None else data.scenario.model_dump(mode="json")
    return single_run(str(folder), metrics, list(data.requests.values()), scenario)


def single_run(name: str, metrics: Mapping[str, Any], rows: RequestRows, scenario: Tree) -> ComparedRuns:
    """Return one run: its metrics and the rows of its requests."""
    numbers = {key: float(value) for key, value in metrics.items() if type(value) in (int, float)}
    return ComparedRuns(name, [{"seed": scenario.get("seed"), "metrics": numbers}], requests=rows, scenario=scenario)


def finished(rows: RequestRows) -> RequestRows:
    """Return the finished requests in order of arrival."""
    return sorted((row for row in rows if row["outcome"] == "finished"), key=lambda row: float(row["arrival"]))


def batch_means(rows: RequestRows) -> dict[str, list[float]]:
    """Return the mean latencies of batches of consecutive requests, by metric."""
    count = min(BATCH_COUNT, len(rows) // 2)
    batches = [rows[k * len(rows) // count : (k + 1) * len(rows) // count] for k in range(count)]
    means: dict[str, list[float]] = {}
    for latencies in map(latencies_of, batches):
        for name, values in latencies.items():
            means.setdefault(f"mean_{name}_ms", []).extend([statistics.fmean(values)] if values else [])
    return means
