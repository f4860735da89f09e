"""`sim compare`: paired differences of two scenarios, runs or configurations."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from servesim.core.limits import check_fraction, check_replications

from . import options
from .notes import note_uncertainty, print_result

if TYPE_CHECKING:
    from servesim.statistics.objective import Objective
    from servesim.study.compared_runs import ComparedRuns


def register(commands: Any) -> None:
    compare = commands.add_parser(
        "compare", run=run_compare, help="compare two scenarios, runs or configurations of a sweep",
        description="Compare B with A. Scenario files run on common random numbers. They and configurations of sweeps "
        "are paired by replication, folders of single runs with the same requests by batches of requests. Runs with "
        "other requests are not paired: their intervals are wider.",
    )  # fmt: skip
    options.add(compare, {
        "A": "scenario YAML file, folder of `sim run -o`, or sweep: DIR is its winner, DIR:CONFIG one configuration, "
        "DIR:CONFIG@RATE one rate",
        "B": "file or folder to compare with A, given in the same way",
    })  # fmt: skip
    default = "those that fit the load first, see docs/metrics.md; then throughput, mean TTFT, TPOT and E2EL"
    options.add(compare, {"--metric NAME": f"metric to compare (repeatable; default: {default})"})
    options.add(compare, options.FURTHER_PERCENTILES, default=())
    options.add(compare, {
        "--replications N": "replications of each scenario (default 10)",
        **options.CONFIDENCE,
        "--set KEY=VALUE": "override a scenario key of A and B (repeatable)",
    })  # fmt: skip
    options.add_intervals(compare, "each scenario")
    options.add(compare, {"-o, --output DIR": "folder for report.html"})
    options.add_json(compare)
    options.add_trust(compare)
    options.add_executor_options(compare)


def run_compare(args: argparse.Namespace) -> int:
    """Compare and print."""
    from servesim.config.user_code import use_access
    from servesim.statistics.objective import parse_objective
    from servesim.study.compared_runs import load_runs
    from servesim.study.executor import open_executor

    named = [parse_objective(name, "--metric") for name in args.metric]
    draws, percentiles = args.intervals or 0, args.metric_percentiles
    check_fraction(args.confidence, "--confidence")
    check_replications(args.replications, "--replications")
    with open_executor(args.executor, args.jobs, args.replications + draws) as executor:
        a, b = load_runs((args.a, args.b), args.set, args.replications, executor, draws, percentiles)
    with use_access(None):  # all runs have ended, and a stored one may name any code
        show_comparison(args, a, b, named)
    return 0


def show_comparison(args: argparse.Namespace, a: ComparedRuns, b: ComparedRuns, named: Sequence[Objective]) -> None:
    """Print the comparison, and write the report."""
    from servesim.files.terminal import screen_of
    from servesim.study.compare import Compared, compare

    if args.intervals:
        note_uncertainty(args, [profile for runs in (a, b) if runs.simulated for profile in runs.profiles])
    differences = compare(a, b, metrics_of(named, args, a, b), args.confidence)
    compared = Compared(a, b, differences, args.confidence)
    print_result(args, compared.as_json, lambda: compared.format(screen_of(sys.stdout)))
    if args.output:
        from servesim.report.compare_page import write_compare_report

        path = Path(args.output) / "report.html"
        write_compare_report(a, b, differences, path)
        print(f"report: {path}", file=sys.stderr if args.json else sys.stdout)


def metrics_of(
    named: Sequence[Objective], args: argparse.Namespace, a: ComparedRuns, b: ComparedRuns
) -> list[Objective]:
    """Return the metrics to compare: the named ones or those that fit the load, and the percentiles."""
    from servesim.runs.metric_table import percentile_metrics
    from servesim.statistics.objective import Objective
    from servesim.study.compare import default_objectives

    further = [Objective(name, "min") for name in percentile_metrics(args.metric_percentiles)]
    return list(dict.fromkeys([*(named or default_objectives(a, b)), *further]))
