"""The options by which a scenario is given on the command line, shared by the commands that take one."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from servesim.config.scenario import Scenario


def add_scenario_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `scenario_tree` reads."""
    given = parser.add_argument_group("scenario")
    given.add_argument("scenario", nargs="?", metavar="FILE", help="scenario YAML, or llm-serving's own configuration")
    given.add_argument("--preset", metavar="NAME", help="start from a preset (see `sim policies list`)")
    given.add_argument("--policy", metavar="NAME", help="a policy by name, or path/to/file.py:Name")
    given.add_argument("--trace", metavar="FILE", help="requests to serve, in any known trace format")
    given.add_argument("--format", metavar="NAME", help="the trace's format, if it is not to be recognised")
    given.add_argument(
        "--column", action="append", default=[], metavar="FIELD=NAME",
        help="the trace's column that holds a field, e.g. prompt=tokens_in",
    )  # fmt: skip
    given.add_argument("-X", type=float, metavar="QPS", help="the contest's workload at this rate")
    given.add_argument("-T", type=float, metavar="S", help="seconds of it (1500 / X if left out)")
    given.add_argument("--profile", metavar="NAME", help="step costs: a bundled profile or a profile folder")
    given.add_argument("--seed", type=int, metavar="N", help="seed of all that is drawn")
    given.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override any scenario key")
    given.add_argument("--goodput", nargs="+", metavar="KEY:MS", help="objectives, e.g. ttft:500 tpot:50 e2el:10000")


def scenario_tree(args: argparse.Namespace) -> dict[str, Any]:
    """Return the tree that file, preset, options and settings give together."""
    from servesim.config.scenario import merge, override, read_tree, with_preset
    from servesim.core import BadInput

    tree: dict[str, Any] = read_tree(args.scenario) if args.scenario else {}
    if args.preset:
        tree = merge(with_preset({"preset": args.preset}), tree)
    if args.policy:
        tree = merge(tree, {"policy": {"name": args.policy}})
    if args.trace:
        trace = {"path": args.trace, "format": args.format, "columns": columns(args.column)}
        tree = merge(tree, {"trace": {key: value for key, value in trace.items() if value}})
    elif args.format or args.column:
        raise BadInput(f"{'--format' if args.format else '--column'}: expected --trace FILE beside it")
    if args.T is not None and args.X is None:
        raise BadInput("-T: expected -X, the requests a second, beside it")
    if args.X is not None:
        # the generator sends int(T * X): a hair more than 1500 / X makes that 1500 for every X
        seconds = args.T if args.T is not None else 1500 / args.X * (1 + 1e-9) if args.X > 0 else 0.0
        tree = merge(tree, {"workload": {"contest": {"X": args.X, "T": seconds}}})
    if args.profile:
        tree["profile"] = args.profile
    if args.seed is not None:
        tree["seed"] = args.seed
    if args.goodput:
        tree["slo"] = objectives(args.goodput)
    return override(tree, args.set)


def columns(given: list[str]) -> dict[str, str]:
    """Read FIELD=NAME, which column holds which field."""
    from servesim.core import BadInput

    found = {}
    for item in given:
        field, sign, name = item.partition("=")
        if not (field and sign and name):
            raise BadInput(f"--column {item}: expected FIELD=NAME, e.g. prompt=tokens_in")
        found[field] = name
    return found


def objectives(given: list[str]) -> dict[str, float]:
    """Read vLLM's KEY:MS objectives."""
    from servesim.core import BadInput

    found: dict[str, float] = {}
    for item in given:
        name, _, text = item.partition(":")
        try:
            found[name] = float(text)
        except ValueError:
            raise BadInput(f"--goodput {item}: expected KEY:MS, e.g. ttft:500") from None
    return found


def scenario_of(args: argparse.Namespace) -> Scenario:
    """Return the scenario that the command line gives."""
    from servesim.config.scenario import scenario_from

    return scenario_from(scenario_tree(args), args.scenario or "scenario")
