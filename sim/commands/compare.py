"""`sim compare`: two scenarios, runs or configurations, pair by pair, with a verdict."""

from __future__ import annotations

import argparse
from typing import Any

from servesim.core import BadInput

from .options import add_executor_options, share


def register(commands: Any) -> None:
    compare = commands.add_parser(
        "compare", help="compare two scenarios, runs or configurations of a sweep",
        description="Compare B with A, pair by pair: scenario files are run on common random numbers, folders of runs "
        "are paired by batches of requests, configurations of sweeps (DIR, DIR:CONFIG) by replication.",
    )  # fmt: skip
    compare.add_argument("a", metavar="A", help="scenario YAML, folder of `sim run -o`, or sweep folder")
    compare.add_argument("b", metavar="B")
    compare.add_argument("--metric", action="append", metavar="NAME", help="figures to compare (repeatable)")
    compare.add_argument("--replications", type=int, default=10, metavar="N", help="of scenarios (default 10)")
    compare.add_argument("--confidence", type=share, default=0.95, metavar="SHARE", help="of intervals (95%%)")
    compare.add_argument(
        "--tolerance", type=share, metavar="SHARE", help="exit 3 if a figure differs by more: 0.05 or 5%%"
    )
    compare.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of both")
    compare.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_executor_options(compare)
    compare.set_defaults(run=run_compare)


def run_compare(args: argparse.Namespace) -> int:
    """Compare and judge; 3 when a figure is outside the tolerance."""
    import json

    from servesim.study.compare import METRICS, compare, side, table, verdict
    from servesim.study.executor import core_count, executing, executor
    from servesim.study.objective import objective

    tolerance = args.tolerance
    if not 0 < args.confidence < 1 or args.replications < 1:
        raise BadInput("--confidence: expected a part between 0 and 1, --replications: at least 1")
    wanted = [objective(name, "--metric") for name in args.metric or METRICS]
    with executing(executor(args.executor, min(core_count(args.jobs), args.replications))) as where:
        a, b = (side(given, args.set, args.replications, where) for given in (args.a, args.b))
    found = compare(a, b, wanted, args.confidence)
    if args.json:
        rows = {one.objective.metric: {"a": one.a, "b": one.b, "difference": one.change.mean, "half": one.change.half,
                                       "part": one.part.mean, "pairs": one.change.size, "words": one.words()}
                for one in found}  # fmt: skip
        print(json.dumps({"a": a.name, "b": b.name, "figures": rows, "verdict": verdict(found, tolerance)}, indent=1))
    else:
        size = max(one.change.size for one in found)
        kind = next(one.pairs for one in found if one.change.size == size)
        pairs = f"{size} pairs of {kind}, {100 * args.confidence:g} % t intervals" if size > 1 else "One run each"
        print(f"A: {a.name}\nB: {b.name}\n{table(found)}\n{verdict(found, tolerance)} {pairs}.")
    return 3 if tolerance is not None and any(one.outside(tolerance) for one in found) else 0
