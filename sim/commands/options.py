"""Options that several commands share: the scenario, the device, where to run, and tolerances."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, Optional

from servesim.core import BadInput

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
    from servesim.config.overrides import merge, override, read_tree, with_preset

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
    found = {}
    for item in given:
        field, sign, name = item.partition("=")
        if not (field and sign and name):
            raise BadInput(f"--column {item}: expected FIELD=NAME, e.g. prompt=tokens_in")
        found[field] = name
    return found


def objectives(given: list[str]) -> dict[str, float]:
    """Read vLLM's KEY:MS objectives."""
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


def add_device_options(parser: argparse.ArgumentParser, model: Optional[str] = "tiny", required: bool = True) -> Any:
    """Add them in a group of their own, which is returned; `model` is the one that is taken if none is named."""
    group = parser.add_argument_group("device")
    taken = model or "the profile's if left out"
    group.add_argument(
        "--backend", choices=("kbk", "torch", "fake"), required=required, help="what runs the model calls"
    )
    group.add_argument("--model", default=model, metavar="NAME", help=f"llama2-7b, tiny or micro ({taken})")
    group.add_argument("--weights", metavar="PATH", help="weights to load; random ones if left out")
    group.add_argument("--worker-python", metavar="PATH", help="the interpreter that has the framework")
    group.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="an option of the backend")
    return group


def add_executor_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where runs are made."""
    where = parser.add_argument_group("where to run")
    where.add_argument("-j", "--jobs", type=int, metavar="N", help="processes (default: one a core)")
    where.add_argument("--executor", default="local", metavar="WHERE", help="local, or dask:ADDRESS of a scheduler")
    where.add_argument("-q", "--quiet", action="store_true", help="no progress")


def add_tolerance(group: Any) -> None:
    """Add the options that `judge` reads."""
    group.add_argument("--tolerance", type=share, metavar="SHARE", help="exit 3 when an error is larger: 0.05 or 5%%")
    group.add_argument("--metrics", nargs="+", metavar="NAME", help="the figures that are judged")
    group.add_argument("--json", action="store_true", help="print the comparison as JSON")


def share(text: str) -> float:
    """Read 5% or 0.05. More than the whole must be in percent: a 5 alone could be meant as either."""
    text = text.strip()
    percent = text.endswith("%")
    try:
        value = float(text[:-1]) / 100 if percent else float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf") or (value > 1 and not percent):
        raise argparse.ArgumentTypeError(f"expected a share such as 0.05 or 5%, got {text!r}")
    return value
