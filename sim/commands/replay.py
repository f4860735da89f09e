"""`sim replay`: run scenarios or the winners of a sweep live, simulate them, and print the error."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from servesim.core import BadInput

from . import options
from .notes import print_note, print_warning
from .verify import report_comparisons

if TYPE_CHECKING:
    from servesim.calibrate.replay.replay import ReplayedScenario
    from servesim.config.scenario import Scenario
    from servesim.core import Request
    from servesim.costs.device_profile import Profile

    Replay = Callable[..., ReplayedScenario]


def register(commands: Any) -> None:
    replay = commands.add_parser(
        "replay", run=replay_scenarios,
        help="run a scenario or the best of a sweep on a live engine and print the error",
        description="Run scenarios on a backend (--backend) or against a running server (--url). Then simulate the "
        "same requests, compare both runs, and print the error.",
    )  # fmt: skip
    options.add_scenario_options(replay)
    best = replay.add_argument_group("best of a sweep")
    options.add(best, {"--from SWEEP": "sweep folder or its best.yaml, instead of a scenario"}, dest="sweep")
    options.add(best, {
        "--top N": "replay the N best configurations (default 3)",
        "--with-baseline": "replay the baseline too",
    })  # fmt: skip
    options.add_device_options(replay, model=None, required=False)
    options.add(options.add_server_options(replay, several=True), {
        "--prompt-seed TEXT": "random seed of the prompts, to send the same ones again (default: a new seed, so that "
        "the server has no prompt in its prefix cache)",
        "--router NAME": "router between several --url (default: cluster.router of the scenario, else round-robin)",
        "--server URL": "a server behind the router at --url, to read its counters (repeatable)",
    })  # fmt: skip
    tokens = replay.add_argument_group("token check")
    options.add(tokens, {
        "--check-tokens [N]": "after the run, run N of its requests alone with batch 1 and compare the answers token "
        "by token (default 16; or all)",
    }, type=str, const="")  # fmt: skip
    options.add(tokens, {
        "--tolerance-tokens N": "exit with 3 if more of the checked answers differ: a number, e.g. 2, or a percentage, "
        "e.g. 5%% (default 0). An answer differs if one token differs, also at a near tie",
    }, type=str, default=None)  # fmt: skip
    how = replay.add_argument_group("run")
    options.add(how, {
        "--warm-up N": "warm-up requests, not measured (default 32; 0 with --url)",
        "--time-scale F": "multiply arrival times by this factor (default 1)",
        "--limit N": "use only the first N requests (default: all)",
        "--live-only": "measure only, do not simulate or compare",
        "-o, --output DIR": "folder for live/, sim/, report.html and verify.json",
    })  # fmt: skip
    options.add_intervals(how, "the simulation")
    options.add(how, options.PERCENTILES)
    options.add_tolerance(how)
    options.add_contest_options(replay)


def replay_scenarios(args: argparse.Namespace) -> int:
    """Replay and print; return 1 if a run failed, 3 outside the tolerance, 130 if interrupted."""
    if bool(args.backend) == bool(args.url):
        raise BadInput("sim replay: expected either --backend or --url")
    if args.limit is not None and args.limit < 1:
        raise BadInput(f"--limit: expected at least 1, got {args.limit}")
    if len(args.url) > 1 and args.server:
        raise BadInput("--server: expected together with one --url, the address of a router")
    if args.router is not None and len(args.url) < 2:
        raise BadInput("--router: expected together with several --url")
    check_report(args)
    scenarios = scenarios_of(args)
    for _, scenario in scenarios if args.backend else ():
        if scenario.cluster is not None:
            raise BadInput("cluster: a backend runs one server; start the servers with `sim serve` and use --url")
    if len(args.url) > 1:
        scenarios = [(name, behind_router(scenario, len(args.url), args.router)) for name, scenario in scenarios]
    check_token_options(args, scenarios)
    from servesim.files.lock import only_writer

    with only_writer(Path(args.output)) if args.output else nullcontext():
        return report(args, against_url(args, scenarios) if args.url else on_backend(args, scenarios))


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
        scenario = options.read_scenario(args)[1]
        return [(scenario.name or scenario.policy["name"], scenario)]
    from servesim.calibrate.replay.replay import top_scenarios

    if args.top < 1:
        raise BadInput(f"--top: expected at least 1, got {args.top}")
    settings = [*args.set, *([f"profile={args.profile}"] if args.profile else [])]
    return top_scenarios(Path(args.sweep), args.top, args.with_baseline, tuple(settings))


def replay_each(
    args: argparse.Namespace, scenarios: list[tuple[str, Scenario]], replay: Replay, place: Optional[str] = None
) -> list[ReplayedScenario]:
    """Replay one scenario after the other, and print each; `place` is the device, None for that of the run."""
    from servesim.calibrate.replay.replay import replay_requests
    from servesim.calibrate.replay.token_check import sample_size
    from servesim.costs.device_profile import load_profile

    done: list[ReplayedScenario] = []
    for name, scenario in scenarios:
        requests = replay_requests(scenario, args.time_scale, args.limit)
        profile = None if args.live_only and args.backend != "fake" else load_profile(scenario.profile)
        tokens = None if args.check_tokens is None else sample_size(args.check_tokens, len(requests))
        show_duration(args, name, scenario, requests, profile)
        chosen = {"quiet": args.quiet, "draws": args.intervals or 0, "check_tokens": tokens}
        done.append(replay(name, scenario, requests, profile, **chosen))
        show_live(args, done[-1], place)
        if done[-1].interrupted:
            break
    return done


def on_backend(args: argparse.Namespace, scenarios: list[tuple[str, Scenario]]) -> list[ReplayedScenario]:
    """Replay the scenarios on one worker."""
    from servesim.calibrate.live.setup import DeviceSession, name_of
    from servesim.calibrate.replay.replay import check_profile, replay_on_backend
    from servesim.config.layers import override
    from servesim.costs.device_profile import load_profile

    profiles = [] if args.live_only and args.backend != "fake" else [load_profile(one.profile) for _, one in scenarios]
    model = args.model or (name_of(profiles[0].about.get("model")) if profiles else None)
    if args.model and args.backend == "fake":
        print_note(args, "--model: the fake backend has no model; ignored")
    with DeviceSession(args.backend, model, args.worker_python, args.weights, override({}, args.option)) as session:
        session.load([scenario for _, scenario in scenarios])
        for profile in profiles:
            check_profile(profile, session)
        replay = partial(replay_on_backend, session, warm_up=32 if args.warm_up is None else args.warm_up)
        done = replay_each(args, scenarios, replay, session.about["device"])
    if (counters := done[0].live.counters) is not None and counters["remark"]:
        print_note(args, counters["remark"])
    return done


def against_url(args: argparse.Namespace, scenarios: list[tuple[str, Scenario]]) -> list[ReplayedScenario]:
    """Send the requests of each scenario to a server, one scenario at a time."""
    import aiohttp  # noqa: F401  a missing package is reported before the first line
    from servesim.calibrate.client.prompts import new_seed
    from servesim.calibrate.replay.http_client import Target, replay_against

    seed, several = args.prompt_seed or new_seed(), len(args.url) > 1
    target = Target(
        args.url[0], args.api, args.served_model, args.timeout, args.warm_up or 0, seed,
        servers=tuple(args.url if several else args.server), routes=several,
    )  # fmt: skip
    place = f"{len(args.url)} servers" if several else None
    return replay_each(args, scenarios, partial(replay_against, target, warn=print_warning), place)


def behind_router(scenario: Scenario, servers: int, router: Optional[str]) -> Scenario:
    """Return a scenario with a replica for each server, and with a router if it is named."""
    from servesim.config.cluster import Cluster, make_router

    cluster = scenario.cluster or Cluster(replicas=servers)
    if cluster.size != servers:
        raise BadInput(f"--url: expected {cluster.size} addresses, one for each replica of the scenario, got {servers}")
    if router is not None:
        make_router({"name": router}, "--router")
        cluster = cluster.model_copy(update={"router": {"name": router}})
    return scenario.model_copy(update={"cluster": cluster})


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


def show_live(args: argparse.Namespace, replayed: ReplayedScenario, place: Optional[str]) -> None:
    """Print the measured metrics and the token check."""
    from servesim.calibrate.replay.measured_run import describe_live
    from servesim.calibrate.replay.token_check import format_check

    live = replayed.live
    for run in (live, replayed.run):
        if run is not None:
            run.measures.add_percentiles(args.metric_percentiles)
    lines = describe_live(live, f"{replayed.name} on {place or live.backend['url']}", args.metric_percentiles)
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
    compared = [r.comparison for r in done if r.comparison is not None and not args.live_only]
    code = report_comparisons(args, compared, args.output) if compared else 0
    if any(r.live.stuck for r in done):
        return 1
    checks = [r.live.token_check for r in done if r.live.token_check is not None]
    if not all(check.within(args.tolerance_tokens) for check in checks):
        return 3
    for name in (failed := [r.name for r in done if not len(r.live.measures.done)]):
        print(f"sim: {name}: no request finished", file=sys.stderr)
    return 1 if failed else code
