"""`sim report` and `sim plot`: an experiment as one page, or its figures as files."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def register(commands: Any) -> None:
    report = commands.add_parser(
        "report", help="write report.html of an experiment",
        description="Write one offline page on an experiment, from the runs that are complete so far.",
    )  # fmt: skip
    report.add_argument("folder", metavar="DIR", help="experiment folder of `sim sweep`")
    report.add_argument("-o", "--output", metavar="FILE", help="the page (default: DIR/report.html)")
    report.set_defaults(run=run_report)

    plot = commands.add_parser(
        "plot", help="draw the figures of an experiment",
        description="Draw what report.html shows (Pareto front, knobs, where the time went, queues) with matplotlib.",
    )  # fmt: skip
    plot.add_argument("folder", metavar="DIR", help="experiment folder of `sim sweep`")
    plot.add_argument("-o", "--output", metavar="DIR", help="where to (default: DIR/plots)")
    plot.add_argument("--format", choices=["png", "svg"], default="png")
    plot.set_defaults(run=run_plot)


def run_report(args: argparse.Namespace) -> int:
    """Write the page and say where."""
    from servesim.report.page import write_report
    from servesim.study.sweep import load

    path = Path(args.output) if args.output else Path(args.folder) / "report.html"
    write_report(load(args.folder), path)
    print(path)
    return 0


def run_plot(args: argparse.Namespace) -> int:
    """Draw and say what was written."""
    from servesim.report.png import plot
    from servesim.study.sweep import load

    for path in plot(load(args.folder), Path(args.output or Path(args.folder) / "plots"), args.format):
        print(path)
    return 0
