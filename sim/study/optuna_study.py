"""The side of a search that faces Optuna: spaces, samplers, and the study in its journal file."""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

from servesim.core import BadInput

from .grid import Assignment, bounds, only
from .objective import Objective

STUDY = "study.journal"


def optuna() -> Any:
    """Return the library, quiet."""
    try:
        found: Any = importlib.import_module("optuna")
    except ImportError:
        raise BadInput("sim search: needs the extra `search`: pip install 'servesim[search]'") from None
    found.logging.set_verbosity(logging.WARNING)
    return found


def distribution(given: Any, where: str) -> Any:
    """Read the space of one key: a list, or one of range, uniform, loguniform, integers."""
    kinds = optuna().distributions
    if isinstance(given, list) and given:
        return kinds.CategoricalDistribution([json.dumps(v) if isinstance(v, (dict, list)) else v for v in given])
    if not isinstance(given, Mapping):
        raise BadInput(f"{where}: expected a list or one of range, uniform, loguniform, integers, got {given!r}")
    for name in ("range", "uniform", "loguniform", "integers"):
        if name in given:
            only(given, (name, "step", "scale") if name == "range" else (name,), where)
            low, high = bounds(given[name], f"{where}.{name}")
            log = name == "loguniform" or given.get("scale") == "log"
            step = given.get("step")
            if name == "integers" or (name == "range" and type(low) is type(high) is int and type(step) is not float):
                return kinds.IntDistribution(low, high, log=log, step=step or 1)
            return kinds.FloatDistribution(low, high, log=log, step=step)
    raise BadInput(f"{where}: expected one of range, uniform, loguniform, integers, got {dict(given)!r}")


def assignment(trial: Any) -> Assignment:
    """Return what a trial sets."""
    found: Assignment = {}
    for key, value in trial.params.items():
        text = isinstance(value, str) and value[:1] in "{["
        found[key] = json.loads(value) if text else float(f"{value:.6g}") if isinstance(value, float) else value
    return found


def open_study(folder: Path, objectives: Sequence[Objective], halving: Optional[int]) -> Any:
    """Open the study; trials that a kill left in the middle count as failed and are proposed anew."""
    library = optuna()
    if hasattr(library.storages, "journal"):  # the class has moved between versions
        backend = importlib.import_module("optuna.storages.journal").JournalFileBackend
    else:
        backend = library.storages.JournalFileStorage
    storage = library.storages.JournalStorage(backend(str(folder / STUDY)))
    directions = ["minimize" if one.goal == "min" else "maximize" for one in objectives]
    pruner = library.pruners.NopPruner()
    if halving is not None:
        pruner = library.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=halving)
    study = library.create_study(
        storage=storage, study_name="search", directions=directions, pruner=pruner, load_if_exists=True
    )
    for trial in study.get_trials(deepcopy=False, states=(library.trial.TrialState.RUNNING,)):
        study.tell(trial.number, state=library.trial.TrialState.FAIL)
    return study


def ended(study: Any) -> list[Any]:
    states = optuna().trial.TrialState
    found: list[Any] = study.get_trials(deepcopy=False, states=(states.COMPLETE, states.PRUNED))
    return found


def make_sampler(kind: str, seed: int, done: int, trials: int) -> Any:
    """Return the sampler of the next batch; its chance depends on how far the search is, not on how it got there."""
    kinds = optuna().samplers
    seed = (seed * 1_000_003 + done) % 2**32
    if kind == "random":
        return kinds.RandomSampler(seed=seed)
    if kind == "nsga2":
        return kinds.NSGAIISampler(seed=seed, population_size=max(10, min(50, trials // 4)))
    startup = min(10, trials // 2)
    return kinds.TPESampler(seed=seed, multivariate=True, constant_liar=True, n_startup_trials=startup)
