"""The Optuna part of a search: parameter spaces, samplers, and the study in its journal file."""

from __future__ import annotations

import fcntl
import importlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

from servesim.core import BadInput
from servesim.core.extras import missing_package
from servesim.files.write import drop_incomplete_line, write_errors
from servesim.statistics.objective import Objective
from servesim.study.grid import Assignment, check_keys, parse_bounds
from servesim.study.journal import DiskFull

STUDY_FILE = "study.journal"
VIOLATIONS = "violations"  # attribute of a trial: by how much it misses each constraint


class JournalLock:
    """Lock of the journal file. The system releases it when its process dies, unlike the lock files of Optuna."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab")

    def acquire(self) -> bool:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        return True

    def release(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)


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
            log = name == "loguniform" or spec.get("scale") == "log"
            step = spec.get("step")
            if name == "integers" or (name == "range" and type(low) is type(high) is int and type(step) is not float):
                return kinds.IntDistribution(low, high, log=log, step=step or 1)
            return kinds.FloatDistribution(low, high, log=log, step=step)
    raise BadInput(f"{where}: expected one of range, uniform, loguniform, integers, got {dict(spec)!r}")


def trial_assignment(trial: Any) -> Assignment:
    """Return the parameter values of a trial."""
    values: Assignment = {}
    for key, value in trial.params.items():
        is_json = isinstance(value, str) and value[:1] in "{["
        values[key] = json.loads(value) if is_json else float(f"{value:.6g}") if isinstance(value, float) else value
    return values


def open_study(folder: Path, objectives: Sequence[Objective], halving: Optional[int]) -> Any:
    """Open the study. Trials that were still running when the search was killed are marked as failed."""
    library = import_optuna()
    if hasattr(library.storages, "journal"):  # the class has moved between versions
        backend = importlib.import_module("optuna.storages.journal").JournalFileBackend
    else:
        backend = library.storages.JournalFileStorage
    path = folder / STUDY_FILE
    directions = ["minimize" if objective.goal == "min" else "maximize" for objective in objectives]
    pruner = library.pruners.NopPruner()
    if halving is not None:
        pruner = library.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=halving)
    try:
        repair_journal(path)
        storage = library.storages.JournalStorage(make_backend(backend, path))
        study = library.create_study(
            storage=storage, study_name="search", directions=directions, pruner=pruner, load_if_exists=True
        )
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
    """Return the trials that are complete or pruned."""
    states = import_optuna().trial.TrialState
    trials: list[Any] = study.get_trials(deepcopy=False, states=(states.COMPLETE, states.PRUNED))
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
