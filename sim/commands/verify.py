"""`sim verify`: a simulated run against a measured one, or many against many."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, Optional

from .tolerance import add_tolerance, judge

if TYPE_CHECKING:
    from pathlib import Path

    from ..calibrate.side import Side
    from ..calibrate.verify import Comparison


def register(commands: Any) -> None:
    """Add `sim verify`."""
    verify = commands.add_parser(
        "verify",
        help="simulated against measured: errors, where they come from, ranks",
        description="Compare folders of `sim run -o` and `sim replay -o`; folders of such folders are paired by name.",
    )
    verify.add_argument("simulated", metavar="SIM", help="folder of a simulated run, or of several")
    verify.add_argument("measured", metavar="LIVE", help="folder of a measured run, or of several")
    verify.add_argument("--profile", metavar="NAME", help="for splitting the error (the simulated run's if left out)")
    verify.add_argument("-o", "--output", metavar="DIR", help="write verify.json and verify.png there")
    add_tolerance(verify)
    verify.set_defaults(run=verify_folders)


def verify_folders(args: argparse.Namespace) -> int:
    """Compare, print, judge."""
    from pathlib import Path

    from ..calibrate.side import read_side

    pairs = paired(Path(args.simulated), Path(args.measured))
    sides = {name: (read_side(ours), read_side(theirs)) for name, ours, theirs in pairs}
    comparisons = [compared(name, *both, args.profile) for name, both in sides.items()]
    return judge(args, comparisons, sides, args.output)


def paired(simulated: Path, measured: Path) -> list[tuple[str, Path, Path]]:
    """Return the runs that both folders have, by name."""
    from ..core import BadInput

    for folder in (simulated, measured):
        if not folder.is_dir():
            raise BadInput(f"{folder}: no such folder")
    if (simulated / "result.json").exists() or (measured / "result.json").exists():
        return [("", simulated, measured)]
    ours = {path.parent.name for path in simulated.glob("*/result.json")}
    theirs = {path.parent.name for path in measured.glob("*/result.json")}
    if not ours & theirs:
        raise BadInput(f"{simulated} and {measured}: expected runs in both, under the same names; there are none")
    for name in sorted(ours ^ theirs):
        print(f"left out, only on one side: {name}")
    return [(name, simulated / name, measured / name) for name in sorted(ours & theirs)]


def compared(name: str, simulated: Side, measured: Side, profile: Optional[str]) -> Comparison:
    """Compare two sides, with the split of the error where the measured one has its calls."""
    from dataclasses import replace

    from ..calibrate.host import Host, Hosted
    from ..calibrate.resimulate import resimulate
    from ..calibrate.verify import compare
    from ..profile import load_profile

    measured = replace(measured, name=name or measured.name)
    if not measured.calls or measured.sent is None or simulated.scenario is None:
        return compare(simulated, measured)
    found = load_profile(profile or simulated.scenario.profile)
    host = Host(*measured.result.get("host", (0.0, 0.0)))
    again, followed = resimulate(measured, replace(found, cost=Hosted(found.cost, host)), simulated.scenario)
    return compare(simulated, measured, again, followed)
