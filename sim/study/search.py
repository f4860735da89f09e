"""A search: Optuna proposes configurations and the simulator runs them. The result has the form of a sweep.

Trials come in batches of a fixed size. Each batch has its own sampler seed, so a resumed search proposes the same
trials. Successive halving runs every trial on the start of the trace, and only the better ones on more of it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Optional, Union

from pydantic import Field
from servesim.config.old_keys import NEW, OLD, rename_settings, rename_sweep
from servesim.config.overrides import Tree, override, read_mapping
from servesim.config.registry import policy_class
from servesim.config.scenario import Section
from servesim.config.user_code import names_file
from servesim.core import BadInput
from servesim.core.limits import MAX_CONFIGS, MAX_RUNS, MAX_SEED
from servesim.files.checked import Int, Number
from servesim.files.write import list_files, write_json

from .draws import Draws, planned_draws
from .executor import Executor
from .experiment import RUNS_FILE, Experiment, Steady, SweepFile, build_experiment, load_base, validate_file
from .experiment_file import EXPERIMENT_FILE, Name, check_unchanged, name_of_file
from .grid import Assignment, apply_assignment
from .inputs import input_digests, versions
from .journal import Journal
from .optuna_study import (
    completed_trials,
    import_optuna,
    make_sampler,
    open_study,
    parse_space,
    trial_assignment,
)
from .progress import Progress
from .ranking import Summary
from .single_run import Record, RunContext, RunKey, Task, record_key

FAILED_VALUE = 1e18  # of a trial that gets stuck or leaves more requests unserved than the baseline
SEARCH_FILE = "search.json"
LEADERS = 10  # configurations that `intervals` repeats with random cost models
SHARED_KEYS = (
    "name",
    "baseline",
    "objectives",
    "replications",
    "confidence",
    "steady",
    "intervals",
)  # as in a sweep file


class Halving(Section):
    """Successive halving over the length of the trace."""

    start: Number = Field(1 / 9, ge=1e-6, lt=1, description="fraction of the trace that every trial runs")
    factor: Int = Field(3, ge=2, le=MAX_CONFIGS, description="keep 1 of N trials, on N times the length")


class SearchFile(Section):
    """The keys of a search file: as in a sweep file, but params are spaces."""

    name: Optional[Name] = Field(None, description="name of the experiment (default: file name)")
    base: Union[str, Tree] = Field({}, description="base scenario: a file in the same folder, a preset, or its keys")
    params: Tree = Field({}, description="scenario key -> list, range, uniform, loguniform or integers")
    objectives: list[Any] = Field([], description="metrics; several give a Pareto front")
    baseline: Tree = Field({}, description="settings of the baseline on top of the base")
    trials: Int = Field(100, gt=0, le=MAX_CONFIGS, description="number of configurations to try")
    batch: Int = Field(8, gt=0, le=MAX_CONFIGS, description="trials proposed at once")
    sampler: Literal["auto", "tpe", "nsga2", "random"] = Field(
        "auto", description="auto: tpe for one objective, nsga2 for several"
    )
    halving: Union[bool, Halving] = Field(
        False, description="run trials on the start of the trace first; true, or start and factor"
    )
    replications: Int = Field(1, gt=0, le=MAX_RUNS, description="runs per trial")
    confidence: Number = Field(0.95, gt=0, lt=1, description="level of the confidence intervals")
    seed: Int = Field(0, ge=0, le=MAX_SEED, description="random seed of the sampler")
    steady: Union[bool, Steady] = Field(False, description="as in a sweep")
    intervals: Draws = Field(0, description="as in a sweep, for the baseline and the 10 best configurations")


@dataclass
class Search:
    """A validated search file."""

    experiment: Experiment  # its only configuration is the baseline
    space: dict[str, Any]  # key -> Optuna distribution
    trials: int
    batch: int
    sampler: str
    halving: Optional[Halving]
    seed: int
    terms: dict[str, Any]  # must not change when the search is resumed
    scenarios: Sequence[Tree]  # see scenarios_of

    def rungs(self) -> list[float]:
        """Return the fractions of the trace that trials run; the last one is 1."""
        if self.halving is None:
            return [1.0]
        steps = max(1, round(math.log(1 / self.halving.start) / math.log(self.halving.factor)))
        return [float(self.halving.factor) ** -(steps - step) for step in range(steps + 1)]


def read_search(path: Union[str, Path], settings: Sequence[str] = (), **changes: Any) -> Search:
    path = Path(path)
    file = validate_file(SearchFile, read_mapping(path, "search"), path, changes)
    if not file.params:
        raise BadInput(f"{path}: params: expected at least one key to search over, got none")
    base = override(load_base(file.base, path), settings)
    shared = {name: getattr(file, name) for name in SHARED_KEYS}
    experiment = build_experiment(SweepFile.model_validate(shared), base, file.name or name_of_file(path))
    sampler = file.sampler if file.sampler != "auto" else "tpe" if len(experiment.objectives) == 1 else "nsga2"
    halving = Halving() if file.halving is True else file.halving or None
    if halving is not None and len(experiment.objectives) > 1:
        raise BadInput(f"{path}: halving: expected exactly one objective, got {len(experiment.objectives)}")
    # The study file keeps the old names of keys, and Optuna's proposals depend on the names.
    params = zip(file.params, rename_settings(file.params, OLD).items())
    space = {old: parse_space(spec, f"{path}: params.{key}") for key, (old, spec) in params}
    unused = {"trials", "name", "base", *(() if file.intervals else ("intervals",))}
    terms = rename_sweep({**file.model_dump(mode="json", exclude=unused), "base": base}, OLD)
    scenarios = scenarios_of(experiment, file.params)
    check_policies(scenarios, path)
    terms |= {"versions": versions(), "inputs": input_digests(scenarios)}
    return Search(experiment, space, file.trials, file.batch, sampler, halving, file.seed, terms, scenarios)


def scenarios_of(experiment: Experiment, params: Tree) -> list[Tree]:
    """Return the baseline, and the base with each listed value: together they name every file that a trial can read."""
    values = [(key, value) for key, spec in params.items() if isinstance(spec, list) for value in spec]
    return [experiment.tree(0), *(apply_assignment(experiment.base, {key: value}) for key, value in values)]


def check_policies(scenarios: Sequence[Tree], path: Path) -> None:
    """Load the policy files that trials can use: a file that does not load would only waste trials."""
    for tree in scenarios:
        name = tree["policy"].get("name") if isinstance(tree.get("policy"), dict) else tree.get("policy")
        if isinstance(name, str) and names_file(name):
            try:
                policy_class(name)
            except BadInput as bad:
                raise BadInput(f"{path}: params: {bad}") from None


class TrialRunner:
    """Runs assignments and keeps their records, numbered like the configurations of a sweep."""

    def __init__(self, search: Search, journal: Journal, executor: Executor) -> None:
        self.search, self.journal, self.executor = search, journal, executor
        self.experiment = search.experiment
        self.configs: list[Assignment] = [dict(search.experiment.configs[0])]
        self.records: dict[RunKey, Record] = {}
        context, task = RunContext(self.experiment.base), self.experiment.task(0, 0)
        self.requests = len(context.trace(context.scenario(task), task))
        for record in journal.records:
            self._add(record)

    def _add(self, record: Record) -> None:
        if not isinstance(record.get("assignment"), dict):
            raise BadInput(f"{self.journal.path}: expected the runs of a search, found a run without its assignment")
        config = self.config_number(rename_settings(record["assignment"], NEW))
        numbered = {**record, "config": config}
        self.records[record_key(numbered)] = numbered

    @property
    def replications(self) -> int:
        """Runs per assignment."""
        return self.experiment.replications if self.experiment.is_random else 1

    def config_number(self, assignment: Assignment) -> int:
        """Return the number of an assignment; a new assignment gets the next number."""
        if assignment not in self.configs:
            self.configs.append(assignment)
        return self.configs.index(assignment)

    def run(self, assignments: Sequence[Assignment], fraction: float = 1.0) -> list[list[Record]]:
        """Return each assignment's records on a fraction of the trace. A full run is journalled and never repeated."""
        count = self.replications
        length = None if fraction == 1.0 else max(2, round(fraction * self.requests))
        tasks = []
        for assignment in assignments:
            for replication in range(count):
                task = Task(self.config_number(assignment), replication, assignment, max_requests=length)
                if task not in tasks and (length or (task.config, replication) not in self.records):
                    tasks.append(task)
        new: dict[tuple[int, int], Record] = {}
        for index, record in sorted(self.executor.run(self.experiment.context, tasks), key=lambda item: item[0]):
            new[tasks[index].config, tasks[index].replication] = record
        if length is None:
            self._store(list(new.values()))
        configs = map(self.config_number, assignments)
        return [[new.get((c, r)) or self.records[c, r] for r in range(count)] for c in configs]

    def run_draws(self, assignments: Sequence[Assignment]) -> None:
        """Run assignments with random cost models."""
        draws = planned_draws(self.experiment.intervals, self.replications)
        tasks = [Task(self.config_number(a), r, a, draw=draw) for r, draw in draws for a in assignments]
        tasks = [task for task in tasks if task.key not in self.records]
        results = sorted(self.executor.run(self.experiment.context, tasks), key=lambda item: item[0])
        self._store([record for _, record in results])

    def _store(self, records: Sequence[Record]) -> None:
        """Write runs to the journal with their assignments, and keep them."""
        full = [{**r, "assignment": rename_settings(self.configs[r["config"]], OLD)} for r in records]
        self.journal.append(full)
        for record in full:
            self._add(record)

    def values(self, records: Sequence[Record], max_unserved: float) -> list[float]:
        """Return the values for Optuna: means of the objectives, or FAILED_VALUE."""
        objectives = self.experiment.objectives
        for record in records:
            metrics = record.get("figures", {})
            incomplete = any(objective.metric not in metrics for objective in objectives)
            if incomplete or record.get("stuck") or metrics.get("failed", math.inf) > max_unserved:
                return [objective.sign * FAILED_VALUE for objective in objectives]
        return [math.fsum(r["figures"][metric] for r in records) / len(records) for metric, _ in objectives]

    def summary(self) -> Summary:
        """Return the summary of all configurations that ran on the full trace, as for a sweep."""
        ran = sorted({key[0] for key in self.records} | {0})
        experiment = replace(self.experiment, configs=[self.configs[config] for config in ran])
        numbers = {config: number for number, config in enumerate(ran)}
        records = {(numbers[c], *r): {**record, "config": numbers[c]} for (c, *r), record in self.records.items()}
        return Summary(experiment, records)


def search(spec: Search, folder: Union[str, Path], executor: Executor, resume: bool, progress: Progress) -> Summary:
    """Run the remaining trials and return the summary of all trials."""
    folder = Path(folder)
    open_folder(spec, folder, resume)
    with Journal(folder / RUNS_FILE) as journal, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Optuna's ExperimentalWarning
        runner = TrialRunner(spec, journal, executor)
        base = runner.run([runner.configs[0]])[0]
        failed = (r.get("figures", {}).get("failed", math.inf) for r in base if not r.get("stuck"))
        unserved = max(failed, default=math.inf)
        study = open_study(folder, spec.experiment.objectives, spec.halving.factor if spec.halving else None)
        while (done := len(completed_trials(study))) < spec.trials:
            progress.expect(spec.trials, done)
            run_batch(spec, study, runner, unserved, min(spec.trials - done, spec.batch))
        progress.expect(spec.trials, spec.trials)
        summary = runner.summary()
        if spec.experiment.intervals:
            leaders = [row.assignment for row in summary.rows[:LEADERS]]
            runner.run_draws([runner.configs[0], *(a for a in leaders if a != runner.configs[0])])
            summary = runner.summary()
    write_json(folder / EXPERIMENT_FILE, summary.experiment.as_json())
    return summary


def run_batch(spec: Search, study: Any, runner: TrialRunner, max_unserved: float, count: int) -> None:
    """Ask Optuna for `count` trials, run them rung by rung, and report their values to Optuna."""
    study.sampler = make_sampler(spec.sampler, spec.seed, len(completed_trials(study)), spec.trials)
    trials = [study.ask(spec.space) for _ in range(count)]
    for step, fraction in enumerate(spec.rungs()):
        results = runner.run([rename_settings(trial_assignment(trial), NEW) for trial in trials], fraction)
        last = fraction == 1.0
        promoted = []
        for trial, records in zip(trials, results):
            values = runner.values(records, max_unserved if last else math.inf)
            if last:
                study.tell(trial, values)
                continue
            trial.report(values[0], step=(spec.halving or Halving()).factor ** step)
            if trial.should_prune():
                study.tell(trial, state=import_optuna().trial.TrialState.PRUNED)
            else:
                promoted.append(trial)
        trials = promoted
        if not trials:
            return


def open_folder(spec: Search, folder: Path, resume: bool) -> None:
    """Create the folder of a search, or check that it holds the same search."""
    file = folder / SEARCH_FILE
    if not file.exists():
        if folder.exists() and list_files(folder):
            raise BadInput(f"{folder}: expected a new folder or the folder of a search, found other files")
        write_json(file, spec.terms)
        return
    if not resume:
        raise BadInput(f"{folder}: already holds a search; continue with --resume, or use another folder (-o)")
    check_unchanged(spec.terms, file, "search")
