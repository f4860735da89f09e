"""`sim calibrate`: step costs from a device, from samples, from logs or from a running server, and their errors."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from servesim.core import BadInput
from servesim.core.errors import DeviceFailed

from .calibrate_derive import register_derive
from .calibrate_endpoint import register_endpoint
from .calibrate_import import register_import
from .calibrate_vllm import register_vllm
from .notes import print_note, print_result
from .options import add, add_device_options, add_json, add_trust, fraction

if TYPE_CHECKING:
    from servesim.calibrate.probe.session import ProbeSession


def register(commands: Any) -> None:
    calibrate = commands.add_parser("calibrate", help="measure or fit the step costs of a device")
    kinds = calibrate.add_subparsers(metavar="ACTION", required=True)
    register_probe(kinds)
    fit = kinds.add_parser(
        "fit", run=fit_samples, help="fit the samples of a profile folder and print the held-out error"
    )
    add(fit, {"FOLDER": "profile folder with samples.csv, and probe.yaml or profile.yaml"})
    register_check(kinds)
    register_logs(kinds)
    register_vllm(kinds)
    register_endpoint(kinds)
    register_import(kinds)
    register_derive(kinds)


def register_logs(kinds: Any) -> None:
    logs = kinds.add_parser(
        "logs", run=fit_from_logs, help="fit step costs to logs of real runs",
        description="Fit step costs to logs and reported totals of real runs. The fit runs the simulator for each "
        "trial value.",
    )  # fmt: skip
    add(logs, {
        "FILE": "YAML file with the scenario and the measured times of each run",
        "-o, --output DIR": "folder for profile.yaml (default: print the fit only)",
        "--no-cross-validation": "skip the fits that leave out one run each (faster, no held-out error)",
    })  # fmt: skip
    add_trust(logs)


def fit_from_logs(args: argparse.Namespace) -> int:
    """Fit, print the fit, and write the profile."""
    from servesim.calibrate.logs.fit import fit_logs
    from servesim.calibrate.logs.observed_runs import read_runs
    from servesim.calibrate.logs.text import format_table, profile_about
    from servesim.costs.device_profile import Profile, write_profile
    from servesim.costs.profile_verdict import verdict_on
    from servesim.files.write import check_new

    if args.output:
        check_new(Path(args.output) / "profile.yaml", "profile")
    runs = read_runs(Path(args.file))
    print_note(args, *dict.fromkeys(remark for run in runs.runs for remark in run.trace.remarks()))

    def show_progress(line: str) -> None:
        if not args.quiet:
            print(line, file=sys.stderr, flush=True)

    fit = fit_logs(runs, show_progress, leave_out=not args.no_cross_validation)
    about = profile_about(fit, runs)
    print("\n".join([format_table(fit), "", *verdict_on(Profile(runs.name, fit.cost, about)).lines()]))
    if args.output:
        write_profile(Path(args.output), about, fit.cost)
        print(f"profile: {Path(args.output) / 'profile.yaml'}")
    return 0


def register_probe(kinds: Any) -> None:
    probe = kinds.add_parser(
        "probe", run=probe_device, help="measure the step times of a device",
        description="Measure step times on a grid of step shapes in random order, then fit a cost model. A shape is "
        "repeated until its median reaches --precision. To continue after an interruption, run the same command again.",
    )  # fmt: skip
    device = add_device_options(probe)
    add(device, {"--num-blocks N": "KV blocks on the device (default 1024)"})
    add(device, {"--block-size N": "tokens per KV block (default 16)"})
    add(device, {"--host-blocks N": "KV blocks in host memory (default 64)"})
    grid = probe.add_argument_group("grid")
    add(grid, {"--budget S": "maximum seconds of measuring (default 120)"})
    precise = "target standard error of each median, relative to it (default 1%%)"
    add(grid, {"--precision FRACTION": precise}, type=fraction, default=0.01)
    add(grid, {"--max-rows N": "maximum rows per step (default 64)"})
    add(grid, {"--max-tokens N": "maximum prompt tokens per step (default 2048)"})
    add(grid, {"--max-seq-len N": "maximum tokens per sequence (default: the model's context)"}, type=int)
    add(grid, {"--seed N": "random seed of the random step shapes in the grid (default 0)"})
    out = probe.add_argument_group("output")
    add(out, {"-o, --output DIR": "profile folder to write or to continue"}, required=True)
    add(out, {"--no-fit": "measure only, do not fit"})


def register_check(kinds: Any) -> None:
    check = kinds.add_parser(
        "check", run=check_profile, help="print the measured range and the error of a profile, and what to measure next"
    )  # fmt: skip
    add(check, {"PROFILE": "bundled profile or profile folder"})
    wrong = "exit with 3 if a held-out error is larger, e.g. 0.03 or 3%%"
    add(check, {"--tolerance FRACTION": wrong}, type=fraction)
    add_json(check)


def probe_device(args: argparse.Namespace) -> int:
    """Measure and fit, as the only writer of the folder; return 1 if the device failed, 130 if interrupted."""
    from servesim.calibrate.probe.session import ProbeSession
    from servesim.files.lock import only_writer

    session = ProbeSession(Path(args.output), settings_of(args))
    with only_writer(session.folder):
        return probe_and_fit(args, session)


def probe_and_fit(args: argparse.Namespace, session: ProbeSession) -> int:
    """Measure and fit; return the exit code. All samples are kept."""
    from servesim.calibrate.probe.session import run_session

    resume_hint = f"samples are kept in {args.output}; run the same command to continue"
    try:
        with start_worker(args) as worker:
            result = run_session(worker, session, args.quiet)
    except KeyboardInterrupt:
        print(f"sim: interrupted; {resume_hint}", file=sys.stderr)
        return 130
    except DeviceFailed as failed:
        print(f"sim: {failed}; {resume_hint}" if session.samples.exists() else f"sim: {failed}", file=sys.stderr)
        return 1
    if result["counters"]["remark"]:
        print_note(args, result["counters"]["remark"])
    print(
        f"{result['points']} points: {result['known']} reached the precision of {args.precision:.1%}, "
        f"{len(result['failed'])} failed; {result['seconds']:.0f} s; samples: {session.samples}"
    )
    return 0 if args.no_fit else fit_samples(argparse.Namespace(folder=args.output))


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the checked settings of a probe session, the keys of probe.yaml."""
    sizes = ["num_blocks", "block_size", "max_rows", "max_tokens"]
    sizes += [] if args.max_seq_len is None else ["max_seq_len"]
    for name in sizes:
        if getattr(args, name) < 2:
            raise BadInput(f"--{name.replace('_', '-')}: expected at least 2, got {getattr(args, name)}")
    for name in ("budget", "precision"):
        if not getattr(args, name) > 0:
            raise BadInput(f"--{name}: expected more than 0, got {getattr(args, name):g}")
    if args.host_blocks < 0:
        raise BadInput(f"--host-blocks: expected 0 or more, got {args.host_blocks}")
    names = ("backend", "model", "host_blocks", "budget", "precision", "seed", *sizes)
    return {name: getattr(args, name) for name in names}


def start_worker(args: argparse.Namespace) -> Any:
    """Start a worker and load the model."""
    from servesim.calibrate.device.backend import model_named
    from servesim.calibrate.device.worker_client import Worker
    from servesim.config.layers import override

    model = model_named(args.model)
    worker = Worker(args.backend, args.worker_python, **override({}, args.option))
    try:
        worker.load(model, args.num_blocks, args.block_size, args.host_blocks, args.weights)
    except BaseException:
        worker.kill()
        raise
    return worker


def fit_samples(args: argparse.Namespace) -> int:
    """Fit the samples of a folder, write its profile.yaml, and print its error."""
    from servesim.calibrate.probe.check import report
    from servesim.calibrate.probe.fitted_profile import fit_profile
    from servesim.calibrate.probe.samples import samples_file
    from servesim.calibrate.probe.session import read_probe
    from servesim.calibrate.probe.token_selection import sampling_keys
    from servesim.costs.device_profile import load_profile, write_profile

    folder = Path(args.folder)
    path = samples_file(folder)
    if path is None:
        raise BadInput(f"{folder}: has no samples.csv; expected a folder of `sim calibrate probe`")
    probed = read_probe(folder)
    if probed is not None:
        about = dict(probed.get("about") or {})
        about["sampling"] = sampling_keys(about.get("sampling"), probed.get("sampling"))
    elif (folder / "profile.yaml").is_file():
        about = dict(load_profile(folder).about)
    else:
        raise BadInput(f"{folder}: has no probe.yaml and no profile.yaml; expected one, with the device and the model")
    profile = fit_profile(path, about, folder.resolve().name)
    write_profile(folder, profile.about, profile.cost)
    print(report(load_profile(folder)))
    print(f"profile: {folder / 'profile.yaml'}")
    return 0


def check_profile(args: argparse.Namespace) -> int:
    """Print the report; return 3 if an error is above the tolerance."""
    from servesim.calibrate.probe.check import is_within, report, report_json
    from servesim.costs.device_profile import load_profile

    profile = load_profile(args.profile)
    known = (profile, args.tolerance)
    print_result(args, lambda: report_json(*known), lambda: report(*known), default=str)
    return 0 if is_within(profile, args.tolerance) else 3
