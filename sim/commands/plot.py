"""`sim plot`: the figures of an experiment as PNG or SVG files."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def register(commands: Any) -> None:
    """Add `sim plot`."""
    plot = commands.add_parser(
        "plot", help="draw the figures of an experiment",
        description="Draw what report.html shows (Pareto front, knobs, where the time went, queues) with matplotlib.",
    )  # fmt: skip
    plot.add_argument("folder", metavar="DIR", help="experiment folder of `sim sweep`")
    plot.add_argument("-o", "--output", metavar="DIR", help="where to (default: DIR/plots)")
    plot.add_argument("--format", choices=["png", "svg"], default="png")
    plot.set_defaults(run=run_plot)


def run_plot(args: argparse.Namespace) -> int:
    """Draw and say what was written."""
    from servesim.report.png import plot
    from servesim.study.sweep import load

    for path in plot(load(args.folder), Path(args.output or Path(args.folder) / "plots"), args.format):
        print(path)
    return 0
