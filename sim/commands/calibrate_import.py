"""`sim calibrate import`: profiles and measured runs from the files of other tools."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from servesim.core import BadInput

from .notes import print_note, print_profile
from .options import MODEL_HELP, add, columns


def register_import(kinds: Any) -> None:
    imported = kinds.add_parser("import", help="convert measurements of another tool into a profile or a measured run")
    sources = imported.add_subparsers(metavar="SOURCE", required=True)
    register_tables(sources)
    register_steps(sources)
    results = sources.add_parser(
        "results", run=import_results,
        help="a result file of vllm bench serve --save-detailed, sglang.bench_serving, guidellm or aiperf: a run",
        description="Write the folder of a measured run: its requests.csv is a trace and a log for `sim calibrate "
        "logs`, and the folder is the measured side of `sim verify`.",
    )  # fmt: skip
    add(results, {"FILE": "result file; the format is detected"})
    add(results, {"--benchmark K": "benchmark in a file with several, counted from 0"}, type=int)
    add_output(results, "folder of the measured run to write")


def register_tables(sources: Any) -> None:
    """Add the sources that have tables of step costs."""
    vidur = sources.add_parser("vidur", run=import_vidur, help="Vidur's tables of step costs (.npz): a profile")
    add(vidur, {"FILE": "file with Vidur's tables of step costs (.npz)"})
    layers = sources.add_parser(
        "layers", run=import_layers,
        help="times of single layers, as LLMServingSim's profiler writes them: a profile",
        description="Import a folder with attention.csv, dense.csv and per_sequence.csv (microseconds of one layer).",
    )  # fmt: skip
    add(layers, {"FOLDER": "folder of the CSV files, or its parent with one folder tpN"})
    add(layers, {"--layers N": "transformer layers of the model"}, type=int, required=True)
    add(layers, {
        "--experts N": "experts per layer, if the folder has moe.csv",
        "--experts-per-token N": "experts that each token uses",
    }, type=int)  # fmt: skip
    text = "(`sim models`), if meta.yaml has none; for the time of exchanges between the N devices of tpN"
    add(layers, {f"--{name} NAME": f"{name} {text}" for name in ("model", "device")})
    for parser in (vidur, layers):
        add(parser, {"--base SECONDS": "host seconds to add to every step (default: 0)"}, type=float, default=0.0)
        add_output(parser)


def register_steps(sources: Any) -> None:
    """Add the source that has the steps of an engine."""
    steps = sources.add_parser(
        "steps", run=import_steps,
        help="the step log of an engine, CSV or JSON lines: a profile",
        description="Read a step log, write its steps as samples.csv and fit them. docs/imports.md lists the columns.",
    )  # fmt: skip
    add(steps, {"FILE": "step log: one row per step, with its start time and its batch"})
    add(steps, {"--column FIELD=NAME": "name of a field in this file (repeatable)"})
    steps.add_argument("--time-unit", choices=["s", "ms", "us", "ns"], default="s", help="unit of the times")
    add(steps, {"--device TEXT": "name of the device, for profile.yaml", "--model MODEL": MODEL_HELP})
    prepared = (
        "the engine prepares a new shape (CUDA graph, compilation) for each multiple of this many tokens; 0: it does "
        "not (default: found from the slow steps)"
    )
    add(steps, {"--first-use TOKENS": prepared}, type=int)
    add_output(steps)


def add_output(parser: Any, about: str = "profile folder to write") -> None:
    """Add the output folder."""
    add(parser, {"-o, --output DIR": about}, required=True)


def import_vidur(args: argparse.Namespace) -> int:
    """Write a profile from Vidur's tables."""
    from servesim.calibrate.imports.cost_tables import import_vidur

    import_vidur(Path(args.file), Path(args.output), args.base)
    print_profile(Path(args.output))
    return 0


def import_layers(args: argparse.Namespace) -> int:
    """Write a profile from layer times."""
    from servesim.calibrate.imports.cost_tables import import_layers
    from servesim.costs.imported_tables import MAX_LAYERS

    if not 1 <= args.layers <= MAX_LAYERS:
        raise BadInput(f"--layers: expected 1 to {MAX_LAYERS}, got {args.layers}")
    experts, per_token = args.experts, args.experts_per_token
    if (experts is None) != (per_token is None) or (experts is not None and not 1 <= per_token <= experts):
        raise BadInput("--experts and --experts-per-token: expected both, and at least one expert per token")
    names = {"model": args.model, "device": args.device}
    counts = None if experts is None else (experts, per_token)
    import_layers(Path(args.folder), Path(args.output), args.layers, args.base, counts, names)
    print_profile(Path(args.output))
    return 0


def import_steps(args: argparse.Namespace) -> int:
    """Fit a step log, and write samples.csv and profile.yaml."""
    from servesim.calibrate.imports.fit_steps import fit_log, write_log_profile
    from servesim.calibrate.imports.step_log import read_step_log
    from servesim.costs.model_config import read_model

    steps = read_step_log(Path(args.file), columns_of(args.column), args.time_unit)
    folder = Path(args.output)
    about = {"name": folder.resolve().name, "device": args.device, "model": read_model(args.model)}
    profile, slow = fit_log(steps, about, args.file, args.first_use)  # a log that cannot be fitted leaves no file
    how = f"fitted to the step log {Path(args.file).name}; host time included"
    write_log_profile(folder, steps, slow, profile, {"how": how})
    print(f"{len(steps)} steps, {steps.seconds.sum():.2f} s; samples: {folder / 'samples.csv'}")
    if first_use := profile.about.get("first_use"):
        seconds, tokens = first_use["seconds"], first_use["tokens"]
        print(f"{slow.sum()} steps prepared new shapes: {seconds:.3g} s per {tokens} tokens")
    if profile.about.get("context_step"):
        print(f"the engine reads cached tokens in multiples of {profile.about['context_step']:,}")
    for kind, error in profile.error.items():
        print(f"held-out error  {kind:<8} {error['mean']:>8.2%}")
    print_profile(folder)
    return 0


def columns_of(options: list[str]) -> dict[str, str]:
    """Return the names of fields in a step log."""
    from servesim.files.step_table import NAMES

    found = columns(options)
    if unknown := set(found) - set(NAMES):
        raise BadInput(f"--column: expected a field of {', '.join(NAMES)}, got {min(unknown)!r}")
    return found


def import_results(args: argparse.Namespace) -> int:
    """Write the folder of a measured run."""
    from servesim.calibrate.replay.measured_run import benchmark_run, write_live
    from servesim.files.write import check_new

    folder = Path(args.output)
    check_new(folder / "manifest.json", "run")
    run = benchmark_run(Path(args.file), args.benchmark)
    write_live(run, folder)
    result = run.result()
    failed = "" if result["failed"] is None else f", {result['failed']} failed"
    print(f"{result['completed']} finished{failed} requests in {result['duration']:.2f} s")
    print_note(args, *(f"{args.file}: {note}" for note in run.backend["notes"]))
    print(f"measured run: {folder}")
    return 0
