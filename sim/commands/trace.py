"""`sim trace`: convert, generate and inspect traces."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any, Optional

from servesim.core import BadInput

from . import options
from .notes import print_note, print_result

if TYPE_CHECKING:
    from servesim.traces.trace import Trace


def register(commands: Any) -> None:
    group = commands.add_parser("trace", help="convert, generate and inspect traces")
    actions = group.add_subparsers(metavar="ACTION", required=True)
    _register_convert(actions)
    _register_synth(actions)
    examples = actions.add_parser(
        "examples", run=write_examples, help="write two results of `vllm bench serve`, the traces of recipe 5"
    )
    options.add(examples, {"-o, --output DIR": "folder for the files (default: this one)"}, default=".")
    _register_inspect(actions)


def _register_convert(actions: Any) -> None:
    convert = actions.add_parser("convert", run=convert_trace, help="convert traces between formats, and edit them")
    source = "trace file, plain or .gz; several files are merged; - reads standard input"
    listing = "list the formats that can be read and written, then exit"
    options.add(convert, {"[FILE...]=files": source, "--list": listing})
    _add_reading_options(convert)
    _add_editing_options(convert)
    _add_writing_options(convert)


def _register_synth(actions: Any) -> None:
    synth = actions.add_parser("synth", run=synth_trace, help="generate a trace from a workload description")
    options.add(synth, {
        "[FILE]=file": "YAML file: a scenario with `workload`, or that section alone",
        "--set KEY=VALUE": "override a workload key, e.g. arrivals.rate=8.2 (repeatable)",
        "--seed N": "random seed (default 0)",
    })  # fmt: skip
    _add_editing_options(synth)
    _add_writing_options(synth)
    options.add(options.add_contest_options(synth, "(required)"), {
        "--lengths FILE": "with -X: CSV file of lengths, or alpaca JSON with --tokenizer",
        "--tokenizer PATH": "with --lengths: tokenizer.model or tokenizer.json",
    })  # fmt: skip


def _register_inspect(actions: Any) -> None:
    inspect = actions.add_parser(
        "inspect", run=inspect_trace, help="print arrivals, lengths, prefixes and sessions of a trace"
    )
    options.add(inspect, {"FILE": "trace file, plain or .gz; - reads standard input"})
    _add_reading_options(inspect)
    _add_editing_options(inspect)
    options.add(inspect, {"--block-size N": "tokens per block of the prefix cache (default 16)"})
    options.add_json(inspect)


def _add_reading_options(parser: argparse.ArgumentParser) -> None:
    options.add(parser.add_argument_group("reading"), {
        "--format NAME": options.FORMAT_HELP,
        "--column FIELD=NAME": "column that holds a field (repeatable): arrival, prompt, output, id, limit, priority, "
        "session, ...",
        "--time-unit {s,ms,us,ns}": "unit of the times (default: the format's own)",
        "--tokenizer PATH": "tokenizer.model or tokenizer.json, for formats that hold text",
        "--conversations": "the prompts of a session contain its earlier turns and answers",
        "--limit N": "keep only the first N requests",
        "--seed N": "random seed of --jitter and of sampled formats (default 0)",
    })  # fmt: skip


def _add_editing_options(parser: argparse.ArgumentParser) -> None:
    options.add(parser.add_argument_group("editing (applied in this order)"), {
        "--slice START:END": "keep requests that arrive from START to before END, seconds",
        "--scale F": "multiply the request rate by F (default 1)",
        "--rate RATE": "set the mean rate to RATE requests per second",
        "--scale-prompt F": "multiply prompt lengths by F (default 1)",
        "--scale-output F": "multiply output lengths by F (default 1)",
        "--jitter S": "delay each arrival by a random time of up to S seconds",
        "--repeat N": "number of copies of the trace, one after the other (default 1)",
    })  # fmt: skip


def _add_writing_options(parser: argparse.ArgumentParser) -> None:
    writing = parser.add_argument_group("writing")
    formats = "output format: servesim (default), mooncake or timed-trace"
    options.add(writing, {"--to NAME": formats}, default="servesim")
    output = "file to write, compressed if it ends in .gz (default: standard output)"
    options.add(writing, {"-o, --output FILE": output})


def convert_trace(args: argparse.Namespace) -> int:
    """Read, edit and write traces."""
    from servesim.traces.edit import merge

    if args.list:
        return _list_formats()
    if not args.files:
        raise BadInput("sim trace convert: expected a FILE (or --list)")
    traces = [_load(args, file) for file in args.files]
    print_note(args, *(remark for trace in traces for remark in trace.remarks()))
    _write(args, _edit(args, traces[0] if len(traces) == 1 else merge(traces)))
    return 0


def write_examples(args: argparse.Namespace) -> int:
    """Write the bundled example traces and print their paths; never overwrite a file."""
    from importlib.resources import files
    from pathlib import Path

    from servesim.files.write import write_text

    for example in sorted((files("servesim.traces") / "examples").iterdir(), key=lambda file: file.name):
        path = Path(args.output, example.name)
        write_text(path, example.read_text(encoding="utf-8"), overwrite=False)
        print(path)
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
    """Generate a trace and write it."""
    from servesim.config.layers import override, read_scenario_file
    from servesim.traces.make.synth import synthesise

    tree: dict[str, Any] = read_scenario_file(args.file) if args.file else {}
    workload = tree.get("workload", tree)
    if args.X is not None:
        keys = {"X": args.X, "T": args.T, "lengths": args.lengths, "tokenizer": args.tokenizer}
        workload = {"contest": {key: value for key, value in keys.items() if value is not None}}
    elif args.T is not None:
        raise BadInput("-T: also needs -X, the request rate, e.g. -X 5 -T 300")
    workload = override({"workload": workload}, [f"workload.{setting}" for setting in args.set])["workload"]
    trace = synthesise(workload, args.seed)
    print_note(args, *trace.remarks())
    _write(args, _edit(args, trace))
    return 0


def inspect_trace(args: argparse.Namespace) -> int:
    """Print the metrics of a trace."""
    from servesim.traces.describe import format_statistics, statistics

    if args.block_size < 1:
        raise BadInput(f"--block-size: expected at least 1 token, got {args.block_size}")
    trace = _load(args, args.file)
    print_note(args, *trace.remarks())
    trace = _edit(args, trace)
    metrics = statistics(trace, args.block_size)
    print_result(args, lambda: metrics, lambda: format_statistics(metrics))
    return 0


def _load(args: argparse.Namespace, file: str) -> Trace:
    from servesim.traces.read.formats import load

    window = _window(args.slice)
    return load(
        file, args.format, options.columns(args.column), args.limit, args.tokenizer,
        unit=args.time_unit, sort=True, seed=args.seed, conversations=args.conversations,
        **({"window": window} if window else {}),
    )  # fmt: skip


def _window(text: Optional[str]) -> Optional[tuple[float, float]]:
    """Read START:END; START is 0 and END is infinite by default."""
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


def _edit(args: argparse.Namespace, trace: Trace) -> Trace:
    from servesim.traces import edit

    window = _window(args.slice)
    if window is not None and args.run is synth_trace:  # reading a file applies the slice itself
        trace = edit.slice_time(trace, *window)
    factors = (args.scale, args.scale_prompt, args.scale_output)
    if factors != (1.0, 1.0, 1.0):
        trace = edit.scale(trace, *factors)
    if args.rate is not None:
        trace = edit.set_rate(trace, args.rate)
    if args.jitter is not None:
        trace = edit.jitter(trace, args.jitter, args.seed)
    return trace if args.repeat == 1 else edit.repeat(trace, args.repeat)


def _write(args: argparse.Namespace, trace: Trace) -> None:
    from servesim.files.terminal import raw_stream
    from servesim.traces.export import export, to_text

    to_file = args.output not in (None, "-")
    if not to_file:
        text, notes = to_text(trace, args.to)
        (sys.stdout if sys.stdout.isatty() else raw_stream(sys.stdout)).write(text)
    else:
        notes = export(trace, args.output, args.to)
        print_note(args, f"{args.output}: {len(trace)} requests")
    print_note(args, *(f"{args.output if to_file else 'output'}: {note}" for note in notes))
