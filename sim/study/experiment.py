"""An experiment: numbered configurations and what they are measured by, from a sweep file or an experiment folder.

Configuration 0 is the baseline. The others follow in the order of the grid, without duplicates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Optional

from pydantic import ConfigDict, Field, PlainValidator, ValidationError
from servesim.config.layers import Tree, apply_assignment, value_at
from servesim.config.scenario import Scenario, scenario_from
from servesim.core import BadInput
from servesim.core.limits import MAX_DRAWS, MAX_RATE, MIN_RATE
from servesim.files.checked import Stored, expected_error, first_error, validate
from servesim.runs.intervals import Draw
from servesim.runs.request_rate import longer_scenario, request_rate, scenario_at_rate
from servesim.statistics.constraints import Bound, parse_bounds
from servesim.statistics.objective import Objective, parse_objective

from .experiment_file import EXPERIMENT_FILE, input_digests, read_terms, versions
from .grid import Assignment
from .single_run import Task, context_json
from .study_keys import INDIFFERENCE

RUNS_FILE = "runs.jsonl"
NOT_STORED = ("auto_rates", "rate")  # of a part of an experiment, or until its rates are chosen
DEFAULT_PROFILE = Scenario.model_fields["profile"].default


def read_objectives(items: Any) -> list[Objective]:
    """Return the objectives of experiment.json."""
    if not isinstance(items, list) or not items:
        raise expected_error("a list of metrics and their goals")
    fields = Objective._fields
    keys = ({k: item[k] for k in fields if k in item} if isinstance(item, Mapping) else item for item in items)
    return [parse_objective(item) for item in keys]


Fraction = Annotated[float, Field(gt=0, lt=1)]
Part = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=1, le=10**9)]
Rate = Annotated[float, Field(ge=MIN_RATE, le=MAX_RATE)]


class Experiment(Stored):
    """Everything that the result of a sweep depends on: a sweep file with its grids unrolled, and experiment.json."""

    model_config = ConfigDict(extra="ignore")

    name: str
    base: Tree
    configs: list[Assignment] = Field(min_length=1)  # the first is the baseline
    objectives: Annotated[Sequence[Objective], PlainValidator(read_objectives)]
    replications: Count
    confidence: Fraction
    ci: Optional[Fraction]
    max_replications: Count  # with ci
    steady_window: Optional[tuple[Part, Part]] = Field(strict=False)  # warm-up and drain
    confirm: int = Field(0, ge=0, le=10**6)  # extra replications that do not influence the choice of the winner
    intervals: int = Field(0, ge=0, le=MAX_DRAWS)  # draws of the cost model per configuration
    subject_to: Annotated[Sequence[Bound], PlainValidator(parse_bounds)] = ()  # a configuration that misses one loses
    indifference: float = Field(INDIFFERENCE, ge=0, lt=1)  # differences below this fraction of the best value are ties
    rates: list[Rate] = Field([])  # request rates; every configuration runs at each of them
    precision: Optional[Fraction] = None  # of the capacity of each configuration, found by bisection
    length: Count = 1  # times as many requests as the scenarios have, see choose_terms
    unserved: float = Field(0.0, ge=0)  # requests that the baseline leaves unserved at every rate
    auto_rates: bool = False  # `rates: auto`, until `choose_terms` has chosen them
    rate: Optional[float] = None  # the request rate of this part of an experiment with rates

    def changed(self, **values: Any) -> Experiment:
        """Return the experiment with other values."""
        return Experiment.model_construct(**{**dict(self), **values})

    @property
    def context(self) -> str:
        """The JSON that workers read."""
        return context_json(self.base, self.steady_window, length=self.length)

    @property
    def profile(self) -> Any:
        """The profile of the base scenario."""
        return self.base.get("profile", DEFAULT_PROFILE)

    @property
    def is_random(self) -> bool:
        """Whether replications differ from each other."""
        return Scenario.model_validate(self.tree(0)).varies

    @property
    def runs_per_config(self) -> int:
        """The replications of a configuration; more would be equal if nothing is random."""
        return self.replications if self.is_random else 1

    def tree(self, config: int) -> Tree:
        """Return the scenario of a configuration as a mapping."""
        return longer_scenario(apply_assignment(self.base, self.configs[config]), self.length)

    def scenario(self, config: int) -> Tree:
        """Return `tree` at the rate of this part of an experiment; BadInput if its workload has no key for the rate."""
        if self.rate is None:
            return self.tree(config)
        tree = scenario_at_rate(self.tree(config), self.rate, self.rate / self.own_rate(config))
        if tree is None:
            raise BadInput(f"{self.name}: its workload has no key for the request rate")
        return tree

    def value(self, config: int, key: str) -> Any:
        """Return the value of a key in the scenario of a configuration; None if nothing sets it."""
        return value_at(self.tree(config), key)

    def task(self, config: int, replication: int, draw: Optional[Draw] = None) -> Task:
        factor = None if self.rate is None else self.rate / self.own_rate(config)
        return Task(config, replication, self.configs[config], rate_factor=factor, draw=draw, rate=self.rate)

    def own_rate(self, config: int) -> float:
        """Return the request rate of a configuration without `rates`."""
        tree = self.tree(config)
        key = json.dumps([tree.get("workload"), tree.get("trace"), tree.get("seed")], sort_keys=True, default=str)
        if key not in self._own_rates:
            self._own_rates[key] = request_rate(tree)
        return self._own_rates[key]

    @cached_property
    def _own_rates(self) -> dict[str, float]:
        return {}

    def at_rate(self, rate: float) -> Experiment:
        """Return the part of an experiment at one of its rates."""
        part = self.changed(rates=[], rate=rate, precision=None)
        part.__dict__["_own_rates"] = self._own_rates  # a trace file is read once
        return part

    def changed_keys(self, config: int) -> list[str]:
        """Return the parameters whose values differ from the baseline's.

        A parameter with one value is the same in all configurations, so it counts only if nothing else differs.
        """
        base, values = self.configs[0], self.configs[config]
        changed = []
        for key in dict.fromkeys([*values, *base]):
            if key in values and key in base:
                same = values[key] == base[key]
            else:  # the base scenario may set the same value
                same = self.value(config, key) == self.value(0, key)
            changed += [] if same else [key]
        return [key for key in self.knobs if key in changed] or changed

    def label(self, config: int) -> str:
        """Return the parameter values of a configuration as short text."""
        values = self.configs[config]
        texts = [format_setting(key, values[key]) for key in self.knobs if key in values]
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
        values = {name: value for name, value in self if name not in NOT_STORED}
        objectives = [objective._asdict() for objective in self.objectives]
        bounds = [str(bound) for bound in self.subject_to]
        inputs = input_digests(self.tree(config) for config in range(len(self.configs)))
        return {**values, "objectives": objectives, "subject_to": bounds, "versions": versions(), "inputs": inputs}


def planned_draws(count: int, replications: int) -> list[tuple[int, Draw]]:
    """Return the replication of every draw; the draws take turns."""
    return [(number % replications, Draw(number, count)) for number in range(count)]


def format_value(value: Any) -> str:
    """Return a setting's value as short text."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{format_value(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list) and value and all(isinstance(item, Mapping) and "name" in item for item in value):
        return "[" + ",".join(map(format_pool, value)) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def format_pool(pool: Mapping[str, Any]) -> str:
    """Return a pool of a cluster as short text: its name, its replicas, and what else it sets."""
    others = {key: value for key, value in pool.items() if key not in ("name", "replicas") and value != pool["name"]}
    return f"{pool['name']}:{pool.get('replicas', 1)}{format_value(others) if others else ''}"


def short_key(key: str) -> str:
    """Return a parameter as tables print it."""
    return key.removeprefix("policy.").removeprefix("cluster.")


def format_setting(key: str, value: Any) -> str:
    """Return a parameter and its value, as tables print them; None is one that nothing sets."""
    return f"no {short_key(key)}" if value is None else f"{short_key(key)}={format_value(value)}"


def config_key(base: Tree, assignment: Mapping[str, Any], where: str) -> str:
    """Return a key that is equal for equal scenarios: all settings with defaults, as JSON."""
    scenario = scenario_from(apply_assignment(base, assignment), where)
    if scenario.trace is None and scenario.workload is None:
        raise BadInput("base: expected a trace or a workload, got neither")
    policy = repr(scenario.make_policy()) if scenario.policy_is_loadable else dict(sorted(scenario.policy.items()))
    settings = {**scenario.model_dump(mode="json"), "policy": policy, "name": None}
    return json.dumps(settings, sort_keys=True, default=str)


def load_experiment(folder: Path) -> Experiment:
    """Read experiment.json of a folder. Its scenarios are validated, but no user policy is loaded."""
    where = folder / EXPERIMENT_FILE
    if not where.exists():
        commands = "`sim sweep`, `sim search` or `sim capacity`"
        raise BadInput(f"{folder}: expected a folder of {commands}; it has no {EXPERIMENT_FILE}")
    experiment = validate(Experiment, read_terms(where), str(where))
    try:
        for config in range(len(experiment.configs)):
            Scenario.model_validate(experiment.tree(config))
    except ValidationError as error:
        raise BadInput(f"{where}: {first_error(error)}") from None
    except BadInput as bad:
        raise BadInput(f"{where}: {bad}") from None
    return experiment
