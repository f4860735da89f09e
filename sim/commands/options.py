"""Options shared by several commands: scenario, device, executor and tolerance."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Optional, Union, get_type_hints

from servesim.core import BadInput
from servesim.core.limits import DEFAULT_DRAWS, MAX_DRAWS
from servesim.policies import FAMILIES

MAX_PERCENTILES = 20  # of one command line

if TYPE_CHECKING:
    from servesim.config.layers import Layer
    from servesim.config.scenario import Scenario

FORMAT_HELP = "trace format, see `sim trace convert --list` (default: detected)"
MODEL_HELP = "model, for profile.yaml: a name, or a folder or config.json of Hugging Face, which has its sizes"
NAMED = {  # keys of a profile by name
    "model": ("NAME", "public model, or a config.json or folder of Hugging Face"),
    "device": ("NAME", "device, such as H100; its memory gives the number of KV blocks"),
    "tensor_parallel": ("N", "devices that share the model"),
    "pipeline_parallel": ("N", "stages of the model, each on as many devices"),
    "precision": ("NAME", "precision of the weights: bf16, fp16, fp8, int8 or mxfp4 (default: as published)"),
}
SERVERS = tuple(dict.fromkeys(family.server for family in FAMILIES.values() if family.server))  # of `sim export`
# Options for `add`, as the help shows them.
GOODPUT = {"--goodput KEY:MS...": "SLO bounds in milliseconds, e.g. ttft:500 tpot:50 e2el:10000"}
SETTING = {"--set KEY=VALUE": "override a scenario key (repeatable)"}
JOBS = {"-j, --jobs N": "worker processes (default: one per core)"}
CONFIDENCE = {"--confidence FRACTION": "confidence level (default 95%%)"}
PERCENTILES = {  # as `vllm bench serve` has them
    "--metric-percentiles N,N...": "percentiles of the latencies to print and to store, e.g. 50,95,99.9 (default 90,99)"
}
FURTHER_PERCENTILES = {
    "--metric-percentiles N,N...": "also compare these percentiles of the latencies, e.g. 50,95,99.9",
}


def fraction(text: str) -> float:
    """Read 5% or 0.05. Values above 1 must be in percent: a plain 5 is ambiguous."""
    text = text.strip()
    percent = text.endswith("%")
    try:
        value = float(text[:-1]) / 100 if percent else float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf") or (value > 1 and not percent):
        raise argparse.ArgumentTypeError(
            f"expected a fraction from 0 to 1 or a percentage, e.g. 0.05 or 5%, got {text!r}"
        )
    return value


def numbers(text: str, kind: Callable[[str], Any] = int, expected: str = "integers separated by commas") -> list[Any]:
    """Read `16,64,256`."""
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}") from None


def percentiles(text: str) -> tuple[float, ...]:
    """Read percentiles separated by commas."""
    expected = f"at most {MAX_PERCENTILES} numbers from 0 to 100, e.g. 50,95,99.9"
    values = tuple(numbers(text, float, expected))
    if len(values) > MAX_PERCENTILES or not all(0 <= value <= 100 for value in values):
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
    return values


def draws(text: str) -> int:
    """Read a number of draws."""
    if not (text.isdecimal() and len(text) < 6 and 2 <= int(text) <= MAX_DRAWS):
        raise argparse.ArgumentTypeError(
            f"expected a number of draws from 2 to {MAX_DRAWS}, got {text!r}; a file name must come before it"
        )
    return int(text)


def rates(text: str) -> Any:
    """Read rates separated by commas, or `auto`."""
    return text if text == "auto" else numbers(text, float, "rates separated by commas, e.g. 5,10,20, or auto")


def bound(text: str, baseline: bool = False) -> str:
    """Check a constraint, so that the error names the option and not the sweep file."""
    from servesim.statistics.constraints import parse_bound

    try:
        parse_bound(text, "bound", baseline)
    except BadInput as bad:
        raise argparse.ArgumentTypeError(str(bad)) from None
    return text


def server_url(text: str) -> str:
    """Read the address of a server. OpenAI clients write it with /v1, which is a part of its paths."""
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"expected http://HOST:PORT, got {text!r}")
    return text.rstrip("/").removesuffix("/v1").rstrip("/")


READERS: Mapping[str, Callable[[str], Any]] = {  # metavar of an option -> what reads its value; others are texts
    **dict.fromkeys(("N", "PORT", "TOKENS"), int), **dict.fromkeys(("S", "F", "M", "QPS", "RATE", "PRICE"), float),
    "FRACTION": fraction, "N,N...": percentiles, "URL": server_url, "BOUND": bound,
}  # fmt: skip
DEFAULT = re.compile(r"\(default ([^:;)]+)\)")  # in a help text


def add(group: Any, table: Mapping[str, str], **how: Any) -> None:
    """Add arguments from a table as the help shows it: `-o, --output DIR` -> what it means.

    A metavar alone is an argument without an option, and `FILE=scenario` one with another name. No metavar is a
    switch, `{a,b}` are choices, `[N]` is optional, `N...` is several values. The metavar selects the type. The text has
    the default, as (default 3), or that of an optional value; (repeatable) makes a list. `how` is what argparse needs
    besides, for all of them.
    """
    for names, text in table.items():
        *short, last = names.split(", ") if names.startswith("-") else [names]
        name, _, metavar = last.partition(" ") if last.startswith("-") else ("", "", last)
        metavar, _, argument = (metavar, "", "") if name else metavar.partition("=")
        is_optional, plain = metavar.startswith("["), metavar.strip("[]")
        kind = how.get("type") or READERS.get(plain, str)
        several = plain.endswith("...") and plain not in READERS
        keys: dict[str, Any] = {"metavar": plain.removesuffix("...") if several else plain, "type": kind}
        if not metavar:
            keys = {"action": "store_true"}
        elif plain.startswith("{"):
            keys = {"choices": plain.strip("{}").split(",")}
        if several or is_optional:
            keys["nargs"] = "?" if not several else "*" if is_optional else "+"
        if "(repeatable" in text:
            keys |= {"action": "append", "default": []}
        elif metavar and (found := DEFAULT.search(text)):
            keys["const" if is_optional and name else "default"] = kind(found[1].replace("%%", "%"))
        flags = [*short, name] if name else [argument or metavar.lower()]
        group.add_argument(*flags, help=text, **{**keys, **how})


def leaf_commands(parser: Any) -> Iterator[Any]:
    """Yield the parsers of all commands that have no subcommands, with all of their options."""
    if parser.commands is None:
        parser.finish()
        yield parser
        return
    for inner in parser.commands.choices.values():
        yield from leaf_commands(inner)


def add_scenario_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `scenario_layers` reads, without those of `add_contest_options`."""
    group = parser.add_argument_group("scenario")
    add(group, {
        "[FILE]=scenario": "scenario YAML file, or a configuration of llm-serving or MindIE",
        "--preset NAME": "preset to start from; `sim policies list` lists them (default: none)",
        "--policy NAME": "policy name, or path/to/file.py:Name (default: the scenario's, else llm-serving; `sim run` "
        "and `check` of a trace alone: vLLM)",
        "--trace FILE": "trace file with the requests, instead of a workload; - reads standard input",
        "--format NAME": FORMAT_HELP,
        "--column FIELD=NAME": "column of the trace that holds a field, e.g. prompt=tokens_in (repeatable)",
        "--profile NAME": "step costs: bundled profile or profile folder (default: the scenario's, else "
        "ascend910b4-llama2-7b)",
        "--seed N": "random seed of the run (default: the scenario's, else 0)",
        "--set KEY=VALUE": "override a scenario key, e.g. policy.max_num_seqs=64 (repeatable)",
        **GOODPUT,
    })  # fmt: skip
    add_trust(group)


def add_names(parser: Any, without: Sequence[str] = ()) -> None:
    """Add the options that `names_of` reads; `without`: keys whose options have another meaning in this command."""
    group = parser.add_argument_group("model and device by name (`sim models` lists them): step times are derived")
    for key, (metavar, text) in NAMED.items():
        if key not in without:
            default = "" if "(default" in text else " (default: that of the profile)"
            option = {f"--{key.replace('_', '-')} {metavar}": f"{text}{default}"}
            add(group, option, dest=f"named_{key}")


def names_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the keys of the options of `add_names`."""
    keys = {key: getattr(args, f"named_{key}", None) for key in NAMED}
    return {key: value for key, value in keys.items() if value is not None}


def settings_of(args: argparse.Namespace) -> list[str]:
    """Return the settings of a command line: the profile of `add_names`, then `--set`."""
    names = names_of(args)
    return [*([f"profile={json.dumps(names)}"] if names else []), *args.set]


def add_contest_options(parser: argparse.ArgumentParser, seconds: str = "(default: 1500 / X)") -> Any:
    """Add the options of the contest's workload, and return their group. Few users need it: it is the last one."""
    group = parser.add_argument_group("llm-serving contest of 2024")
    add(group, {
        "-X QPS": "use the contest's workload, with QPS requests per second",
        "-T S": f"with -X: seconds of the workload {seconds}",
    })  # fmt: skip
    return group


def add_trust(parser: Any) -> None:
    """Add --trust. Only a command with this option may load policies from files: it runs scenarios."""
    add(parser, {"--trust": "also execute policy files outside the working folder; see docs/security.md"})


def scenario_layers(args: argparse.Namespace, file: Optional[str]) -> list[Layer]:
    """Return the layers of a command line: the preset, the file, the options, then `--set`."""
    from servesim.config.layers import Layer, file_layer, setting_layers

    layers = [Layer({"preset": args.preset})] if args.preset else []
    layers += [file_layer(file)] if file else []
    layers += [Layer({"policy": {"name": args.policy}})] if args.policy else []
    layers += [Layer({"trace": keys})] if (keys := trace_keys(args)) else []
    layers += [Layer({"workload": {"contest": contest}})] if (contest := contest_keys(args)) else []
    values = {"profile": args.profile or None, "seed": args.seed, "slo": slo_bounds(args.goodput) or None}
    layers.append(Layer({key: value for key, value in values.items() if value is not None}, are_settings=True))
    return [*layers, *setting_layers(settings_of(args))]


def layers_with_server(args: argparse.Namespace) -> tuple[list[Layer], list[str]]:
    """Return the layers of a command line, and notes. A trace alone gets a default server, which a note names."""
    from servesim.config.first_scenario import default_server
    from servesim.config.layers import Layer, assemble

    layers = scenario_layers(args, args.scenario)
    tree = {} if args.scenario or args.preset or args.X is not None or not args.trace else assemble(layers)
    if not tree or "policy" in tree or "server_config" in tree:
        return layers, []
    server, note = default_server(tree)
    return [Layer(server), *layers], [note]


def trace_keys(args: argparse.Namespace) -> dict[str, Any]:
    """Return the section of --trace, --format and --column."""
    if not args.trace and (args.format or args.column):
        raise BadInput(f"{'--format' if args.format else '--column'}: also needs --trace FILE")
    keys = {"path": args.trace, "format": args.format, "columns": columns(args.column)}
    return {key: value for key, value in keys.items() if value}


def contest_keys(args: argparse.Namespace) -> dict[str, float]:
    """Return the section of -X and -T."""
    if args.X is None:
        if args.T is not None:
            raise BadInput("-T: also needs -X, the request rate, e.g. -X 5 -T 300")
        return {}
    # The client sends int(T * X) requests. A T slightly above 1500 / X makes that 1500 for every X.
    seconds = args.T if args.T is not None else 1500 / args.X * (1 + 1e-9) if args.X > 0 else 0.0
    return {"X": args.X, "T": seconds}


def columns(options: list[str]) -> dict[str, str]:
    """Read FIELD=NAME options: which column holds a field."""
    result = {}
    for item in options:
        field, sign, name = item.partition("=")
        if not (field and sign and name):
            raise BadInput(f"--column {item}: expected FIELD=NAME, e.g. prompt=tokens_in")
        result[field] = name
    return result


def slo_bounds(options: Optional[list[str]]) -> dict[str, float]:
    """Read KEY:MS bounds, as `vllm bench serve --goodput` has them."""
    result: dict[str, float] = {}
    for item in options or ():
        name, _, text = item.partition(":")
        try:
            result[name] = float(text)
        except ValueError:
            raise BadInput(f"--goodput {item}: expected KEY:MS, e.g. ttft:500") from None
    return result


def read_scenario(args: argparse.Namespace) -> tuple[dict[str, Any], Scenario]:
    """Return the scenario of a command line: its keys, and the checked scenario."""
    from servesim.config.layers import assemble
    from servesim.config.scenario import scenario_from

    tree = assemble(scenario_layers(args, args.scenario))
    return tree, scenario_from(tree, args.scenario or "scenario")


def add_server_options(parser: Any, required: bool = False, timeout: float = 3600.0, several: bool = False) -> Any:
    """Add the options of a running server, or of several; return their group."""
    server = parser.add_argument_group("server")
    url = "address of a running server, http://HOST:PORT; its key, if it needs one, is in the environment variable"
    more = "; repeat it to send through the router of the scenario to several servers" if several else ""
    how: dict[str, Any] = {"action": "append", "default": []} if several else {"required": required}
    add(server, {"--url URL": f"{url} SERVESIM_API_KEY{more}"}, **how)
    api = "HTTP API of the server" if required else "HTTP API of the server (default openai)"
    if several:
        api += "; openai-text sends prompts as text, for routers that read it"
    add(server, {f"--api {{llm-serving,openai{',openai-text' if several else ''}}}": api}, required=required)
    add(server, {
        "--served-model NAME": "model name on the server (default: the first one it lists)",
        "--timeout S": f"seconds until a request counts as failed (default {timeout:g})",
    })  # fmt: skip
    return server


def add_device_options(parser: argparse.ArgumentParser, model: Optional[str] = "tiny", required: bool = True) -> Any:
    """Add the device options and return their group; `model` is the default model."""
    group = parser.add_argument_group("device")
    backend = "backend that runs the model calls; fake sleeps instead"
    add(group, {"--backend {kbk,torch,fake}": backend}, required=required)
    default = model or "the profile's model"
    add(group, {"--model NAME": f"model: llama2-7b, tiny or micro (default: {default})"}, default=model)
    add(group, {
        "--weights PATH": "weights to load (default: random weights)",
        "--worker-python PATH": "Python interpreter of the worker, with the framework installed (default: this one)",
        "--option KEY=VALUE": "backend option (repeatable)",
    })  # fmt: skip
    return group


def add_executor_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that select where runs are computed."""
    where = parser.add_argument_group("execution")
    add(where, JOBS)
    add(where, {"--executor WHERE": "`local` (default), or dask:ADDRESS of a dask scheduler"}, default="local")


def add_intervals(group: Any, runs: str) -> None:
    """Add --intervals; `runs` says what is repeated."""
    text = f"also run {runs} with N random cost models that agree with the calibration (default {DEFAULT_DRAWS})"
    add(group, {"--intervals [N]": text}, type=draws)


def add_keys(group: Any, model: str, names: Sequence[str], required: str = "", default: str = "") -> None:
    """Add keys of a model of study_keys.py as options. It is slow to import, so a command calls this when it is used.

    Name, help text, type and default are those of the model; `default` is a text before the default.
    """
    from servesim.files.checked import Int
    from servesim.study import study_keys as keys

    percent = {"type": fraction, "metavar": "FRACTION"}
    readers = (
        (Int, {"type": int, "metavar": "N"}), (keys.Percent, percent), (Optional[keys.Percent], percent),
        (keys.Rates, {"type": rates, "metavar": "N,N..."}), (Union[bool, keys.Steady], {"action": "store_true"}),
        (keys.Draws, {"type": draws, "nargs": "?", "const": DEFAULT_DRAWS, "metavar": "N"}),
        (keys.Constraints, {"type": bound, "action": "append", "metavar": "BOUND"}),
    )  # fmt: skip
    kind = getattr(keys, model)
    hints = get_type_hints(kind, include_extras=True)
    for name in names:
        field, how = kind.model_fields[name], dict(next(how for hint, how in readers if hint == hints[name]))
        value = f"{100 * field.default:g}%" if isinstance(field.default, float) else field.default
        text = f"{field.description} (default: {default}{value})" if value else field.description
        text += " (repeatable)" if "append" in how.values() else ""
        how |= {"required": True} if name == required else {}
        group.add_argument(f"--{name.replace('_', '-')}", help=text.replace("%", "%%"), **how)


def add_json(group: Any) -> None:
    """Add --json. The command then prints one JSON document on standard output and nothing else there."""
    add(group, {"--json": "print the result as JSON instead of text"})


def add_tolerance(group: Any) -> None:
    """Add the options that check and print a comparison."""
    add(group, {
        "--tolerance FRACTION": "exit with 3 if a relative error is larger, e.g. 0.05 or 5%%",
        "--metrics NAME...": "metrics that --tolerance applies to (default: those marked with * in the table)",
    })  # fmt: skip
    add_json(group)
