"""Compare two scenarios, runs or configurations of a sweep, in pairs that had the same random numbers.

A pair is a replication, or for folders of single runs a batch of consecutive arrivals: neighbours are not independent.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import numpy as np
from servesim.config.overrides import Tree, override, read_tree
from servesim.config.scenario import scenario_from
from servesim.core import BadInput
from servesim.runs.metrics import time_per_token
from servesim.runs.run_folder import RESULT, read_run

from .executor import Executor
from .intervals import Interval, interval, paired
from .number_format import columns, spread
from .objective import Objective
from .single_run import Task, seed_of, setup_of
from .sweep import load

METRICS = ("makespan", "output_throughput", "mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms")
BATCHES = 20  # of consecutive arrivals: long beside what neighbours share, enough for an interval
Values = dict[Hashable, dict[str, float]]  # what a pair is known by -> figures


@dataclass
class Side:
    """One of the two: its figures by what they can be paired on."""

    name: str
    runs: Values  # by seed
    batches: Values = field(default_factory=dict)  # by number, for a single run

    def mean(self, metric: str) -> float:
        """Return the mean of a figure over its runs."""
        return interval([run[metric] for run in self.runs.values() if metric in run]).mean


@dataclass(frozen=True)
class Difference:
    """B less A in one figure."""

    objective: Objective
    a: float
    b: float
    change: Interval
    pairs: str  # replications | batches | one run

    @property
    def part(self) -> Interval:
        """The change as a part of A."""
        return self.change.over(self.a) if self.a else self.change

    @property
    def outcome(self) -> str:
        """What B is beside A: the same, unclear, better or worse."""
        if self.change.mean == 0 and not self.change.half:
            return "the same"
        if self.part.half is not None and not self.part.certain:
            return "unclear"
        return "better" if self.objective.better(self.part.mean) else "worse"

    def words(self) -> str:
        """Say what the change amounts to."""
        mean, half, _ = self.part
        sure = "one run each"
        if half is not None:
            sure = f"between {100 * (mean - half):+.2f} and {100 * (mean + half):+.2f} %"
        if self.outcome == "unclear":
            return f"cannot be told apart ({sure})"
        return self.outcome if self.outcome == "the same" else f"B is {100 * abs(mean):.2f} % {self.outcome} ({sure})"

    def outside(self, tolerance: float) -> bool:
        """Whether the two differ by more than this part of A."""
        return not abs(self.part.mean) <= tolerance


def difference(a: Side, b: Side, one: Objective, confidence: float) -> Difference:
    """Return the paired difference in one figure; by batches where there are no replications to pair."""
    metric = one.metric
    for kind, mine, other in (("replications", a.runs, b.runs), ("batches", a.batches, b.batches)):
        keys = [key for key in mine if key in other and metric in mine[key] and metric in other[key]]
        if len(keys) > 1:
            first, second = [mine[key][metric] for key in keys], [other[key][metric] for key in keys]
            change = paired(second, first, confidence)
            return Difference(one, interval(first).mean, interval(second).mean, change, kind)
    single, its_other = a.mean(metric), b.mean(metric)
    return Difference(one, single, its_other, Interval(its_other - single, None, 1), "one run")


def compare(a: Side, b: Side, objectives: Sequence[Objective], confidence: float = 0.95) -> list[Difference]:
    """Return the difference in each figure that both have."""
    found = [difference(a, b, one, confidence) for one in objectives]
    found = [one for one in found if not math.isnan(one.a) and not math.isnan(one.b)]
    if not found:
        raise BadInput(f"{a.name} and {b.name} have none of {', '.join(one.metric for one in objectives)} in common")
    return found


def verdict(found: Sequence[Difference], tolerance: Optional[float] = None) -> str:
    """Say in words how the two compare."""
    if all(one.outcome == "the same" for one in found):
        text = "A and B are the same in every figure."
    else:
        first = found[0]
        text = f"By {first.objective.metric}, {first.words()}."
        for word in ("better", "worse"):
            names = [one.objective.metric for one in found[1:] if one.outcome == word]
            text += f" B is {word} in {', '.join(names)}." if names else ""
    if tolerance is not None:
        out = [one for one in found if one.outside(tolerance)]
        listed = ", ".join(f"{one.objective.metric} ({100 * one.part.mean:+.2f} %)" for one in out)
        text += f" Outside the tolerance of {100 * tolerance:g} %: {listed}." if out else " All within the tolerance."
    return text


def table(found: Sequence[Difference]) -> str:
    lines = [["", "A", "B", "B - A", "verdict"]]
    for one in found:
        metric = one.objective.metric
        levels = [spread(Interval(level, None, 1), metric) for level in (one.a, one.b)]
        lines.append([metric, *levels, spread(one.change, metric, True), one.words()])
    return "\n".join(columns(lines))


def side(given: str, settings: Sequence[str], replications: int, executor: Executor) -> Side:
    """Return one side: FILE.yaml, the folder of a run, or a sweep's DIR (its winner) or DIR:CONFIG."""
    head, colon, number = given.rpartition(":")
    path = Path(given)
    if colon and number.isdigit() and (Path(head) / "experiment.json").is_file():
        return from_sweep(Path(head), int(number))
    if (path / "experiment.json").is_file():
        return from_sweep(path, None)
    if path.is_dir():
        return from_run(path)
    return from_scenario(override(read_tree(path), settings), given, replications, executor)


def from_scenario(tree: Tree, name: str, replications: int, executor: Executor) -> Side:
    """Run the replications of a scenario."""
    scenario = scenario_from(tree, name)
    tasks = [Task(0, replication, {}) for replication in range(replications if scenario.varies else 1)]
    runs: Values = {}
    for place, record in executor.run(setup_of(tree), tasks):
        if "error" in record:
            raise BadInput(f"{name}: {record['error']}")
        runs[seed_of(scenario.seed, place)] = record["figures"]
    return Side(name, dict(sorted(runs.items(), key=str)))


def from_sweep(folder: Path, config: Optional[int]) -> Side:
    """Return a configuration of a sweep, its winner if none is named."""
    summary = load(folder)
    row = summary.winner if config is None else next((row for row in summary.rows if row.config == config), None)
    if row is None:
        what = "no winner" if config is None else f"no configuration {config}, only 0 to {len(summary.rows) - 1}"
        raise BadInput(f"{folder}: {what}")
    runs: Values = {run["seed"]: run["figures"] for run in row.runs if "figures" in run}
    return Side(f"{folder}: {row.label}", runs)


def from_run(folder: Path) -> Side:
    """Return a run that `sim run -o` or `sim replay -o` wrote."""
    if not (folder / RESULT).is_file():
        raise BadInput(f"{folder}: expected the folder of a run or of a sweep")
    data = read_run(folder)
    numbers = {key: float(value) for key, value in data.result.items() if type(value) in (int, float)}
    seed = None if data.scenario is None else data.scenario.seed
    return Side(str(folder), {("run", seed): numbers}, batch_means(list(data.requests.values())))


def batch_means(rows: Sequence[Mapping[str, Any]]) -> Values:
    """Return mean latencies (ms) over batches of consecutive arrivals, of requests that finished."""
    done = sorted((row for row in rows if row["outcome"] == "finished"), key=lambda row: row["arrival"])
    count = min(BATCHES, len(done) // 2)
    found: Values = {}
    for number in range(count):
        batch = done[number * len(done) // count : (number + 1) * len(done) // count]
        ttft = [row["first_token"] - row["arrival"] for row in batch]
        e2el = [row["finish"] - row["arrival"] for row in batch]
        output = np.array([row["output"] for row in batch])
        tpot = time_per_token(np.array(ttft), np.array(e2el), output)[output > 1].tolist()
        means = {"mean_ttft_ms": ttft, "mean_e2el_ms": e2el, "mean_tpot_ms": tpot}
        key = (number, batch[0]["id"], batch[-1]["id"])  # pairs only where the requests are the same
        found[key] = {name: 1e3 * math.fsum(values) / len(values) for name, values in means.items() if values}
    return found
