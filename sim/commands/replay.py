"""`sim replay`: scenarios or a sweep's winners on a live engine, then simulated against measured."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from servesim.core import BadInput

from .options import add_device_options, add_scenario_options, add_tolerance, scenario_of
from .verify import judge

if TYPE_CHECKING:
    from servesim.calibrate.live.setup import Stage
    from servesim.calibrate.replay.replay import Replayed
    from servesim.config.scenario import Scenario


def register(commands: Any) -> None:
    replay = commands.add_parser(
        "replay",
        help="run scenarios or a sweep's winners on a live engine and print the error",
        description="Replay on a backend (--backend) or against a running server (--url), then compare.",
    )
    add_scenario_options(replay)
    given = replay.add_argument_group("winners")
    given.add_argument("--from", dest="sweep", metavar="SWEEP", help="the folder of a sweep instead of a scenario")
    given.add_argument("--top", type=int, default=3, metavar="N", help="how many of its best (3)")
    given.add_argument("--with-baseline", action="store_true", help="and the sweep's baseline")
    add_device_options(replay, model=None, required=False)
    server = replay.add_argument_group("server")
    server.add_argument("--url", metavar="URL", help="send the requests to this server instead")
    server.add_argument("--api", choices=("llm-serving", "openai"), default="openai", help="what it speaks (openai)")
    server.add_argument("--served-model", metavar="NAME", help="the model's name there (the first it lists)")
    server.add_argument("--timeout", type=float, default=3600.0, metavar="S", help="give up a request after (3600)")
    how = replay.add_argument_group("run")
    how.add_argument("--warm-up", type=int, metavar="N", help="requests served before and forgotten (32; with --url 0)")
    how.add_argument("--time-scale", type=float, default=1.0, metavar="F", help="stretch arrivals by this factor")
    how.add_argument("--limit", type=int, metavar="N", help="only the first N requests")
    how.add_argument("--live-only", action="store_true", help="measure, simulate nothing, compare nothing")
    how.add_argument("--quiet", action="store_true", help="no progress line")
    how.add_argument("-o", "--output", metavar="DIR", help="write live/, sim/, verify.json and verify.png there")
    add_tolerance(how)
    replay.set_defaults(run=replay_scenarios)


def replay_scenarios(args: argparse.Namespace) -> int:
    """Replay, print, judge; 1 when a run failed, 3 outside the tolerance, 130 when interrupted."""
    if bool(args.backend) == bool(args.url):
        raise BadInput("replay: expected one of --backend and --url")
    if args.limit is not None and args.limit < 1:
        raise BadInput(f"--limit: expected at least 1, got {args.limit}")
    scenarios = scenarios_of(args)
    if args.url:
        return against_url(args, scenarios)
    from servesim.calibrate.device.backend import OutOfMemory
    from servesim.calibrate.device.worker_client import WorkerFailed

    try:
        return on_backend(args, scenarios)
    except (WorkerFailed, OutOfMemory) as failed:
        print(f"sim: {failed}", file=sys.stderr)
        return 1


def scenarios_of(args: argparse.Namespace) -> list[tuple[str, Scenario]]:
    """Return what is to be replayed, by name."""
    if args.sweep is None:
        scenario = scenario_of(args)
        return [(scenario.name or scenario.policy["name"], scenario)]
    from servesim.calibrate.replay.replay import winners

    if args.top < 1:
        raise BadInput(f"--top: expected at least 1, got {args.top}")
    settings = [*args.set, *([f"profile={args.profile}"] if args.profile else [])]
    return winners(Path(args.sweep), args.top, args.with_baseline, tuple(settings))


def on_backend(args: argparse.Namespace, scenarios: list[tuple[str, Scenario]]) -> int:
    """Replay all of them on one worker."""
    from servesim.calibrate.live.setup import Stage, name_of
    from servesim.calibrate.replay.replay import check_profile, replay_on, requests_of
    from servesim.config.overrides import override
    from servesim.costs.device_profile import load_profile

    profile = None if args.live_only and args.backend != "fake" else load_profile(scenarios[0][1].profile)
    model = args.model or (name_of(profile.about.get("model")) if profile else None)
    done: list[Replayed] = []
    with Stage(args.backend, model, args.worker_python, args.weights, override({}, args.option)) as stage:
        stage.load([scenario for _, scenario in scenarios])
        if profile is not None:
            check_profile(profile, stage)
        for name, scenario in scenarios:
            requests = requests_of(scenario, args.time_scale, args.limit)
            warm_up = 32 if args.warm_up is None else args.warm_up
            done.append(replay_on(stage, name, scenario, requests, profile, warm_up, args.quiet))
            show_live(done[-1], stage)
            if done[-1].live.stopped:
                break
    return report(args, done)


def show_live(replayed: Replayed, stage: Optional[Stage]) -> None:
    """Print what was measured."""
    from servesim.runs.text import benchmark, rule

    live = replayed.live
    what = stage.about["device"] if stage is not None else live.backend.get("url", "")
    print(rule(f" {replayed.name} on {what} (measured) ", "="))
    print("\n".join(benchmark(live)))
    host = live.result()["host_s"]
    if live.model_calls:
        print(f"model calls {len(live.model_calls)}, host {100 * host / max(live.busy, 1e-9):.1f} % of their time")
    for name, count in live.measures.outcomes().items():
        if name != "finished":
            print(f"requests {name}: {count}")
    if late := live.extra.get("lateness_ms"):
        print(f"sent late by {late['mean']:.2f} ms in the mean, {late['max']:.2f} ms at most")
        print(f"most streams open at once: {live.extra['most_open']}")
    for reason, count in live.extra.get("reasons", {}).items():
        print(f"{count} x {reason}")
    if live.stopped:
        print("stopped early: these are the results so far")
    if live.stuck:
        print(live.stuck)


def report(args: argparse.Namespace, done: list[Replayed]) -> int:
    """Write the files, print the comparisons, and return the exit code."""
    from servesim.calibrate.replay.replay import write_replay

    if args.output:
        for replayed in done:
            write_replay(replayed, Path(args.output), len(done) == 1)
    if any(replayed.live.stopped for replayed in done):
        return 130
    compared = [r for r in done if r.comparison is not None]
    if args.live_only or not compared:
        return 1 if any(r.live.stuck for r in done) else 0
    sides = {r.name: (r.simulated, r.measured) for r in compared}
    code = judge(args, [r.comparison for r in compared], sides, args.output)
    return 1 if any(r.live.stuck for r in done) else code


def against_url(args: argparse.Namespace, scenarios: list[tuple[str, Scenario]]) -> int:
    """Send the requests of one scenario after the other to a server."""
    from servesim.calibrate.replay.http_client import Target, replay_against
    from servesim.calibrate.replay.replay import requests_of
    from servesim.costs.device_profile import load_profile

    done = []
    target = Target(args.url, args.api, args.served_model, args.timeout, args.warm_up or 0)
    for name, scenario in scenarios:
        requests = requests_of(scenario, args.time_scale, args.limit)
        profile = None if args.live_only else load_profile(scenario.profile)
        done.append(replay_against(target, name, scenario, requests, profile, args.quiet))
        show_live(done[-1], None)
        if done[-1].live.stopped:
            break
    return report(args, done)
