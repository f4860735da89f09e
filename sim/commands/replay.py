"""`sim replay`: run scenarios or the winners of a sweep live, simulate them, and print the error."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from servesim.core import BadInput

from .notes import print_note, print_warning
from .options import (
    add_contest_options,
    add_device_options,
    add_intervals,
    add_percentiles,
    add_scenario_options,
    add_server_options,
    add_tolerance,
    read_scenario,
)
from .verify import report_comparisons

if TYPE_CHECKING:
    from servesim.calibrate.live.setup import DeviceSession
    from servesim.calibrate.replay.replay import ReplayedScenario
    from servesim.config.scenario import Scenario
    from servesim.core import Request
    from servesim.costs.device_profile import Profile


def register(commands: Any) -> None:
    replay = commands.add_parser(
        "replay",
        help="run a scenario or the best of a sweep on a live engine and print the error",
        description="Run scenarios on a backend (--backend) or against a running server (--url). Then simulate the "
        "same requests, compare both runs, and print the error.",
    )
    add_scenario_options(replay)
    best = replay.add_argument_group("best of a sweep")
    best.add_argument(
        "--from", dest="sweep", metavar="SWEEP", help="sweep folder or its best.yaml, instead of a scenario"
    )
    best.add_argument("--top", type=int, default=3, metavar="N", help="replay the N best configurations (default 3)")
    best.add_argument("--with-baseline", action="store_true", help="replay the baseline too")
    add_device_options(replay, model=None, required=False)
    add_server_options(replay).add_argument(
        "--prompt-seed", metavar="TEXT",
        help="random seed of the prompts, to send the same ones again (default: a new seed, so that the server has no "
        "prompt in its prefix cache)",
    )  # fmt: skip
    add_token_check(replay)
    how = replay.add_argument_group("run")
    how.add_argument(
        "--warm-up", type=int, metavar="N", help="warm-up requests, not measured (default 32; 0 with --url)"
    )
    how.add_argument(
        "--time-scale", type=float, default=1.0, metavar="F", help="multiply arrival times by this factor (default 1)"
    )
    how.add_argument("--limit", type=int, metavar="N", help="use only the first N requests (default: all)")
    how.add_argument("--live-only", action="store_true", help="measure only, do not simulate or compare")
    how.add_argument(
        "-o", "--output", metavar="DIR", help="folder for live/, sim/, report.html, verify.json and verify.png"
    )
    add_intervals(how, "the simulation")
    add_percentiles(how)
    add_tolerance(how)
    add_contest_options(replay)
    replay.set_defaults(run=replay_scenarios)


def add_token_check(replay: argparse.ArgumentParser) -> None:
    """Add the options of the token check."""
    tokens = replay.add_argument_group("token check")
    tokens.add_argument(
        "--check-tokens", nargs="?", const="", metavar="N",
        help="after the run, run N of its requests alone with batch 1 and compare the answers token by token (default "
        "16; or all)",
    )  # fmt: skip
    tokens.add_argument(
        "--tolerance-tokens", metavar="N",
        help="exit with 3 if more of the checked answers differ: a number, e.g. 2, or a percentage, e.g. 5%% "
        "(default 0). An answer differs if one token differs, also at a near tie",
    )  # fmt: skip


def replay_scenarios(args: argparse.Namespace) -> int:
    """Replay and print; return 1 if a run failed, 3 outside the tolerance, 130 if interrupted."""
    if bool(args.backend) == bool(args.url):
        raise BadInput("sim replay: expected either --backend or --url")
    if args.limit is not None and args.limit < 1:
        raise BadInput(f"--limit: expected at least 1, got {args.limit}")
    check_report(args)
    scenarios = scenarios_of(args)
    check_token_options(args, scenarios)
    from servesim.files.lock import only_writer

    with only_writer(Path(args.output)) if args.output else nullcontext():
        return replay_and_report(args, scenarios)


def replay_and_report(args: argparse.Namespace, scenarios: list[tuple[str, Scenario]]) -> int:
    """Replay on a backend or against a server; return the exit code."""
    if args.url:
        return against_url(args, scenarios)
    from servesim.calibrate.device.backend import OutOfMemory
    from servesim.calibrate.device.worker_client import WorkerFailed

    try:
        return on_backend(args, scenarios)
    except (WorkerFailed, OutOfMemory) as failed:
        print(f"sim: {failed}", file=sys.stderr)
        return 1


def check_token_options(args: argparse.Namespace, scenarios: list[tuple[str, Scenario]]) -> None:
    """Raise BadInput before the first run, e.g. if a scenario has fewer requests than the token check needs."""
    from servesim.calibrate.replay.replay import replay_requests
    from servesim.calibrate.replay.token_check import allowed_differences, sample_size

    if args.check_tokens is None and args.tolerance_tokens is not None:
        raise BadInput("--tolerance-tokens: expected together with --check-tokens")
    args.tolerance_tokens = args.tolerance_tokens or "0"
    allowed_differences(args.tolerance_tokens, 0)
    for _, scenario in scenarios if args.check_tokens is not None else ():
        sample_size(args.check_tokens, len(replay_requests(scenario, args.time_scale, args.limit)))


def check_report(args: argparse.Namespace) -> None:
    """Check what is needed after the run, which can take hours, before it starts."""
    from servesim.calibrate.replay.verify import check_metrics
    from servesim.files.write import check_new

    check_metrics(args.metrics or ())
    if args.output is not None:
        check_new(Path(args.output) / "live", "replay")
        try:
            Path(args.output).mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:
            raise BadInput(f"-o {args.output}: cannot make the folder: {error}") from None


def scenarios_of(args: argparse.Namespace) -> list[tuple[str, Scenario]]:
    """Return the scenarios to replay, with their names."""
    if args.sweep is None:
        scenario = read_scenario(args)[1]
        return [(scenario.name or scenario.policy["name"], scenario)]
    from servesim.calibrate.replay.replay import top_scenarios

    if args.top < 1:
        raise BadInput(f"--top: expected at least 1, got {args.top}")
    settings = [*args.set, *([f"profile={args.profile}"] if args.profile else [])]
    return top_scenarios(Path(args.sweep), args.top, args.with_baseline, tuple(settings))


def on_backend(args: argparse.Namespace, scenarios: list[tuple[str, Scenario]]) -> int:
    """Replay the scenarios on one worker."""
    from servesim.calibrate.live.setup import DeviceSession, name_of
    from servesim.calibrate.replay.replay import check_profile, replay_on_backend, replay_requests
    from servesim.calibrate.replay.token_check import sample_size
    from servesim.config.layers import override
    from servesim.costs.device_profile import load_profile

    profile = None if args.live_only and args.backend != "fake" else load_profile(scenarios[0][1].profile)
    model = args.model or (name_of(profile.about.get("model")) if profile else None)
    if args.model and args.backend == "fake":
        print_note(args, "--model: the fake backend has no model; ignored")
    done: list[ReplayedScenario] = []
    with DeviceSession(args.backend, model, args.worker_python, args.weights, override({}, args.option)) as session:
        session.load([scenario for _, scenario in scenarios])
        if profile is not None:
            check_profile(profile, session)
        for name, scenario in scenarios:
            requests = replay_requests(scenario, args.time_scale, args.limit)
            warm_up = 32 if args.warm_up is None else args.warm_up
            tokens = None if args.check_tokens is None else sample_size(args.check_tokens, len(requests))
            show_duration(args, name, scenario, requests, profile)
            draws = args.intervals or 0
            done.append(
                replay_on_backend(session, name, scenario, requests, profile, warm_up, args.quiet, draws, tokens)
            )
            show_live(args, done[-1], session)
            if done[-1].interrupted:
                break
    if (counters := done[0].live.counters) is not None and counters["remark"]:
        print_note(args, counters["remark"])
    return report(args, done)


def show_duration(
    args: argparse.Namespace, name: str, scenario: Scenario, requests: Sequence[Request], profile: Optional[Profile]
) -> None:
    """Print how long a replay will take: it runs in real time."""
    if args.quiet:
        return
    from servesim.calibrate.replay.replay import expected_seconds

    seconds = expected_seconds(scenario, requests, profile)
    duration = f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.1f} min"
    bound = "at least" if profile is None else "about"
    print(f"{name}: {len(requests)} requests in real time, {bound} {duration} plus warm-up", file=sys.stderr)


def show_live(args: argparse.Namespace, replayed: ReplayedScenario, session: Optional[DeviceSession]) -> None:
    """Print the measured metrics and the token check."""
    from servesim.calibrate.replay.measured_run import describe_live
    from servesim.calibrate.replay.token_check import format_check

    live = replayed.live
    for run in (live, replayed.run):
        if run is not None:
            run.measures.add_percentiles(args.metric_percentiles)
    place = session.about["device"] if session is not None else live.backend.get("url", "")
    lines = describe_live(live, f"{replayed.name} on {place}", args.metric_percentiles)
    if live.token_check is not None:
        lines += format_check(live.token_check, args.tolerance_tokens)
    print("\n".join(lines))


def report(args: argparse.Namespace, done: list[ReplayedScenario]) -> int:
    """Write the files, print the comparisons, and return the exit code."""
    from servesim.calibrate.replay.replay import write_replay

    if args.output:
        for replayed in done:
            write_replay(replayed, Path(args.output), len(done) == 1)
    if any(replayed.interrupted for replayed in done):
        return 130
    compared = [r for r in done if r.comparison is not None and not args.live_only]
    sides = {r.name: (r.simulated, r.measured) for r in compared}
    code = report_comparisons(args, [r.comparison for r in compared], sides, args.output) if compared else 0
    if any(r.live.stuck for r in done):
        return 1
    checks = [r.live.token_check for r in done if r.live.token_check is not None]
    if not all(check.within(args.tolerance_tokens) for check in checks):
        return 3
    for name in (failed := [r.name for r in done if not r.live.measures.done]):
        print(f"sim: {name}: no request finished", file=sys.stderr)
    return 1 if failed else code


def against_url(args: argparse.Namespace, scenarios: list[tuple[str, Scenario]]) -> int:
    """Send the requests of each scenario to a server, one scenario at a time."""
    import aiohttp  # noqa: F401  a missing package is reported before the first line
    from servesim.calibrate.client.prompts import new_seed
    from servesim.calibrate.replay.http_client import Target, replay_against
    from servesim.calibrate.replay.replay import replay_requests
    from servesim.calibrate.replay.token_check import sample_size
    from servesim.costs.device_profile import load_profile

    done = []
    seed = args.prompt_seed or new_seed()
    target = Target(args.url, args.api, args.served_model, args.timeout, args.warm_up or 0, seed)
    for name, scenario in scenarios:
        requests = replay_requests(scenario, args.time_scale, args.limit)
        profile = None if args.live_only else load_profile(scenario.profile)
        tokens = None if args.check_tokens is None else sample_size(args.check_tokens, len(requests))
        show_duration(args, name, scenario, requests, profile)
        draws = args.intervals or 0
        done.append(
            replay_against(target, name, scenario, requests, profile, args.quiet, draws, tokens, print_warning)
        )
        show_live(args, done[-1], None)
        if done[-1].interrupted:
            break
    return report(args, done)
