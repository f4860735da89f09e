"""`sim sweep`: many configurations, replicated on common random numbers; `sim sweep merge` puts shards together."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from servesim.core import BadInput

from .options import add_executor_options, share

if TYPE_CHECKING:
    from servesim.study.experiment import Experiment
    from servesim.study.ranking import Summary
    from servesim.study.sweep import Shard


def register(commands: Any) -> None:
    sweep = commands.add_parser(
        "sweep", help="run a grid of configurations and rank them",
        description="Run every configuration of a sweep file on the same random numbers and rank them against a "
        "baseline. `sim sweep merge DIR` puts the shards of a folder together.",
    )  # fmt: skip
    sweep.add_argument("file", metavar="FILE", help="sweep YAML, the folder of an experiment to continue, or `merge`")
    sweep.add_argument("folder", nargs="?", metavar="DIR", help="of `merge`: the folder that the shards wrote to")
    sweep.add_argument("-o", "--output", metavar="DIR", help="experiment folder (default: runs/NAME)")
    sweep.add_argument("--resume", action="store_true", help="continue what was interrupted or killed")
    sweep.add_argument("--fresh", action="store_true", help="if DIR is taken, write to DIR-2, DIR-3 ... instead")
    add_executor_options(sweep)
    sweep.add_argument("--shard", metavar="I/N", help="run only part I of N; then `sim sweep merge DIR`")
    how = sweep.add_argument_group("instead of the file's")
    how.add_argument("--replications", type=int, metavar="N")
    how.add_argument(
        "--ci", type=share, metavar="SHARE", help="replicate until half-widths are so much of the mean: 0.01 or 1%%"
    )
    how.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the base")
    out = sweep.add_argument_group("output")
    out.add_argument("--top", type=int, default=10, metavar="N", help="rows of the table (default 10)")
    out.add_argument("--emit-config", choices=["llm-serving"], help="write the winner as the server's own YAML too")
    out.add_argument("--no-report", action="store_true", help="leave report.html out")
    sweep.set_defaults(run=run_sweep)


def run_sweep(args: argparse.Namespace) -> int:
    """Run, sum up, print the table; 1 when a run failed or the disk was full."""
    from servesim.study.executor import WorkerLost, core_count, executing, executor
    from servesim.study.experiment import read_experiment
    from servesim.study.progress import Progress
    from servesim.study.ranking import Summary
    from servesim.study.sweep import merge, sweep

    if args.file == "merge":
        experiment, found = merge(args.folder or "")
        return finish(Summary(experiment, found), Path(args.folder), args)
    experiment = read_experiment(args.file, args.set, replications=args.replications, ci=args.ci)
    given = Path(args.file)
    folder = Path(args.output) if args.output else given if given.is_dir() else Path("runs") / experiment.name
    folder = vacant(folder) if args.fresh else folder
    shard = shard_of(args.shard, experiment)
    try:
        workers = executor(args.executor, core_count(args.jobs))
        with executing(workers) as where, Progress("sweep", args.quiet) as progress:
            found = sweep(experiment, folder, where, args.resume or given.is_dir(), shard, progress)
        if shard.parts > 1:
            print(f"{folder / shard.journal}: {len(found)} runs; `sim sweep merge {folder}` when all parts are done")
            return 0
        return finish(Summary(experiment, found), folder, args)
    except BrokenPipeError:
        raise
    except (OSError, WorkerLost) as error:
        print(f"sim: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"sim: interrupted; --resume -o {folder} continues", file=sys.stderr)
        return 130


def vacant(folder: Path) -> Path:
    """Return the folder, or the first of DIR-2, DIR-3 ... that nobody has taken."""
    number, found = 1, folder
    while found.exists():
        number += 1
        found = folder.with_name(f"{folder.name}-{number}")
    return found


def shard_of(given: str | None, experiment: Experiment) -> Shard:
    """Read I/N."""
    from servesim.study.sweep import WHOLE, Shard

    if given is None:
        return WHOLE
    part, _, parts = given.partition("/")
    if not (part.isdigit() and parts.isdigit() and 1 <= int(part) <= int(parts)):
        raise BadInput(f"--shard {given}: expected I/N, e.g. 2/4")
    if experiment.ci is not None or experiment.confirm:
        raise BadInput("--shard: with ci or confirm, all runs must be in one place; use --executor dask for those")
    return Shard(int(part), int(parts))


def finish(summary: Summary, folder: Path, args: argparse.Namespace) -> int:
    """Write the result's files, print the table."""
    from servesim.study.files import table, write_summary

    if len(summary.failures) == sum(len(row.runs) for row in summary.rows):
        print(f"sim: every run failed, the first of them so: {summary.failures[0]['error']}", file=sys.stderr)
        return 1
    write_summary(summary, folder)
    print(table(summary, args.top))
    if summary.winner is not None:
        print(f"winner: {folder / 'best.yaml'}")
    if not args.no_report:
        from servesim.report.page import write_report

        write_report(summary, folder / "report.html")
        print(f"report: {folder / 'report.html'}")
    if args.emit_config and summary.winner is not None:
        print(f"server configuration: {emit(summary, folder)}")
    return 1 if summary.failures or summary.winner is None else 0


def emit(summary: Summary, folder: Path) -> Path:
    """Write the winner as llm-serving's own YAML."""
    import yaml
    from servesim.config.llm_serving_yaml import to_llm_serving
    from servesim.config.scenario import scenario_from
    from servesim.files.write import open_text

    assert summary.winner is not None
    scenario = scenario_from(summary.experiment.tree(summary.winner.config))
    config = to_llm_serving(scenario.policy, scenario.engine.model_dump())
    with open_text(folder / "llm-serving.yaml") as file:
        yaml.safe_dump(config, file, sort_keys=False)
    return folder / "llm-serving.yaml"
