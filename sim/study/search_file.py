"""The search file: its parameter space, and the search that it describes."""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union

from servesim.config.layers import Tree, apply_assignment, read_sweep_file
from servesim.core import BadInput
from servesim.core.errors import missing_package
from servesim.runs.request_rate import RATE_KEYS

from .experiment import Experiment
from .experiment_file import input_digests, name_of_file, versions
from .grid import check_keys, parse_bounds
from .study_keys import SearchFile, StudyFile, SweepFile
from .sweep_file import build_experiment, load_base, validate_file


@dataclass
class Search:
    """A validated search file."""

    experiment: Experiment  # its only configuration is the baseline
    space: dict[str, Any]  # key -> Optuna distribution
    trials: int
    batch: int
    sampler: str
    seed: int
    terms: dict[str, Any]  # must not change when the search is resumed
    scenarios: Sequence[Tree]  # see scenarios_of


def read_search(path: Union[str, Path], settings: Sequence[str] = (), **changes: Any) -> Search:
    """Read a search file; `changes` replace keys of it."""
    path = Path(path)
    file = validate_file(SearchFile, read_sweep_file(path, "search"), path, changes)
    return build_search(file, load_base(file.base, path, settings), str(path), name_of_file(path))


def build_search(file: SearchFile, base: Tree, path: str, name: str) -> Search:
    """Return the search that the keys describe; `path` begins error messages, `name` is used if the keys have none."""
    if not file.params:
        raise BadInput(f"{path}: params: expected at least one key to search over, got none")
    for key in set(file.params) & set(RATE_KEYS):
        raise BadInput(f"{path}: params.{key}: a request rate is not a setting that can win; use `sim sweep`")
    shared = {key: getattr(file, key) for key in StudyFile.model_fields if key not in ("base", "params")}
    experiment = build_experiment(SweepFile.model_validate(shared), base, file.name or name)
    sampler = file.sampler if file.sampler != "auto" else "tpe" if len(experiment.objectives) == 1 else "nsga2"
    space = {key: parse_space(spec, f"{path}: params.{key}") for key, spec in file.params.items()}
    keys = file.model_dump(mode="json", exclude={"trials", "name", "base"})  # a resumed search may have more trials
    scenarios = scenarios_of(experiment, file.params)
    terms = {**keys, "base": base, "versions": versions(), "inputs": input_digests(scenarios)}
    return Search(experiment, space, file.trials, file.batch, sampler, file.seed, terms, scenarios)


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


def scenarios_of(experiment: Experiment, params: Tree) -> list[Tree]:
    """Return the baseline, and the base with each listed value: together they name every file that a trial can read."""
    values = [(key, value) for key, spec in params.items() if isinstance(spec, list) for value in spec]
    return [experiment.tree(0), *(apply_assignment(experiment.base, {key: value}) for key, value in values)]
