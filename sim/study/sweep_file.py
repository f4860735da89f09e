"""The sweep file: its base scenario, and the experiment that it describes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, Union

from servesim.config.layers import Layer, Tree, apply_assignment, assemble, file_layer, read_sweep_file, setting_layers
from servesim.config.registry import presets
from servesim.core import BadInput
from servesim.core.limits import MAX_RUNS
from servesim.files.checked import validate
from servesim.runs.leading import leading_metrics
from servesim.runs.metric_table import whole_metric
from servesim.runs.prices import COSTS, HOW_TO_PRICE, is_priced
from servesim.runs.request_rate import RATE_KEYS, rate_key_value
from servesim.statistics.constraints import Bound, parse_bounds
from servesim.statistics.objective import Objective, check_figures, parse_objective

from .experiment import DEFAULT_PROFILE, Experiment, config_key, load_experiment
from .experiment_file import name_of_file
from .grid import Assignment, unroll
from .study_keys import CapacityKeys, SearchFile, SweepFile

File = TypeVar("File", SweepFile, SearchFile, CapacityKeys)
Source = Union[str, Path, Mapping[str, Any], None]  # a file, a mapping of keys, or no keys


def read_experiment(source: Source, settings: Sequence[str] = (), /, **changes: Any) -> Experiment:
    """Read a sweep file, a mapping of its keys, or an experiment folder; `changes` replace keys."""
    if isinstance(source, (str, Path)) and Path(source).is_dir():
        for key in (*["--set"] * bool(settings), *(key for key, value in changes.items() if value is not None)):
            raise BadInput(f"{source}: {key}: cannot change in a folder that holds a sweep; give the sweep file")
        return load_experiment(Path(source))
    file, path = read_keys(SweepFile, source, "sweep", changes)
    base = load_base(file.base, path, settings)
    with errors_of(source):
        return build_experiment(file, base, file.name or name_of_file(path))


@contextmanager
def errors_of(source: Source) -> Iterator[None]:
    """Add to an error the name of the sweep or search file, if the source is one."""
    try:
        yield
    except BadInput as bad:
        raise BadInput(f"{Path(source)}: {bad}" if isinstance(source, (str, Path)) else str(bad)) from None


def read_keys(kind: type[File], source: Source, noun: str, changes: Mapping[str, Any]) -> tuple[File, Path]:
    """Return the checked keys of a sweep or search file, or of a mapping, and the path of the file, or the noun."""
    if isinstance(source, (str, Path)):
        return validate_file(kind, read_sweep_file(source, noun), source, changes), Path(source)
    return validate_file(kind, {**mapping_of(source, noun), **changes}, noun, {}), Path(noun)


def mapping_of(source: Any, where: str) -> Tree:
    """Return the keys of a mapping, with paths as texts; None has no keys."""
    if source is not None and not isinstance(source, Mapping):
        raise BadInput(f"{where}: expected a file or a mapping of keys, got {type(source).__name__}")
    tree: Tree = paths_as_text(source or {})
    return tree


def paths_as_text(value: Any) -> Any:
    """Return a value of a scenario with every path in it as a text, as in a file."""
    if isinstance(value, Mapping):
        return {key: paths_as_text(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [paths_as_text(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def validate_file(kind: type[File], tree: Tree, where: Union[str, Path], changes: Mapping[str, Any]) -> File:
    """Validate the keys of a sweep or search file; `changes` that are not None replace keys."""
    changed = {**tree, **{key: value for key, value in changes.items() if value is not None}}
    return validate(kind, changed, str(where))


def load_base(base: Union[str, Tree], path: Path, settings: Sequence[str]) -> Tree:
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
    configs = deduplicate(base, [file.baseline, *unroll(file.params)])
    check_rates(base, configs)
    chosen = file.objectives or leading_metrics(base, file.steady_window is not None)
    objectives = [parse_objective(spec) for spec in chosen]
    bounds = parse_bounds(file.subject_to)
    check_metrics("subject_to", bounds, file, base)
    check_metrics("objectives", objectives, file, base)
    metrics = [objective.metric for objective in objectives] + [bound.metric for bound in bounds]
    check_prices(metrics, base, configs)
    check_figures(metrics, [base.get("profile", DEFAULT_PROFILE), *(config.get("profile") for config in configs)])
    auto = file.rates == "auto"
    rates = [] if auto or file.rates is None else file.rates
    if file.precision is not None and not (bounds and file.rates):
        raise BadInput("precision: also needs `rates` and `subject_to`: it is that of the highest rate that meets them")
    runs = (file.replications + file.intervals) * max(1, len(rates))
    if len(configs) * runs > MAX_RUNS:
        raise BadInput(f"replications: expected at most {MAX_RUNS} runs, got {len(configs)} * {runs}")
    shared = (*SweepFile.model_fields, "steady_window")
    values = {key: getattr(file, key) for key in shared if key in Experiment.model_fields}
    values |= {"name": name, "base": base, "configs": configs, "objectives": objectives, "subject_to": bounds}
    experiment = Experiment.model_construct(**{**values, "rates": rates, "auto_rates": auto})
    if file.rates:
        experiment.own_rate(0)  # raises BadInput if the requests have no rate
    return experiment


def capacity_experiment(base: Tree, name: str, keys: Mapping[str, Any]) -> Experiment:
    """Return the sweep of one scenario over rates that finds its capacity; `keys` are those of a sweep file."""
    file = validate_file(CapacityKeys, {}, name, keys)
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


def check_prices(metrics: Sequence[str], base: Tree, configs: Sequence[Assignment]) -> None:
    """Raise BadInput for a cost if a configuration has no price."""
    for metric in [metric for metric in metrics if metric in COSTS]:
        if not all(is_priced(apply_assignment(base, assignment)) for assignment in configs):
            raise BadInput(f"{metric}: {HOW_TO_PRICE}")


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
