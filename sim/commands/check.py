"""`sim check`: constraints of a scenario, for continuous integration."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import Any

from servesim.core import BadInput
from servesim.core.limits import DEFAULT_DRAWS, check_fraction, check_replications

from . import options
from .notes import note_uncertainty, print_note, print_result, print_warnings_of

CODES = {"met": 0, "undecided": 1, "broken": 3}  # exit codes; 2 is bad input


def register(commands: Any) -> None:
    check = commands.add_parser(
        "check", run=run_check_command, help="check that a scenario meets constraints, for continuous integration",
        description="Simulate a scenario several times and check its constraints. Exit code: 0 if all are met, 1 if "
        "the interval of a metric contains its limit (undecided), 3 if a constraint is broken.",
    )  # fmt: skip
    options.add_scenario_options(check)
    options.add_names(check)
    how = check.add_argument_group("check")
    options.add(how, {
        "--subject-to BOUND": "constraint such as 'p99_ttft_ms <= 2000'; with --baseline also 'p99_ttft_ms <= 1.05 * "
        "baseline' (repeatable)",
    }, type=partial(options.bound, baseline=True), required=True)  # fmt: skip
    options.add(how, {
        "--baseline FILE": "scenario to compare with, on the same random numbers; the options above apply to it too",
        "--replications N": "replications (default 10)",
    })  # fmt: skip
    models = f"random cost models that agree with the calibration (default {DEFAULT_DRAWS}); 0: none"
    options.add(how, {"--intervals N": models}, type=lambda text: 0 if text == "0" else options.draws(text))
    options.add(how, {**options.CONFIDENCE, "--allow-undecided": "exit with 0 if no constraint is broken"})
    out = check.add_argument_group("output")
    options.add(out, {
        "--junit FILE": "write JUnit XML: one test case per constraint",
        "--summary FILE": "add the result as Markdown to this file, e.g. $GITHUB_STEP_SUMMARY",
    })  # fmt: skip
    options.add_json(out)
    options.add_executor_options(check)
    check.set_defaults(X=None, T=None)  # no options of the contest


def run_check_command(args: argparse.Namespace) -> int:
    """Check, print and write the files; return the exit code of the worst verdict."""
    from servesim.config.layers import assemble
    from servesim.files.terminal import screen_of
    from servesim.study.check import append_summary, run_check, write_junit
    from servesim.study.executor import open_executor

    check_fraction(args.confidence, "--confidence")
    check_replications(args.replications, "--replications")
    if args.baseline == "":  # a variable of a workflow that is not set: the check must not pass without its baseline
        raise BadInput("--baseline: expected a file name, got ''")
    layers, notes = options.layers_with_server(args)
    scenario = assemble(layers), args.scenario or args.preset or "scenario"
    baseline = (assemble(options.scenario_layers(args, args.baseline)), args.baseline) if args.baseline else None
    with open_executor(args.executor, args.jobs, args.replications + args.intervals) as executor:
        chosen = (executor, args.replications, args.intervals, args.confidence, "--subject-to")
        check = run_check(scenario, baseline, args.subject_to, *chosen)
    if check.runs.draws:
        note_uncertainty(args, check.runs.profiles)
    print_note(args, *notes)
    print_warnings_of(scenario[0])
    print_result(args, check.as_json, lambda: check.format(screen_of(sys.stdout)))
    if args.junit:
        write_junit(check, args.junit, args.allow_undecided)
    if args.summary:
        append_summary(check, args.summary)
    return 0 if args.allow_undecided and check.verdict == "undecided" else CODES[check.verdict]
