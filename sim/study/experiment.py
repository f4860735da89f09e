"""An experiment: the sweep file read and checked, its configurations numbered, its folder laid out.

Configuration 0 is always the baseline; the others follow in the order of the grid, none twice.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Optional, TypeVar, Union

from pydantic import Field, ValidationError, field_validator
from servesim import __version__
from servesim.config.overrides import Tree, override, read_mapping, read_tree, with_preset
from servesim.config.registry import presets
from servesim.config.scenario import Scenario, Section, first_error, scenario_from
from servesim.core import BadInput
from servesim.costs.device_profile import load_profile
from servesim.files.suggestions import meant
from servesim.runs.steady_state import STEADY

from .grid import Assignment, assigned, unroll
from .objective import Objective, objective
from .single_run import Task, setup_of

EXPERIMENT, RUNS = "experiment.json", "runs.jsonl"
File = TypeVar("File", bound=Section)


class Steady(Section):
    """What is left out of steady-state runs, as parts of the span of arrivals."""

    warm_up: float = Field(STEADY[0], ge=0, lt=1)
    drain: float = Field(STEADY[1], ge=0, lt=1)


class SweepFile(Section):
    """The keys of a sweep file."""

    name: Optional[str] = Field(None, description="of the experiment (default: of the file)")
    base: Union[str, Tree] = Field({}, description="a scenario: a file beside this one, a preset's name, or its keys")
    params: Union[Tree, list[Tree]] = Field({}, description="scenario key -> values, or a list of such grids")
    samples: Optional[int] = Field(None, gt=0, description="draw so many configurations instead of all")
    seed: int = Field(0, ge=0, description="of the draws; the runs' chance comes from the scenario's seed")
    replications: int = Field(1, gt=0, description="runs of each configuration, each on requests of its own")
    baseline: Tree = Field({}, description="what the baseline sets over the base")
    objectives: list[Any] = Field([], description="the first decides, the others make the Pareto front")
    confidence: float = Field(0.95, gt=0, lt=1, description="of the intervals")
    ci: Optional[float] = Field(None, gt=0, lt=1, description="replicate until half-widths are this part of the mean")
    max_replications: int = Field(64, gt=1, description="where `ci` asks for more")
    confirm: int = Field(0, ge=0, description="fresh replications of the winner and the baseline, after the choice")
    steady: Union[bool, Steady] = Field(False, description="cut warm-up and drain; false: terminating, all counts")

    @field_validator("objectives", mode="before")
    @classmethod
    def _listed(cls, given: Any) -> Any:
        return [given] if isinstance(given, (str, dict)) else given

    @field_validator("ci", mode="before")
    @classmethod
    def _percent(cls, given: Any) -> Any:
        text = given.strip() if isinstance(given, str) else ""
        try:
            return float(text[:-1]) / 100 if text.endswith("%") else given
        except ValueError:
            return given

    @property
    def cut(self) -> Optional[tuple[float, float]]:
        """Warm-up and drain, None for terminating runs."""
        if isinstance(self.steady, Steady):
            return self.steady.warm_up, self.steady.drain
        return STEADY if self.steady else None


@dataclass(frozen=True)
class Experiment:
    """All that a sweep's result depends on."""

    name: str
    base: Tree
    configs: Sequence[Assignment]  # the first is the baseline
    objectives: Sequence[Objective]
    replications: int
    confidence: float = 0.95
    ci: Optional[float] = None
    most: int = 64  # replications, where ci asks for more
    cut: Optional[tuple[float, float]] = None
    confirm: int = 0  # fresh replications that have no part in the choice

    @property
    def setup(self) -> str:
        """What workers are told."""
        return setup_of(self.base, self.cut)

    @property
    def varies(self) -> bool:
        """Whether replications differ."""
        return Scenario.model_validate(self.tree(0)).varies

    @cached_property
    def places(self) -> dict[str, int]:
        """The numbers of the configurations, by what they come down to."""
        return {identity(self.base, assignment): config for config, assignment in enumerate(self.configs)}

    def place(self, assignment: Mapping[str, Any]) -> Optional[int]:
        """Return the number of the configuration that an assignment comes down to, None if there is none."""
        try:
            return self.places.get(identity(self.base, assignment))
        except BadInput:
            return None

    def tree(self, config: int) -> Tree:
        """Return the scenario of a configuration."""
        return assigned(self.base, self.configs[config])

    def task(self, config: int, replication: int) -> Task:
        return Task(config, replication, self.configs[config])

    def label(self, config: int) -> str:
        """Return what sets a configuration apart, in short."""
        mine = self.configs[config]
        parts = [f"{key.removeprefix('policy.')}={shown(mine[key])}" for key in self.knobs if key in mine]
        return " ".join(parts) or "the base scenario"

    @cached_property
    def knobs(self) -> dict[str, list[Any]]:
        """The keys that take more than one value, and their values in order."""
        values: dict[str, list[Any]] = {}
        for assignment in self.configs:
            for key, value in assignment.items():
                if value not in values.setdefault(key, []):
                    values[key].append(value)
        partly = {key for key in values if any(key not in one for one in self.configs[1:])}
        return {key: found for key, found in values.items() if len(found) > 1 or key in partly}

    def as_json(self) -> dict[str, Any]:
        """Return what experiment.json holds: enough to continue it, to check that, and to run it elsewhere."""
        return {
            "name": self.name,
            "versions": {"servesim": __version__, "python": platform.python_version()},
            "profile": load_profile(self.base.get("profile", Scenario.model_fields["profile"].default)).digest,
            "base": self.base,
            "configs": list(self.configs),
            "objectives": [one._asdict() for one in self.objectives],
            "replications": self.replications,
            "confidence": self.confidence,
            "ci": self.ci,
            "max_replications": self.most,
            "cut": self.cut,
            "confirm": self.confirm,
        }


def shown(value: Any) -> str:
    """Return a value in short."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{shown(one)}" for key, one in value.items()) + "}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def read_experiment(path: Union[str, Path], settings: Sequence[str] = (), **changes: Any) -> Experiment:
    """Read a sweep file, or the folder of an experiment that was begun; `changes` replace keys of the file."""
    path = Path(path)
    if path.is_dir():
        return stored(path)
    file = checked(SweepFile, read_mapping(path, "sweep"), path, changes)
    base = override(base_of(file.base, path), settings)
    try:
        return experiment_of(file, base, file.name or path.stem)
    except BadInput as bad:
        raise BadInput(f"{path}: {bad}") from None


def checked(kind: type[File], tree: Tree, where: Union[str, Path], changes: Mapping[str, Any]) -> File:
    """Return the keys of a sweep or search file as their model; `changes` that are not None replace keys."""
    try:
        return kind.model_validate({**tree, **{key: value for key, value in changes.items() if value is not None}})
    except ValidationError as error:
        raise BadInput(f"{where}: {file_error(error, kind)}") from None


def file_error(error: ValidationError, kind: type[Section]) -> str:
    """Return pydantic's first complaint; an unknown key lists those of the file."""
    fault = error.errors()[0]
    if fault["type"] == "extra_forbidden" and len(fault["loc"]) == 1:
        key = str(fault["loc"][0])
        theirs = "; this is a key of scenarios: `sim run FILE`, or put it under base"
        hint = theirs if key in Scenario.model_fields else meant(key, kind.model_fields)
        return f"{key}: unknown key; known: {', '.join(kind.model_fields)}{hint}"
    return first_error(error)


def base_of(given: Union[str, Tree], path: Path) -> Tree:
    """Return the base scenario's tree."""
    if isinstance(given, dict):
        return with_preset(given)
    file = path.parent / given
    if file.is_file():
        return read_tree(file)
    if given in presets():
        return with_preset({"preset": given})
    raise BadInput(f"{path}: base: no file {file} and no preset {given!r}; presets: {', '.join(presets())}")


def experiment_of(file: SweepFile, base: Tree, name: str) -> Experiment:
    """Unroll a sweep file and check every scenario in it."""
    configs = distinct(base, [file.baseline, *unroll(file.params, file.samples, file.seed)])
    defaults = ["mean_e2el_ms", "output_throughput"] if file.steady else ["makespan", "mean_ttft_ms"]
    objectives = [objective(given) for given in file.objectives or defaults]
    if file.cut is not None:
        for one in objectives:
            if one.metric.endswith("_itl_ms") or one.metric == "makespan":
                raise BadInput(f"objectives: {one.metric}: of the whole run, which a steady-state sweep does not count")
    found = Experiment(
        name, base, configs, objectives, file.replications, file.confidence, file.ci, file.max_replications, file.cut,
        file.confirm,
    )  # fmt: skip
    if "request_goodput" in [one.metric for one in objectives] and not any(base.get("slo") or {}):
        raise BadInput("objectives: request_goodput: expected a `slo` in the base scenario, got none")
    return found


def distinct(base: Tree, configs: Sequence[Assignment]) -> list[Assignment]:
    """Return the configurations, each once, after checking that each is a scenario."""
    found: dict[str, Assignment] = {}
    for place, assignment in enumerate(configs):
        where = "baseline" if place == 0 else f"configuration {place} ({assignment})"
        key = identity(base, assignment, where)
        if key not in found:
            found[key] = assignment
        elif next(iter(found)) == key:  # the baseline is a point of the grid: name it by its place there
            found[key] = {**found[key], **assignment}
    return list(found.values())


def identity(base: Tree, assignment: Mapping[str, Any], where: str = "scenario") -> str:
    """Return what tells scenarios apart: all they come down to, defaults filled in."""
    scenario = scenario_from(assigned(base, assignment), where)
    if scenario.trace is None and scenario.workload is None:
        raise BadInput("base: expected a trace or a workload, got neither")
    settings = {**scenario.model_dump(mode="json"), "policy": repr(scenario.make_policy()), "name": None}
    return json.dumps(settings, sort_keys=True, default=str)


def stored(folder: Path) -> Experiment:
    """Return the experiment of a folder."""
    try:
        given = json.loads((folder / EXPERIMENT).read_text(encoding="utf-8"))
        cut = given["cut"]
        return Experiment(
            given["name"], given["base"], given["configs"], [Objective(**one) for one in given["objectives"]],
            given["replications"], given["confidence"], given["ci"], given["max_replications"],
            None if cut is None else (cut[0], cut[1]), given.get("confirm", 0),
        )  # fmt: skip
    except FileNotFoundError:
        raise BadInput(f"{folder}: no experiment here: {EXPERIMENT} is missing") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{folder / EXPERIMENT}: not the record of an experiment: {error}") from None
