"""`sim compare`: paired differences of two scenarios, runs or configurations."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from servesim.core.limits import check_fraction, check_replications

from .notes import note_uncertainty
from .options import (
    add_executor_options,
    add_further_percentiles,
    add_intervals,
    add_json,
    add_setting,
    add_trust,
    fraction,
)

if TYPE_CHECKING:
    from servesim.statistics.objective import Objective
    from servesim.study.compare import Difference
    from servesim.study.compared_runs import ComparedRuns


def register(commands: Any) -> None:
    compare = commands.add_parser(
        "compare", help="compare two scenarios, runs or configurations of a sweep",
        description="Compare B with A. Scenario files run on common random numbers. They and configurations of sweeps "
        "are paired by replication, folders of single runs with the same requests by batches of requests. Runs with "
        "other requests are not paired: their intervals are wider.",
    )  # fmt: skip
    compare.add_argument(
        "a", metavar="A",
        help="scenario YAML file, folder of `sim run -o`, or sweep: DIR is its winner, DIR:CONFIG one configuration, "
        "DIR:CONFIG@RATE one rate",
    )  # fmt: skip
    compare.add_argument("b", metavar="B", help="file or folder to compare with A, given in the same way")
    compare.add_argument(
        "--metric", action="append", metavar="NAME",
        help="metric to compare (repeatable; default: makespan, output_throughput, mean TTFT, TPOT and E2EL)",
    )  # fmt: skip
    add_further_percentiles(compare)
    compare.add_argument(
        "--replications", type=int, default=10, metavar="N", help="replications of each scenario (default 10)"
    )
    compare.add_argument(
        "--confidence", type=fraction, default=0.95, metavar="FRACTION", help="confidence level (default 95%%)"
    )
    compare.add_argument(
        "--tolerance", type=fraction, metavar="FRACTION",
        help="exit with 3 if the relative difference of a metric is larger, e.g. 0.05 or 5%%",
    )  # fmt: skip
    add_setting(compare, "override a scenario key of A and B (repeatable)")
    add_intervals(compare, "each scenario")
    compare.add_argument("-o", "--output", metavar="DIR", help="folder for report.html")
    add_json(compare)
    add_trust(compare)
    add_executor_options(compare)
    compare.set_defaults(run=run_compare)


def run_compare(args: argparse.Namespace) -> int:
    """Compare and print; return 3 if a metric is outside the tolerance."""
    import json

    from servesim.study.compare import compare, differences_json
    from servesim.study.compared_runs import load_runs
    from servesim.study.executor import open_executor

    tolerance, draws, percentiles = args.tolerance, args.intervals or 0, args.metric_percentiles
    check_fraction(args.confidence, "--confidence")
    check_replications(args.replications, "--replications")
    metrics = metrics_of(args)
    with open_executor(args.executor, args.jobs, args.replications + draws) as executor:
        options = (args.set, args.replications, executor, draws, percentiles)
        a, b = (load_runs(source, *options) for source in (args.a, args.b))
    simulated = {str(runs.profile): runs.profile for runs in (a, b) if runs.simulated}
    for profile in simulated.values() if draws else ():
        note_uncertainty(args, profile)
    differences = compare(a, b, metrics, args.confidence)
    if args.json:
        print(json.dumps(differences_json(a, b, differences, tolerance), indent=1))
    else:
        print_differences(args, a, b, differences)
    if args.output:
        from servesim.report.compare_page import write_compare_report

        path = Path(args.output) / "report.html"
        write_compare_report(a, b, differences, tolerance, path)
        print(f"report: {path}", file=sys.stderr if args.json else sys.stdout)
    return 3 if tolerance is not None and any(row.exceeds(tolerance) for row in differences) else 0


def metrics_of(args: argparse.Namespace) -> list[Objective]:
    """Return the metrics to compare: those of --metric, and the percentiles."""
    from servesim.runs.metric_table import metrics_in, percentile_metrics
    from servesim.statistics.objective import Objective, parse_objective

    metrics = [parse_objective(name, "--metric") for name in args.metric or metrics_in("compare")]
    further = [Objective(name, "min") for name in percentile_metrics(args.metric_percentiles)]
    return list(dict.fromkeys([*metrics, *further]))


def print_differences(
    args: argparse.Namespace, a: ComparedRuns, b: ComparedRuns, differences: Sequence[Difference]
) -> None:
    """Print the table, the comparison in sentences, and notes on the profiles."""
    from servesim.files.terminal import screen_of
    from servesim.runs.run_warnings import source_notes
    from servesim.study.compare import describe_pairs, format_table, name_of_b, summarise

    summary = summarise(differences, name_of_b(a, b), args.tolerance)
    text = f"{summary} {describe_pairs(differences, args.confidence)}"
    notes = [f"note: {note.text}" for note in source_notes([a.profile, b.profile])]
    print(f"A: {a.name}", f"B: {b.name}", format_table(differences, screen_of(sys.stdout)), text, *notes, sep="\n")
