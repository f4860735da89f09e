"""`sim report`: the page of an experiment, written anew from its journal."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def register(commands: Any) -> None:
    """Add `sim report`."""
    report = commands.add_parser(
        "report", help="write report.html of an experiment",
        description="Write one offline page on an experiment, from the runs that are complete so far.",
    )  # fmt: skip
    report.add_argument("folder", metavar="DIR", help="experiment folder of `sim sweep`")
    report.add_argument("-o", "--output", metavar="FILE", help="the page (default: DIR/report.html)")
    report.set_defaults(run=run_report)


def run_report(args: argparse.Namespace) -> int:
    """Write the page and say where."""
    from servesim.report.page import write_report
    from servesim.study.sweep import load

    path = Path(args.output) if args.output else Path(args.folder) / "report.html"
    write_report(load(args.folder), path)
    print(path)
    return 0
