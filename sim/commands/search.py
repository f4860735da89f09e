"""`sim search`: find the best policy with Optuna, or the highest rate that meets a bound by bisection."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from servesim.core import BadInput
from servesim.core.limits import MAX_RUNS

from .options import add_executor_options, add_intervals, add_trust, fraction, remark_uncertainty, slo_bounds
from .sweep import check_emit, finish

MIN_PRECISION = 1e-6  # a finer search never ends: rates are floats


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
        "--emit-config", choices=["llm-serving"], help="also write the winner as a configuration of this server"
    )
    search.add_argument("--no-report", action="store_true", help="do not write report.html")
    add_intervals(search, "the 10 best configurations")
    add_trust(search)
    rate = search.add_argument_group("highest rate")
    rate.add_argument(
        "--meet", action="append", metavar="BOUND",
        help="bound of a metric, e.g. 'p99_ttft_ms<=500' or 'attainment>=0.99' (repeatable)",
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
    from servesim.study.executor import WorkerLost, close_on_exit, make_executor, process_count

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
    from servesim.study.progress import Progress
    from servesim.study.search import read_search, search

    changes = {"trials": args.trials, "replications": args.replications, "intervals": args.intervals}
    plan = read_search(args.file, args.set, **changes)
    check_emit(args, plan.scenarios)
    if plan.experiment.intervals:
        remark_uncertainty(plan.experiment.profile)
    folder = Path(args.output) if args.output else Path("runs") / plan.experiment.name
    with Progress("search", args.quiet, unit="trial") as progress:
        summary = search(plan, folder, executor, args.resume, progress)
    return finish(summary, folder, args)


def highest_rate(args: argparse.Namespace, executor: Any) -> int:
    """Find and print the highest rate; write its scenario if the workload has a rate to set."""
    from servesim.config.old_keys import OLD, rename_keys
    from servesim.config.overrides import override, read_scenario_file
    from servesim.config.scenario import scenario_from
    from servesim.files.write import write_yaml
    from servesim.runs.steady_state import STEADY
    from servesim.study.capacity import CapacitySearch, format_result, parse_bound, scenario_at_rate

    if not MIN_PRECISION <= args.precision < 1:
        raise BadInput(
            f"--precision: expected a fraction between 0 and 1, at least {MIN_PRECISION:g}, got {args.precision:g}"
        )
    if args.replications is not None and not 1 <= args.replications <= MAX_RUNS:
        raise BadInput(f"--replications: expected at least 1, at most {MAX_RUNS}, got {args.replications}")
    if args.intervals is not None:
        raise BadInput("--intervals: not possible with --meet; use `sim run --intervals` at the rate that it finds")
    tree = override(read_scenario_file(args.file), args.set)
    if args.goodput:
        tree["slo"] = slo_bounds(args.goodput)
    scenario_from(tree, args.file)
    bounds = [parse_bound(text) for text in args.meet]
    search = CapacitySearch(tree, bounds, args.replications or 1, executor, STEADY if args.steady else None)
    best = search.find_rate(args.precision)
    print(format_result(search, best))
    scenario = None if best is None else scenario_at_rate(tree, best)
    if args.output and scenario is not None:
        write_yaml(Path(args.output) / "best.yaml", rename_keys(scenario, OLD))
        print(f"scenario: {Path(args.output) / 'best.yaml'}")
    return 3 if best is None else 0
