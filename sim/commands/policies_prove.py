"""`sim policies prove`: compare the decisions of a policy with the scheduler of an installed engine."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

from . import options
from .notes import print_note, print_path, print_result

if TYPE_CHECKING:
    from servesim.calibrate.engines.prove import Proof

SCENARIOS = 40  # presets and random scenarios


def register(actions: Any) -> None:
    prove = actions.add_parser(
        "prove", run=run_prove, help="compare the decisions of a policy with those of an installed engine",
        description="Run the scheduler and the KV cache of an installed engine with a pretended model, and compare "
        "every decision with the policy: requests and tokens of each step, preemptions, cached tokens, free blocks. "
        "Exit code 3 if there is a difference.",
    )  # fmt: skip
    options.add(prove, {"NAME=policy": "policy, e.g. vllm-v1"})
    options.add(prove, {"--engine NAME": "installed engine (default: vllm)"}, default="vllm")
    options.add(prove, {
        "--worker-python PATH": "Python interpreter that has the engine (default: SERVESIM_VLLM_PYTHON, else this one)",
        "--scenario FILE": f"compare on this scenario, not on {SCENARIOS} presets and random ones (repeatable)",
        "--seed N": "random seed of the scenarios (default 0)",
        "--scheduler-cls CLASS": "scheduler class: module.Class or FILE.py:Class",
        "--store FILE": "write the result as JSON; `proof: FILE` of a scenario shows it",
        "--set KEY=VALUE": "value of a policy field, e.g. version=0.27.0 (repeatable)",
    })  # fmt: skip
    options.add_json(prove)
    options.add_trust(prove)


def run_prove(args: argparse.Namespace) -> int:
    """Compare and print; return 3 if a decision differs."""
    from servesim.calibrate.engines.prove import Proof, cases, compare, compared_policies, policy_version, range_warning
    from servesim.config.layers import merge, override, read_scenario_file
    from servesim.config.scenario import scenario_from
    from servesim.files.write import write_json
    from servesim.study.progress import Progress

    if args.worker_python:
        os.environ[f"SERVESIM_{args.engine.upper()}_PYTHON"] = args.worker_python
    settings = override({"name": args.policy}, args.set)
    print_note(args, f"importing {args.engine}; this can take a minute")
    policy, installed = compared_policies(args.policy, settings, args.engine, args.scheduler_cls)
    if warning := range_warning(args.policy, policy, installed):
        print_note(args, f"warning: {warning}")
    base = {"policy": {"name": args.policy, "version": policy_version(policy)}}  # a file may name another version
    trees = [(file, merge(base, read_scenario_file(file))) for file in args.scenario]
    trees = trees or list(cases(policy, args.policy, args.seed, SCENARIOS))
    proof = Proof(args.policy, policy_version(policy), installed.title)
    with Progress("prove", args.quiet, unit="scenario") as progress:
        progress.expect(len(trees), 0)
        for label, tree in trees:
            compare(proof, label, scenario_from(tree, label), installed)
            progress.advance(1)
            if proof.difference is not None:
                break
    if args.store:
        write_json(args.store, proof.as_json())
        print_path(args, f"written: {args.store}")
    print_result(args, proof.as_json, lambda: describe(proof))
    return 0 if proof.difference is None else 3


def describe(proof: Proof) -> str:
    """Return the printed result: the counts, and the first difference with both states."""
    from servesim.calibrate.engines.prove import SHOWN
    from servesim.files.terminal import align_columns, screen_of

    lines = [
        f"{proof.engine}, {proof.policy} with the rules of {proof.version}:",
        f"{proof.equal:,} of {proof.steps:,} steps equal in {proof.scenarios} scenarios",
        f"asynchronous: {proof.asynchronous:,}, with stages: {proof.piped:,}, with speculation: {proof.drafted:,}, "
        f"with windows: {proof.windowed:,}, with cached tokens: {proof.cached:,}, preempted: {proof.preemptions:,}, "
        f"aborted: {proof.aborts:,}",
    ]
    found = proof.difference
    if found is None:
        return "\n".join(lines)
    names = ", ".join(SHOWN.get(name, name) for name in found["fields"])
    time = (found["engine"] or found["policy"])["t"]
    lines.append(f"first difference: {found['scenario']}, step {found['step']}, t={time:.6g} s: {names}")
    rows = [["", proof.engine, proof.policy]]
    rows += [[label, *(show(found[side].get(key)) for side in ("engine", "policy"))] for key, label in SHOWN.items()]
    return "\n".join(lines + align_columns(rows, screen_of(sys.stdout), text_columns=rows[0][1:]))


def show(value: Any) -> str:
    """Return a part of a decision as text: ids, or ids with their numbers."""
    if value in (None, []):
        return "-"
    if isinstance(value, list):
        return " ".join(":".join(map(str, item)) if isinstance(item, (list, tuple)) else str(item) for item in value)
    return str(value)
