"""`sim sweep`, `sim search` and `sim capacity`: run many configurations on common random numbers and rank them.

A search lets Optuna choose the configurations. The capacity of one configuration is a sweep over request rates.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import options
from .notes import (
    note_uncertainty,
    print_path,
    print_result,
    print_warning,
    print_warnings_of,
    resumable,
)

if TYPE_CHECKING:
    from servesim.study.executor import Executor
    from servesim.study.experiment import Experiment
    from servesim.study.progress import Progress
    from servesim.study.rate_summary import Result


SWEEP_KEYS = ("replications", "ci", "rates", "precision", "subject_to", "indifference", "intervals")
SEARCH_KEYS = ("replications", "subject_to", "indifference", "intervals")
CAPACITY_KEYS = ("subject_to", "rates", "precision", "replications", "steady")


def register(commands: Any) -> None:
    sweep = commands.add_parser(
        "sweep", run=run_sweep, help="run a grid of configurations and rank them",
        description="Run every configuration of a sweep file on the same random numbers and rank them against a "
        "baseline.",
    )  # fmt: skip
    options.add(sweep, {"FILE": "sweep YAML file, or sweep folder to continue"})
    add_study_options(sweep, "sweep", "SweepFile", SWEEP_KEYS)
    search = commands.add_parser(
        "search", run=run_search, help="search for the best configuration with Optuna",
        description="Search the parameter space of a search file with Optuna: TPE, or NSGA-II for several objectives.",
    )  # fmt: skip
    options.add(search, {"FILE": "search YAML file"})
    add_study_options(search, "search", "SearchFile", SEARCH_KEYS)
    capacity = commands.add_parser(
        "capacity", run=run_capacity, help="find the highest request rate that meets constraints",
        description="Find the highest request rate at which a scenario meets all constraints, by bisection. Every rate "
        "has the same requests; only their arrival times are scaled. A short workload is made longer: in a short run, "
        "a backlog that grows stays small. The result is that of a sweep over rates.",
    )  # fmt: skip
    options.add(capacity, {"FILE": "scenario YAML file"})
    options.add(add_study_options(capacity, "capacity", "CapacityKeys", CAPACITY_KEYS), options.GOODPUT)
    capacity.set_defaults(top=None)


def add_study_options(command: Any, noun: str, model: str, keys: Sequence[str]) -> Any:
    """Add the options that all commands on many runs have, and those of a model; return the group of the overrides."""
    is_capacity = noun == "capacity"
    folder, noun = ("runs/NAME-capacity", "sweep") if is_capacity else ("runs/NAME", noun)
    options.add(command, {
        "-o, --output DIR": f"folder of the {noun} (default: {folder}, NAME from the file)",
        "--resume": f"continue an interrupted or killed {noun}",
        "--fresh": "if DIR exists, write to DIR-2, DIR-3 ... instead",
    })  # fmt: skip
    options.add_trust(command)
    options.add_executor_options(command)
    out = command.add_argument_group("output")
    if not is_capacity:  # it prints all rates of its only configuration
        options.add(out, {"--top N": "rows of the printed table (default 10)"})
    options.add(out, {"--no-report": "do not write report.html"})
    options.add_json(out)
    how = command.add_argument_group("overrides of the file")
    options.add(how, {"--set KEY=VALUE": "override a scenario key of the base (repeatable)"})
    options.add_names(command, without=keys)
    required, default = ("subject_to", "") if is_capacity else ("", "the file's, else ")
    command.add_late = partial(options.add_keys, how, model, keys, required, default)
    return how


def keys_of(args: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """Return the keys that are options; None if the command line does not set one."""
    return {name: getattr(args, name) for name in names}


def run_sweep(args: argparse.Namespace) -> int:
    """Run, write the files and print the table; return 1 if a run failed or the disk is full."""
    from servesim.study.sweep_file import read_experiment

    experiment = read_experiment(args.file, options.settings_of(args), **keys_of(args, SWEEP_KEYS))
    source = Path(args.file)
    args.resume = args.resume or source.is_dir()
    return run_experiment_of(args, experiment, source if source.is_dir() else Path("runs") / experiment.name)


def run_search(args: argparse.Namespace) -> int:
    """Run the trials and print the table."""
    from servesim.study.optuna_search import read_search, search

    plan = read_search(args.file, options.settings_of(args), **keys_of(args, SEARCH_KEYS))
    default, run = Path("runs") / plan.experiment.name, partial(search, plan)
    return run_and_finish(args, plan.experiment, default, run, "search", "trial")


def run_capacity(args: argparse.Namespace) -> int:
    """Find and print the capacity; return 1 if no rate meets the constraints."""
    from servesim.config.layers import Layer, assemble, file_layer, setting_layers
    from servesim.study.experiment_file import name_of_file
    from servesim.study.sweep_file import capacity_experiment

    bounds = [Layer({"slo": options.slo_bounds(args.goodput)}, are_settings=True)] if args.goodput else []
    tree = assemble([file_layer(args.file), *setting_layers(options.settings_of(args)), *bounds])
    name = name_of_file(Path(args.file))
    experiment = capacity_experiment(tree, name, keys_of(args, CAPACITY_KEYS))
    return run_experiment_of(args, experiment, Path("runs") / f"{name}-capacity")


def run_experiment_of(args: argparse.Namespace, experiment: Experiment, default: Path) -> int:
    """Run a sweep and print its result; `default` is its folder without -o."""
    from servesim.study.result import run_experiment

    return run_and_finish(args, experiment, default, partial(run_experiment, experiment))


def run_and_finish(
    args: argparse.Namespace, experiment: Experiment, default: Path,
    run: Callable[[Path, Executor, bool, Progress], Result], noun: str = "sweep", unit: str = "run",
) -> int:  # fmt: skip
    """Call `run` with a folder and an executor, and finish its result.

    The folder is that of -o, else the default one; with --fresh, the first of DIR, DIR-2 ... that does not exist.
    """
    from servesim.config.scenario import Scenario
    from servesim.runs.pools import scenarios_of
    from servesim.study.executor import open_executor
    from servesim.study.progress import Progress

    first = folder = Path(args.output) if args.output else default
    for number in itertools.count(2) if args.fresh else ():
        if not folder.exists():
            break
        folder = first.with_name(f"{first.name}-{number}")
    if experiment.intervals:
        servers = scenarios_of(Scenario.model_validate(experiment.base))
        note_uncertainty(args, [server.profile for server in servers])
    with resumable(folder):
        with open_executor(args.executor, args.jobs) as executor, Progress(noun, args.quiet, unit=unit) as progress:
            result = run(folder, executor, args.resume, progress)
        return finish(result, folder, args)


def finish(result: Result, folder: Path, args: argparse.Namespace) -> int:
    """Write the result files and print the table; return 1 if a run failed or there is no winner."""
    from servesim.files.terminal import screen_of
    from servesim.study.result import result_json
    from servesim.study.single_run import is_repeated
    from servesim.study.sweep_text import format_result
    from servesim.study.table import write_summary
    from servesim.study.verdict import verdict_of

    if repeats := [run for run in result.failures if is_repeated(run)]:
        why = f"failed because of the machine ({repeats[0]['error']})"
        print_warning(f"{len(repeats)} of {result.run_count} runs {why}; --resume -o {folder} repeats them")
    if result.failures and len(result.failures) == result.run_count:
        print(f"sim: every run failed; the first error is: {result.failures[0]['error']}", file=sys.stderr)
        return 1
    print_warnings_of(result.experiment.tree(0))
    write_summary(result, folder)
    verdict = verdict_of(result)
    table = partial(format_result, result, args.top, screen_of(sys.stdout))
    print_result(args, lambda: result_json(result), lambda: f"{table()}\n{verdict.text}")
    if (folder / "best.yaml").exists():
        name = {"baseline": "baseline", "capacity": "scenario"}.get(verdict.kind, "winner")
        print_path(args, f"{name}: {folder / 'best.yaml'}")
    if not args.no_report:
        from servesim.report.sweep_page import write_report

        write_report(result, folder / "report.html")
        print_path(args, f"report: {folder / 'report.html'}")
    return 1 if result.failures or verdict.kind in ("infeasible", "failed") else 0
