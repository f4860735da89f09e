"""`sim run`: one scenario, its figures, its files."""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from typing import Any

from .options import add_scenario_options, scenario_of


def register(commands: Any) -> None:
    run = commands.add_parser("run", help="simulate one scenario", description="Simulate one scenario.")
    add_scenario_options(run)
    out = run.add_argument_group("output")
    out.add_argument("-o", "--output", metavar="DIR", help="write manifest.json, result.json and requests.csv there")
    out.add_argument("--decisions", metavar="FILE", help="write one JSON line a step (.gz is compressed)")
    out.add_argument("--timeline", metavar="FILE", help="write a trace for Perfetto (FILE.json.gz)")
    out.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
    run.add_argument("--no-leaps", action="store_true", help="decide every iteration anew (slower, same result)")
    run.set_defaults(run=run_scenario)


def run_scenario(args: argparse.Namespace) -> int:
    """Simulate and report; 1 when the engine got stuck."""
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
        run = simulate(scenario, trace, observers, leaps=not args.no_leaps)
    if args.output:
        write_run(run, args.output)
    print(json.dumps(run.result(), indent=1) if args.json else show_run(run))
    return 1 if run.stuck else 0
