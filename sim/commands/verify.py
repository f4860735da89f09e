"""`sim verify`: compare simulated runs with measured runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from . import options
from .notes import print_json, print_note

if TYPE_CHECKING:
    from servesim.calibrate.replay.verify import Comparison


def register(commands: Any) -> None:
    verify = commands.add_parser(
        "verify", run=verify_folders, help="compare simulated with measured runs: errors, their sources, ranks",
        description="Compare folders of `sim run -o` and `sim replay -o`. Folders that hold several runs are paired "
        "by name.",
    )  # fmt: skip
    options.add(verify, {
        "SIM=simulated": "folder of one or several simulated runs",
        "LIVE=measured": "folder of one or several measured runs, or the result file of vllm bench, guidellm or aiperf",
        "--profile NAME": "profile used to find the sources of the error (default: that of the simulated run)",
        "-o, --output DIR": "folder for report.html and verify.json",
    })  # fmt: skip
    options.add(verify, options.FURTHER_PERCENTILES, default=())
    options.add_tolerance(verify)


def verify_folders(args: argparse.Namespace) -> int:
    """Compare the runs, print the errors, apply the tolerance."""
    from servesim.calibrate.replay.measured_run import benchmark_run
    from servesim.calibrate.replay.resimulate import compare_runs
    from servesim.calibrate.replay.verify import pair_folders
    from servesim.runs.run_folder import read_run, run_data

    simulated, measured = Path(args.simulated), Path(args.measured)
    if measured.is_file():  # of a load generator
        run = benchmark_run(measured)
        print_note(args, *(f"{measured}: {note}" for note in run.backend["notes"]))
        runs = [("", read_run(simulated), replace(run_data(run), name=measured.stem))]
    else:
        pairs, left_out = pair_folders(simulated, measured)
        for name in left_out:
            print_note(args, f"skipped, found in one folder only: {name}")
        runs = [(name, read_run(ours), read_run(theirs)) for name, ours, theirs in pairs]
        for name, ours, _ in runs:
            if ours.scenario is not None and not ours.scenario.policy_is_loadable:
                policy = ours.scenario.policy["name"]
                message = f"policy {policy} was not loaded, so the sources of the error are not shown"
                print_note(args, f"{name or args.simulated}: {message}")
    return report_comparisons(
        args, [compare_runs(*each, args.profile, args.metric_percentiles) for each in runs], args.output
    )


def report_comparisons(args: argparse.Namespace, comparisons: Sequence[Comparison], output: Optional[str]) -> int:
    """Print and write comparisons; return 3 if one is outside the tolerance."""
    from servesim.calibrate.replay.comparison_text import format_comparison, format_ranks
    from servesim.calibrate.replay.verify import CHECKED_METRICS, comparisons_to_json
    from servesim.files.write import write_json
    from servesim.runs.run_warnings import source_notes

    metrics = args.metrics or CHECKED_METRICS
    for comparison in comparisons:
        for metric in metrics:
            comparison.row(metric)  # raises BadInput for an unknown name before anything is printed
    content = comparisons_to_json(comparisons, args.tolerance)
    if args.json:
        print_json(content, default=str)
    else:
        for comparison in comparisons:
            print(format_comparison(comparison, metrics, args.tolerance))
        if len(comparisons) > 1:
            print(format_ranks(comparisons))
        scenarios = [comparison.simulated.scenario for comparison in comparisons]
        for note in source_notes(scenario.profile for scenario in scenarios if scenario is not None):
            print(f"note: {note.text}")
    if output:
        write_json(Path(output) / "verify.json", content)
        write_report(comparisons, metrics, args.tolerance, Path(output))
    if args.tolerance is None:
        return 0
    return 3 if any(c.outside(args.tolerance, metrics) for c in comparisons) else 0


def write_report(
    comparisons: Sequence[Comparison], metrics: Sequence[str], tolerance: Optional[float], folder: Path
) -> None:
    """Write report.html."""
    from servesim.calibrate.replay.verify import latency_pairs, rank_correlations
    from servesim.report.verify_page import VerifiedRun, write_verify_report

    runs = []
    for comparison in comparisons:
        simulated, measured = comparison.simulated, comparison.measured
        latencies = {name: list(latency_pairs(name, simulated, measured).values()) for name in ("ttft", "e2el")}
        outside = [] if tolerance is None else [row.metric for row in comparison.outside(tolerance, metrics)]
        runs.append(VerifiedRun(comparison.name, comparison.as_dict(), latencies, simulated.scenario, outside))
    ranks = rank_correlations(comparisons) if len(comparisons) > 1 else {}
    write_verify_report(runs, metrics, tolerance, ranks, folder / "report.html")
