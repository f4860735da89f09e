"""`sim search`: find the best policy with Optuna, or the highest rate that meets a bound by bisection."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from servesim.core import BadInput
from servesim.core.limits import check_fraction, check_replications

from .notes import note_uncertainty, print_path
from .options import (
    SERVERS,
    add_constraints,
    add_executor_options,
    add_intervals,
    add_json,
    add_trust,
    fraction,
    slo_bounds,
)
from .sweep import check_emit, finish


def register(commands: Any) -> None:
    search = commands.add_parser(
        "search", help="search for the best policy, or for the highest rate that meets a bound",
        description="Search the parameter space of a search file with Optuna: TPE, or NSGA-II for several objectives. "
        "The key `halving` turns on successive halving over the trace length. With --meet, find the highest "
        "request rate at which a scenario meets all bounds, by bisection.",
    )  # fmt: skip
    search.add_argument("file", metavar="FILE", help="search YAML file; with --meet, a scenario YAML file")
    search.add_argument("-o", "--output", metavar="DIR", help="folder of the search (default: runs/NAME)")
    search.add_argument("--resume", action="store_true", help="continue an interrupted search, or add trials")
    search.add_argument("--trials", type=int, metavar="N", help="number of trials (default: the file's)")
    search.add_argument(
        "--replications", type=int, metavar="N", help="replications of each trial or rate (default: the file's, or 1)"
    )
    search.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a scenario key (repeatable)"
    )
    search.add_argument("--top", type=int, default=10, metavar="N", help="rows of the printed table (default 10)")
    search.add_argument(
        "--emit-config", choices=SERVERS, help="also write the winner as flags or configuration of this server"
    )
    search.add_argument("--no-report", action="store_true", help="do not write report.html")
    add_json(search)
    add_constraints(search)
    add_intervals(search, "the 10 best configurations")
    add_trust(search)
    rate = search.add_argument_group("highest rate")
    rate.add_argument(
        "--meet", action="append", metavar="BOUND",
        help="bound of a metric, e.g. 'p99_ttft_ms <= 500' or 'attainment >= 0.99' (repeatable)",
    )  # fmt: skip
    rate.add_argument(
        "--goodput", nargs="+", metavar="KEY:MS", help="SLO bounds in milliseconds, e.g. ttft:500 tpot:50"
    )
    rate.add_argument(
        "--precision",
        type=fraction,
        default=0.01,
        metavar="FRACTION",
        help="relative precision of the rate (default 1%%)",
    )
    rate.add_argument("--steady", action="store_true", help="measure steady state: leave out warm-up and drain")
    add_executor_options(search)
    search.set_defaults(run=run_search)


def run_search(args: argparse.Namespace) -> int:
    """Search; return 3 if no rate meets the bounds."""
    from servesim.execution.executor import WorkerLost, close_on_exit, make_executor, process_count

    try:
        with close_on_exit(make_executor(args.executor, process_count(args.jobs))) as executor:
            return highest_rate(args, executor) if args.meet else best_policy(args, executor)
    except BrokenPipeError:
        raise
    except (OSError, WorkerLost) as error:
        print(f"sim: {error}", file=sys.stderr)
        return 1


def best_policy(args: argparse.Namespace, executor: Any) -> int:
    """Run the trials and print the table."""
    from servesim.execution.progress import Progress
    from servesim.searches.optuna_search import search
    from servesim.searches.search_file import read_search

    changes = {
        "trials": args.trials, "replications": args.replications, "intervals": args.intervals,
        "subject_to": args.subject_to, "indifference": args.indifference,
    }  # fmt: skip
    plan = read_search(args.file, args.set, **changes)
    check_emit(args, plan.scenarios)
    if plan.experiment.intervals:
        note_uncertainty(args, plan.experiment.profile)
    folder = Path(args.output) if args.output else Path("runs") / plan.experiment.name
    with Progress("search", args.quiet, unit="trial") as progress:
        summary = search(plan, folder, executor, args.resume, progress)
    return finish(summary, folder, args)


def highest_rate(args: argparse.Namespace, executor: Any) -> int:
    """Find and print the highest rate; write its scenario if the workload has a rate to set."""
    import json

    from servesim.config.overrides import override, read_scenario_file
    from servesim.config.scenario import scenario_from
    from servesim.files.terminal import screen_of
    from servesim.runs.steady_state import STEADY
    from servesim.searches.capacity import MIN_PRECISION, CapacitySearch, format_result
    from servesim.searches.rate_files import capacity_json, write_best_rate, write_rates
    from servesim.statistics.constraints import parse_bounds

    check_fraction(args.precision, "--precision", MIN_PRECISION)
    check_replications(1 if args.replications is None else args.replications, "--replications")
    if args.subject_to or args.indifference is not None:
        raise BadInput("--subject-to and --indifference: not possible with --meet, which gives the bounds itself")
    if args.intervals is not None:
        raise BadInput("--intervals: not possible with --meet; use `sim run --intervals` at the rate that it finds")
    tree = override(read_scenario_file(args.file), args.set)
    if args.goodput:
        tree["slo"] = slo_bounds(args.goodput)
    scenario_from(tree, args.file)
    bounds = parse_bounds(args.meet, "--meet")
    search = CapacitySearch(tree, bounds, args.replications or 1, executor, STEADY if args.steady else None)
    best = search.find_rate(args.precision)
    print(
        json.dumps(capacity_json(search, best), indent=1)
        if args.json
        else format_result(search, best, screen_of(sys.stdout))
    )
    if args.output:
        folder = Path(args.output)
        write_rates(search, folder)
        print_path(args, f"rates: {folder / 'rates.csv'}, {folder / 'rates.png'}")
        if best is not None and write_best_rate(search, best, folder / "best.yaml"):
            print_path(args, f"scenario: {folder / 'best.yaml'}")
        if not args.no_report:
            from servesim.report.capacity_page import write_capacity_report

            write_capacity_report(search, best, Path(args.file).stem, folder / "report.html")
            print_path(args, f"report: {folder / 'report.html'}")
    return 3 if best is None else 0
