"""`sim run`: simulate one scenario, print its metrics, write its files."""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from typing import Any

from .options import add_renamed_option, add_scenario_options, scenario_of


def register(commands: Any) -> None:
    run = commands.add_parser(
        "run", help="simulate one scenario", description="Simulate one scenario and print its metrics."
    )
    add_scenario_options(run)
    out = run.add_argument_group("output")
    out.add_argument("-o", "--output", metavar="DIR", help="folder for manifest.json, result.json and requests.csv")
    out.add_argument(
        "--decisions",
        metavar="FILE",
        help="write the decision log: one JSON line per step (compressed if it ends in .gz)",
    )
    out.add_argument(
        "--timeline", metavar="FILE", help="write the timeline of the run for Perfetto, e.g. timeline.json.gz"
    )
    out.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
    add_renamed_option(
        run, "--no-fast-forward", "--no-leaps", action="store_true",
        help="call the policy in every decode step (slower, same result)",
    )  # fmt: skip
    run.set_defaults(run=run_scenario)


def run_scenario(args: argparse.Namespace) -> int:
    """Simulate and print; return 1 if the engine got stuck."""
    import json

    from servesim.files.write import open_text
    from servesim.runs.decision_log import DecisionLog
    from servesim.runs.run_folder import write_run
    from servesim.runs.simulate import load_trace, simulate
    from servesim.runs.text import show_run

    scenario = scenario_of(args)
    trace = load_trace(scenario)
    for remark in trace.remarks():
        print(f"sim: {remark}", file=sys.stderr)
    with ExitStack() as files:
        observers: list[Any] = []
        if args.decisions:
            observers.append(DecisionLog(files.enter_context(open_text(args.decisions))))
        if args.timeline:
            from servesim.runs.timeline import Timeline

            observers.append(files.enter_context(Timeline(args.timeline)))
        run = simulate(scenario, trace, observers, fast_forward=not args.no_fast_forward)
        if args.output:  # if this fails, the other files do not appear either
            write_run(run, args.output)
    print(json.dumps(run.result(), indent=1) if args.json else show_run(run))
    return 1 if run.stuck else 0
