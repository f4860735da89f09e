"""`sim calibrate probe`, `fit` and `check`: measure a device, fit its samples, and see what a profile is worth."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from servesim.core import BadInput

from .options import add_device_options, share


def register_probe(kinds: Any) -> None:
    probe = kinds.add_parser(
        "probe",
        help="measure a device's step times",
        description="Measure step times over a designed grid, shapes shuffled, each until its median is known; then "
        "fit them. Samples are kept as they come: the same command goes on where an interrupted one stopped.",
    )
    device = add_device_options(probe)
    device.add_argument("--blocks", type=int, default=1024, metavar="N", help="KV blocks on the device (1024)")
    device.add_argument("--block-size", type=int, default=16, metavar="N", help="tokens a block (16)")
    device.add_argument("--host-blocks", type=int, default=64, metavar="N", help="KV blocks on the host (64)")
    grid = probe.add_argument_group("grid")
    grid.add_argument("--budget", type=float, default=120.0, metavar="S", help="seconds to measure at most (120)")
    grid.add_argument("--precision", type=share, default=0.01, metavar="SHARE", help="of a point's median (1%%)")
    grid.add_argument("--most-rows", type=int, default=64, metavar="N", help="rows of a step (64)")
    grid.add_argument("--most-tokens", type=int, default=2048, metavar="N", help="prompt tokens of a step (2048)")
    grid.add_argument("--longest", type=int, metavar="N", help="tokens of a sequence (what the model is built for)")
    grid.add_argument("--seed", type=int, default=0, metavar="N", help="of points between the designed ones (0)")
    out = probe.add_argument_group("output")
    out.add_argument("-o", "--output", required=True, metavar="DIR", help="profile folder to write, or to go on with")
    out.add_argument("--name", metavar="NAME", help="the profile's name (the folder's)")
    out.add_argument("--no-fit", action="store_true", help="only measure")
    out.add_argument("-q", "--quiet", action="store_true", help="no progress")
    probe.set_defaults(run=probe_device)


def register_fit(kinds: Any) -> None:
    fit = kinds.add_parser("fit", help="fit the samples of a profile folder and tell the held-out error")
    fit.add_argument("folder", metavar="DIR", help="with samples.csv, and probe.yaml or profile.yaml")
    fit.add_argument("--name", metavar="NAME", help="the profile's name (the folder's)")
    fit.add_argument("--plot", metavar="FILE.png", help="draw samples against the fit")
    fit.set_defaults(run=fit_samples)


def register_check(kinds: Any) -> None:
    check = kinds.add_parser("check", help="say what a profile covers, what it is off by, what to measure next")
    check.add_argument("profile", metavar="PROFILE", help="a bundled profile or a profile folder")
    check.add_argument(
        "--tolerance", type=share, metavar="SHARE", help="exit 3 if a held-out error is larger: 0.03 or 3%%"
    )
    check.add_argument("--plot", metavar="FILE.png", help="draw samples against the fit")
    check.set_defaults(run=check_profile)


def probe_device(args: argparse.Namespace) -> int:
    """Measure and fit; 1 when the device failed, 130 when interrupted, with all samples kept."""
    from servesim.calibrate.device.backend import OutOfMemory
    from servesim.calibrate.device.worker_client import WorkerFailed
    from servesim.calibrate.probe.session import Sitting, bar, sit

    sitting = Sitting(Path(args.output), settings_of(args))
    again = f"{args.output} keeps what was measured; the same command goes on"
    try:
        with loaded(args) as worker, bar(args.quiet) as told:
            result = sit(worker, sitting, told)
    except KeyboardInterrupt:
        print(f"sim: interrupted; {again}", file=sys.stderr)
        return 130
    except (WorkerFailed, OutOfMemory) as failed:
        print(f"sim: {failed}; {again}" if sitting.samples.exists() else f"sim: {failed}", file=sys.stderr)
        return 1
    print(
        f"{result['points']} points, {result['known']} known to {args.precision:.1%}, {len(result['failed'])} failed, "
        f"{result['seconds']:.0f} s: {sitting.samples}"
    )
    return 0 if args.no_fit else fit_samples(argparse.Namespace(folder=args.output, name=args.name, plot=None))


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return what a probe is told, checked."""
    names = ("blocks", "block_size", "most_rows", "most_tokens")
    for name in (*names, *(("longest",) if args.longest is not None else ())):
        if getattr(args, name) < 2:
            raise BadInput(f"--{name.replace('_', '-')}: expected at least 2, got {getattr(args, name)}")
    for name in ("budget", "precision"):
        if not getattr(args, name) > 0:
            raise BadInput(f"--{name}: expected more than 0, got {getattr(args, name):g}")
    if args.host_blocks < 0:
        raise BadInput(f"--host-blocks: expected 0 or more, got {args.host_blocks}")
    kept = ("backend", "model", "host_blocks", "budget", "precision", "seed", *names)
    settings = {name: getattr(args, name) for name in kept}
    return settings if args.longest is None else {**settings, "longest": args.longest}


def loaded(args: argparse.Namespace) -> Any:
    """Start a worker and load the model."""
    from servesim.calibrate.device.worker_client import Worker
    from servesim.calibrate.live.setup import known_model
    from servesim.config.overrides import override

    model = known_model(args.model)
    worker = Worker(args.backend, args.worker_python, **override({}, args.option))
    try:
        worker.load(model, args.blocks, args.block_size, args.host_blocks, args.weights)
    except BaseException:
        worker.kill()
        raise
    return worker


def fit_samples(args: argparse.Namespace) -> int:
    """Fit a folder's samples, write its profile.yaml, and say what it is off by."""
    from servesim.calibrate.probe.check import report
    from servesim.calibrate.probe.fit import profile_from
    from servesim.calibrate.probe.samples import samples_file
    from servesim.calibrate.probe.session import read_probe
    from servesim.costs.device_profile import load_profile, write_profile

    folder = Path(args.folder)
    path = samples_file(folder)
    if path is None:
        raise BadInput(f"{folder}: expected a samples.csv; `sim calibrate probe` makes one")
    probed = read_probe(folder)
    if probed is not None:
        about = dict(probed.get("about") or {})
    elif (folder / "profile.yaml").is_file():
        about = dict(load_profile(folder).about)
    else:
        raise BadInput(f"{folder}: expected a probe.yaml or a profile.yaml that says what was measured")
    profile = profile_from(path, about, args.name or folder.resolve().name)
    write_profile(folder, profile.about, profile.cost)
    written = load_profile(folder)
    print(report(written)[0])
    drawn(written, args.plot)
    print(f"profile: {folder / 'profile.yaml'}")
    return 0


def check_profile(args: argparse.Namespace) -> int:
    """Print the report; 3 when an error is above the tolerance."""
    from servesim.calibrate.probe.check import report
    from servesim.costs.device_profile import load_profile

    profile = load_profile(args.profile)
    text, fine = report(profile, args.tolerance)
    print(text)
    drawn(profile, args.plot)
    return 0 if fine else 3


def drawn(profile: Any, path: Any) -> None:
    """Draw the fit where asked for."""
    if path:
        from servesim.calibrate.probe.plot import plot_fit

        plot_fit(profile, Path(path))
        print(f"plot: {path}")
