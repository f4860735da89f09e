"""`sim search`: the best policy by Optuna, or the highest rate that meets an objective by bisection."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from servesim.core import BadInput

from .options import add_executor_options, objectives, share
from .sweep import finish


def register(commands: Any) -> None:
    search = commands.add_parser(
        "search", help="search for the best policy, or for the highest rate that meets an objective",
        description="Search the spaces of a search file with Optuna (TPE, or NSGA-II for several objectives), with "
        "successive halving over the trace if the file says so. With --meet, find instead the highest request rate at "
        "which a scenario meets its objectives, by bisection.",
    )  # fmt: skip
    search.add_argument("file", metavar="FILE", help="search YAML; with --meet, a scenario")
    search.add_argument("-o", "--output", metavar="DIR", help="folder of the search (default: runs/NAME)")
    search.add_argument("--resume", action="store_true", help="continue what was interrupted, or add trials")
    search.add_argument("--trials", type=int, metavar="N", help="instead of the file's")
    search.add_argument("--replications", type=int, metavar="N", help="runs of each trial or rate")
    search.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the base")
    search.add_argument("--top", type=int, default=10, metavar="N", help="rows of the table (default 10)")
    search.add_argument("--emit-config", choices=["llm-serving"], help="write the winner as the server's own YAML too")
    search.add_argument("--no-report", action="store_true", help="leave report.html out")
    rate = search.add_argument_group("highest rate")
    rate.add_argument("--meet", action="append", metavar="BOUND", help="e.g. 'p99_ttft_ms<=500' or 'attainment>=0.99'")
    rate.add_argument("--goodput", nargs="+", metavar="KEY:MS", help="what a good answer is, e.g. ttft:500 tpot:50")
    rate.add_argument("--precision", type=share, default=0.01, metavar="SHARE", help="of the rate (default 1%%)")
    rate.add_argument("--steady", action="store_true", help="cut warm-up and drain from every run")
    add_executor_options(search)
    search.set_defaults(run=run_search)


def run_search(args: argparse.Namespace) -> int:
    """Search; 3 when no rate meets the objectives."""
    from servesim.study.executor import WorkerLost, core_count, executing, executor

    try:
        with executing(executor(args.executor, core_count(args.jobs))) as where:
            return highest_rate(args, where) if args.meet else best_policy(args, where)
    except BrokenPipeError:
        raise
    except (OSError, WorkerLost) as error:
        print(f"sim: {error}", file=sys.stderr)
        return 1


def best_policy(args: argparse.Namespace, where: Any) -> int:
    """Run the trials, print the table."""
    from servesim.study.progress import Progress
    from servesim.study.search import read_search, search

    given = read_search(args.file, args.set, trials=args.trials, replications=args.replications)
    folder = Path(args.output) if args.output else Path("runs") / given.experiment.name
    with Progress("search", args.quiet, unit="trial") as progress:
        summary = search(given, folder, where, args.resume, progress)
    return finish(summary, folder, args)


def highest_rate(args: argparse.Namespace, where: Any) -> int:
    """Climb to the highest rate, print it, and write the scenario at it where that can be said."""
    import yaml
    from servesim.config.overrides import override, read_tree
    from servesim.files.write import open_text
    from servesim.runs.steady_state import STEADY
    from servesim.study.capacity import Ladder, at_rate, bound, told

    if not 0 < args.precision < 1:
        raise BadInput(f"--precision: expected a part between 0 and 1, got {args.precision:g}")
    tree = override(read_tree(args.file), args.set)
    if args.goodput:
        tree["slo"] = objectives(args.goodput)
    bounds = [bound(given) for given in args.meet]
    ladder = Ladder(tree, bounds, args.replications or 1, where, STEADY if args.steady else None)
    best = ladder.climb(args.precision)
    print(told(ladder, best))
    found = None if best is None else at_rate(tree, best)
    if args.output and found is not None:
        with open_text(Path(args.output) / "best.yaml") as file:
            yaml.safe_dump(found, file, sort_keys=False)
        print(f"scenario: {Path(args.output) / 'best.yaml'}")
    return 3 if best is None else 0
