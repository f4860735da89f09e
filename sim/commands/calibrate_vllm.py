"""`sim calibrate vllm`: profile and scenario of a vLLM server from its recorded steps, with a check on the server."""

from __future__ import annotations

import argparse
import itertools
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from servesim.core import BadInput

from .notes import print_note, print_path
from .options import add, add_tolerance, server_url

if TYPE_CHECKING:
    from servesim.calibrate.vllm.calibration import Calibration

RECORDER = "servesim.calibrate.adapter.vllm_recorder.recording_scheduler"


def register_vllm(kinds: Any) -> None:
    vllm = kinds.add_parser(
        "vllm", run=calibrate_vllm,
        help="record the steps of a vLLM server under a load, fit them and check the result on the server",
        description="Start a vLLM server, or use one that runs with the recorder (--url and --steps). Send loads to "
        "it, fit the steps that its scheduler recorded, and write a profile and a scenario with its settings. Then "
        "send another load, and compare it with the simulation. Start your own server with SERVESIM_STEPS=FILE and "
        f"--scheduler-cls {RECORDER}",
        usage="sim calibrate vllm [options] -o DIR -- MODEL [flags of vLLM]",
    )  # fmt: skip
    vllm.add_argument(
        "arguments", nargs="*", metavar="MODEL [FLAGS]", help="after --: model and flags of the vLLM server to start"
    )
    server = vllm.add_argument_group("server")
    python = "Python interpreter with vLLM (default: SERVESIM_VLLM_PYTHON of the environment, else this one)"
    add(server, {"--worker-python PATH": python})
    add(server, {"--url URL": "a server that runs with the recorder"}, type=server_url)
    add(server, {"--steps FILE": "file that its recorder writes (SERVESIM_STEPS)"})
    late = "seconds until a request counts as failed (default 600)"
    add(server, {"--timeout S": late})
    loads = vllm.add_argument_group("loads")
    add(loads, {"--seconds S": "seconds of each load with a rate (default 60)"})
    add(loads, {"--prompt-tokens N": "mean prompt tokens (default 256)"})
    add(loads, {"--output-tokens N": "mean output tokens (default 64)"})
    out = vllm.add_argument_group("output")
    folder = "new folder for profile/, scenario.yaml, steps.jsonl, server.log and the report of the check"
    add(out, {"-o, --output DIR": folder}, required=True)
    add(out, {
        "--resume": "continue with the loads in DIR that are complete; repeat the command",
        "--check-only": "only check: send the last load again, also to a server with other flags, and compare",
    })  # fmt: skip
    add_tolerance(out)
    vllm.set_defaults(metrics=None)


def calibrate_vllm(args: argparse.Namespace) -> int:
    """Calibrate and check; return 1 if the server failed, 3 outside the tolerance, 130 if interrupted."""
    from servesim.files.lock import only_writer
    from servesim.files.write import check_new

    if bool(args.url) == bool(args.arguments) or bool(args.url) != bool(args.steps):
        raise BadInput("sim calibrate vllm: expected either -- MODEL FLAGS, or --url URL and --steps FILE")
    folder = Path(args.output)
    if args.check_only and not (folder / "profile").exists():
        raise BadInput(f"{folder}: --check-only: expected a calibration with a profile, got none")
    if not (args.check_only or args.resume):
        check_new(folder / "profile", "profile")
        if (folder / "loads.jsonl").exists():
            raise BadInput(f"{folder}: already holds the loads of a calibration; continue with --resume")
    with only_writer(folder):
        return record_and_check(args, folder)


def record_and_check(args: argparse.Namespace, folder: Path) -> int:
    """Run all parts; a fault is one line, and says where the recorded steps are."""
    import aiohttp  # noqa: F401  a missing package is reported before the server starts
    from servesim.calibrate.replay.http_client import Target
    from servesim.calibrate.vllm.calibration import Calibration
    from servesim.calibrate.vllm.loads import LoadFailed, LoadPlan
    from servesim.calibrate.vllm.recording import open_recording
    from servesim.calibrate.vllm.server import ServerFailed, VllmServer

    plan = LoadPlan(args.seconds, args.prompt_tokens, args.output_tokens)
    steps, server = Path(args.steps or folder / "steps.jsonl"), None
    with ExitStack() as stack:
        try:
            if not args.url:
                server = stack.enter_context(VllmServer(args.arguments, args.worker_python, folder))
                steps = server.steps
                print_note(args, f"vLLM {server.version} starts; log: {server.log}")
                server.wait_until_ready()
            recording = open_recording(steps)
            target = Target(server.url if server else args.url, timeout=args.timeout, vocabulary=recording.vocabulary)
            calibration = Calibration(
                target, recording, folder, plan, args.arguments, args.quiet, lambda line: print_note(args, line)
            )
            return fit_and_check(args, calibration)
        except KeyboardInterrupt:
            print(f"sim: interrupted{kept(steps, folder)}", file=sys.stderr)
            return 130
        except (ServerFailed, LoadFailed, BadInput) as failed:
            if isinstance(failed, BadInput) and not kept(steps, folder):
                raise
            print(f"sim: {server.why_failed(failed) if server else failed}{kept(steps, folder)}", file=sys.stderr)
            return 1


def fit_and_check(args: argparse.Namespace, calibration: Calibration) -> int:
    """Send the loads, write the files, print the table, the verdict and the dominant cause; return the exit code."""
    from servesim.calibrate.replay.replay import write_replay
    from servesim.calibrate.vllm.calibration import METRICS, check_server, fit_server, read_fit, start, with_check
    from servesim.calibrate.vllm.causes import dominant_cause
    from servesim.costs.device_profile import write_profile
    from servesim.costs.profile_verdict import verdict_on

    from .verify import report_comparisons

    folder, noise = calibration.folder, start(calibration)
    fitted = read_fit(calibration) if (folder / "profile").exists() else fit_server(calibration, noise)
    fitted, replayed = check_server(calibration, fitted)
    output = check_folder(folder)
    write_replay(replayed, output, True)
    assert replayed.comparison is not None
    args.metrics = args.metrics or METRICS  # those that the dominant cause is about
    code = report_comparisons(args, [replayed.comparison], str(output))
    profile = with_check(fitted.profile, replayed, noise)
    if changed := calibration.recording.changed_settings(fitted.scenario):
        print_note(args, f"other settings than those of {fitted.scenario}: {', '.join(changed)}")
    else:
        write_profile(folder / "profile", profile.about, profile.cost)
    cause = dominant_cause(fitted, replayed)
    lines = [*verdict_on(profile).lines(), *([f"dominant cause of the error: {cause}"] if cause else [])]
    print_path(args, "\n".join([*lines, f"profile: {folder / 'profile'}", f"scenario: {fitted.scenario}"]))
    return code


def check_folder(folder: Path) -> Path:
    """Return the folder of a check: that of the calibration for the first one, then check-2, check-3, ..."""
    numbers = (folder / f"check-{number}" for number in itertools.count(2))
    return next(one for one in itertools.chain([folder], numbers) if not (one / "verify.json").exists())


def kept(steps: Path, folder: Path) -> str:
    """Return where the recorded steps are, and the command that fits them."""
    count = steps.read_bytes().count(b"\n") - 1 if steps.exists() else 0
    if count < 1:
        return ""
    text = f"; {count} recorded steps are kept in {steps}: `sim calibrate import steps {steps} -o DIR` fits them"
    resume = ", and the same command with --resume sends only the loads that are not complete"
    return text + (resume if (folder / "loads.jsonl").exists() else "")
