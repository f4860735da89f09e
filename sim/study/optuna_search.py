"""A search: Optuna proposes configurations and the simulator runs them. The result has the form of a sweep.

Trials come in batches of a fixed size. Each batch has its own sampler seed, so a resumed search proposes the same
trials.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Union

from servesim.core import BadInput
from servesim.files.write import drop_incomplete_line, write_errors, write_json
from servesim.statistics.objective import Objective

from .executor import Executor
from .experiment import RUNS_FILE, planned_draws
from .experiment_file import EXPERIMENT_FILE, open_folder, stored_terms
from .grid import Assignment
from .journal import DiskFull, Journal
from .progress import Progress
from .ranking import Summary
from .search_file import Search, import_optuna
from .single_run import Record, RunKey, Task, record_key

FAILED_VALUE = 1e18  # of a trial that gets stuck or leaves more requests unserved than the baseline
SEARCH_FILE = "search.json"
STUDY_FILE = "study.journal"
VIOLATIONS = "violations"  # attribute of a trial: by how much it misses each constraint
LEADERS = 10  # configurations that `intervals` repeats with random cost models


class JournalLock:
    """Lock of the journal file. The system releases it when its process dies, unlike the lock files of Optuna."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab")

    def acquire(self) -> bool:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        return True

    def release(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)


class TrialRunner:
    """Runs assignments and keeps their records, numbered like the configurations of a sweep."""

    def __init__(self, search: Search, journal: Journal, executor: Executor) -> None:
        self.search, self.journal, self.executor = search, journal, executor
        self.experiment = search.experiment
        self.configs: list[Assignment] = [dict(search.experiment.configs[0])]
        self.records: dict[RunKey, Record] = {}
        for record in journal.records:
            self._add(record)

    def _add(self, record: Record) -> None:
        if not isinstance(record.get("assignment"), dict):
            raise BadInput(f"{self.journal.path}: expected the runs of a search, found a run without its assignment")
        config = self.config_number(record["assignment"])
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

    def run(self, assignments: Sequence[Assignment]) -> list[list[Record]]:
        """Return each assignment's records. A run is journalled and never repeated."""
        count = self.replications
        self._run(Task(self.config_number(a), r, a) for a in assignments for r in range(count))
        configs = map(self.config_number, assignments)
        return [[self.records[config, replication] for replication in range(count)] for config in configs]

    def run_draws(self, assignments: Sequence[Assignment]) -> None:
        """Run assignments with random cost models."""
        draws = planned_draws(self.experiment.intervals, self.replications)
        tasks = [Task(self.config_number(a), r, a, draw=draw) for r, draw in draws for a in assignments]
        self._run(tasks)

    def _run(self, tasks: Iterable[Task]) -> None:
        """Run the tasks that have no record yet; journal the records with their assignments, and keep them."""
        missing = list({task.key: task for task in tasks if task.key not in self.records}.values())
        results = sorted(self.executor.run(self.experiment.context, missing), key=lambda item: item[0])
        full = [{**r, "assignment": self.configs[r["config"]]} for _, r in results]
        self.journal.append(full)
        for record in full:
            self._add(record)

    def values(self, records: Sequence[Record], max_unserved: float) -> list[float]:
        """Return the values for Optuna: means of the objectives, or FAILED_VALUE."""
        objectives = self.experiment.objectives
        for record in records:
            metrics = record.get("metrics", {})
            incomplete = any(objective.metric not in metrics for objective in objectives)
            if incomplete or record.get("stuck") or metrics.get("failed", math.inf) > max_unserved:
                return [objective.sign * FAILED_VALUE for objective in objectives]
        return [mean_of(records, objective.metric) for objective in objectives]

    def violations(self, records: Sequence[Record]) -> list[float]:
        """Return by how much each constraint is missed; 0 if it is met."""
        bounds = self.experiment.subject_to
        return [min(FAILED_VALUE, bound.violation(mean_of(records, bound.metric))) for bound in bounds]

    def summary(self) -> Summary:
        """Return the summary of all configurations that ran, as for a sweep."""
        ran = sorted({key[0] for key in self.records} | {0})
        experiment = replace(self.experiment, configs=[self.configs[config] for config in ran])
        numbers = {config: number for number, config in enumerate(ran)}
        records = {(numbers[c], *r): {**record, "config": numbers[c]} for (c, *r), record in self.records.items()}
        return Summary(experiment, records)


def mean_of(records: Sequence[Record], metric: str) -> float:
    """Return the mean of a metric over the replications of a trial, NaN if one lacks it."""
    return math.fsum(record.get("metrics", {}).get(metric, math.nan) for record in records) / len(records)


def search(spec: Search, folder: Union[str, Path], executor: Executor, resume: bool, progress: Progress) -> Summary:
    """Run the remaining trials and return the summary of all trials."""
    folder = Path(folder)
    open_folder(folder, SEARCH_FILE, spec.terms, resume, "search")
    with Journal(folder / RUNS_FILE) as journal, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Optuna's ExperimentalWarning
        runner = TrialRunner(spec, journal, executor)
        base = runner.run([runner.configs[0]])[0]
        failed = (r.get("metrics", {}).get("failed", math.inf) for r in base if not r.get("stuck"))
        unserved = max(failed, default=math.inf)
        study = open_study(folder, spec.experiment.objectives)
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
    """Ask Optuna for `count` trials, run them, and report their values to Optuna."""
    study.sampler = make_sampler(
        spec.sampler, spec.seed, len(completed_trials(study)), spec.trials, bool(spec.experiment.subject_to)
    )
    trials = [study.ask(spec.space) for _ in range(count)]
    results = runner.run([trial_assignment(trial) for trial in trials])
    for trial, records in zip(trials, results):
        violations = runner.violations(records)
        if violations:
            trial.set_user_attr(VIOLATIONS, violations)
        study.tell(trial, runner.values(records, max_unserved))


def trial_assignment(trial: Any) -> Assignment:
    """Return the parameter values of a trial."""
    values: Assignment = {}
    for key, value in trial.params.items():
        is_json = isinstance(value, str) and value[:1] in "{["
        values[key] = json.loads(value) if is_json else float(f"{value:.6g}") if isinstance(value, float) else value
    return values


def open_study(folder: Path, objectives: Sequence[Objective]) -> Any:
    """Open the study. Trials that were still running when the search was killed are marked as failed."""
    library = import_optuna()
    if hasattr(library.storages, "journal"):  # the class has moved between versions
        backend = importlib.import_module("optuna.storages.journal").JournalFileBackend
    else:
        backend = library.storages.JournalFileStorage
    path = folder / STUDY_FILE
    directions = ["minimize" if objective.goal == "min" else "maximize" for objective in objectives]
    try:
        repair_journal(path)
        storage = library.storages.JournalStorage(make_backend(backend, path))
        study = library.create_study(storage=storage, study_name="search", directions=directions, load_if_exists=True)
        for trial in study.get_trials(deepcopy=False, states=(library.trial.TrialState.RUNNING,)):
            study.tell(trial.number, state=library.trial.TrialState.FAIL)
    except (BadInput, DiskFull):
        raise
    except Exception as error:  # Optuna does not validate its journal, so a damaged one raises any kind of error
        message = " ".join(f"{type(error).__name__}: {error}".split())[:120]
        raise BadInput(f"{path}: Optuna cannot read its journal ({message}); use another folder with -o") from None
    return study


def make_backend(backend: Any, path: Path) -> Any:
    """Return Optuna's journal file, whose write errors are one line."""

    class Backend(backend):  # type: ignore[misc]
        def append_logs(self, logs: Any) -> None:
            try:
                super().append_logs(logs)
            except OSError as error:
                raise DiskFull(path, error) from None

    with write_errors(path):
        return Backend(str(path), JournalLock(path))


def repair_journal(path: Path) -> None:
    """Remove an incomplete last line, which a killed search leaves behind and Optuna cannot read."""
    if path.is_file():
        drop_incomplete_line(path)


def completed_trials(study: Any) -> list[Any]:
    """Return the trials that are complete."""
    trials: list[Any] = study.get_trials(deepcopy=False, states=(import_optuna().trial.TrialState.COMPLETE,))
    return trials


def make_sampler(kind: str, seed: int, done: int, trials: int, constrained: bool) -> Any:
    """Return the sampler of the next batch. Its seed depends on `done`, so a resumed search draws the same numbers."""
    kinds = import_optuna().samplers
    seed = (seed * 1_000_003 + done) % 2**32
    constraints = {"constraints_func": trial_violations} if constrained else {}
    if kind == "random":
        return kinds.RandomSampler(seed=seed)
    if kind == "nsga2":
        return kinds.NSGAIISampler(seed=seed, population_size=max(10, min(50, trials // 4)), **constraints)
    startup = min(10, trials // 2)
    return kinds.TPESampler(seed=seed, multivariate=True, constant_liar=True, n_startup_trials=startup, **constraints)


def trial_violations(trial: Any) -> Sequence[float]:
    """Return the constraint values of a trial for Optuna: above 0 means missed."""
    violations: Sequence[float] = trial.user_attrs.get(VIOLATIONS, ())
    return violations
