"""`sim calibrate vllm`: profile and scenario of a vLLM server from its recorded steps, with a check on the server."""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from servesim.core import BadInput

from .notes import print_note, print_path
from .options import add_tolerance, server_url

RECORDER = "servesim.calibrate.adapter.vllm_recorder.recording_scheduler"


def register_vllm(kinds: Any) -> None:
    vllm = kinds.add_parser(
        "vllm",
        help="record the steps of a vLLM server under a load, fit them and check the result on the server",
        description="Start a vLLM server, or use one that runs with the recorder (--url and --steps). Send loads to "
        "it, fit the steps that its scheduler recorded, and write a profile and a scenario with its settings. Then "
        "send another load, and compare it with the simulation. Start your own server with SERVESIM_STEPS=FILE and "
        f"--scheduler-cls {RECORDER}",
        usage="sim calibrate vllm [options] -o DIR -- MODEL [flags of vLLM]",
    )
    vllm.add_argument(
        "arguments", nargs="*", metavar="MODEL [FLAGS]", help="after --: model and flags of the vLLM server to start"
    )
    server = vllm.add_argument_group("server")
    server.add_argument(
        "--worker-python", metavar="PATH",
        help="Python interpreter with vLLM (default: SERVESIM_VLLM_PYTHON of the environment, else this one)",
    )  # fmt: skip
    server.add_argument("--url", type=server_url, metavar="URL", help="a server that runs with the recorder")
    server.add_argument("--steps", metavar="FILE", help="file that its recorder writes (SERVESIM_STEPS)")
    server.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds until a request counts as failed (default 600)",
    )
    loads = vllm.add_argument_group("loads")
    number: dict[str, Any] = {"type": int, "metavar": "N"}
    loads.add_argument(
        "--seconds", type=float, default=60.0, metavar="S", help="seconds of each load with a rate (default 60)"
    )
    loads.add_argument("--prompt-tokens", default=256, help="mean prompt tokens (default 256)", **number)
    loads.add_argument("--output-tokens", default=64, help="mean output tokens (default 64)", **number)
    out = vllm.add_argument_group("output")
    out.add_argument(
        "-o", "--output", required=True, metavar="DIR",
        help="new folder for profile/, scenario.yaml, steps.jsonl, server.log and the report of the check",
    )  # fmt: skip
    add_tolerance(out)
    vllm.set_defaults(run=calibrate_vllm, metrics=None)


def calibrate_vllm(args: argparse.Namespace) -> int:
    """Calibrate and check; return 1 if the server failed, 3 outside the tolerance, 130 if interrupted."""
    from servesim.files.lock import only_writer
    from servesim.files.write import check_new

    if bool(args.url) == bool(args.arguments) or bool(args.url) != bool(args.steps):
        raise BadInput("sim calibrate vllm: expected either -- MODEL FLAGS, or --url URL and --steps FILE")
    folder = Path(args.output)
    check_new(folder / "profile", "profile")
    with only_writer(folder):
        return record_and_check(args, folder)


def record_and_check(args: argparse.Namespace, folder: Path) -> int:
    """Run all parts; a fault is one line, and says where the recorded steps are."""
    import aiohttp  # noqa: F401  a missing package is reported before the server starts
    from servesim.calibrate.vllm.loads import LoadFailed, LoadPlan
    from servesim.calibrate.vllm.server import ServerFailed, VllmServer

    plan = LoadPlan(args.seconds, args.prompt_tokens, args.output_tokens)
    steps = Path(args.steps) if args.steps else folder / "steps.jsonl"
    server = None
    with ExitStack() as stack:
        try:
            if not args.url:
                server = stack.enter_context(VllmServer(args.arguments, args.worker_python, folder))
                print_note(args, f"vLLM {server.version} starts; log: {server.log}")
                server.wait_until_ready()
            return fit_and_check(args, plan, steps, server.url if server else args.url, folder)
        except KeyboardInterrupt:
            print(f"sim: interrupted{kept(steps)}", file=sys.stderr)
            return 130
        except (ServerFailed, LoadFailed, BadInput) as failed:
            if isinstance(failed, BadInput) and not kept(steps):
                raise
            print(f"sim: {server.why_failed(failed) if server else failed}{kept(steps)}", file=sys.stderr)
            return 1


def fit_and_check(args: argparse.Namespace, plan: Any, steps: Path, url: str, folder: Path) -> int:
    """Send the loads, write the files, print the table and the dominant cause; return the exit code."""
    from servesim.calibrate.replay.http_client import Target
    from servesim.calibrate.replay.replay import write_replay
    from servesim.calibrate.vllm.calibration import METRICS, check_server, fit_server
    from servesim.calibrate.vllm.causes import dominant_cause

    from .verify import report_comparisons

    target = Target(url, timeout=args.timeout)
    fitted = fit_server(target, steps, plan, folder, args.quiet, lambda line: print_note(args, line))
    replayed = check_server(target, fitted, args.quiet)
    write_replay(replayed, folder, True)
    assert replayed.comparison is not None
    args.metrics = args.metrics or METRICS  # those that the dominant cause is about
    sides = {replayed.name: (replayed.simulated, replayed.measured)}
    code = report_comparisons(args, [replayed.comparison], sides, args.output)
    cause = dominant_cause(fitted, replayed)
    print_path(args, f"dominant cause of the error: {cause}" if cause else "all of these errors are at most 10 %")
    print_path(args, f"profile: {folder / 'profile'}\nscenario: {fitted.scenario}")
    return code


def kept(steps: Path) -> str:
    """Return where the recorded steps are, and the command that fits them."""
    count = steps.read_bytes().count(b"\n") - 1 if steps.exists() else 0
    if count < 1:
        return ""
    return f"; {count} recorded steps are kept in {steps}: `sim calibrate import steps {steps} -o DIR` fits them"
