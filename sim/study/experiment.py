"""An experiment: a validated sweep file with numbered configurations.

Configuration 0 is the baseline. The others follow in the order of the grid, without duplicates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Optional, TypeVar, Union

from pydantic import Field, ValidationError, field_validator
from servesim.config.old_keys import NEW, OLD, rename_keys, rename_settings, rename_sweep
from servesim.config.overrides import Tree, override, read_mapping, read_scenario_file, with_preset
from servesim.config.registry import presets
from servesim.config.scenario import Scenario, Section, first_error, scenario_from
from servesim.core import BadInput
from servesim.core.limits import MAX_CONFIGS, MAX_RUNS, MAX_SEED
from servesim.costs.device_profile import load_profile
from servesim.files.checked import Int, Number
from servesim.files.suggestions import did_you_mean
from servesim.runs.intervals import Draw
from servesim.runs.steady_state import STEADY

from .draws import Draws
from .experiment_file import EXPERIMENT_FILE, Name, name_of_file, read_experiment_file
from .grid import Assignment, apply_assignment, unroll
from .inputs import input_digests, versions
from .objective import Objective, check_figures, parse_objective
from .single_run import Task, context_json

RUNS_FILE = "runs.jsonl"
DEFAULT_PROFILE = Scenario.model_fields["profile"].default
File = TypeVar("File", bound=Section)


class Steady(Section):
    """Warm-up and drain that a steady-state run cuts, as fractions of the arrival span."""

    warm_up: Number = Field(STEADY[0], ge=0, lt=1)
    drain: Number = Field(STEADY[1], ge=0, lt=1)


class SweepFile(Section):
    """The keys of a sweep file."""

    name: Optional[Name] = Field(None, description="name of the experiment (default: file name)")
    base: Union[str, Tree] = Field({}, description="base scenario: a file in the same folder, a preset, or its keys")
    params: Union[Tree, list[Tree]] = Field({}, description="scenario key -> values (a grid), or a list of grids")
    samples: Optional[Int] = Field(
        None, gt=0, le=MAX_CONFIGS, description="draw N random configurations per grid, not all"
    )
    seed: Int = Field(0, ge=0, le=MAX_SEED, description="random seed of `samples`; runs use the scenario's seed")
    replications: Int = Field(
        1, gt=0, le=MAX_RUNS, description="runs per configuration, each with other random numbers"
    )
    baseline: Tree = Field({}, description="settings of the baseline on top of the base")
    objectives: list[Any] = Field([], description="metrics; the first ranks, all define the Pareto front")
    confidence: Number = Field(0.95, gt=0, lt=1, description="level of the confidence intervals")
    ci: Optional[Number] = Field(None, gt=0, lt=1, description="add replications until half-width <= this * mean")
    max_replications: Int = Field(64, gt=1, le=MAX_RUNS, description="upper limit of replications with `ci`")
    confirm: Int = Field(
        0, ge=0, le=MAX_RUNS, description="extra replications of winner and baseline, after the choice"
    )
    steady: Union[bool, Steady] = Field(False, description="cut warm-up and drain; false: all requests count")
    intervals: Draws = Field(0, description="also run N random cost models that agree with the calibration; true: 24")

    @field_validator("objectives", mode="before")
    @classmethod
    def _to_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, (str, dict)) else value

    @field_validator("ci", mode="before")
    @classmethod
    def _parse_percent(cls, value: Any) -> Any:
        text = value.strip() if isinstance(value, str) else ""
        try:
            return float(text[:-1]) / 100 if text.endswith("%") else value
        except ValueError:
            return value

    @property
    def steady_window(self) -> Optional[tuple[float, float]]:
        """Warm-up and drain; None for terminating runs."""
        if isinstance(self.steady, Steady):
            return self.steady.warm_up, self.steady.drain
        return STEADY if self.steady else None


@dataclass(frozen=True)
class Experiment:
    """Everything that the result of a sweep depends on."""

    name: str
    base: Tree
    configs: Sequence[Assignment]  # the first is the baseline
    objectives: Sequence[Objective]
    replications: int
    confidence: float = 0.95
    ci: Optional[float] = None
    max_replications: int = 64  # with ci
    steady_window: Optional[tuple[float, float]] = None  # warm-up and drain
    confirm: int = 0  # extra replications that do not influence the choice of the winner
    intervals: int = 0  # draws of the cost model per configuration

    @property
    def context(self) -> str:
        """The JSON that workers read."""
        return context_json(self.base, self.steady_window)

    @property
    def profile(self) -> Any:
        """The profile of the base scenario."""
        return self.base.get("profile", DEFAULT_PROFILE)

    @property
    def is_random(self) -> bool:
        """Whether replications differ from each other."""
        return Scenario.model_validate(self.tree(0)).varies

    @cached_property
    def config_index(self) -> dict[str, int]:
        """The number of each configuration, by its key."""
        return {config_key(self.base, assignment): config for config, assignment in enumerate(self.configs)}

    def find_config(self, assignment: Mapping[str, Any]) -> Optional[int]:
        """Return the number of the configuration that equals an assignment, None if the sweep has none."""
        try:
            return self.config_index.get(config_key(self.base, assignment))
        except BadInput:
            return None

    def tree(self, config: int) -> Tree:
        """Return the scenario of a configuration as a mapping."""
        return apply_assignment(self.base, self.configs[config])

    def task(self, config: int, replication: int, draw: Optional[Draw] = None) -> Task:
        return Task(config, replication, self.configs[config], draw=draw)

    def label(self, config: int) -> str:
        """Return the parameter values of a configuration as short text."""
        values = self.configs[config]
        texts = [f"{key.removeprefix('policy.')}={format_value(values[key])}" for key in self.knobs if key in values]
        return " ".join(texts) or "the base scenario"

    @cached_property
    def knobs(self) -> dict[str, list[Any]]:
        """The keys that take more than one value, and their values in order."""
        values: dict[str, list[Any]] = {}
        for assignment in self.configs:
            for key, value in assignment.items():
                if value not in values.setdefault(key, []):
                    values[key].append(value)
        partly = {key for key in values if any(key not in assignment for assignment in self.configs[1:])}
        return {key: choices for key, choices in values.items() if len(choices) > 1 or key in partly}

    def as_json(self) -> dict[str, Any]:
        """Return the content of experiment.json: enough to resume the sweep and to check its terms."""
        return {
            "name": self.name,
            "versions": versions(),
            "profile": load_profile(self.profile).digest,
            "inputs": input_digests(self.tree(config) for config in range(len(self.configs))),
            "base": rename_keys(self.base, OLD),
            "configs": [rename_settings(assignment, OLD) for assignment in self.configs],
            "objectives": [objective._asdict() for objective in self.objectives],
            "replications": self.replications,
            "confidence": self.confidence,
            "ci": self.ci,
            "max_replications": self.max_replications,
            "cut": self.steady_window,
            "confirm": self.confirm,
            **({"intervals": self.intervals} if self.intervals else {}),
        }


def format_value(value: Any) -> str:
    """Return a setting's value as short text."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{format_value(inner)}" for key, inner in value.items()) + "}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def read_experiment(path: Union[str, Path], settings: Sequence[str] = (), **changes: Any) -> Experiment:
    """Read a sweep file or an experiment folder; `changes` replace keys of the file."""
    path = Path(path)
    if path.is_dir():
        return load_experiment(path)
    file = validate_file(SweepFile, read_mapping(path, "sweep"), path, changes)
    base = override(load_base(file.base, path), settings)
    try:
        return build_experiment(file, base, file.name or name_of_file(path))
    except BadInput as bad:
        raise BadInput(f"{path}: {bad}") from None


def validate_file(kind: type[File], tree: Tree, where: Union[str, Path], changes: Mapping[str, Any]) -> File:
    """Validate the keys of a sweep or search file; `changes` that are not None replace keys."""
    changed = {**tree, **{key: value for key, value in changes.items() if value is not None}}
    try:
        return kind.model_validate(rename_sweep(changed, NEW, f"{where}: "))
    except ValidationError as error:
        raise BadInput(f"{where}: {file_error(error, kind)}") from None


def file_error(error: ValidationError, kind: type[Section]) -> str:
    """Return pydantic's first error as one line; for an unknown key, list the known ones."""
    fault = error.errors()[0]
    if fault["type"] == "extra_forbidden" and len(fault["loc"]) == 1:
        key = str(fault["loc"][0])
        scenario_hint = "; this is a scenario key: use `sim run FILE`, or put it under base"
        hint = scenario_hint if key in Scenario.model_fields else did_you_mean(key, kind.model_fields)
        return f"{key}: unknown key; known: {', '.join(kind.model_fields)}{hint}"
    return first_error(error)


def load_base(base: Union[str, Tree], path: Path) -> Tree:
    """Return the base scenario as a mapping; `path` is the sweep file."""
    if isinstance(base, dict):
        return with_preset(base)
    file = path.parent / base
    if file.is_file():
        return read_scenario_file(file)
    if base in presets():
        return with_preset({"preset": base})
    raise BadInput(f"{path}: base: no file {file} and no preset {base!r}; presets: {', '.join(presets())}")


def build_experiment(file: SweepFile, base: Tree, name: str) -> Experiment:
    """List the configurations of a sweep file and validate every scenario."""
    configs = deduplicate(base, [file.baseline, *unroll(file.params, file.samples, file.seed)])
    runs = file.replications + file.intervals
    if len(configs) * runs > MAX_RUNS:
        raise BadInput(f"replications: expected at most {MAX_RUNS} runs, got {len(configs)} * {runs}")
    defaults = ["mean_e2el_ms", "output_throughput"] if file.steady else ["makespan", "mean_ttft_ms"]
    objectives = [parse_objective(spec) for spec in file.objectives or defaults]
    metrics = [objective.metric for objective in objectives]
    for metric in metrics if file.steady_window is not None else ():
        if metric.endswith("_itl_ms") or metric == "makespan":
            raise BadInput(
                f"objectives: {metric}: not available in a steady-state sweep; remove it or the key `steady`"
            )
    if "request_goodput" in metrics and not any(base.get("slo") or {}):
        raise BadInput("objectives: request_goodput: expected a `slo` in the base scenario, got none")
    check_figures(metrics, [base.get("profile", DEFAULT_PROFILE), *(config.get("profile") for config in configs)])
    return Experiment(
        name, base, configs, objectives, file.replications, file.confidence, file.ci, file.max_replications,
        file.steady_window, file.confirm, file.intervals,
    )  # fmt: skip


def deduplicate(base: Tree, configs: Sequence[Assignment]) -> list[Assignment]:
    """Return the configurations without duplicates; each must be a valid scenario."""
    unique: dict[str, Assignment] = {}
    for number, assignment in enumerate(configs):
        where = "baseline" if number == 0 else f"configuration {number} ({assignment})"
        key = config_key(base, assignment, where)
        if key not in unique:
            unique[key] = assignment
        elif next(iter(unique)) == key:  # the baseline is a point of the grid: use its parameter values
            unique[key] = {**unique[key], **assignment}
    return list(unique.values())


def config_key(base: Tree, assignment: Mapping[str, Any], where: str = "scenario") -> str:
    """Return a key that is equal for equal scenarios: all settings with defaults, as JSON."""
    scenario = scenario_from(apply_assignment(base, assignment), where)
    if scenario.trace is None and scenario.workload is None:
        raise BadInput("base: expected a trace or a workload, got neither")
    policy = repr(scenario.make_policy()) if scenario.policy_is_loadable else dict(sorted(scenario.policy.items()))
    settings = {**scenario.model_dump(mode="json"), "policy": policy, "name": None}
    return json.dumps(settings, sort_keys=True, default=str)


def load_experiment(folder: Path) -> Experiment:
    """Read experiment.json of a folder. Its scenarios are validated, but no user policy is loaded."""
    data, where = read_experiment_file(folder), folder / EXPERIMENT_FILE
    window = None if data.cut is None else (data.cut[0], data.cut[1])
    try:
        configs = [rename_settings(config, NEW) for config in data.configs]
        experiment = Experiment(
            data.name, rename_keys(data.base, NEW), configs,
            [Objective(objective.metric, objective.goal) for objective in data.objectives],
            data.replications, data.confidence, data.ci, data.max_replications, window, data.confirm, data.intervals,
        )  # fmt: skip
        for config in range(len(configs)):
            Scenario.model_validate(experiment.tree(config))
    except ValidationError as error:
        raise BadInput(f"{where}: {first_error(error)}") from None
    except BadInput as bad:
        raise BadInput(f"{where}: {bad}") from None
    return experiment
