"""`sim run`: simulate one scenario, print its metrics, write its files."""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from servesim.core import BadInput

from .notes import print_note, print_warning
from .options import (
    add_contest_options,
    add_intervals,
    add_json,
    add_percentiles,
    add_scenario_options,
    read_scenario,
)

if TYPE_CHECKING:
    from servesim.config.scenario import Scenario
    from servesim.runs.simulate import Run

SLOW_SECONDS = 3.0  # of all draws: shorter than starting worker processes


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
    add_json(out)
    add_percentiles(out)
    spread = run.add_argument_group("intervals")
    add_intervals(spread, "the scenario")
    spread.add_argument(
        "-j",
        "--jobs",
        type=int,
        metavar="N",
        help="worker processes of --intervals (default: one per core if it is slow)",
    )
    checks = run.add_argument_group("checks")
    checks.add_argument(
        "--no-fast-forward", action="store_true", help="call the policy in every decode step (slower, same result)"
    )
    add_contest_options(run)
    run.set_defaults(run=run_scenario)


def run_scenario(args: argparse.Namespace) -> int:
    """Simulate and print; return 1 if the engine got stuck."""
    import json

    from servesim.files.write import check_new, open_text
    from servesim.runs.decision_log import DecisionLog
    from servesim.runs.run_folder import SENT, write_run
    from servesim.runs.run_warnings import run_warnings, source_notes
    from servesim.runs.simulate import load_trace, simulate
    from servesim.runs.text import show_run

    if args.output:
        check_new(Path(args.output) / SENT, "measured run")
    tree, scenario = read_scenario(args)
    trace = load_trace(scenario)
    for remark in trace.remarks():
        print_note(args, remark)
    with ExitStack() as files:
        observers: list[Any] = []
        if args.decisions:
            observers.append(DecisionLog(files.enter_context(open_text(args.decisions))))
        if args.timeline:
            from servesim.runs.timeline import Timeline

            observers.append(files.enter_context(Timeline(args.timeline)))
        start = time.perf_counter()
        run = simulate(scenario, trace, observers, fast_forward=not args.no_fast_forward)
        run.measures.add_percentiles(args.metric_percentiles)
        if args.intervals:
            add_intervals_of(run, tree, args, time.perf_counter() - start)
        warnings = run_warnings(scenario, run.profile, trace)
        run.notes = [*warnings, *source_notes([run.profile])]  # the table prints the latter
        if args.output:  # if this fails, the other files do not appear either
            write_run(run, args.output)
    for remark in filter(None, [*remarks_of(args, scenario), run.server.policy.remark(run.server.view.state)]):
        print_note(args, remark)
    for warning in warnings:
        print_warning(warning.text)
    print(json.dumps(run.result(), indent=1) if args.json else show_run(run, args.metric_percentiles))
    return 1 if run.stuck else 0


def remarks_of(args: argparse.Namespace, scenario: Scenario) -> list[str]:
    """Return what the command chose itself: the profile of a policy without one, and the number of KV blocks."""
    from servesim.config.memory import describe_budget, memory_budget

    remarks = []
    if scenario.policy["name"] != "llm-serving" and "profile" not in scenario.model_fields_set:
        remarks.append(f"profile: {scenario.profile}, the default; --profile selects another one")
    if scenario.engine.device_memory is not None:
        budget = memory_budget(scenario.engine, scenario.profile)
        remarks.append(f"engine.num_blocks: {describe_budget(budget)}")
    return remarks


def add_intervals_of(run: Run, tree: dict[str, Any], args: argparse.Namespace, seconds: float) -> None:
    """Repeat a run of a scenario with random cost models; `seconds` is its duration."""
    from servesim.runs.intervals import draws_of, intervals_of
    from servesim.study.executor import open_executor
    from servesim.study.single_run import Task, context_json

    tasks = [Task(0, 0, {}, draw=draw) for draw in draws_of(run.profile, args.intervals)]
    jobs = 1 if args.jobs is None and seconds * len(tasks) < SLOW_SECONDS else args.jobs
    with open_executor("local", jobs, len(tasks)) as executor:
        records = [record for _, record in executor.run(context_json(tree), tasks)]
    for record in records:
        if "error" in record:
            raise BadInput(f"--intervals: {record['error']}")
    draws = [{**record["metrics"], "stuck": record["stuck"]} for record in sorted(records, key=itemgetter("draw"))]
    run.intervals = intervals_of(run.result(), draws, run.profile)
