"""The keys of sweep and search files and of `sim capacity`, as pydantic models.

Options of the commands are made from these models, so this module imports little.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Optional, Union

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator
from servesim.core.limits import (
    MAX_CONFIGS,
    MAX_DRAWS,
    MAX_RATE,
    MAX_RUNS,
    MAX_SEED,
    MIN_RATE,
    draw_count,
    is_number,
)
from servesim.files.checked import Int, Keys, Number, expected_error, invalid_error

Tree = dict[str, Any]  # keys of a scenario
STEADY = (0.2, 0.1)  # default warm-up and drain, as fractions of the time span of the arrivals
INDIFFERENCE = 0.005  # default of `indifference`
CAPACITY_PRECISION = 0.01  # default of `sim capacity`
MAX_RATES = 100
NAME_PATTERN = re.compile(r"\w[\w .+-]{0,99}")  # a name is part of a path and of a comment in best.yaml
RATES = "such as 5, 10 and 20"
BOUND = "such as 'p99_ttft_ms <= 2000'"
DRAWN = "N random cost models that agree with the calibration; true, or no number: 24"
ONE_SERVER = "all configurations share the one of the base; `sim compare A B` compares two servers"


def check_name(name: str) -> str:
    """Return the name of an experiment; it must not contain a separator of paths or lines."""
    if not NAME_PATTERN.fullmatch(name):
        raise ValueError("a name of letters, digits, spaces and . _ + -, at most 100 characters, such as knobs-2")
    return name


def parse_percent(value: Any) -> Any:
    """Return `0.5%` or `0.5 %` as a fraction; other values unchanged."""
    text = value.strip() if isinstance(value, str) else ""
    try:
        return float(text[:-1]) / 100 if text.endswith("%") else value
    except ValueError:
        return value


def check_rate_list(value: Any) -> Any:
    """Check request rates and return them in rising order; `auto` stays."""
    rates = [value] if is_number(value) else value
    valid = isinstance(rates, (list, tuple)) and all(is_number(rate, MIN_RATE, MAX_RATE) for rate in rates)
    if rates is not None and rates != "auto" and not (valid and 1 <= len(rates) <= MAX_RATES):
        raise expected_error(f"auto, or up to {MAX_RATES} request rates such as [5, 10, 20], requests per second")
    return sorted({float(rate) for rate in rates}) if valid else rates


def check_draws(value: Any) -> int:
    """Return the number of draws in a file; true is the default number."""
    draws = draw_count(value)
    if draws is None:
        raise expected_error(f"true, false or a number of draws from 2 to {MAX_DRAWS}")
    return draws


Percent = Annotated[Number, BeforeValidator(parse_percent)]
Draws = Annotated[int, BeforeValidator(check_draws)]
Rates = Annotated[Any, BeforeValidator(check_rate_list)]  # rates in rising order, "auto" or None
Constraints = list[Any]
Name = Annotated[str, AfterValidator(check_name)]


class Steady(Keys):
    """Warm-up and drain that a steady-state run cuts, as fractions of the arrival span."""

    warm_up: Number = Field(STEADY[0], ge=0, lt=1)
    drain: Number = Field(STEADY[1], ge=0, lt=1)

    @model_validator(mode="after")
    def _leaves_a_part(self) -> Steady:
        if self.warm_up + self.drain >= 1:
            raise ValueError("warm_up and drain that are together less than 1")
        return self


class StudyFile(Keys):
    """The keys that sweep files and search files share."""

    @classmethod
    def suggest(cls, key: str, known: Sequence[str]) -> str:
        from servesim.config.scenario import Scenario  # slow

        if key == "preset" or key in Scenario.model_fields:
            return "; this is a scenario key: use `sim run FILE`, or put it under base"
        for command, kind in (("search", SearchFile), ("sweep", SweepFile)):
            if key in kind.model_fields:
                return f"; this is a key of `sim {command} FILE`"
        return super().suggest(key, known)

    name: Optional[Name] = Field(None, description="name of the experiment (default: file name)")
    base: Union[str, Tree] = Field({}, description="base scenario: a file in the same folder, a preset, or its keys")
    params: Any = Field({})
    baseline: Tree = Field({}, description="settings of the baseline on top of the base")
    objectives: list[Any] = Field(
        [], description="metrics; the first ranks, all define the Pareto front (default: as docs/metrics.md says)"
    )
    replications: Int = Field(
        1, gt=0, le=MAX_RUNS, description="runs per configuration, each with other random numbers"
    )
    confidence: Number = Field(0.95, gt=0, lt=1, description="level of the confidence intervals")
    steady: Union[bool, Steady] = Field(False, description="measure steady state: leave out warm-up and drain")
    intervals: Draws = Field(0, description=f"also run every configuration with {DRAWN}")
    subject_to: Constraints = Field([], description=f"constraint {BOUND}; a configuration that misses it cannot win")
    indifference: Percent = Field(
        INDIFFERENCE, ge=0, lt=1, description="differences below this fraction of the best value are ties"
    )

    @field_validator("objectives", "subject_to", mode="before")
    @classmethod
    def _to_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, (str, dict)) else value

    @field_validator("params", "baseline", mode="before")
    @classmethod
    def _one_server(cls, settings: Any) -> Any:
        for grid in settings if isinstance(settings, list) else [settings]:
            if isinstance(grid, Mapping) and "server_config" in grid:
                raise invalid_error(f"server_config: {ONE_SERVER}")
        return settings

    @field_validator("steady", mode="before")
    @classmethod
    def _keys_or_switch(cls, steady: Any) -> Any:
        return Steady.model_validate(steady) if isinstance(steady, Mapping) else steady

    @property
    def steady_window(self) -> Optional[tuple[float, float]]:
        """Warm-up and drain; None for terminating runs."""
        if isinstance(self.steady, Steady):
            return self.steady.warm_up, self.steady.drain
        return STEADY if self.steady else None


class SweepFile(StudyFile):
    """The keys of a sweep file."""

    params: Union[Tree, list[Tree]] = Field({}, description="scenario key -> values (a grid), or a list of grids")
    ci: Optional[Percent] = Field(
        None,
        gt=0,
        lt=1,
        description="add replications until the half-width <= this fraction of the mean, e.g. 1%",
    )
    max_replications: Int = Field(64, gt=1, le=MAX_RUNS, description="upper limit of replications with `ci`")
    confirm: Int = Field(
        0, ge=0, le=MAX_RUNS, description="extra replications of winner and baseline, after the choice"
    )
    rates: Rates = Field(None, description=f"run every configuration at request rates {RATES}; auto chooses them")
    precision: Optional[Percent] = Field(
        None, ge=1e-6, lt=1, description="with rates and subject_to: find each capacity to this precision, e.g. 2%"
    )


class SearchFile(StudyFile):
    """The keys of a search file: as in a sweep file, but params are spaces."""

    params: Tree = Field({}, description="scenario key -> list, range, uniform, loguniform or integers")
    trials: Int = Field(100, gt=0, le=MAX_CONFIGS, description="number of configurations to try")
    batch: Int = Field(8, gt=0, le=MAX_CONFIGS, description="trials proposed at once")
    sampler: Literal["auto", "tpe", "nsga2", "random"] = Field(
        "auto", description="auto: tpe for one objective, nsga2 for several"
    )
    seed: Int = Field(0, ge=0, le=MAX_SEED, description="random seed of the sampler")
    intervals: Draws = Field(0, description=f"also run the baseline and the 10 best configurations with {DRAWN}")
    subject_to: Constraints = Field(
        [], description=f"constraint {BOUND}; the sampler knows how far a configuration misses it"
    )


class CapacityKeys(SweepFile):
    """The keys of the sweep over rates that finds the capacity of one scenario."""

    rates: Rates = Field(
        "auto", description=f"rates to start with, {RATES}; auto: up to more than the scenario can serve"
    )
    precision: Optional[Percent] = Field(
        CAPACITY_PRECISION, ge=1e-6, lt=1, description="relative precision of the highest rate"
    )
    subject_to: Constraints = Field(
        [], description=f"constraint {BOUND}; the capacity is the highest rate that meets all of them"
    )
