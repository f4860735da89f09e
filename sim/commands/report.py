"""`sim report`, `sim plot` and `sim table`: a run or a sweep as a page, a sweep as charts or as a table."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from . import options
from .notes import print_json, print_warning


def register(commands: Any) -> None:
    report = commands.add_parser(
        "report", run=run_report, help="write report.html of a sweep or a run",
        description="Write one offline HTML page from the finished runs of a sweep, or from a single run.",
    )  # fmt: skip
    sources = "folder of `sim sweep`, `sim search`, `sim capacity`, `sim run` or `sim replay`"
    options.add(report, {"DIR=folder": sources, "-o, --output FILE": "file to write (default: DIR/report.html)"})

    plot = commands.add_parser(
        "plot", run=run_plot, help="draw the charts of a sweep",
        description="Draw charts of report.html with matplotlib: trade-offs and parameters; "
        "for a sweep over rates, its curves.",
    )  # fmt: skip
    options.add(plot, {
        "DIR=folder": "folder of `sim sweep`, `sim search` or `sim capacity`",
        "-o, --output DIR": "folder for the charts (default: DIR/plots)",
        "--format {png,svg}": "file format (default png)",
    })  # fmt: skip

    table = commands.add_parser(
        "table", run=run_table, help="print a metric of a sweep over two parameters",
        description="Print one metric of a sweep as a table: the values of one parameter in rows, of another in "
        "columns. The other parameters have the winner's values.",
    )  # fmt: skip
    options.add(table, {
        "DIR=folder": "folder of `sim sweep` or `sim search`",
        "--rows KEY": "parameter of the rows, e.g. policy.max_num_seqs (default: a strong one)",
        "--columns KEY": "parameter of the columns (default: a strong one)",
        "--metric NAME": "metric of the cells (default: the first objective)",
        "--best": "use the best values of the other parameters for each cell",
        "--rate RATE": "rate of a sweep over rates, requests per second",
    })  # fmt: skip
    options.add_json(table)


def run_report(args: argparse.Namespace) -> int:
    """Write the page and print its path."""
    from servesim.report.run_page import write_run_report
    from servesim.report.sweep_page import write_report
    from servesim.runs.run_folder import RESULT, read_run
    from servesim.study.result import load_result

    folder = Path(args.folder)
    path = Path(args.output) if args.output else folder / "report.html"
    if (folder / RESULT).is_file():
        write_run_report(read_run(folder), path)
    else:
        write_report(load_result(args.folder), path)
    print(path)
    return 0


def run_plot(args: argparse.Namespace) -> int:
    """Draw the charts and print their paths."""
    from servesim.report.figures import plot
    from servesim.study.result import load_result

    paths = plot(load_result(args.folder), Path(args.output or Path(args.folder) / "plots"), args.format)
    print(*paths, sep="\n", end="\n" * bool(paths))
    if not paths:
        print_warning(f"{args.folder}: no chart: no two configurations that can win have different metrics")
    return 0


def run_table(args: argparse.Namespace) -> int:
    """Print the table."""
    import math

    from servesim.config.user_code import use_access
    from servesim.files.terminal import screen_of
    from servesim.study.knob_table import format_knob_table, knob_table
    from servesim.study.sweep import load_summary

    with use_access(None):  # it only reads: it executes no policy file
        table = knob_table(load_summary(args.folder, args.rate), args.rows, args.columns, args.metric, args.best)
    if not args.json:
        print(format_knob_table(table, screen_of(sys.stdout)))
        return 0
    levels = [[None if row is None else row.mean(table.metric) for row in cells] for cells in table.cells]
    values = [[None if level is None or math.isnan(level) else level for level in line] for line in levels]
    names = {"metric": table.metric, "rows": table.row_key, "columns": table.column_key, "others": table.fixed}
    data = {**names, "row_values": table.row_values, "column_values": table.column_values, "values": values}
    print_json(data)
    return 0
