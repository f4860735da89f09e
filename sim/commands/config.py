"""`sim config`: print the schema of scenario files, check files, write a first file."""

from __future__ import annotations

import argparse
from typing import Any

START = """\
# A scenario: requests, policy, engine and step costs. Run it: `sim run FILE`
workload:
  contest: {X: 0.5, T: 3000}     # or e.g. {requests: 1000, arrivals: {kind: poisson, rate: 2}, lengths: {...}}
# trace: path/to/trace.csv       # instead of workload
policy:
  name: llm-serving              # `sim policies list`, `sim policies show llm-serving`
  decode_batch: 64
engine:
  num_blocks: 1024
  block_size: 16
  max_model_len: 4096
  prefill_buckets: [4096]        # every prompt is padded to 4096 tokens (llm-serving: seq_length)
  front_end: {lag: 7, end_lag: true}
profile: ascend910b4-llama2-7b   # bundled, or a profile folder
seed: 0
slo: {ttft: 5000, tpot: 200}     # milliseconds
"""


def register(commands: Any) -> None:
    group = commands.add_parser("config", help="scenario files: schema, validate, init")
    actions = group.add_subparsers(metavar="ACTION", required=True)
    schema = actions.add_parser("schema", help="print the JSON schema of scenario files")
    schema.set_defaults(run=print_schema)
    validate = actions.add_parser("validate", help="check scenario files")
    validate.add_argument("files", nargs="+", metavar="FILE", help="scenario YAML file")
    validate.set_defaults(run=validate_files)
    start = actions.add_parser("init", help="write a first scenario file")
    start.add_argument("file", nargs="?", metavar="FILE", help="file to write (default: standard output)")
    start.set_defaults(run=write_start)


def print_schema(args: argparse.Namespace) -> int:
    import json

    from servesim.config.scenario import Scenario

    print(json.dumps(Scenario.model_json_schema(), indent=1))
    return 0


def validate_files(args: argparse.Namespace) -> int:
    """Check the files in order; stop at the first error."""
    from servesim.config.overrides import read_scenario_file
    from servesim.config.scenario import scenario_from
    from servesim.costs.device_profile import load_profile

    for file in args.files:
        scenario = scenario_from(read_scenario_file(file), file)
        load_profile(scenario.profile).for_run(scenario.engine.sampling)
        note = "" if scenario.policy_is_loadable else f", but policy {scenario.policy['name']} was not loaded"
        print(f"{file}: valid{note}{' (`sim policies check` executes and checks it)' if note else ''}")
    return 0


def write_start(args: argparse.Namespace) -> int:
    """Write the first scenario file; never overwrite a file."""
    from servesim.files.write import write_text

    if args.file is None:
        print(START, end="")
        return 0
    write_text(args.file, START, overwrite=False, parents=False)
    print(f"wrote {args.file}; next: sim run {args.file}")
    return 0
