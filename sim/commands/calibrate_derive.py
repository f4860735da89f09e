"""`sim calibrate derive`: a profile for another model, precision, tensor-parallel degree or device, by arithmetic."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from servesim.core import BadInput

from .notes import print_profile
from .options import add, add_names, names_of


def register_derive(kinds: Any) -> None:
    derive = kinds.add_parser(
        "derive", run=derive_profile,
        help="compute a profile for another model, precision, tensor-parallel degree or device from a measured one",
        description="Scale the measured step times with the FLOPs and bytes of the models and the data sheets of the "
        "devices. The result is marked as derived in every output, and its intervals are wide.",
    )  # fmt: skip
    known = "h200-llama2-7b; h200-llama3.1-8b for models with grouped heads"
    source = f"measured profile: bundled name or folder (default: {known})"
    add(derive, {"--from PROFILE": source}, dest="source")
    add_names(derive)
    outside = "seconds of a request outside of the steps: HTTP, tokeniser (default: those of PROFILE)"
    add(derive, {"--front-end SECONDS": outside}, type=float)
    add(derive, {"--eager": "server without CUDA graphs: the host launches every kernel of a step"})
    add(derive, {"-o, --output DIR": "profile folder to write"}, required=True)


def derive_profile(args: argparse.Namespace) -> int:
    """Write the profile; print its KV blocks and the verdict on it."""
    from servesim.config.memory import blocks_of_device, describe_budget
    from servesim.costs.device_profile import load_profile, write_profile
    from servesim.costs.named_profile import derive_named, measured_for
    from servesim.files.write import check_new

    folder = Path(args.output)
    check_new(folder / "profile.yaml", "profile")
    keys = names_of(args) | ({} if args.front_end is None else {"front_end": args.front_end}) | {"eager": args.eager}
    try:
        source = load_profile(args.source or measured_for(keys, "--"))
        profile = derive_named(keys, source, "--")
    except BadInput as bad:
        option, sign, rest = str(bad).partition(":")
        option = option.replace("_", "-") if option.startswith("--") else option  # else it is a file
        raise BadInput(f"{option}{sign}{rest}") from None
    about = {**profile.about, "name": folder.name}
    budget = blocks_of_device(about, 16)
    if budget is not None and budget.blocks < 1:
        raise BadInput(f"--device: no KV block fits: {describe_budget(budget)}; expected more --tensor-parallel")
    write_profile(folder, about, profile.cost)
    print(str(about["how"]))
    if budget is not None:
        print(f"memory: {describe_budget(budget)}")
    print_profile(folder)
    return 0
