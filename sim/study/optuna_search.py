"""A search: Optuna proposes configurations and the simulator runs them. The result has the form of a sweep.

Trials come in batches of a fixed size, and each batch has its own sampler seed. So the trials depend only on the search
file and on the results of earlier runs. A resumed search asks Optuna for all trials again; the journal has the results
of the runs that are done, and only the missing ones run.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Union

from servesim.config.layers import Tree, apply_assignment
from servesim.core import BadInput
from servesim.core.errors import missing_package
from servesim.core.limits import MAX_CONFIGS, MIN_NUMBER, is_number
from servesim.files.read import check_keys, quote
from servesim.files.write import write_json
from servesim.runs.request_rate import RATE_KEYS
from servesim.statistics.objective import Objective

from .executor import Executor
from .experiment import RUNS_FILE, Experiment, planned_draws
from .experiment_file import (
    EXPERIMENT_FILE,
    input_digests,
    load_code,
    name_of_file,
    open_folder,
    read_terms,
    stored_terms,
    versions,
)
from .grid import Assignment, parse_bounds, parse_scale, parse_step
from .journal import Journal
from .progress import Progress
from .ranking import Summary
from .single_run import Record, RunKey, Task, metric_of
from .study_keys import SearchFile, StudyFile, SweepFile
from .sweep import finished_runs, run_missing
from .sweep_file import Source, build_experiment, errors_of, load_base, read_keys

FAILED_VALUE = 1e18  # of a trial that gets stuck or leaves more requests unserved than the baseline
SEARCH_FILE = "search.json"
VIOLATIONS = "violations"  # attribute of a trial: by how much it misses each constraint
LEADERS = 10  # configurations that `intervals` repeats with random cost models


@dataclass
class Search:
    """A validated search file."""

    file: SearchFile
    experiment: Experiment  # its only configuration is the baseline
    space: dict[str, Any]  # key -> Optuna distribution
    terms: dict[str, Any]  # must not change when the search is resumed
    scenarios: Sequence[Tree]  # see scenarios_of


def read_search(source: Source, settings: Sequence[str] = (), /, **changes: Any) -> Search:
    """Read a search file or a mapping of its keys; `changes` replace keys of it."""
    file, path = read_keys(SearchFile, source, "search", changes)
    base = load_base(file.base, path, settings)
    with errors_of(source):
        return build_search(file, base, file.name or name_of_file(path))


def build_search(file: SearchFile, base: Tree, name: str) -> Search:
    """Return the search that the keys describe."""
    if not file.params:
        raise BadInput("params: expected at least one key to search over, got none")
    for key in set(file.params) & set(RATE_KEYS):
        raise BadInput(f"params.{key}: a request rate is not a setting that can win; use `sim sweep`")
    shared = {key: getattr(file, key) for key in StudyFile.model_fields if key not in ("base", "params")}
    experiment = build_experiment(SweepFile.model_validate(shared), base, name)
    space = {key: parse_space(spec, f"params.{key}") for key, spec in file.params.items()}
    keys = file.model_dump(mode="json", exclude={"trials", "name", "base"})  # a resumed search may have more trials
    scenarios = scenarios_of(experiment, file.params)
    terms = {**keys, "base": base, "versions": versions(), "inputs": input_digests(scenarios)}
    return Search(file, experiment, space, terms, scenarios)


def import_optuna() -> Any:
    """Return the optuna module, with its log reduced to warnings."""
    try:
        optuna: Any = importlib.import_module("optuna")
    except ImportError:
        raise BadInput(missing_package("optuna")) from None
    optuna.logging.set_verbosity(logging.WARNING)
    return optuna


def parse_space(spec: Any, where: str) -> Any:
    """Read the space of one key (a list, range, uniform, loguniform or integers) as an Optuna distribution."""
    kinds = import_optuna().distributions
    if isinstance(spec, list) and spec:
        return kinds.CategoricalDistribution([json.dumps(v) if isinstance(v, (dict, list)) else v for v in spec])
    if not isinstance(spec, Mapping):
        raise BadInput(f"{where}: expected a list or one of range, uniform, loguniform, integers, got {spec!r}")
    for name in ("range", "uniform", "loguniform", "integers"):
        if name in spec:
            check_keys(spec, (name, "step", "scale") if name == "range" else (name,), where)
            low, high = parse_bounds(spec[name], f"{where}.{name}")
            step = parse_step(spec["step"], where) if "step" in spec else None
            log = name == "loguniform" or parse_scale(spec.get("scale", "linear"), low, where)
            if name == "loguniform" and low < MIN_NUMBER:
                raise BadInput(f"{where}.{name}: expected numbers above 0, got {spec[name]!r}")
            if log and step is not None:
                raise BadInput(f"{where}.step: expected none with a logarithmic scale, got {step!r}")
            if name == "integers" and not (type(low) is type(high) is int):
                raise BadInput(f"{where}.{name}: expected whole numbers, got {spec[name]!r}")
            if name == "integers" or (name == "range" and type(low) is type(high) is int and type(step) is not float):
                return kinds.IntDistribution(low, high, log=log, step=step or 1)
            return kinds.FloatDistribution(low, high, log=log, step=step)
    raise BadInput(f"{where}: expected one of range, uniform, loguniform, integers, got {dict(spec)!r}")


def scenarios_of(experiment: Experiment, params: Tree) -> list[Tree]:
    """Return the baseline, and the base with each listed value: together they name every file that a trial can read."""
    values = [(key, value) for key, spec in params.items() if isinstance(spec, list) for value in spec]
    return [experiment.tree(0), *(apply_assignment(experiment.base, {key: value}) for key, value in values)]


def search(spec: Search, folder: Union[str, Path], executor: Executor, resume: bool, progress: Progress) -> Summary:
    """Run the missing runs of all trials and return the summary."""
    folder = Path(folder)
    load_code(spec.scenarios)
    planned = planned_trials(spec, folder / SEARCH_FILE)
    open_folder(folder, SEARCH_FILE, {**spec.terms, "trials": planned}, resume, "search")
    experiment = spec.experiment.changed(configs=[dict(spec.experiment.configs[0])])  # every trial adds one
    line = lambda run: {**run, "assignment": experiment.configs[run["config"]]}  # noqa: E731
    with Journal(folder / RUNS_FILE) as journal, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Optuna's ExperimentalWarning
        records = finished_runs(map(partial(numbered, experiment, journal.path), journal.records))
        for tasks in plan_trials(spec, experiment, records, planned, progress):
            for _ in run_missing(tasks, records, journal, executor, experiment.context, line):
                pass
    write_json(folder / EXPERIMENT_FILE, stored_terms(experiment.as_json(), folder))
    return Summary(experiment, records)


def numbered(experiment: Experiment, path: Path, record: Record) -> Record:
    """Return a line of the journal with the number of its assignment."""
    if not isinstance(record.get("assignment"), dict):
        raise BadInput(f"{path}: expected the runs of a search, found a run without its assignment")
    return {**record, "config": config_number(experiment, record["assignment"])}


def config_number(experiment: Experiment, assignment: Assignment) -> int:
    """Return the number of an assignment; a new assignment gets the next number."""
    if assignment not in experiment.configs:
        experiment.configs.append(assignment)
    return experiment.configs.index(assignment)


def plan_trials(
    spec: Search, experiment: Experiment, records: Mapping[RunKey, Record], planned: int, progress: Progress
) -> Iterator[list[Task]]:
    """Yield the tasks of the baseline, of each batch of trials, and of the draws. A batch adds its configurations.

    `records` must have the tasks before the next ones, as in a sweep.
    """
    count, trials, batch = experiment.runs_per_config, spec.file.trials, spec.file.batch
    yield [experiment.task(0, replication) for replication in range(count)]
    failed = [r.get("metrics", {}).get("failed", math.inf) for r in runs_of(records, 0, count) if not r.get("stuck")]
    unserved = max(failed, default=math.inf)
    goals = ["minimize" if objective.goal == "min" else "maximize" for objective in experiment.objectives]
    study = import_optuna().create_study(directions=goals)
    for first in range(0, trials, batch):
        progress.expect(trials, first)
        study.sampler = make_sampler(spec, first, planned)
        asked = [study.ask(spec.space) for _ in range(min(trials - first, batch))]
        configs = [config_number(experiment, trial_assignment(trial)) for trial in asked]
        yield [experiment.task(config, replication) for config in configs for replication in range(count)]
        for trial, config in zip(asked, configs):
            tell(study, trial, experiment, runs_of(records, config, count), unserved)
    progress.expect(trials, trials)
    if experiment.intervals:
        leaders = dict.fromkeys([0, *(row.config for row in Summary(experiment, records).rows[:LEADERS])])
        draws = planned_draws(experiment.intervals, count)
        yield [experiment.task(config, replication, draw) for replication, draw in draws for config in leaders]


def runs_of(records: Mapping[RunKey, Record], config: int, count: int) -> list[Record]:
    """Return the replications of a configuration."""
    return [records[config, replication] for replication in range(count)]


def tell(study: Any, trial: Any, experiment: Experiment, runs: Sequence[Record], max_unserved: float) -> None:
    """Report the runs of a trial to Optuna: by how much it misses each constraint, and its values."""
    bounds = experiment.subject_to
    if bounds:
        violations = [min(FAILED_VALUE, bound.violation(mean_of(runs, bound.metric))) for bound in bounds]
        trial.set_user_attr(VIOLATIONS, violations)
    study.tell(trial, values_of(runs, experiment.objectives, max_unserved))


def values_of(runs: Sequence[Record], objectives: Sequence[Objective], max_unserved: float) -> list[float]:
    """Return the values for Optuna: means of the objectives, or FAILED_VALUE."""
    for run in runs:
        metrics = run.get("metrics", {})
        incomplete = any(objective.metric not in metrics for objective in objectives) or bool(run.get("stuck"))
        if incomplete or metrics.get("failed", math.inf) > max_unserved:
            return [objective.sign * FAILED_VALUE for objective in objectives]
    return [mean_of(runs, objective.metric) for objective in objectives]


def mean_of(runs: Sequence[Record], metric: str) -> float:
    """Return the mean of a metric over the replications of a trial, NaN if one lacks it."""
    return math.fsum(math.nan if (value := metric_of(run, metric)) is None else value for run in runs) / len(runs)


def planned_trials(spec: Search, path: Path) -> int:
    """Return the trials with which a search started. The settings of the sampler depend on them.

    A resumed search may have more trials. With other settings, Optuna would propose other trials from the start.
    """
    planned: Any = read_terms(path).get("trials") if path.exists() else spec.file.trials
    if not is_number(planned, 1, MAX_CONFIGS) or planned % 1:
        raise BadInput(f"{path}: trials: expected a number from 1 to {MAX_CONFIGS}, got {quote(planned)}")
    return int(planned)


def trial_assignment(trial: Any) -> Assignment:
    """Return the parameter values of a trial."""
    values: Assignment = {}
    for key, value in trial.params.items():
        is_json = isinstance(value, str) and value[:1] in "{["
        values[key] = json.loads(value) if is_json else float(f"{value:.6g}") if isinstance(value, float) else value
    return values


def make_sampler(spec: Search, first: int, trials: int) -> Any:
    """Return the sampler of the batch that starts with the trial number `first`, for a search of this many trials."""
    kinds = import_optuna().samplers
    seed = (spec.file.seed * 1_000_003 + first) % 2**32
    violations = lambda trial: trial.user_attrs.get(VIOLATIONS, ())  # noqa: E731  above 0: missed
    constraints = {"constraints_func": violations} if spec.experiment.subject_to else {}
    automatic = "tpe" if len(spec.experiment.objectives) == 1 else "nsga2"
    sampler = automatic if spec.file.sampler == "auto" else spec.file.sampler
    if sampler == "random":
        return kinds.RandomSampler(seed=seed)
    if sampler == "nsga2":
        return kinds.NSGAIISampler(seed=seed, population_size=max(10, min(50, trials // 4)), **constraints)
    startup = min(10, trials // 2)
    return kinds.TPESampler(seed=seed, multivariate=True, constant_liar=True, n_startup_trials=startup, **constraints)
