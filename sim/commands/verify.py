"""`sim verify`: a simulated run against a measured one, or many against many."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

from .options import add_tolerance


def register(commands: Any) -> None:
    verify = commands.add_parser(
        "verify",
        help="simulated against measured: errors, where they come from, ranks",
        description="Compare folders of `sim run -o` and `sim replay -o`; folders of such folders are paired by name.",
    )
    verify.add_argument("simulated", metavar="SIM", help="folder of a simulated run, or of several")
    verify.add_argument("measured", metavar="LIVE", help="folder of a measured run, or of several")
    verify.add_argument("--profile", metavar="NAME", help="for splitting the error (the simulated run's if left out)")
    verify.add_argument("-o", "--output", metavar="DIR", help="write verify.json and verify.png there")
    add_tolerance(verify)
    verify.set_defaults(run=verify_folders)


def verify_folders(args: argparse.Namespace) -> int:
    """Compare, print, judge."""
    from servesim.calibrate.replay.resimulate import compare_runs
    from servesim.calibrate.replay.verify import pair_folders
    from servesim.runs.run_folder import read_run

    pairs, left_out = pair_folders(Path(args.simulated), Path(args.measured))
    for name in left_out:
        print(f"left out, only on one side: {name}")
    sides = {name: (read_run(ours), read_run(theirs)) for name, ours, theirs in pairs}
    comparisons = [compare_runs(name, *both, args.profile) for name, both in sides.items()]
    return judge(args, comparisons, sides, args.output)


def judge(args: argparse.Namespace, comparisons: Sequence[Any], sides: Mapping[str, Any], output: Optional[str]) -> int:
    """Print and write comparisons; return 3 when one is outside the tolerance."""
    import json

    from servesim.calibrate.replay.verify import JUDGED, as_json, ranks
    from servesim.calibrate.replay.verify_report import plot, rank_text, text, write_report

    judged = args.metrics or JUDGED
    for comparison in comparisons:
        for metric in judged:
            comparison.line(metric)  # an unknown name is bad input before anything is printed
    if args.json:
        report = {"settings": [as_json(c) for c in comparisons], "kendall_tau": ranks(comparisons)}
        print(json.dumps(report, indent=1, default=str))
    else:
        for comparison in comparisons:
            print(text(comparison, judged, args.tolerance))
        if len(comparisons) > 1:
            print(rank_text(comparisons))
    if output:
        write_report(comparisons, Path(output), args.tolerance)
        plot(sides, comparisons, Path(output) / "verify.png")
    if args.tolerance is None:
        return 0
    return 3 if any(c.outside(args.tolerance, judged) for c in comparisons) else 0
