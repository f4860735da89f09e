"""`sim config`: print the schema of scenario files, check files, write a first file."""

from __future__ import annotations

import argparse
from typing import Any

from . import options
from .notes import print_json

FIRST_PRESET = "vllm-v1-0.32"  # of `sim config init`


def register(commands: Any) -> None:
    group = commands.add_parser("config", help="scenario files: schema, validate, init")
    actions = group.add_subparsers(metavar="ACTION", required=True)
    actions.add_parser("schema", run=print_schema, help="print the JSON schema of scenario files")
    validate = actions.add_parser("validate", run=validate_files, help="check scenario files")
    options.add(validate, {"FILE...=files": "scenario YAML file"})
    start = actions.add_parser("init", run=write_start, help="write a first scenario file")
    preset = f"preset whose settings the file has; `sim policies list` lists them (default {FIRST_PRESET})"
    options.add(start, {"[FILE]=file": "file to write (default: standard output)", "--preset NAME": preset})
    options.add_names(start)


def print_schema(args: argparse.Namespace) -> int:
    from servesim.config.schema import scenario_schema

    print_json(scenario_schema())
    return 0


def validate_files(args: argparse.Namespace) -> int:
    """Check the files in order; stop at the first error."""
    from servesim.config.layers import read_scenario_file
    from servesim.config.scenario import scenario_from
    from servesim.costs.device_profile import load_profile
    from servesim.runs.run_warnings import warn_refused

    for file in args.files:
        scenario = scenario_from(read_scenario_file(file), file)
        load_profile(scenario.profile).for_run(scenario.engine.sampling)
        if scenario.policy_is_loadable:
            refused = warn_refused(scenario)
            note = "" if refused is None else f", but {refused.text}"
        else:
            name = scenario.policy["name"]
            note = f", but policy {name} was not loaded (`sim policies check` executes and checks it)"
        print(f"{file}: valid{note}")
    return 0


def write_start(args: argparse.Namespace) -> int:
    """Write the first scenario file; never overwrite a file."""
    from servesim.config.first_scenario import first_scenario
    from servesim.files.write import write_text

    text = first_scenario(args.preset, options.names_of(args))
    if args.file is None:
        print(text, end="")
        return 0
    write_text(args.file, text, overwrite=False, parents=False)
    print(f"wrote {args.file}; next: sim run {args.file}")
    return 0
