"""`sim calibrate import`: profiles and measured runs from the files of other tools."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Optional

from servesim.core import BadInput
from servesim.core.limits import MAX_NUMBER, is_number


def register_import(kinds: Any) -> None:
    imported = kinds.add_parser("import", help="convert measurements of another tool into a profile or a measured run")
    sources = imported.add_subparsers(metavar="SOURCE", required=True)
    register_vidur(sources)
    register_layers(sources)
    register_steps(sources)
    register_vllm_log(sources)
    register_results(sources)


def register_vidur(sources: Any) -> None:
    vidur = sources.add_parser("vidur", help="Vidur's tables of step costs (.npz): a profile")
    vidur.add_argument("file", metavar="FILE", help="file with Vidur's tables of step costs (.npz)")
    add_base(vidur)
    add_output(vidur)
    vidur.set_defaults(run=import_vidur)


def register_layers(sources: Any) -> None:
    layers = sources.add_parser(
        "layers",
        help="times of single layers, as LLMServingSim's profiler writes them: a profile",
        description="Import a folder with attention.csv, dense.csv and per_sequence.csv (microseconds of one layer).",
    )
    layers.add_argument("folder", metavar="FOLDER", help="folder of the CSV files, or its parent with one folder tpN")
    layers.add_argument("--layers", type=int, required=True, metavar="N", help="transformer layers of the model")
    layers.add_argument("--experts", type=int, metavar="N", help="experts per layer, if the folder has moe.csv")
    layers.add_argument("--experts-per-token", type=int, metavar="N", help="experts that each token uses")
    add_base(layers)
    add_output(layers)
    layers.set_defaults(run=import_layers)


def register_steps(sources: Any) -> None:
    steps = sources.add_parser(
        "steps",
        help="the step log of an engine, CSV or JSON lines: a profile",
        description="Read a step log, write its steps as samples.csv and fit them. docs/imports.md lists the columns.",
    )
    steps.add_argument("file", metavar="FILE", help="step log: one row per step, with its start time and its batch")
    steps.add_argument(
        "--column", action="append", default=[], metavar="FIELD=NAME", help="name of a field in this file (repeatable)"
    )
    steps.add_argument("--time-unit", choices=["s", "ms", "us", "ns"], default="s", help="unit of the times")
    add_fit(steps)
    steps.set_defaults(run=import_steps)


def register_vllm_log(sources: Any) -> None:
    log = sources.add_parser(
        "vllm-log",
        help="a vLLM log with --enable-logging-iteration-details: a profile",
        description="Read the lines `Iteration(N): ...` of a vLLM log, write them as samples.csv and fit them.",
    )
    log.add_argument("file", metavar="FILE", help="log of the vLLM server")
    log.add_argument(
        "--mean-context", type=float, default=0.0, metavar="TOKENS",
        help="mean cached tokens of a decoding request, which the log does not have (default: 0)",
    )  # fmt: skip
    add_fit(log)
    log.set_defaults(run=import_vllm_log)


def register_results(sources: Any) -> None:
    results = sources.add_parser(
        "results",
        help="a result file of vllm bench serve --save-detailed, guidellm or aiperf: a measured run",
        description="Write the folder of a measured run: its requests.csv is a trace and a log for `sim calibrate "
        "logs`, and the folder is the measured side of `sim verify`.",
    )
    results.add_argument("file", metavar="FILE", help="result file; the format is detected")
    results.add_argument("--benchmark", type=int, metavar="K", help="benchmark in a guidellm report, counted from 0")
    add_output(results, "folder of the measured run to write")
    results.set_defaults(run=import_results)


def add_output(parser: Any, about: str = "profile folder to write") -> None:
    parser.add_argument("-o", "--output", metavar="DIR", required=True, help=about)


def add_base(parser: Any) -> None:
    parser.add_argument(
        "--base", type=float, default=0.0, metavar="SECONDS", help="host seconds to add to every step (default: 0)"
    )


def add_fit(parser: Any) -> None:
    parser.add_argument("--device", metavar="TEXT", help="name of the device, for profile.yaml")
    parser.add_argument("--model", metavar="TEXT", help="name of the model, for profile.yaml")
    parser.add_argument(
        "--first-use", type=int, metavar="TOKENS",
        help="the engine prepares a new shape (CUDA graph, compilation) for each multiple of this many tokens; 0: it "
        "does not (default: found from the slow steps)",
    )  # fmt: skip
    parser.add_argument("--no-fit", action="store_true", help="write samples.csv only")
    add_output(parser)


def import_vidur(args: argparse.Namespace) -> int:
    """Write a profile from Vidur's tables."""
    from servesim.calibrate.imports.vidur import import_vidur

    import_vidur(Path(args.file), Path(args.output), args.base)
    return print_profile(args)


def import_layers(args: argparse.Namespace) -> int:
    """Write a profile from layer times."""
    from servesim.calibrate.imports.layers import import_layers
    from servesim.costs.layer_profile import MAX_LAYERS

    if not 1 <= args.layers <= MAX_LAYERS:
        raise BadInput(f"--layers: expected 1 to {MAX_LAYERS}, got {args.layers}")
    experts, per_token = args.experts, args.experts_per_token
    if (experts is None) != (per_token is None) or (experts is not None and not 1 <= per_token <= experts):
        raise BadInput("--experts and --experts-per-token: expected both, and at least one expert per token")
    import_layers(
        Path(args.folder), Path(args.output), args.layers, args.base, None if experts is None else (experts, per_token)
    )
    return print_profile(args)


def print_profile(args: argparse.Namespace) -> int:
    print(f"profile: {Path(args.output) / 'profile.yaml'}")
    return 0


def import_steps(args: argparse.Namespace) -> int:
    """Fit a step log."""
    from servesim.calibrate.imports.step_log import NAMES, read_step_log

    columns = {}
    for text in args.column:
        field, equals, name = text.partition("=")
        if field not in NAMES or not equals or not name:
            raise BadInput(f"--column: expected FIELD=NAME with a field of {', '.join(NAMES)}, got {text!r}")
        columns[field] = name
    return fit_steps(args, read_step_log(Path(args.file), columns, args.time_unit), "step log")


def import_vllm_log(args: argparse.Namespace) -> int:
    """Fit the steps of a vLLM log."""
    from servesim.calibrate.imports.vllm_log import read_vllm_log

    if not is_number(args.mean_context, 0, MAX_NUMBER):
        raise BadInput(f"--mean-context: expected a number of at least 0, got {args.mean_context:g}")
    return fit_steps(args, read_vllm_log(Path(args.file), args.mean_context), "vLLM's iteration details")


def fit_steps(args: argparse.Namespace, steps: Any, source: str) -> int:
    """Fit steps, unless asked not to, and write samples.csv and profile.yaml."""
    from servesim.calibrate.imports.first_uses import find_width, first_use_seconds, slow_steps
    from servesim.calibrate.imports.sample_file import write_samples
    from servesim.costs.device_profile import write_profile

    folder = Path(args.output)
    width = find_width(steps) if args.first_use is None else args.first_use
    if width is not None and not 0 <= width <= MAX_NUMBER:
        raise BadInput(f"--first-use: expected at least 0 tokens, got {width}")
    slow = slow_steps(steps, width) if width else None
    summary = f"{len(steps)} steps, {sum(step.seconds for step in steps):.2f} s; samples: {folder / 'samples.csv'}"
    if args.no_fit:
        write_samples(folder / "samples.csv", steps, slow)
        print(summary)
        return 0
    profile, slow = fit_regular_steps(args, steps, slow)
    about = {**profile.about, "how": f"fitted to the {source} {Path(args.file).name}; host time included"}
    if slow is not None and width:
        about["first_use"] = {"tokens": width, "seconds": first_use_seconds(steps, width, profile.cost, slow)}
    write_samples(folder / "samples.csv", steps, slow)  # only now: a log that cannot be fitted leaves no file
    write_profile(folder, about, profile.cost)
    print(summary)
    if slow is not None:
        print(f"{slow.sum()} steps prepared new shapes: {about['first_use']['seconds']:.3g} s per {width} tokens")
    print_errors(about.get("error"))
    return print_profile(args)


def fit_regular_steps(args: argparse.Namespace, steps: Any, slow: Any) -> Any:
    """Return the profile of the steps that prepared no new shape, and which steps did."""
    from servesim.calibrate.imports.first_uses import slower_than
    from servesim.calibrate.probe.fitted_profile import profile_from

    about, name = {"device": args.device, "model": args.model}, Path(args.output).resolve().name
    profile = profile_from(regular_samples(steps, slow), about, args.file, name)
    if slow is None:
        return profile, None
    slow = slower_than(profile.cost, steps)
    return profile_from(regular_samples(steps, slow), about, args.file, name), slow


def regular_samples(steps: Any, slow: Any) -> Any:
    """Return the steps that prepared no new shape as samples."""
    from servesim.calibrate.probe.sample_set import Samples
    from servesim.core import Shape

    kept = [step for k, step in enumerate(steps) if slow is None or not slow[k]]
    if not kept:
        raise BadInput("--first-use: expected steps that prepared no new shape, got none")
    columns = dict(zip(Shape._fields, zip(*(step.shape for step in kept))))
    return Samples.from_arrays([step.seconds for step in kept], columns)


def print_errors(errors: Optional[Any]) -> None:
    """Print the held-out error of each kind of step."""
    for kind, error in (errors or {}).items():
        mean = error.get("mean") if isinstance(error, dict) else error
        if mean is not None:
            print(f"held-out error  {kind:<8} {mean:>8.2%}")


def import_results(args: argparse.Namespace) -> int:
    """Write the folder of a measured run."""
    from servesim.calibrate.replay.benchmark_run import benchmark_run
    from servesim.calibrate.replay.live_run import write_live

    folder = Path(args.output)
    if (folder / "manifest.json").exists():
        raise BadInput(f"{folder}: already holds a run, which is not overwritten; use another folder")
    run = benchmark_run(Path(args.file), args.benchmark)
    write_live(run, folder)
    result = run.result()
    print(f"{result['completed']} finished, {result['failed']} failed requests in {result['duration']:.2f} s")
    print(f"measured run: {folder}")
    return 0
