"""`sim report` and `sim plot`: write the report page of a sweep, or its charts as files."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def register(commands: Any) -> None:
    report = commands.add_parser(
        "report", help="write report.html of a sweep",
        description="Write one offline HTML page from the finished runs of a sweep.",
    )  # fmt: skip
    report.add_argument("folder", metavar="DIR", help="folder of `sim sweep` or `sim search`")
    report.add_argument("-o", "--output", metavar="FILE", help="file to write (default: DIR/report.html)")
    report.set_defaults(run=run_report)

    plot = commands.add_parser(
        "plot", help="draw the charts of a sweep",
        description="Draw the charts of report.html with matplotlib: Pareto front, parameters, time breakdown, queues.",
    )  # fmt: skip
    plot.add_argument("folder", metavar="DIR", help="folder of `sim sweep` or `sim search`")
    plot.add_argument("-o", "--output", metavar="DIR", help="folder for the charts (default: DIR/plots)")
    plot.add_argument("--format", choices=["png", "svg"], default="png", help="file format (default png)")
    plot.set_defaults(run=run_plot)


def run_report(args: argparse.Namespace) -> int:
    """Write the page and print its path."""
    from servesim.report.page import write_report
    from servesim.study.sweep import load_summary

    path = Path(args.output) if args.output else Path(args.folder) / "report.html"
    write_report(load_summary(args.folder), path)
    print(path)
    return 0


def run_plot(args: argparse.Namespace) -> int:
    """Draw the charts and print their paths."""
    from servesim.report.png import plot
    from servesim.study.sweep import load_summary

    for path in plot(load_summary(args.folder), Path(args.output or Path(args.folder) / "plots"), args.format):
        print(path)
    return 0
