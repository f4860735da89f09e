"""The sweep file: its keys, the base scenario, and the experiment that it describes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Optional, TypeVar, Union

from pydantic import BeforeValidator, Field, field_validator
from servesim.config.layers import Layer, Tree, apply_assignment, assemble, file_layer, read_sweep_file, setting_layers
from servesim.config.registry import presets
from servesim.config.scenario import Scenario
from servesim.core import BadInput
from servesim.core.limits import (
    DEFAULT_DRAWS,
    MAX_CONFIGS,
    MAX_DRAWS,
    MAX_RATE,
    MAX_RUNS,
    MAX_SEED,
    MIN_RATE,
    is_number,
)
from servesim.files.checked import Int, Keys, Number, expected_error, invalid_error, validate
from servesim.runs.metric_table import whole_metric
from servesim.runs.request_rate import RATE_KEYS, rate_key_value
from servesim.runs.steady_state import STEADY
from servesim.statistics.constraints import Bound, parse_bounds
from servesim.statistics.objective import Objective, check_figures, parse_objective

from .experiment import DEFAULT_PROFILE, Experiment, config_key, load_experiment
from .experiment_file import INDIFFERENCE, Name, name_of_file
from .grid import Assignment, unroll

MAX_RATES = 100
CAPACITY_PRECISION = 0.01  # default of `sim capacity`
ONE_SERVER = "all configurations share the one of the base; `sim compare A B` compares two servers"
File = TypeVar("File", bound=Keys)


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
    draws = {True: DEFAULT_DRAWS, False: 0}[value] if isinstance(value, bool) else value
    if not is_number(draws, 0, MAX_DRAWS) or draws % 1 or draws == 1:
        raise expected_error(f"true, false or a number of draws from 2 to {MAX_DRAWS}")
    return int(draws)


Percent = Annotated[Number, BeforeValidator(parse_percent)]
Draws = Annotated[int, BeforeValidator(check_draws)]
Rates = Annotated[Any, BeforeValidator(check_rate_list)]  # rates in rising order, "auto" or None


class Steady(Keys):
    """Warm-up and drain that a steady-state run cuts, as fractions of the arrival span."""

    warm_up: Number = Field(STEADY[0], ge=0, lt=1)
    drain: Number = Field(STEADY[1], ge=0, lt=1)


class StudyFile(Keys):
    """The keys that sweep files and search files share."""

    @classmethod
    def suggest(cls, key: str, known: Sequence[str]) -> str:
        if key in Scenario.model_fields:
            return "; this is a scenario key: use `sim run FILE`, or put it under base"
        return super().suggest(key, known)

    name: Optional[Name] = Field(None, description="name of the experiment (default: file name)")
    base: Union[str, Tree] = Field({}, description="base scenario: a file in the same folder, a preset, or its keys")
    params: Any = Field({})
    baseline: Tree = Field({}, description="settings of the baseline on top of the base")
    objectives: list[Any] = Field([], description="metrics; the first ranks, all define the Pareto front")
    replications: Int = Field(
        1, gt=0, le=MAX_RUNS, description="runs per configuration, each with other random numbers"
    )
    confidence: Number = Field(0.95, gt=0, lt=1, description="level of the confidence intervals")
    steady: Union[bool, Steady] = Field(False, description="cut warm-up and drain; false: all requests count")
    intervals: Draws = Field(0, description="also run N random cost models that agree with the calibration; true: 24")
    subject_to: list[Any] = Field([], description="constraints such as p99_ttft_ms <= 2000 that the winner must meet")
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

    @property
    def steady_window(self) -> Optional[tuple[float, float]]:
        """Warm-up and drain; None for terminating runs."""
        if isinstance(self.steady, Steady):
            return self.steady.warm_up, self.steady.drain
        return STEADY if self.steady else None


class SweepFile(StudyFile):
    """The keys of a sweep file."""

    params: Union[Tree, list[Tree]] = Field({}, description="scenario key -> values (a grid), or a list of grids")
    samples: Optional[Int] = Field(
        None, gt=0, le=MAX_CONFIGS, description="draw N random configurations per grid, not all"
    )
    seed: Int = Field(0, ge=0, le=MAX_SEED, description="random seed of `samples`; runs use the scenario's seed")
    ci: Optional[Percent] = Field(None, gt=0, lt=1, description="add replications until half-width <= this * mean")
    max_replications: Int = Field(64, gt=1, le=MAX_RUNS, description="upper limit of replications with `ci`")
    confirm: Int = Field(
        0, ge=0, le=MAX_RUNS, description="extra replications of winner and baseline, after the choice"
    )
    rates: Rates = Field(None, description="request rates; run every configuration at each of them; or auto")
    precision: Optional[Percent] = Field(
        None, ge=1e-6, lt=1, description="with rates and subject_to: find each capacity to this precision"
    )


def read_experiment(path: Union[str, Path], settings: Sequence[str] = (), **changes: Any) -> Experiment:
    """Read a sweep file or an experiment folder; `changes` replace keys of the file."""
    path = Path(path)
    if path.is_dir():
        for key in (*["--set"] * bool(settings), *(key for key, value in changes.items() if value is not None)):
            raise BadInput(f"{path}: {key}: cannot change in a folder that holds a sweep; give the sweep file")
        return load_experiment(path)
    file = validate_file(SweepFile, read_sweep_file(path), path, changes)
    base = load_base(file.base, path, settings)
    try:
        return build_experiment(file, base, file.name or name_of_file(path))
    except BadInput as bad:
        raise BadInput(f"{path}: {bad}") from None


def validate_file(kind: type[File], tree: Tree, where: Union[str, Path], changes: Mapping[str, Any]) -> File:
    """Validate the keys of a sweep or search file; `changes` that are not None replace keys."""
    changed = {**tree, **{key: value for key, value in changes.items() if value is not None}}
    return validate(kind, changed, str(where))


def load_base(base: Union[str, Tree], path: Path, settings: Sequence[str] = ()) -> Tree:
    """Return the base scenario as a mapping, with settings of the command line; `path` is the sweep file."""
    if isinstance(base, dict):
        lowest = Layer(base)
    elif (path.parent / base).is_file():
        lowest = file_layer(path.parent / base)
    elif base in presets():
        lowest = Layer({"preset": base})
    else:
        file = path.parent / base
        raise BadInput(f"{path}: base: no file {file} and no preset {base!r}; presets: {', '.join(presets())}")
    return assemble([lowest, *setting_layers(settings)])


def build_experiment(file: SweepFile, base: Tree, name: str) -> Experiment:
    """List the configurations of a sweep file and validate every scenario."""
    configs = deduplicate(base, [file.baseline, *unroll(file.params, file.samples, file.seed)])
    check_rates(base, configs)
    defaults = ["mean_e2el_ms", "output_throughput"] if file.steady else ["makespan", "mean_ttft_ms"]
    objectives = [parse_objective(spec) for spec in file.objectives or defaults]
    bounds = parse_bounds(file.subject_to)
    check_metrics("subject_to", bounds, file, base)
    check_metrics("objectives", objectives, file, base)
    metrics = [objective.metric for objective in objectives] + [bound.metric for bound in bounds]
    check_figures(metrics, [base.get("profile", DEFAULT_PROFILE), *(config.get("profile") for config in configs)])
    auto = file.rates == "auto"
    rates = [] if auto or file.rates is None else file.rates
    if file.precision is not None and not (bounds and file.rates):
        raise BadInput("precision: also needs `rates` and `subject_to`: it is that of the highest rate that meets them")
    runs = (file.replications + file.intervals) * max(1, len(rates))
    if len(configs) * runs > MAX_RUNS:
        raise BadInput(f"replications: expected at most {MAX_RUNS} runs, got {len(configs)} * {runs}")
    experiment = Experiment(
        name, base, configs, objectives, file.replications, file.confidence, file.ci, file.max_replications,
        file.steady_window, file.confirm, file.intervals, bounds, file.indifference, rates, auto, file.precision,
    )  # fmt: skip
    if file.rates:
        experiment.own_rate(0)  # raises BadInput if the requests have no rate
    return experiment


def capacity_experiment(base: Tree, name: str, keys: Mapping[str, Any]) -> Experiment:
    """Return the sweep of one scenario over rates that finds its capacity; `keys` are those of a sweep file."""
    file = validate_file(SweepFile, {"rates": "auto", "precision": CAPACITY_PRECISION}, name, keys)
    bounds = parse_bounds(file.subject_to)
    if not bounds:
        raise BadInput("subject_to: expected at least one constraint, e.g. p99_ttft_ms <= 500, got none")
    served = ["request_throughput", *(["request_goodput"] if base.get("slo") else [])]
    objectives = list(dict.fromkeys([*(bound.metric for bound in bounds), *served]))
    return build_experiment(file.model_copy(update={"objectives": objectives}), base, name)


def check_metrics(key: str, items: Sequence[Union[Objective, Bound]], file: SweepFile, base: Tree) -> None:
    """Raise BadInput for a metric that the runs will not have."""
    for metric in [item.metric for item in items]:
        if file.steady_window is not None and metric == "makespan":
            raise BadInput(f"{key}: {metric}: not available in a steady-state sweep; remove it or the key `steady`")
        if whole_metric(metric) in ("request_goodput", "attainment") and not any(base.get("slo") or {}):
            raise BadInput(f"{key}: {metric}: expected a `slo` in the base scenario, got none")


def check_rates(base: Tree, configs: Sequence[Assignment]) -> None:
    """Raise BadInput if configurations set different request rates: the lowest or highest one would always win."""
    sections = {key for assignment in configs for key in assignment if key.partition(".")[0] in ("workload", "trace")}
    rates = {rate_key_value(apply_assignment(base, assignment)) for assignment in configs} if sections else set()
    if len(rates - {None}) > 1:
        key = min(sections & set(RATE_KEYS) or sections)
        hint = "use the key `rates`, e.g. `rates: [5, 10, 20]`"
        raise BadInput(f"params.{key}: a request rate is not a setting that can win; {hint}")


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
