"""`sim run`: simulate one scenario, print its metrics, write its files."""

from __future__ import annotations

import argparse
import os
import time
from contextlib import ExitStack
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from servesim.core import BadInput

from . import options
from .notes import print_note, print_result, print_warning

if TYPE_CHECKING:
    from servesim.config.scenario import Scenario
    from servesim.runs.simulate import Run

SLOW_SECONDS = 3.0  # of all draws: shorter than starting worker processes


def register(commands: Any) -> None:
    run = commands.add_parser(
        "run", run=run_scenario, help="simulate one scenario",
        description="Simulate one scenario and print its metrics.",
    )  # fmt: skip
    options.add_scenario_options(run)
    options.add_names(run)
    out = run.add_argument_group("output")
    options.add(out, {
        "-o, --output DIR": "folder for manifest.json, result.json and requests.csv",
        "--decisions FILE": "write the decision log: one JSON line per step (compressed if it ends in .gz)",
        "--timeline FILE": "write the timeline of the run for Perfetto, e.g. timeline.json.gz",
    })  # fmt: skip
    options.add_json(out)
    options.add(out, options.PERCENTILES)
    spread = run.add_argument_group("intervals")
    options.add_intervals(spread, "the scenario")
    options.add(spread, {"-j, --jobs N": "worker processes of --intervals (default: one per core if it is slow)"})
    options.add_contest_options(run)


def run_scenario(args: argparse.Namespace) -> int:
    """Simulate and print; return 1 if the engine got stuck."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy would start a thread per core that has nothing to do
    from servesim.config.layers import assemble
    from servesim.config.scenario import scenario_from
    from servesim.runs.run_warnings import run_warnings, source_notes
    from servesim.runs.simulate import load_trace, simulate
    from servesim.runs.text import show_run

    check_output(args.output)
    layers, notes = options.layers_with_server(args)
    tree = assemble(layers)
    scenario = scenario_from(tree, args.scenario or "scenario")
    trace = load_trace(scenario)
    print_note(args, *trace.remarks())
    with ExitStack() as files:
        observers = open_observers(args, scenario, files)
        start = time.perf_counter()
        run = simulate(scenario, trace, observers)
        run.measures.add_percentiles(args.metric_percentiles)
        if args.intervals:
            add_intervals_of(run, tree, args, time.perf_counter() - start)
        warnings = run_warnings(scenario, run.profile, trace)
        run.notes = [*warnings, *source_notes(run.profiles)]  # the table prints the latter
        if args.output:  # if this fails, the other files do not appear either
            from servesim.runs.run_folder import write_run

            write_run(run, args.output)
    of_policy = run.server.policy.remark(run.server.view.state)
    print_note(args, *notes, *remarks_of(args, scenario), *([of_policy] if of_policy else []))
    print_warning(*(warning.text for warning in warnings))
    print_result(args, run.result, lambda: show_run(run, args.metric_percentiles))
    return 1 if run.stuck else 0


def check_output(folder: Optional[str]) -> None:
    """Raise BadInput if the folder has a measured run, before the simulation."""
    if folder:
        from servesim.files.write import check_new
        from servesim.runs.run_folder import SENT

        check_new(Path(folder) / SENT, "measured run")


def open_observers(args: argparse.Namespace, scenario: Scenario, files: ExitStack) -> list[Any]:
    """Return what writes the decision log and the timeline; their files are closed with `files`."""
    observers: list[Any] = []
    if args.decisions:
        from servesim.files.write import open_text
        from servesim.runs.decision_log import DecisionLog

        observers.append(DecisionLog(files.enter_context(open_text(args.decisions))))
    if args.timeline:
        from servesim.runs.timeline import Timeline

        names = [] if scenario.fleet is None else scenario.fleet.names
        observers.append(files.enter_context(Timeline(args.timeline, names)))
    return observers


def remarks_of(args: argparse.Namespace, scenario: Scenario) -> list[str]:
    """Return what the command chose itself: the profile of a policy without one, and the number of KV blocks."""
    from servesim.config.memory import describe_budget, memory_budget
    from servesim.costs.named_profile import is_named
    from servesim.costs.public_models import alias_note

    remarks, given = [], scenario.model_fields_set
    if args.scenario and not {"policy", "server_config"} & given and "contest" not in (scenario.workload or {}):
        remarks.append(f"policy: {scenario.policy['name']}, the default; --policy selects another server")
    if scenario.policy["name"] != "llm-serving" and "profile" not in given:
        remarks.append(f"profile: {scenario.profile}, the default; --profile selects another one")
    profile = scenario.profile
    if isinstance(profile, dict) and is_named(profile) and (alias := alias_note(str(profile.get("device")))):
        remarks.append(alias)
    if scenario.engine.device_memory is not None:
        budget = memory_budget(scenario.engine, scenario.profile)
        remarks.append(f"engine.num_blocks: {describe_budget(budget)}")
    return remarks


def add_intervals_of(run: Run, tree: dict[str, Any], args: argparse.Namespace, seconds: float) -> None:
    """Repeat a run of a scenario with random cost models; `seconds` is its duration."""
    from servesim.runs.intervals import draws_of, intervals_of
    from servesim.study.executor import open_executor
    from servesim.study.single_run import Task, context_json

    tasks = [Task(0, 0, {}, draw=draw) for draw in draws_of(run.profiles, args.intervals)]
    jobs = 1 if args.jobs is None and seconds * len(tasks) < SLOW_SECONDS else args.jobs
    with open_executor("local", jobs, len(tasks)) as executor:
        records = [record for _, record in executor.run(context_json(tree), tasks)]
    for record in records:
        if "error" in record:
            raise BadInput(f"--intervals: {record['error']}")
    draws = [{**record["metrics"], "stuck": record["stuck"]} for record in sorted(records, key=itemgetter("draw"))]
    run.intervals = intervals_of(run, draws, run.profile)
