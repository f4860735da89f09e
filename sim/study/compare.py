"""Compare two scenarios, runs or configurations of a sweep, in pairs with the same random numbers.

A pair is a replication. For folders of single runs it is a batch of consecutive arrivals, because the latencies of
neighbouring requests are not independent.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, Optional

import numpy as np
from servesim.config.overrides import Tree, override, read_scenario_file
from servesim.config.scenario import scenario_from
from servesim.core import BadInput
from servesim.runs.metrics import time_per_token
from servesim.runs.run_folder import RESULT, read_run

from .draws import draw_effects, paired_effects, planned_draws
from .executor import Executor
from .experiment_file import EXPERIMENT_FILE
from .intervals import Interval, interval, paired_difference, with_draws
from .number_format import align_columns, format_mean
from .objective import Objective
from .single_run import Record, Task, context_json, replication_seed
from .sweep import load_summary

DEFAULT_METRICS = ("makespan", "output_throughput", "mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms")
BATCHES = 20  # of consecutive arrivals: long enough to be nearly independent, enough for an interval
MetricsByPair = dict[Hashable, dict[str, float]]  # pair key -> metrics


@dataclass
class ComparedRuns:
    """The metrics of A or of B, by the keys that pair them."""

    name: str
    runs: MetricsByPair  # by seed
    batches: MetricsByPair = field(default_factory=dict)  # by batch, for a single run
    draws: Sequence[Record] = ()  # runs with random cost models
    records: Sequence[Record] = ()  # the runs that the draws repeat
    profile: Any = None  # of a scenario

    def effects(self, metric: str) -> dict[int, float]:
        """Return the change of a metric in each draw of the cost model."""
        return draw_effects(metric, self.records, self.draws)

    def mean(self, metric: str) -> float:
        """Return the mean of a metric over the runs."""
        return interval([run[metric] for run in self.runs.values() if metric in run]).mean


@dataclass(frozen=True)
class Difference:
    """B minus A in one metric."""

    objective: Objective
    a: float
    b: float
    change: Interval
    pairs: str  # replications | batches | one run
    draws: Sequence[float] = ()  # B minus A in each draw of the cost model

    @property
    def relative(self) -> Interval:
        """The change as a fraction of A."""
        return self.change.relative_to(self.a) if self.a else self.change

    @property
    def outcome(self) -> str:
        """How B compares with A: the same, not significant, better or worse."""
        if self.change.mean == 0 and not self.change.half_width:
            return "the same"
        if self.relative.half_width is not None and not self.relative.excludes_zero:
            return "not significant"
        return "better" if self.objective.better(self.relative.mean) else "worse"

    def describe(self) -> str:
        """Return the outcome with the size of the change and its interval."""
        mean, half_width, _ = self.relative
        limits = "one run each"
        if half_width is not None:
            limits = f"interval {100 * (mean - half_width):+.2f} to {100 * (mean + half_width):+.2f} %"
        if self.draws:
            better = sum(self.objective.better(change) for change in self.draws)
            limits += f", better in {better} of {len(self.draws)} draws"
        if self.outcome == "not significant":
            return f"the difference is not significant ({limits})"
        return self.outcome if self.outcome == "the same" else f"B is {100 * abs(mean):.2f} % {self.outcome} ({limits})"

    def exceeds(self, tolerance: float) -> bool:
        """Whether B differs from A by more than this fraction of A."""
        return not abs(self.relative.mean) <= tolerance


def difference(a: ComparedRuns, b: ComparedRuns, objective: Objective, confidence: float) -> Difference:
    """Return the paired difference in one metric, with the uncertainty of the cost model if both have draws."""
    pair = paired_runs(a, b, objective, confidence)
    if not a.draws or len(a.draws) != len(b.draws):  # another number of draws has other cost models
        return pair
    effects = paired_effects(b.effects(objective.metric), a.effects(objective.metric))
    changes = [pair.change.mean + effect for effect in effects]
    return replace(pair, change=with_draws(pair.change, effects, confidence), draws=changes)


def paired_runs(a: ComparedRuns, b: ComparedRuns, objective: Objective, confidence: float) -> Difference:
    """Return the paired difference in one metric; pairs are batches if there are no replications to pair."""
    metric = objective.metric
    for kind, mine, other in (("replications", a.runs, b.runs), ("batches", a.batches, b.batches)):
        keys = [key for key in mine if key in other and metric in mine[key] and metric in other[key]]
        if len(keys) > 1:
            first, second = [mine[key][metric] for key in keys], [other[key][metric] for key in keys]
            change = paired_difference(second, first, confidence)
            return Difference(objective, interval(first).mean, interval(second).mean, change, kind)
    mean_a, mean_b = a.mean(metric), b.mean(metric)
    return Difference(objective, mean_a, mean_b, Interval(mean_b - mean_a, None, 1), "one run")


def compare(
    a: ComparedRuns, b: ComparedRuns, objectives: Sequence[Objective], confidence: float = 0.95
) -> list[Difference]:
    """Return the difference in each metric that A and B both have."""
    differences = [difference(a, b, objective, confidence) for objective in objectives]
    differences = [d for d in differences if not math.isnan(d.a) and not math.isnan(d.b)]
    if not differences:
        raise BadInput(f"{a.name} and {b.name} have none of {', '.join(o.metric for o in objectives)} in common")
    return differences


def summarise(differences: Sequence[Difference], tolerance: Optional[float] = None) -> str:
    """Return the comparison in sentences."""
    if all(d.outcome == "the same" for d in differences):
        text = "A and B are the same in every metric."
    else:
        first = differences[0]
        text = f"By {first.objective.metric}, {first.describe()}."
        for word in ("better", "worse"):
            names = [d.objective.metric for d in differences[1:] if d.outcome == word]
            text += f" B is {word} in {', '.join(names)}." if names else ""
    if tolerance is not None:
        outside = [d for d in differences if d.exceeds(tolerance)]
        names_text = ", ".join(f"{d.objective.metric} ({100 * d.relative.mean:+.2f} %)" for d in outside)
        limit = f"the tolerance of {100 * tolerance:g} %"
        text += f" Outside {limit}: {names_text}." if outside else " All within the tolerance."
    return text


def format_table(differences: Sequence[Difference]) -> str:
    """Return one line per metric."""
    lines = [["", "A", "B", "B - A", "verdict"]]
    for d in differences:
        metric = d.objective.metric
        levels = [format_mean(Interval(level, None, 1), metric) for level in (d.a, d.b)]
        lines.append([metric, *levels, format_mean(d.change, metric, True), d.describe()])
    return "\n".join(align_columns(lines))


def load_runs(
    source: str, settings: Sequence[str], replications: int, executor: Executor, draws: int = 0
) -> ComparedRuns:
    """Load or simulate A or B: FILE.yaml, the folder of a run, or a sweep's DIR (its winner) or DIR:CONFIG."""
    head, colon, number = source.rpartition(":")
    path = Path(source)
    if colon and number.isdigit() and (Path(head) / EXPERIMENT_FILE).is_file():
        return from_sweep(Path(head), int(number))
    if (path / EXPERIMENT_FILE).is_file():
        return from_sweep(path, None)
    if path.is_dir():
        return from_run(path)
    return from_scenario(override(read_scenario_file(path), settings), source, replications, executor, draws)


def from_scenario(tree: Tree, name: str, replications: int, executor: Executor, draws: int = 0) -> ComparedRuns:
    """Run the replications of a scenario, and `draws` random cost models."""
    scenario = scenario_from(tree, name)
    count = replications if scenario.varies else 1
    tasks = [Task(0, replication, {}) for replication in range(count)]
    tasks += [Task(0, replication, {}, draw=draw) for replication, draw in planned_draws(draws, count)]
    records = sorted(executor.run(context_json(tree), tasks), key=itemgetter(0))
    for _, record in records:
        if "error" in record:
            raise BadInput(f"{name}: {record['error']}")
    fitted, drawn = [record for _, record in records[:count]], [record for _, record in records[count:]]
    runs: MetricsByPair = {replication_seed(scenario.seed, r["replication"]): r["figures"] for r in fitted}
    return ComparedRuns(
        name, dict(sorted(runs.items(), key=str)), draws=drawn, records=fitted, profile=scenario.profile
    )


def from_sweep(folder: Path, config: Optional[int]) -> ComparedRuns:
    """Return the runs of a configuration of a sweep; without a number, of its winner."""
    summary = load_summary(folder)
    row = summary.winner if config is None else next((row for row in summary.rows if row.config == config), None)
    if row is None:
        problem = (
            "has no winner; choose a configuration, e.g. DIR:0"
            if config is None
            else f"no configuration {config}, only 0 to {len(summary.rows) - 1}"
        )
        raise BadInput(f"{folder}: {problem}")
    runs: MetricsByPair = {run.get("seed"): run["figures"] for run in row.runs if "figures" in run}
    return ComparedRuns(f"{folder}: {row.label}", runs, draws=row.draws, records=row.runs)


def from_run(folder: Path) -> ComparedRuns:
    """Return a run that `sim run -o` or `sim replay -o` wrote."""
    if not (folder / RESULT).is_file():
        raise BadInput(f"{folder}: expected a folder of `sim run -o` or `sim sweep`; it has no {RESULT}")
    data = read_run(folder)
    numbers = {key: float(value) for key, value in data.result.items() if type(value) in (int, float)}
    seed = None if data.scenario is None else data.scenario.seed
    return ComparedRuns(str(folder), {("run", seed): numbers}, batch_means(list(data.requests.values())))


def batch_means(rows: Sequence[Mapping[str, Any]]) -> MetricsByPair:
    """Return mean latencies (ms) per batch of consecutive arrivals, of finished requests."""
    done = sorted((row for row in rows if row["outcome"] == "finished"), key=lambda row: row["arrival"])
    count = min(BATCHES, len(done) // 2)
    means: MetricsByPair = {}
    for number in range(count):
        batch = done[number * len(done) // count : (number + 1) * len(done) // count]
        ttft = [row["first_token"] - row["arrival"] for row in batch]
        e2el = [row["finish"] - row["arrival"] for row in batch]
        output = np.array([row["output"] for row in batch])
        tpot = time_per_token(np.array(ttft), np.array(e2el), output)[output > 1].tolist()
        latencies = {"mean_ttft_ms": ttft, "mean_e2el_ms": e2el, "mean_tpot_ms": tpot}
        key = (number, batch[0]["id"], batch[-1]["id"])  # batches pair only if their requests are the same
        means[key] = {name: 1e3 * math.fsum(values) / len(values) for name, values in latencies.items() if values}
    return means
