"""A search: Optuna proposes configurations and the simulator runs them. The result has the form of a sweep.

Trials come in batches of a fixed size. Each batch has its own sampler seed, so a resumed search proposes the same
trials. Successive halving runs every trial on the start of the trace, and only the better ones on more of it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Union

from servesim.config.old_keys import NEW, OLD, rename_settings
from servesim.core import BadInput
from servesim.execution.executor import Executor
from servesim.execution.progress import Progress
from servesim.execution.single_run import Record, RunContext, RunKey, Task, record_key
from servesim.files.write import list_files, write_json
from servesim.study.draws import planned_draws
from servesim.study.experiment import RUNS_FILE
from servesim.study.experiment_file import EXPERIMENT_FILE, check_unchanged, stored_terms
from servesim.study.grid import Assignment
from servesim.study.journal import Journal
from servesim.study.ranking import Summary

from .optuna_study import (
    VIOLATIONS,
    completed_trials,
    import_optuna,
    make_sampler,
    open_study,
    trial_assignment,
)
from .search_file import Halving, Search

FAILED_VALUE = 1e18  # of a trial that gets stuck or leaves more requests unserved than the baseline
SEARCH_FILE = "search.json"
LEADERS = 10  # configurations that `intervals` repeats with random cost models


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
        return [mean_of(records, objective.metric) for objective in objectives]

    def violations(self, records: Sequence[Record]) -> list[float]:
        """Return by how much each constraint is missed; 0 if it is met."""
        bounds = self.experiment.subject_to
        return [min(FAILED_VALUE, bound.violation(mean_of(records, bound.metric))) for bound in bounds]

    def summary(self) -> Summary:
        """Return the summary of all configurations that ran on the full trace, as for a sweep."""
        ran = sorted({key[0] for key in self.records} | {0})
        experiment = replace(self.experiment, configs=[self.configs[config] for config in ran])
        numbers = {config: number for number, config in enumerate(ran)}
        records = {(numbers[c], *r): {**record, "config": numbers[c]} for (c, *r), record in self.records.items()}
        return Summary(experiment, records)


def mean_of(records: Sequence[Record], metric: str) -> float:
    """Return the mean of a metric over the replications of a trial, NaN if one lacks it."""
    return math.fsum(record.get("figures", {}).get(metric, math.nan) for record in records) / len(records)


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
    write_json(folder / EXPERIMENT_FILE, stored_terms(summary.experiment.as_json(), folder))
    return summary


def run_batch(spec: Search, study: Any, runner: TrialRunner, max_unserved: float, count: int) -> None:
    """Ask Optuna for `count` trials, run them rung by rung, and report their values to Optuna."""
    study.sampler = make_sampler(
        spec.sampler, spec.seed, len(completed_trials(study)), spec.trials, bool(spec.experiment.subject_to)
    )
    trials = [study.ask(spec.space) for _ in range(count)]
    for step, fraction in enumerate(spec.rungs()):
        results = runner.run([rename_settings(trial_assignment(trial), NEW) for trial in trials], fraction)
        last = fraction == 1.0
        promoted = []
        for trial, records in zip(trials, results):
            values = runner.values(records, max_unserved if last else math.inf)
            violations = runner.violations(records)
            if violations:
                trial.set_user_attr(VIOLATIONS, violations)
            if last:
                study.tell(trial, values)
                continue
            worst = max(violations, default=0.0)
            if worst:  # worse than every trial that meets the constraints, and ordered by the violation
                values = [spec.experiment.objectives[0].sign * FAILED_VALUE * worst / (1 + worst)]
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
        write_json(file, stored_terms(spec.terms, folder))
        return
    if not resume:
        raise BadInput(f"{folder}: already holds a search; continue with --resume, or use another folder (-o)")
    check_unchanged(spec.terms, file, "search")
