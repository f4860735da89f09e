"""`sim calibrate`: real step costs, from a device, from samples, from logs of real runs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from .calibrate_device import register_check, register_fit, register_probe
from .endpoint import register_endpoint


def register(commands: Any) -> None:
    calibrate = commands.add_parser("calibrate", help="find out what steps cost on a device")
    kinds = calibrate.add_subparsers(metavar="WHAT", required=True)
    register_probe(kinds)
    register_fit(kinds)
    register_check(kinds)
    register_logs(kinds)
    register_endpoint(kinds)
    register_import(kinds)


def register_logs(kinds: Any) -> None:
    logs = kinds.add_parser(
        "logs",
        help="fit step costs to logs of real runs",
        description="Fit step costs to logs and reported totals of real runs: the simulator runs inside the fit.",
    )
    logs.add_argument("runs", metavar="RUNS.yaml", help="the runs, how each was set up and what was seen of it")
    logs.add_argument("-o", "--output", metavar="DIR", help="write profile.yaml there")
    logs.add_argument("--no-leave-out", action="store_true", help="do not fit again without each run (faster)")
    logs.add_argument("-q", "--quiet", action="store_true", help="do not tell how the fit goes on")
    logs.set_defaults(run=fit_from_logs)


def register_import(kinds: Any) -> None:
    imported = kinds.add_parser("import", help="make a profile from another tool's measurements")
    imported.add_argument("kind", choices=["vidur"], help="whose measurements")
    imported.add_argument("file", metavar="FILE")
    imported.add_argument("-o", "--output", metavar="DIR", required=True, help="profile folder to write")
    imported.set_defaults(run=import_profile)


def fit_from_logs(args: argparse.Namespace) -> int:
    """Fit, tell, and write the profile."""
    from servesim.calibrate.logs.fit import fit_logs
    from servesim.calibrate.logs.observed_runs import read_runs
    from servesim.calibrate.logs.text import about, table
    from servesim.costs.device_profile import write_profile

    runs = read_runs(Path(args.runs))

    def told(line: str) -> None:
        if not args.quiet:
            print(line, file=sys.stderr, flush=True)

    fit = fit_logs(runs, told, leave_out=not args.no_leave_out)
    print(table(fit))
    if args.output:
        write_profile(Path(args.output), about(fit, runs), fit.cost)
        print(f"profile: {Path(args.output) / 'profile.yaml'}")
    return 0


def import_profile(args: argparse.Namespace) -> int:
    """Write a profile from another tool's file."""
    from servesim.calibrate.imports.vidur import import_vidur

    import_vidur(Path(args.file), Path(args.output))
    print(f"profile: {Path(args.output) / 'profile.yaml'}")
    return 0
