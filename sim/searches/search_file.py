"""The search file: its keys, the parameter space, and the search that it describes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Optional, Union

from pydantic import Field
from servesim.config.old_keys import OLD, rename_settings, rename_sweep
from servesim.config.overrides import Tree, apply_assignment, override, read_sweep_file
from servesim.config.registry import policy_class
from servesim.config.scenario import Section
from servesim.config.user_code import names_file
from servesim.core import BadInput
from servesim.core.limits import MAX_CONFIGS, MAX_RUNS, MAX_SEED
from servesim.files.checked import Int, Number
from servesim.runs.request_rate import RATE_KEYS
from servesim.study.draws import Draws
from servesim.study.experiment import Experiment
from servesim.study.experiment_file import INDIFFERENCE, Name, name_of_file
from servesim.study.inputs import input_digests, versions
from servesim.study.sweep_file import Percent, Steady, SweepFile, build_experiment, load_base, validate_file

from .optuna_study import (
    parse_space,
)

ADDED_KEYS = ("intervals", "subject_to", "indifference")  # of newer versions: part of the terms only if they are used
SHARED_KEYS = (
    "name",
    "baseline",
    "objectives",
    "replications",
    "confidence",
    "steady",
    "intervals",
    "subject_to",
    "indifference",
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
    subject_to: Union[str, list[Any]] = Field([], description="as in a sweep; the sampler knows how far a trial misses")
    indifference: Percent = Field(INDIFFERENCE, ge=0, lt=1, description="as in a sweep")


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
    """Read a search file; `changes` replace keys of it."""
    path = Path(path)
    file = validate_file(SearchFile, read_sweep_file(path, "search"), path, changes)
    return build_search(file, override(load_base(file.base, path), settings), str(path), name_of_file(path))


def build_search(file: SearchFile, base: Tree, path: str, name: str) -> Search:
    """Return the search that the keys describe; `path` begins error messages, `name` is used if the keys have none."""
    if not file.params:
        raise BadInput(f"{path}: params: expected at least one key to search over, got none")
    for key in set(file.params) & set(RATE_KEYS):
        raise BadInput(f"{path}: params.{key}: a request rate is a load, not a setting that can win; use `sim sweep`")
    shared = {key: getattr(file, key) for key in SHARED_KEYS}
    experiment = build_experiment(SweepFile.model_validate(shared), base, file.name or name)
    sampler = file.sampler if file.sampler != "auto" else "tpe" if len(experiment.objectives) == 1 else "nsga2"
    halving = Halving() if file.halving is True else file.halving or None
    if halving is not None and len(experiment.objectives) > 1:
        raise BadInput(f"{path}: halving: expected exactly one objective, got {len(experiment.objectives)}")
    # The study file keeps the old names of keys, and Optuna's proposals depend on the names.
    params = zip(file.params, rename_settings(file.params, OLD).items())
    space = {old: parse_space(spec, f"{path}: params.{key}") for key, (old, spec) in params}
    unused = {
        "trials",
        "name",
        "base",
        *(key for key in ADDED_KEYS if getattr(file, key) == SearchFile.model_fields[key].default),
    }
    terms = rename_sweep({**file.model_dump(mode="json", exclude=unused), "base": base}, OLD)
    scenarios = scenarios_of(experiment, file.params)
    check_policies(scenarios, path)
    terms |= {"versions": versions(), "inputs": input_digests(scenarios)}
    return Search(experiment, space, file.trials, file.batch, sampler, halving, file.seed, terms, scenarios)


def scenarios_of(experiment: Experiment, params: Tree) -> list[Tree]:
    """Return the baseline, and the base with each listed value: together they name every file that a trial can read."""
    values = [(key, value) for key, spec in params.items() if isinstance(spec, list) for value in spec]
    return [experiment.tree(0), *(apply_assignment(experiment.base, {key: value}) for key, value in values)]


def check_policies(scenarios: Sequence[Tree], path: str) -> None:
    """Load the policy files that trials can use: a file that does not load would only waste trials."""
    for tree in scenarios:
        name = tree["policy"].get("name") if isinstance(tree.get("policy"), dict) else tree.get("policy")
        if isinstance(name, str) and names_file(name):
            try:
                policy_class(name)
            except BadInput as bad:
                raise BadInput(f"{path}: params: {bad}") from None
