"""A search: Optuna proposes configurations, the simulator tries them; the result is a sweep's.

Trials come in batches of a fixed size, each with a new seed of the sampler: a continued search proposes the same ones.
Successive halving runs every trial on the beginning of the trace first, and only the better ones on more of it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Optional, Union

from pydantic import Field
from servesim.config.overrides import Tree, override, read_mapping
from servesim.config.scenario import Section
from servesim.core import BadInput
from servesim.files.write import write_json

from .executor import Executor
from .experiment import EXPERIMENT, RUNS, Experiment, Steady, SweepFile, base_of, checked, experiment_of
from .grid import Assignment
from .journal import Journal
from .optuna_study import assignment, distribution, ended, make_sampler, open_study, optuna
from .progress import Progress
from .ranking import Summary
from .single_run import Bench, Record, Task
from .sweep import check_same

PENALTY = 1e18  # the value of a configuration that gets stuck or leaves requests unserved
SEARCH = "search.json"
SHARED = ("name", "baseline", "objectives", "replications", "confidence", "steady")  # as in a sweep file


class Halving(Section):
    """Successive halving over the length of the trace."""

    start: float = Field(1 / 9, gt=0, lt=1, description="part of the trace that every trial runs")
    factor: int = Field(3, ge=2, description="one in so many goes on, on so many times the length")


class SearchFile(Section):
    """The keys of a search file: those of a sweep, with spaces for params."""

    name: Optional[str] = Field(None, description="of the experiment (default: of the file)")
    base: Union[str, Tree] = Field({}, description="a scenario: a file beside this one, a preset's name, or its keys")
    params: Tree = Field({}, description="scenario key -> list, range, uniform, loguniform or integers")
    objectives: list[Any] = Field([], description="one, or several for a Pareto front")
    baseline: Tree = Field({}, description="what the baseline sets over the base")
    trials: int = Field(100, gt=0, description="configurations to try")
    batch: int = Field(8, gt=0, description="trials proposed at once")
    sampler: Literal["auto", "tpe", "nsga2", "random"] = Field(
        "auto", description="tpe for one objective, nsga2 for several; or random"
    )
    halving: Union[bool, Halving] = Field(
        False, description="try on the beginning of the trace first; or start, factor"
    )
    replications: int = Field(1, gt=0, description="runs of each trial")
    confidence: float = Field(0.95, gt=0, lt=1, description="of the intervals")
    seed: int = Field(0, ge=0, description="of the sampler")
    steady: Union[bool, Steady] = Field(False, description="as in a sweep")


@dataclass
class Search:
    """What to search for and how."""

    experiment: Experiment  # its only configuration is the baseline
    space: dict[str, Any]  # key -> Optuna distribution
    trials: int
    batch: int
    sampler: str
    halving: Optional[Halving]
    seed: int
    terms: dict[str, Any]  # what a continued search must agree with

    def rungs(self) -> list[float]:
        """Return the parts of the trace that trials run, the last one whole."""
        if self.halving is None:
            return [1.0]
        steps = max(1, round(math.log(1 / self.halving.start) / math.log(self.halving.factor)))
        return [float(self.halving.factor) ** -(steps - step) for step in range(steps + 1)]


def read_search(path: Union[str, Path], settings: Sequence[str] = (), **changes: Any) -> Search:
    path = Path(path)
    file = checked(SearchFile, read_mapping(path, "search"), path, changes)
    if not file.params:
        raise BadInput(f"{path}: params: expected at least one key to search over, got none")
    base = override(base_of(file.base, path), settings)
    shared = {name: getattr(file, name) for name in SHARED}
    experiment = experiment_of(SweepFile.model_validate(shared), base, file.name or path.stem)
    sampler = file.sampler if file.sampler != "auto" else "tpe" if len(experiment.objectives) == 1 else "nsga2"
    halving = Halving() if file.halving is True else file.halving or None
    if halving is not None and len(experiment.objectives) > 1:
        raise BadInput(f"{path}: halving: expected one objective to judge by, got {len(experiment.objectives)}")
    space = {key: distribution(given, f"{path}: params.{key}") for key, given in file.params.items()}
    terms = {**file.model_dump(mode="json", exclude={"trials", "name", "base"}), "base": base}
    return Search(experiment, space, file.trials, file.batch, sampler, halving, file.seed, terms)


class Tries:
    """Runs assignments and keeps what came of them: numbered as the configurations of a sweep."""

    def __init__(self, search: Search, journal: Journal, executor: Executor) -> None:
        self.search, self.journal, self.executor = search, journal, executor
        self.experiment = search.experiment
        self.configs: list[Assignment] = [dict(search.experiment.configs[0])]
        self.found: dict[tuple[int, int], Record] = {}
        bench, task = Bench(self.experiment.base), self.experiment.task(0, 0)
        self.requests = len(bench.trace(bench.scenario(task), task))
        for record in journal.records:
            self._keep(record)

    def _keep(self, record: Record) -> None:
        config = self.number(record["assignment"])
        self.found[config, record["replication"]] = {**record, "config": config}

    def number(self, wanted: Assignment) -> int:
        """Return an assignment's number, a new one if it was never run."""
        if wanted not in self.configs:
            self.configs.append(wanted)
        return self.configs.index(wanted)

    def run(self, assignments: Sequence[Assignment], part: float = 1.0) -> list[list[Record]]:
        """Return each assignment's records on a part of the trace; whole runs are journalled and never repeated."""
        count = self.experiment.replications if self.experiment.varies else 1
        length = None if part == 1.0 else max(2, round(part * self.requests))
        tasks = []
        for wanted in assignments:
            for replication in range(count):
                task = Task(self.number(wanted), replication, wanted, requests=length)
                if task not in tasks and (length or (task.config, replication) not in self.found):
                    tasks.append(task)
        fresh: dict[tuple[int, int], Record] = {}
        for place, record in sorted(self.executor.run(self.experiment.setup, tasks), key=lambda item: item[0]):
            fresh[tasks[place].config, tasks[place].replication] = record
        if length is None:
            whole = [{**record, "assignment": self.configs[config]} for (config, _), record in fresh.items()]
            self.journal.append(whole)
            for record in whole:
                self._keep(record)
        return [[fresh.get((c, r)) or self.found[c, r] for r in range(count)] for c in map(self.number, assignments)]

    def values(self, records: Sequence[Record], unserved: float) -> list[float]:
        """Return what Optuna is told: means of the objectives, or a penalty."""
        objectives = self.experiment.objectives
        for record in records:
            figures = record.get("figures", {})
            incomplete = any(one.metric not in figures for one in objectives)
            if incomplete or record.get("stuck") or figures.get("failed", math.inf) > unserved:
                return [one.sign * PENALTY for one in objectives]
        return [math.fsum(r["figures"][one.metric] for r in records) / len(records) for one in objectives]

    def summary(self) -> Summary:
        """Return what was found, as of a sweep over the configurations that were run whole."""
        ran = sorted({config for config, _ in self.found} | {0})
        experiment = replace(self.experiment, configs=[self.configs[config] for config in ran])
        places = {config: place for place, config in enumerate(ran)}
        found = {(places[c], r): {**record, "config": places[c]} for (c, r), record in self.found.items()}
        return Summary(experiment, found)


def search(given: Search, folder: Union[str, Path], executor: Executor, resume: bool, progress: Progress) -> Summary:
    """Run the trials that are still to be run; return the summary of all."""
    folder = Path(folder)
    claim(given, folder, resume)
    with Journal(folder / RUNS) as journal, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Optuna warns of what it calls experimental
        tries = Tries(given, journal, executor)
        base = tries.run([tries.configs[0]])[0]
        unserved = max((r["figures"]["failed"] for r in base if "figures" in r and not r["stuck"]), default=math.inf)
        study = open_study(folder, given.experiment.objectives, given.halving.factor if given.halving else None)
        while (done := len(ended(study))) < given.trials:
            progress.expect(given.trials, done)
            round_of(given, study, tries, unserved, min(given.trials - done, given.batch))
        progress.expect(given.trials, given.trials)
        summary = tries.summary()
    write_json(folder / EXPERIMENT, summary.experiment.as_json())
    return summary


def round_of(given: Search, study: Any, tries: Tries, unserved: float, count: int) -> None:
    """Ask for some trials, run them rung by rung, tell what came of them."""
    study.sampler = make_sampler(given.sampler, given.seed, len(ended(study)), given.trials)
    alive = [study.ask(given.space) for _ in range(count)]
    rungs = given.rungs()
    for step, part in enumerate(rungs):
        found = tries.run([assignment(trial) for trial in alive], part)
        last = part == 1.0
        going = []
        for trial, records in zip(alive, found):
            values = tries.values(records, unserved if last else math.inf)
            if last:
                study.tell(trial, values)
                continue
            trial.report(values[0], step=(given.halving or Halving()).factor ** step)
            if trial.should_prune():
                study.tell(trial, state=optuna().trial.TrialState.PRUNED)
            else:
                going.append(trial)
        alive = going
        if not alive:
            return


def claim(given: Search, folder: Path, resume: bool) -> None:
    """Make the folder this search's, or make sure that it is."""
    file = folder / SEARCH
    if not file.exists():
        if folder.exists() and any(folder.iterdir()):
            raise BadInput(f"{folder}: expected a new folder or a search's, found other files in it")
        write_json(file, given.terms)
        return
    if not resume:
        raise BadInput(f"{folder}: holds a search, which is never overwritten; --resume continues it")
    check_same(given.terms, file, "search")
