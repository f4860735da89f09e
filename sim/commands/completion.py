"""`sim completion`: print a completion script for a shell, made from the parser of all commands by shtab."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, Callable

from .options import leaf_commands

SHELLS = ("bash", "zsh", "fish")
FILES = ("FILE", "FILE.png", "RUNS.yaml", "A", "B", "PATH", "SWEEP", "LIVE", "SIM")  # metavars that are paths
FOLDERS = ("DIR", "FOLDER")


def register(commands: Any) -> None:
    completion = commands.add_parser(
        "completion", help="print a completion script for bash, zsh or fish",
        description="Print a script that completes commands, options, policies, presets, profiles and files. Load it "
        'in bash with: eval "$(sim completion bash)", in zsh with: eval "$(sim completion zsh)", in fish with: '
        "sim completion fish | source.",
    )  # fmt: skip
    completion.add_argument("shell", choices=SHELLS, help="bash, zsh or fish")
    completion.set_defaults(run=print_completion)


def print_completion(args: argparse.Namespace) -> int:
    """Print the script."""
    import shtab

    for command in leaf_commands(args.parser):
        for action in command._actions:
            annotate(action)
    print(shtab.complete(args.parser, args.shell))
    return 0


def annotate(action: Any) -> None:
    """Add to an argument what completes it. The parser is used for nothing else after this."""
    import shtab

    names = NAMES.get(action.dest)
    if names is not None and action.metavar in ("NAME", "PROFILE"):
        action.choices = names()
    elif action.metavar in (*FILES, *FOLDERS):
        action.complete = shtab.DIRECTORY if action.metavar in FOLDERS else shtab.FILE


def policy_names() -> Sequence[str]:
    from servesim.policies import POLICIES

    return list(POLICIES)


def preset_names() -> Sequence[str]:
    from servesim.config.registry import presets

    return list(presets())


def profile_names() -> Sequence[str]:
    from servesim.costs.device_profile import bundled_profiles

    return list(bundled_profiles())


def format_names() -> Sequence[str]:
    from servesim.traces.read.formats import FORMATS

    return list(FORMATS)


NAMES: dict[str, Callable[[], Sequence[str]]] = {  # by the name of the argument
    "policy": policy_names,
    "policy_or_preset": lambda: list(dict.fromkeys([*policy_names(), *preset_names()])),
    "preset": preset_names,
    "profile": profile_names,
    "format": format_names,
}
