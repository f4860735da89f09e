"""`sim calibrate`: get step costs from a device, from samples, from logs or from a running server."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from .calibrate_device import register_check, register_fit, register_probe
from .calibrate_import import register_import
from .endpoint import register_endpoint
from .options import add_renamed_option, add_trust


def register(commands: Any) -> None:
    calibrate = commands.add_parser("calibrate", help="measure or fit the step costs of a device")
    kinds = calibrate.add_subparsers(metavar="ACTION", required=True)
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
        description="Fit step costs to logs and reported totals of real runs. The fit runs the simulator for each "
        "trial value.",
    )
    logs.add_argument(
        "runs", metavar="RUNS.yaml", help="YAML file with the scenario and the measured times of each run"
    )
    logs.add_argument("-o", "--output", metavar="DIR", help="folder for profile.yaml (default: print the fit only)")
    add_renamed_option(
        logs, "--no-cross-validation", "--no-leave-out", action="store_true",
        help="skip the fits that leave out one run each (faster, no held-out error)",
    )  # fmt: skip
    add_trust(logs)
    logs.set_defaults(run=fit_from_logs)


def fit_from_logs(args: argparse.Namespace) -> int:
    """Fit, print the fit, and write the profile."""
    from servesim.calibrate.logs.fit import fit_logs
    from servesim.calibrate.logs.observed_runs import read_runs
    from servesim.calibrate.logs.text import format_table, profile_about
    from servesim.costs.device_profile import write_profile

    runs = read_runs(Path(args.runs))

    def show_progress(line: str) -> None:
        if not args.quiet:
            print(line, file=sys.stderr, flush=True)

    fit = fit_logs(runs, show_progress, leave_out=not args.no_cross_validation)
    print(format_table(fit))
    if args.output:
        write_profile(Path(args.output), profile_about(fit, runs), fit.cost)
        print(f"profile: {Path(args.output) / 'profile.yaml'}")
    return 0
