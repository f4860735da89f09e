"""`sim trace`: convert traces, make them, look at them."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any, Optional

from servesim.core import BadInput

from .options import columns

if TYPE_CHECKING:
    from servesim.traces.trace import Trace


def register(commands: Any) -> None:
    group = commands.add_parser("trace", help="convert, make and inspect workload traces")
    actions = group.add_subparsers(metavar="ACTION", required=True)

    convert = actions.add_parser("convert", help="read a trace of any known format, change it, write it down")
    convert.add_argument("files", nargs="*", metavar="FILE", help="a trace, .gz or not; several are merged")
    convert.add_argument("--list", action="store_true", help="list the formats that can be read and written")
    _reading(convert)
    _changing(convert)
    _writing(convert)
    convert.set_defaults(run=convert_trace)

    synth = actions.add_parser("synth", help="make a trace from a workload description")
    synth.add_argument(
        "file", nargs="?", metavar="FILE", help="YAML: a scenario with `workload`, or that section alone"
    )
    synth.add_argument(
        "-X", type=float, metavar="QPS", help="the contest's workload at this rate (performance_serving -X)"
    )
    synth.add_argument("-T", type=float, metavar="S", help="seconds of it (performance_serving -T)")
    synth.add_argument("--lengths", metavar="FILE", help="with -X: lengths CSV, or alpaca json with --tokenizer")
    synth.add_argument("--tokenizer", metavar="PATH", help="with --lengths: tokenizer.model or tokenizer.json")
    synth.add_argument("--dispatch", type=float, metavar="S", help="with -X: seconds each gap is longer in reality")
    synth.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="e.g. arrivals.rate=8.2")
    synth.add_argument("--seed", type=int, default=0, metavar="N", help="seed of all that is drawn (default 0)")
    _changing(synth)
    _writing(synth)
    synth.set_defaults(run=synth_trace)

    inspect = actions.add_parser("inspect", help="arrivals, lengths, prefixes and sessions of a trace")
    inspect.add_argument("file", metavar="FILE", help="a trace, .gz or not")
    _reading(inspect)
    _changing(inspect)
    inspect.add_argument("--picture", metavar="FILE", help="draw it (PNG, SVG or PDF)")
    inspect.add_argument("--json", action="store_true", help="print figures as JSON")
    inspect.set_defaults(run=inspect_trace)


def _reading(parser: argparse.ArgumentParser) -> None:
    reading = parser.add_argument_group("reading")
    reading.add_argument("--format", metavar="NAME", help="the format, if it is not to be recognised from the content")
    reading.add_argument(
        "--column", action="append", default=[], metavar="FIELD=NAME",
        help="the column that holds a field: arrival, prompt, output, id, limit, priority, session, prefix, ...",
    )  # fmt: skip
    reading.add_argument("--time-unit", choices=("s", "ms", "us", "ns"), help="unit of its times, if not the usual one")
    reading.add_argument("--tokenizer", metavar="PATH", help="tokenizer.model or tokenizer.json, for formats with text")
    reading.add_argument("--sort", action="store_true", help="put rows in order of arrival")
    reading.add_argument("--limit", type=int, metavar="N", help="keep the first N requests")
    reading.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of formats that are sampled, and of jitter"
    )


def _changing(parser: argparse.ArgumentParser) -> None:
    changing = parser.add_argument_group("changing (done in this order)")
    changing.add_argument("--slice", metavar="START:END", help="keep what arrives from START to before END seconds")
    changing.add_argument("--scale", type=float, metavar="F", help="F times as many requests a second")
    changing.add_argument("--rate", type=float, metavar="R", help="bring it to R requests a second on average")
    changing.add_argument("--scale-prompt", type=float, default=1.0, metavar="F", help="prompts F times as long")
    changing.add_argument("--scale-output", type=float, default=1.0, metavar="F", help="outputs F times as long")
    changing.add_argument("--jitter", type=float, metavar="S", help="delay each arrival by up to S seconds")
    changing.add_argument("--repeat", type=int, metavar="N", help="N times in a row")


def _writing(parser: argparse.ArgumentParser) -> None:
    writing = parser.add_argument_group("writing")
    writing.add_argument("--to", default="servesim", metavar="NAME", help="servesim (default), mooncake, timed-trace")
    writing.add_argument(
        "-o", "--output", metavar="FILE", help="file to write, .gz packs it (default: standard output)"
    )


def convert_trace(args: argparse.Namespace) -> int:
    """Read, change, write."""
    from servesim.traces.edit import merge

    if args.list:
        return _list_formats()
    if not args.files:
        raise BadInput("sim trace convert: expected a FILE (or --list)")
    traces = [_load(args, file) for file in args.files]
    for trace in traces:
        _remark(trace)
    _write(args, _changed(args, traces[0] if len(traces) == 1 else merge(traces)))
    return 0


def _list_formats() -> int:
    from servesim.traces.export import EXPORTS
    from servesim.traces.read.formats import FORMATS

    for title, table in (("read", FORMATS), ("written", EXPORTS)):
        print(title)
        for name, entry in table.items():
            print(f"  {name:<28} {entry.about}")
    return 0


def synth_trace(args: argparse.Namespace) -> int:
    """Make a trace and write it."""
    from servesim.config.overrides import override, read_tree
    from servesim.traces.make.synth import synthesise

    tree: dict[str, Any] = read_tree(args.file) if args.file else {}
    workload = tree.get("workload", tree)
    if args.X is not None:
        workload = {"contest": _contest(args)}
    elif args.T is not None:
        raise BadInput("-T: expected with -X")
    workload = override({"workload": workload}, [f"workload.{setting}" for setting in args.set])["workload"]
    trace = synthesise(workload, args.seed)
    _remark(trace)
    _write(args, _changed(args, trace))
    return 0


def _contest(args: argparse.Namespace) -> dict[str, Any]:
    keys = {"X": args.X, "T": args.T, "lengths": args.lengths, "tokenizer": args.tokenizer, "dispatch": args.dispatch}
    return {key: value for key, value in keys.items() if value is not None}


def inspect_trace(args: argparse.Namespace) -> int:
    """Print what a trace is like."""
    import json

    from servesim.traces.describe import described, statistics

    trace = _load(args, args.file)
    _remark(trace)
    trace = _changed(args, trace)
    figures = statistics(trace)
    print(json.dumps(figures, indent=1) if args.json else described(figures))
    if args.picture:
        from servesim.traces.picture import picture

        picture(trace, args.picture)
    return 0


def _load(args: argparse.Namespace, file: str) -> Trace:
    from servesim.traces.read.load import load

    window = _window(args.slice)
    return load(
        file, args.format, columns(args.column), args.limit, args.tokenizer,
        unit=args.time_unit, sort=args.sort, seed=args.seed, **({"window": window} if window else {}),
    )  # fmt: skip


def _window(text: Optional[str]) -> Optional[tuple[float, float]]:
    """Read START:END; either may be left out."""
    if text is None:
        return None
    start, colon, end = text.partition(":")
    try:
        window = (float(start or 0), float(end or "inf"))
    except ValueError:
        colon = ""
    if not colon or not 0 <= window[0] < window[1]:
        raise BadInput(f"--slice {text}: expected START:END in seconds, e.g. 600:1200")
    return window


def _changed(args: argparse.Namespace, trace: Trace) -> Trace:
    from servesim.traces import edit

    window = _window(args.slice)
    if window is not None and args.run is synth_trace:  # a trace that was read is cut while reading
        trace = edit.cut(trace, *window)
    if args.scale is not None or args.scale_prompt != 1.0 or args.scale_output != 1.0:
        trace = edit.scale(trace, 1.0 if args.scale is None else args.scale, args.scale_prompt, args.scale_output)
    if args.rate is not None:
        trace = edit.at_rate(trace, args.rate)
    if args.jitter is not None:
        trace = edit.jitter(trace, args.jitter, args.seed)
    return trace if args.repeat is None else edit.repeat(trace, args.repeat)


def _write(args: argparse.Namespace, trace: Trace) -> None:
    from servesim.traces.export import export, exported

    if args.output is None:
        text, notes = exported(trace, args.to)
        sys.stdout.write(text)
    else:
        notes = export(trace, args.output, args.to)
        print(f"{args.output}: {len(trace)} requests", file=sys.stderr)
    for note in notes:
        print(f"{args.output or 'output'}: {note}", file=sys.stderr)


def _remark(trace: Trace) -> None:
    for line in trace.remarks():
        print(line, file=sys.stderr)
