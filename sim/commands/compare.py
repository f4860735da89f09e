"""`sim compare`: paired differences of two scenarios, runs or configurations."""

from __future__ import annotations

import argparse
from typing import Any

from servesim.core import BadInput
from servesim.core.limits import MAX_RUNS

from .options import add_executor_options, add_intervals, add_trust, fraction, remark_uncertainty


def register(commands: Any) -> None:
    compare = commands.add_parser(
        "compare", help="compare two scenarios, runs or configurations of a sweep",
        description="Compare B with A by paired differences. Scenario files run on common random numbers. They and "
        "configurations of sweeps are paired by replication, folders of single runs by batches of requests.",
    )  # fmt: skip
    compare.add_argument(
        "a", metavar="A",
        help="scenario YAML file, folder of `sim run -o`, or sweep: DIR is its winner, DIR:CONFIG one configuration",
    )  # fmt: skip
    compare.add_argument("b", metavar="B", help="file or folder to compare with A, given in the same way")
    compare.add_argument(
        "--metric", action="append", metavar="NAME",
        help="metric to compare (repeatable; default: makespan, output_throughput, mean TTFT, TPOT and E2EL)",
    )  # fmt: skip
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
    compare.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a scenario key of A and B (repeatable)",
    )
    add_intervals(compare, "each scenario")
    compare.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_trust(compare)
    add_executor_options(compare)
    compare.set_defaults(run=run_compare)


def run_compare(args: argparse.Namespace) -> int:
    """Compare and print; return 3 if a metric is outside the tolerance."""
    import json

    from servesim.study.compare import DEFAULT_METRICS, compare, format_table, load_runs, summarise
    from servesim.study.executor import close_on_exit, make_executor, process_count
    from servesim.study.objective import parse_objective

    tolerance = args.tolerance
    if not 0 < args.confidence < 1:
        raise BadInput(f"--confidence: expected a fraction between 0 and 1, got {args.confidence:g}")
    if not 1 <= args.replications <= MAX_RUNS:
        raise BadInput(f"--replications: expected at least 1, at most {MAX_RUNS}, got {args.replications}")
    metrics = [parse_objective(name, "--metric") for name in args.metric or DEFAULT_METRICS]
    draws = args.intervals or 0
    jobs = min(process_count(args.jobs), args.replications + draws)
    with close_on_exit(make_executor(args.executor, jobs)) as executor:
        a, b = (load_runs(source, args.set, args.replications, executor, draws) for source in (args.a, args.b))
    for profile in [] if not draws else [a.profile] if a.profile == b.profile else [a.profile, b.profile]:
        if profile is not None:
            remark_uncertainty(profile)
    differences = compare(a, b, metrics, args.confidence)
    if args.json:
        rows = {}
        for row in differences:
            change, relative = row.change, row.relative
            rows[row.objective.metric] = {
                "a": row.a, "b": row.b, "difference": change.mean, "half": change.half_width, "part": relative.mean,
                "pairs": change.n, "words": row.describe(), **({"draws": list(row.draws)} if row.draws else {}),
            }  # fmt: skip
        print(
            json.dumps(
                {"a": a.name, "b": b.name, "figures": rows, "verdict": summarise(differences, tolerance)}, indent=1
            )
        )
    else:
        size = max(row.change.n for row in differences)
        kind = next(row.pairs for row in differences if row.change.n == size)
        pairs = f"{size} pairs of {kind}, {100 * args.confidence:g} % t intervals" if size > 1 else "One run each"
        count = max(len(row.draws) for row in differences)
        pairs += f" and {count} draws of the cost model (calibration uncertainty)" if count else ""
        print(f"A: {a.name}\nB: {b.name}\n{format_table(differences)}\n{summarise(differences, tolerance)} {pairs}.")
    return 3 if tolerance is not None and any(row.exceeds(tolerance) for row in differences) else 0
