"""`sim calibrate probe`, `fit` and `check`: measure a device, fit the samples, report the error of a profile."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from servesim.core import BadInput

from .notes import print_note, print_path
from .options import add_device_options, add_json, add_renamed_option, fraction


def register_probe(kinds: Any) -> None:
    probe = kinds.add_parser(
        "probe",
        help="measure the step times of a device",
        description="Measure step times on a grid of step shapes in random order, then fit a cost model. A shape is "
        "repeated until its median reaches --precision. To continue after an interruption, run the same command again.",
    )
    device = add_device_options(probe)
    number: dict[str, Any] = {"type": int, "metavar": "N"}
    add_renamed_option(
        device, "--num-blocks", "--blocks", default=1024, help="KV blocks on the device (default 1024)", **number
    )
    device.add_argument("--block-size", default=16, help="tokens per KV block (default 16)", **number)
    device.add_argument("--host-blocks", default=64, help="KV blocks in host memory (default 64)", **number)
    grid = probe.add_argument_group("grid")
    grid.add_argument(
        "--budget", type=float, default=120.0, metavar="S", help="maximum seconds of measuring (default 120)"
    )
    grid.add_argument(
        "--precision", type=fraction, default=0.01, metavar="FRACTION",
        help="target standard error of each median, relative to it (default 1%%)",
    )  # fmt: skip
    add_renamed_option(
        grid, "--max-rows", "--most-rows", default=64, help="maximum rows per step (default 64)", **number
    )
    add_renamed_option(
        grid, "--max-tokens", "--most-tokens", default=2048, **number,
        help="maximum prompt tokens per step (default 2048)",
    )  # fmt: skip
    add_renamed_option(
        grid, "--max-seq-len", "--longest", help="maximum tokens per sequence (default: the model's context)", **number
    )
    grid.add_argument(
        "--seed", default=0, help="random seed of the random step shapes in the grid (default 0)", **number
    )
    out = probe.add_argument_group("output")
    out.add_argument("-o", "--output", required=True, metavar="DIR", help="profile folder to write or to continue")
    out.add_argument("--name", metavar="NAME", help="name of the profile (default: name of the folder)")
    out.add_argument("--no-fit", action="store_true", help="measure only, do not fit")
    probe.set_defaults(run=probe_device)


def register_fit(kinds: Any) -> None:
    fit = kinds.add_parser("fit", help="fit the samples of a profile folder and print the held-out error")
    fit.add_argument("folder", metavar="DIR", help="profile folder with samples.csv, and probe.yaml or profile.yaml")
    fit.add_argument("--name", metavar="NAME", help="name of the profile (default: name of the folder)")
    fit.add_argument("--plot", metavar="FILE.png", help="draw a chart of the samples and the fit")
    fit.set_defaults(run=fit_samples, json=False)


def register_check(kinds: Any) -> None:
    check = kinds.add_parser(
        "check", help="print the measured range and the error of a profile, and what to measure next"
    )
    check.add_argument("profile", metavar="PROFILE", help="bundled profile or profile folder")
    check.add_argument(
        "--tolerance", type=fraction, metavar="FRACTION",
        help="exit with 3 if a held-out error is larger, e.g. 0.03 or 3%%",
    )  # fmt: skip
    check.add_argument("--plot", metavar="FILE.png", help="draw a chart of the samples and the fit")
    add_json(check)
    check.set_defaults(run=check_profile)


def probe_device(args: argparse.Namespace) -> int:
    """Measure and fit; return 1 if the device failed, 130 if interrupted. All samples are kept."""
    from servesim.calibrate.device.backend import OutOfMemory
    from servesim.calibrate.device.worker_client import WorkerFailed
    from servesim.calibrate.probe.progress import progress_bar
    from servesim.calibrate.probe.session import ProbeSession, run_session

    session = ProbeSession(Path(args.output), settings_of(args))
    resume_hint = f"samples are kept in {args.output}; run the same command to continue"
    try:
        with start_worker(args) as worker, progress_bar(args.quiet) as progress:
            result = run_session(worker, session, progress)
    except KeyboardInterrupt:
        print(f"sim: interrupted; {resume_hint}", file=sys.stderr)
        return 130
    except (WorkerFailed, OutOfMemory) as failed:
        print(f"sim: {failed}; {resume_hint}" if session.samples.exists() else f"sim: {failed}", file=sys.stderr)
        return 1
    if result["counters"]["remark"]:
        print_note(args, result["counters"]["remark"])
    print(
        f"{result['points']} points: {result['known']} reached the precision of {args.precision:.1%}, "
        f"{len(result['failed'])} failed; {result['seconds']:.0f} s; samples: {session.samples}"
    )
    return (
        0 if args.no_fit else fit_samples(argparse.Namespace(folder=args.output, name=args.name, plot=None, json=False))
    )


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the checked settings of a probe session, under the keys of probe.yaml."""
    keys = {"num_blocks": "blocks", "block_size": "block_size", "max_rows": "most_rows", "max_tokens": "most_tokens"}
    if args.max_seq_len is not None:
        keys["max_seq_len"] = "longest"
    for name in keys:
        if getattr(args, name) < 2:
            raise BadInput(f"--{name.replace('_', '-')}: expected at least 2, got {getattr(args, name)}")
    for name in ("budget", "precision"):
        if not getattr(args, name) > 0:
            raise BadInput(f"--{name}: expected more than 0, got {getattr(args, name):g}")
    if args.host_blocks < 0:
        raise BadInput(f"--host-blocks: expected 0 or more, got {args.host_blocks}")
    same = ("backend", "model", "host_blocks", "budget", "precision", "seed")
    settings = {name: getattr(args, name) for name in same}
    return {**settings, **{key: getattr(args, name) for name, key in keys.items()}}


def start_worker(args: argparse.Namespace) -> Any:
    """Start a worker and load the model."""
    from servesim.calibrate.device.worker_client import Worker
    from servesim.calibrate.live.setup import find_model
    from servesim.config.overrides import override

    model = find_model(args.model)
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
    from servesim.calibrate.probe.sampling import sampling_keys
    from servesim.calibrate.probe.session import read_probe
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
    profile = fit_profile(path, about, args.name or folder.resolve().name)
    write_profile(folder, profile.about, profile.cost)
    written = load_profile(folder)
    print(report(written)[0])
    write_plot(written, args.plot, args)
    print(f"profile: {folder / 'profile.yaml'}")
    return 0


def check_profile(args: argparse.Namespace) -> int:
    """Print the report; return 3 if an error is above the tolerance."""
    import json

    from servesim.calibrate.probe.check import report, report_json
    from servesim.costs.device_profile import load_profile

    profile = load_profile(args.profile)
    text, within_tolerance = report(profile, args.tolerance)
    print(json.dumps(report_json(profile, args.tolerance), indent=1, default=str) if args.json else text)
    write_plot(profile, args.plot, args)
    return 0 if within_tolerance else 3


def write_plot(profile: Any, path: Any, args: argparse.Namespace) -> None:
    """Draw the fit if a path is given."""
    if path:
        from servesim.calibrate.probe.plot import plot_fit

        plot_fit(profile, Path(path))
        print_path(args, f"plot: {path}")
