"""`sim verify`: a simulated run against a measured one, or many against many."""

from __future__ import annotations

import argparse
from typing import Any

from .tolerance import add_tolerance, judge


def register(commands: Any) -> None:
    """Add `sim verify`."""
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
    from pathlib import Path

    from servesim.calibrate.replay.resimulate import compare_runs
    from servesim.calibrate.replay.verify import pair_folders
    from servesim.runs.run_folder import read_run

    pairs, left_out = pair_folders(Path(args.simulated), Path(args.measured))
    for name in left_out:
        print(f"left out, only on one side: {name}")
    sides = {name: (read_run(ours), read_run(theirs)) for name, ours, theirs in pairs}
    comparisons = [compare_runs(name, *both, args.profile) for name, both in sides.items()]
    return judge(args, comparisons, sides, args.output)
