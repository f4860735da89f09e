"""`sim sweep`: run many configurations on common random numbers and rank them; `sim sweep merge` joins shards."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from servesim.core import BadInput

from .notes import note_uncertainty, print_path, print_warning
from .options import SERVERS, add_constraints, add_executor_options, add_intervals, add_json, add_trust, fraction

if TYPE_CHECKING:
    from servesim.study.experiment import Experiment
    from servesim.study.load_summary import Result
    from servesim.study.sweep import Shard
    from servesim.study.verdict import Verdict


def register(commands: Any) -> None:
    sweep = commands.add_parser(
        "sweep", help="run a grid of configurations and rank them",
        description="Run every configuration of a sweep file on the same random numbers and rank them against a "
        "baseline. `sim sweep merge DIR` joins the shards of a folder.",
    )  # fmt: skip
    sweep.add_argument("file", metavar="FILE", help="sweep YAML file, sweep folder to continue, or `merge`")
    sweep.add_argument("folder", nargs="?", metavar="DIR", help="with `merge`: folder of the shards")
    sweep.add_argument(
        "-o", "--output", metavar="DIR", help="folder of the sweep (default: runs/NAME, NAME from the sweep file)"
    )
    sweep.add_argument("--resume", action="store_true", help="continue an interrupted or killed sweep")
    sweep.add_argument("--fresh", action="store_true", help="if DIR exists, write to DIR-2, DIR-3 ... instead")
    add_trust(sweep)
    add_executor_options(sweep)
    sweep.add_argument(
        "--shard", metavar="I/N", help="run only shard I of N; join the shards with `sim sweep merge DIR`"
    )
    how = sweep.add_argument_group("overrides of the file")
    how.add_argument(
        "--replications", type=int, metavar="N", help="replications of each configuration (default: the file's)"
    )
    how.add_argument(
        "--ci", type=fraction, metavar="FRACTION",
        help="add replications until the half-width is at most this fraction of the mean, e.g. 0.01 or 1%%",
    )  # fmt: skip
    how.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE",
        help="override a scenario key of the base (repeatable)",
    )  # fmt: skip
    how.add_argument(
        "--loads", metavar="RATES",
        help="run every configuration at these request rates, e.g. 5,10,20; `auto` chooses them",
    )  # fmt: skip
    how.add_argument(
        "--precision", type=fraction, metavar="FRACTION",
        help="with loads and constraints: find the capacity of every configuration to this precision, e.g. 2%%",
    )  # fmt: skip
    add_constraints(how)
    add_intervals(how, "every configuration")
    out = sweep.add_argument_group("output")
    out.add_argument("--top", type=int, default=10, metavar="N", help="rows of the printed table (default 10)")
    out.add_argument(
        "--emit-config", choices=SERVERS, help="also write the winner as flags or configuration of this server"
    )
    out.add_argument("--no-report", action="store_true", help="do not write report.html")
    add_json(out)
    sweep.set_defaults(run=run_sweep)


def run_sweep(args: argparse.Namespace) -> int:
    """Run, write the files and print the table; return 1 if a run failed or the disk is full."""
    from servesim.config.user_code import use_access
    from servesim.execution.executor import WorkerLost, close_on_exit, make_executor, process_count
    from servesim.execution.progress import Progress
    from servesim.study.load_summary import summarise
    from servesim.study.loads import with_loads
    from servesim.study.sweep import merge_shards, sweep
    from servesim.study.sweep_file import read_experiment

    if args.file == "merge":
        if not args.folder:
            raise BadInput("sim sweep merge: expected DIR, the folder of the shards")
        with use_access(None):  # merging only reads: it executes no policy file
            experiment, records = merge_shards(args.folder)
            check_emit(args, map(experiment.tree, range(len(experiment.configs))))
            return finish(summarise(experiment, records), Path(args.folder), args)
    if args.json and args.shard:
        raise BadInput("--json: not possible with --shard; use it with `sim sweep merge DIR`")
    if args.folder is not None:
        raise BadInput(f"sim sweep: expected one file or folder, got also {args.folder}; the output folder is -o DIR")
    changes = {
        "replications": args.replications, "ci": args.ci, "intervals": args.intervals, "subject_to": args.subject_to,
        "indifference": args.indifference, "loads": rates_of(args.loads), "precision": args.precision,
    }  # fmt: skip
    experiment = read_experiment(args.file, args.set, **changes)
    check_emit(args, map(experiment.tree, range(len(experiment.configs))))
    source = Path(args.file)
    folder = Path(args.output) if args.output else source if source.is_dir() else Path("runs") / experiment.name
    folder = free_folder(folder) if args.fresh else folder
    shard = shard_of(args.shard, experiment)
    if experiment.intervals:
        note_uncertainty(args, experiment.profile)
    try:
        workers = make_executor(args.executor, process_count(args.jobs))
        with close_on_exit(workers) as executor, Progress("sweep", args.quiet) as progress:
            experiment = with_loads(experiment, folder, executor)
            records = sweep(experiment, folder, executor, args.resume or source.is_dir(), shard, progress)
        if shard.total > 1:
            print(f"{folder / shard.journal}: {len(records)} runs; run `sim sweep merge {folder}` after the last shard")
            return 0
        return finish(summarise(experiment, records), folder, args)
    except BrokenPipeError:
        raise
    except (OSError, WorkerLost) as error:
        print(f"sim: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"sim: interrupted; --resume -o {folder} continues", file=sys.stderr)
        return 130


def free_folder(folder: Path) -> Path:
    """Return the folder, or the first of DIR-2, DIR-3 ... that does not exist."""
    number, result = 1, folder
    while result.exists():
        number += 1
        result = folder.with_name(f"{folder.name}-{number}")
    return result


def shard_of(text: str | None, experiment: Experiment) -> Shard:
    """Read I/N; None is the whole sweep."""
    from servesim.study.sweep import ONLY_SHARD, Shard

    if text is None:
        return ONLY_SHARD
    part, _, parts = text.partition("/")
    if not (part.isdigit() and parts.isdigit() and 1 <= int(part) <= int(parts)):
        raise BadInput(f"--shard {text}: expected I/N, e.g. 2/4")
    if experiment.ci is not None or experiment.confirm or experiment.precision is not None:
        keys = "the keys `ci`, `confirm` and `precision`"
        raise BadInput(f"--shard: not possible with {keys}; remove them or use --executor dask:ADDRESS")
    return Shard(int(part), int(parts))


def rates_of(text: Optional[str]) -> Any:
    """Read --loads: rates separated by commas, or `auto`."""
    if text is None or text == "auto":
        return text
    try:
        return [float(rate) for rate in text.split(",")]
    except ValueError:
        raise BadInput(f"--loads {text}: expected rates separated by commas, e.g. 5,10,20, or auto") from None


def finish(result: Result, folder: Path, args: argparse.Namespace) -> int:
    """Write the result files and print the table; return 1 if a run failed or there is no winner."""
    from servesim.runs.run_warnings import scenario_warnings

    if len(result.failures) == result.run_count:
        print(f"sim: every run failed; the first error is: {result.failures[0]['error']}", file=sys.stderr)
        return 1
    for text in scenario_warnings(result.experiment.tree(0)):
        print_warning(text)
    verdict = write_and_print(result, folder, args)
    if (folder / "best.yaml").exists():
        print_path(args, f"{'baseline' if verdict.kind == 'baseline' else 'winner'}: {folder / 'best.yaml'}")
    if not args.no_report:
        from servesim.report.write import write_report

        write_report(result, folder / "report.html")
        print_path(args, f"report: {folder / 'report.html'}")
    if args.emit_config and result.winner is not None:
        path = emit(result.experiment.tree(result.winner.config), folder, args.emit_config)
        print_path(args, f"server configuration: {path}")
    return 1 if result.failures or verdict.kind in ("infeasible", "failed") else 0


def write_and_print(result: Result, folder: Path, args: argparse.Namespace) -> Verdict:
    """Write the files of a sweep, and print its table and its verdict, or all of it as JSON."""
    import json

    from servesim.files.terminal import screen_of
    from servesim.study.files import write_summary
    from servesim.study.load_table import format_load_table, write_load_summary
    from servesim.study.ranking import Summary
    from servesim.study.result_json import result_json
    from servesim.study.table import format_table
    from servesim.study.verdict import verdict_of

    screen = screen_of(sys.stdout)
    if isinstance(result, Summary):
        write_summary(result, folder)
        table, verdict = format_table(result, args.top, screen), verdict_of(result)
    else:
        write_load_summary(result, folder)
        table, verdict = format_load_table(result, args.top, screen), result.verdict
    print(json.dumps(result_json(result, verdict), indent=1) if args.json else f"{table}\n{verdict.text}")
    return verdict


def check_emit(args: argparse.Namespace, scenarios: Iterable[Mapping[str, Any]]) -> None:
    """Raise BadInput before the first run if a scenario has no configuration for --emit-config: each can win."""
    if not args.emit_config:
        return
    from servesim.config.export import export_scenario
    from servesim.config.scenario import scenario_from

    for tree in scenarios:
        scenario = scenario_from(tree)
        try:
            export_scenario(scenario, args.emit_config)
        except BadInput as bad:
            raise BadInput(f"--emit-config {args.emit_config}: {bad}") from None


def emit(tree: Mapping[str, Any], folder: Path, server: str) -> Path:
    """Write the winner as the configuration of a server."""
    from servesim.config.export import export_scenario
    from servesim.config.scenario import scenario_from
    from servesim.files.write import write_text

    exported = export_scenario(scenario_from(tree), server)
    path = folder / exported.file_name
    write_text(path, exported.render("best.yaml"))
    return path
