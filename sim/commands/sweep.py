"""`sim sweep`: run many configurations on common random numbers and rank them; `sim sweep merge` joins shards."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from servesim.core import BadInput

from .options import add_executor_options, add_intervals, add_trust, fraction, remark_uncertainty

if TYPE_CHECKING:
    from servesim.study.experiment import Experiment
    from servesim.study.ranking import Summary
    from servesim.study.sweep import Shard


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
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a scenario key of the base (repeatable)",
    )
    add_intervals(how, "every configuration")
    out = sweep.add_argument_group("output")
    out.add_argument("--top", type=int, default=10, metavar="N", help="rows of the printed table (default 10)")
    out.add_argument(
        "--emit-config", choices=["llm-serving"], help="also write the winner as a configuration of this server"
    )
    out.add_argument("--no-report", action="store_true", help="do not write report.html")
    sweep.set_defaults(run=run_sweep)


def run_sweep(args: argparse.Namespace) -> int:
    """Run, write the files and print the table; return 1 if a run failed or the disk is full."""
    from servesim.config.user_code import use_access
    from servesim.study.executor import WorkerLost, close_on_exit, make_executor, process_count
    from servesim.study.experiment import read_experiment
    from servesim.study.progress import Progress
    from servesim.study.ranking import Summary
    from servesim.study.sweep import merge_shards, sweep

    if args.file == "merge":
        if not args.folder:
            raise BadInput("sim sweep merge: expected DIR, the folder of the shards")
        with use_access(None):  # merging only reads: it executes no policy file
            experiment, records = merge_shards(args.folder)
            check_emit(args, map(experiment.tree, range(len(experiment.configs))))
            return finish(Summary(experiment, records), Path(args.folder), args)
    if args.folder is not None:
        raise BadInput(f"sim sweep: expected one file or folder, got also {args.folder}; the output folder is -o DIR")
    changes = {"replications": args.replications, "ci": args.ci, "intervals": args.intervals}
    experiment = read_experiment(args.file, args.set, **changes)
    check_emit(args, map(experiment.tree, range(len(experiment.configs))))
    source = Path(args.file)
    folder = Path(args.output) if args.output else source if source.is_dir() else Path("runs") / experiment.name
    folder = free_folder(folder) if args.fresh else folder
    shard = shard_of(args.shard, experiment)
    if experiment.intervals:
        remark_uncertainty(experiment.profile)
    try:
        workers = make_executor(args.executor, process_count(args.jobs))
        with close_on_exit(workers) as executor, Progress("sweep", args.quiet) as progress:
            records = sweep(experiment, folder, executor, args.resume or source.is_dir(), shard, progress)
        if shard.total > 1:
            print(f"{folder / shard.journal}: {len(records)} runs; run `sim sweep merge {folder}` after the last shard")
            return 0
        return finish(Summary(experiment, records), folder, args)
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
    if experiment.ci is not None or experiment.confirm:
        raise BadInput(
            "--shard: not possible with the keys `ci` and `confirm`; remove them or use --executor dask:ADDRESS"
        )
    return Shard(int(part), int(parts))


def finish(summary: Summary, folder: Path, args: argparse.Namespace) -> int:
    """Write the result files and print the table."""
    from servesim.study.files import format_table, write_summary

    if len(summary.failures) == summary.run_count:
        print(f"sim: every run failed; the first error is: {summary.failures[0]['error']}", file=sys.stderr)
        return 1
    write_summary(summary, folder)
    print(format_table(summary, args.top))
    if summary.winner is not None:
        print(f"winner: {folder / 'best.yaml'}")
    elif not summary.failures:
        print("sim: no winner: every configuration failed, got stuck or served no request", file=sys.stderr)
    if not args.no_report:
        from servesim.report.page import write_report

        write_report(summary, folder / "report.html")
        print(f"report: {folder / 'report.html'}")
    if args.emit_config and summary.winner is not None:
        print(f"server configuration: {emit(summary, folder)}")
    return 1 if summary.failures or summary.winner is None else 0


def check_emit(args: argparse.Namespace, scenarios: Iterable[Mapping[str, Any]]) -> None:
    """Raise BadInput before the first run if a scenario has no configuration for --emit-config: each can win."""
    if not args.emit_config:
        return
    from servesim.config.llm_serving_yaml import to_llm_serving
    from servesim.config.scenario import scenario_from

    for tree in scenarios:
        scenario = scenario_from(tree)
        try:
            to_llm_serving(scenario.policy, scenario.engine.model_dump())
        except BadInput as bad:
            raise BadInput(f"--emit-config {args.emit_config}: {bad}") from None


def emit(summary: Summary, folder: Path) -> Path:
    """Write the winner as an llm-serving configuration."""
    from servesim.config.llm_serving_yaml import to_llm_serving
    from servesim.config.scenario import scenario_from
    from servesim.files.write import write_yaml

    assert summary.winner is not None
    scenario = scenario_from(summary.experiment.tree(summary.winner.config))
    config = to_llm_serving(scenario.policy, scenario.engine.model_dump())
    write_yaml(folder / "llm-serving.yaml", config)
    return folder / "llm-serving.yaml"
