"""`sim calibrate derive`: a profile for another model, precision, tensor-parallel degree or device, by arithmetic."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from servesim.core import BadInput
from servesim.core.limits import MAX_SECONDS, is_number

PRECISIONS = ("bfloat16", "float16", "float8", "int8", "mxfp4")
MAX_DEGREE = 64


def register_derive(kinds: Any) -> None:
    derive = kinds.add_parser(
        "derive",
        help="compute a profile for another model, precision, tensor-parallel degree or device from a measured one",
        description="Scale the measured step times with the FLOPs and bytes of the models and the data sheets of the "
        "devices. The result is marked as derived in every output, and its intervals are wide.",
    )
    derive.add_argument(
        "--from", dest="source", metavar="PROFILE", default="h200-llama2-7b",
        help="measured profile: bundled name or folder (default: h200-llama2-7b)",
    )  # fmt: skip
    derive.add_argument("--model", metavar="NAME", help="public model, or its config.json (default: that of PROFILE)")
    derive.add_argument("--device", metavar="NAME", help="device, such as H100 or L40S (default: that of PROFILE)")
    derive.add_argument("--precision", choices=PRECISIONS, help="of the weights (default: that of PROFILE)")
    derive.add_argument(
        "--tensor-parallel", type=int, metavar="N", help="devices that share the model (default: that of PROFILE)"
    )
    derive.add_argument(
        "--front-end", type=float, metavar="SECONDS",
        help="seconds of a request outside of the steps: HTTP, tokeniser (default: those of PROFILE)",
    )  # fmt: skip
    derive.add_argument("-o", "--output", metavar="DIR", required=True, help="profile folder to write")
    derive.set_defaults(run=derive_profile)


def derive_profile(args: argparse.Namespace) -> int:
    """Write the profile; print its KV blocks and the verdict on it."""
    from servesim.config.memory import blocks_of_device, describe_budget
    from servesim.costs import derivation
    from servesim.costs.device_profile import load_profile, write_profile
    from servesim.costs.profile_verdict import verdict_on
    from servesim.files.write import check_new

    source, folder = load_profile(args.source), Path(args.output)
    check_new(folder / "profile.yaml", "profile")
    if args.front_end is not None and not is_number(args.front_end, 0, MAX_SECONDS):
        raise BadInput(f"--front-end: expected seconds from 0 to {MAX_SECONDS:g}, got {args.front_end:g}")
    profile = derivation.derive_profile(source, chosen_setting(args, derivation.setting_of(source)), folder.name)
    front_end = {} if args.front_end is None else {"front_end": {"seconds": args.front_end}}
    about = {**profile.about, **front_end}
    budget = blocks_of_device(about, 16)
    if budget is not None and budget.blocks < 1:
        raise BadInput(f"--device: no KV block fits: {describe_budget(budget)}; expected more --tensor-parallel")
    write_profile(folder, about, profile.cost)
    print(str(about["how"]))
    if budget is not None:
        print(f"memory: {describe_budget(budget)}")
    print("\n".join([*verdict_on(load_profile(folder)).lines(), f"profile: {folder / 'profile.yaml'}"]))
    return 0


def chosen_setting(args: argparse.Namespace, old: Any) -> Any:
    """Return the setting of the options; what is not given stays as in the measured profile."""
    from dataclasses import replace

    from servesim.costs.model_arithmetic import model_of
    from servesim.costs.model_config import read_model
    from servesim.costs.public_models import find_device, find_model

    model = read_model(args.model)
    if model is not None:
        found = find_model(model) if isinstance(model, str) else model_of({"model": {**model, "dtype": old.dtype}})
        old = replace(old, model=found)
    degree = old.degree if args.tensor_parallel is None else args.tensor_parallel
    if not 1 <= degree <= MAX_DEGREE:
        raise BadInput(f"--tensor-parallel: expected 1 to {MAX_DEGREE}, got {degree}")
    device = old.device if args.device is None else find_device(args.device)
    return replace(old, device=device, dtype=args.precision or old.dtype, degree=degree)
