"""`sim tune`: sweep, measure the leading configurations live, correct the profile, and sweep again."""

from __future__ import annotations

import argparse
import math
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from servesim.core import BadInput

from . import options
from .notes import print_warning, resumable

if TYPE_CHECKING:
    from servesim.calibrate.tune.results import TuneResult
    from servesim.calibrate.tune.setup import Settings
    from servesim.calibrate.tune.targets import LiveTarget
    from servesim.study.experiment import Experiment


def register(commands: Any) -> None:
    tune = commands.add_parser(
        "tune", run=run_tune, help="sweep, measure the leaders live, correct the profile, and sweep again",
        description="Sweep, run the leading configurations and the baseline live, correct the profile with the "
        "measured steps, and sweep again, until the order of the leaders is stable or the device time is spent.",
    )  # fmt: skip
    options.add(tune, {"FILE": "sweep YAML file"})
    options.add(tune, {"-o, --output DIR": "folder of the tuning run"}, required=True)
    options.add(tune, {
        "--resume": "continue an interrupted, killed or finished run",
        "--profile PROFILE": "profile to start with (default: that of the file)",
        **options.SETTING,
    })  # fmt: skip
    options.add_trust(tune)
    options.add(tune.add_argument_group("limits"), {
        "--device-minutes M": "maximum device time of all measurements (default: no limit)",
        "--rounds N": "maximum rounds with measurements (default 5)",
        "--top N": "leaders whose order must be stable, and measurements per round (default 3)",
        "--draws N": "random cost models that rate the leaders (default 24)",
        "--repeat N": "measure each chosen configuration N times, which shows the noise of a measurement (default 1)",
    })  # fmt: skip
    options.add_device_options(tune, model=None, required=False)
    restart = "shell command that restarts the server with the scenario file $SCENARIO (default: you restart it)"
    options.add(options.add_server_options(tune), {"--restart COMMAND": restart})
    options.add(tune, {"--warm-up N": "warm-up requests of a run, not measured (default 32; 0 with --url)"})
    options.add_executor_options(tune)


def run_tune(args: argparse.Namespace) -> int:
    """Tune, write the files and print the rounds."""
    from servesim.calibrate.tune.loop import Tuner
    from servesim.calibrate.tune.setup import tuned_experiment
    from servesim.study.executor import open_executor
    from servesim.study.sweep_file import read_experiment

    if bool(args.backend) == bool(args.url):
        raise BadInput("sim tune: expected either --backend or --url")
    if args.restart and not args.url:
        raise BadInput("--restart: also needs --url")
    settings, folder = settings_of(args), Path(args.output)
    changes = [*args.set, *([f"profile={args.profile}"] if args.profile else [])]
    if Path(args.file).is_dir():
        raise BadInput(f"{args.file}: expected a sweep file, found a folder")
    experiment = tuned_experiment(read_experiment(args.file, changes), bool(args.backend))

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    with resumable(folder), ExitStack() as stack:
        executor = stack.enter_context(open_executor(args.executor, args.jobs))
        target = target_of(args, experiment, stack)
        tuner = Tuner(experiment, target, folder, executor, settings, None if args.quiet else say)
        result = tuner.run(terms_of(args), args.resume)
    return finish(result, settings, folder)


def settings_of(args: argparse.Namespace) -> Settings:
    """Return the checked limits."""
    from servesim.calibrate.tune.setup import Settings

    for name in ("rounds", "top", "draws", "repeat"):
        if not 1 <= getattr(args, name) <= 1000:
            raise BadInput(f"--{name}: expected a number from 1 to 1000, got {getattr(args, name)}")
    minutes = math.inf if args.device_minutes is None else args.device_minutes
    if not minutes > 0:
        raise BadInput(f"--device-minutes: expected more than 0, got {minutes:g}")
    if args.warm_up is not None and args.warm_up < 0:
        raise BadInput(f"--warm-up: expected 0 or more, got {args.warm_up}")
    return Settings(60 * minutes, args.rounds, args.top, args.draws, args.repeat)


def terms_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that a resumed run must repeat: with others, its choices would differ."""
    names = ("backend", "model", "weights", "option", "api", "top", "draws")
    return {name: getattr(args, name) for name in names}


def target_of(args: argparse.Namespace, experiment: Experiment, stack: ExitStack) -> LiveTarget:
    """Return where configurations are measured; the stack closes it."""
    from servesim.calibrate.live.setup import DeviceSession, name_of
    from servesim.calibrate.tune.targets import BackendTarget, UrlTarget
    from servesim.config.layers import override
    from servesim.config.scenario import scenario_from
    from servesim.costs.device_profile import load_profile

    scenarios = [scenario_from(experiment.tree(config)) for config in range(len(experiment.configs))]
    if args.url:
        import aiohttp  # noqa: F401  a missing package is reported before the first sweep
        from servesim.calibrate.replay.http_client import Target

        server = Target(args.url, args.api, args.served_model, args.timeout, args.warm_up or 0)
        return UrlTarget(server, args.restart, args.quiet)
    model = args.model or name_of(load_profile(scenarios[0].profile).about.get("model"))
    session = DeviceSession(args.backend, model, args.worker_python, args.weights, override({}, args.option))
    stack.enter_context(session)
    return BackendTarget(session, scenarios, 32 if args.warm_up is None else args.warm_up, args.quiet)


def finish(result: TuneResult, settings: Settings, folder: Path) -> int:
    """Write the final profile, the winner, the table and the report; print the table."""
    from servesim.calibrate.tune.results import failure_warnings, format_rounds, setting_warnings, write_results
    from servesim.files.terminal import screen_of
    from servesim.report.sweep_page import write_report

    summary = write_results(result, folder)
    write_report(summary, folder / "report.html")
    for text in [*failure_warnings(result.rounds), *setting_warnings(result.measurements)]:
        print_warning(text)
    print(format_rounds(result.rounds, screen_of(sys.stdout)))
    if text := result.describe_scatter():
        print(text)
    minutes = result.device_seconds / 60
    limit = "" if math.isinf(settings.device_seconds) else f" of {settings.device_seconds / 60:g}"
    print(f"stopped: {result.reason}; device time {minutes:.2f}{limit} minutes")
    if result.needs_server is not None:
        print(f"next: start the server with {result.needs_server}, then run this command again with --resume")
    if (folder / "profile").exists():
        print(f"profile: {folder / 'profile'}")
    if result.has_winner:
        print(f"winner: {folder / 'best.yaml'} ({result.describe_winner()})")
    print(f"report: {folder / 'report.html'}")
    return 0
