"""`sim completion`: print a completion script for a shell, made from the parser of all commands by shtab."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any

from . import options

FILES = ("FILE", "FILE.png", "RUNS.yaml", "A", "B", "PATH", "SWEEP", "LIVE", "SIM")  # metavars that are paths
FOLDERS = ("DIR", "FOLDER")


def register(commands: Any) -> None:
    completion = commands.add_parser(
        "completion", run=print_completion, help="print a completion script for bash, zsh or fish",
        description="Print a script that completes commands, options, policies, presets, profiles and files. Load it "
        'in bash with: eval "$(sim completion bash)", in zsh with: eval "$(sim completion zsh)", in fish with: '
        "sim completion fish | source.",
    )  # fmt: skip
    options.add(completion, {"{bash,zsh,fish}=shell": "bash, zsh or fish"})


def print_completion(args: argparse.Namespace) -> int:
    """Print the script."""
    import shtab

    whole = args.whole()
    for command in options.leaf_commands(whole):
        for action in command._actions:
            annotate(action)
    print(shtab.complete(whole, args.shell))
    return 0


def annotate(action: Any) -> None:
    """Add to an argument what completes it. The parser is used for nothing else after this."""
    import shtab

    tables = TABLES.get(action.dest)
    if tables is not None and action.metavar in ("NAME", "PROFILE"):
        action.choices = list(dict.fromkeys(name for table in tables for name in names_in(*table)))
    elif action.metavar in (*FILES, *FOLDERS):
        action.complete = shtab.DIRECTORY if action.metavar in FOLDERS else shtab.FILE


def names_in(module: str, attribute: str) -> list[str]:
    """Return the names in a table of the library, or in the table that its function returns."""
    table = getattr(import_module(f"servesim.{module}"), attribute)
    return list(table() if callable(table) else table)


POLICIES, PRESETS = ("policies", "POLICIES"), ("config.registry", "presets")
TABLES = {  # name of the argument -> tables with the names that complete it
    "policy": [POLICIES],
    "policy_or_preset": [POLICIES, PRESETS],
    "preset": [PRESETS],
    "profile": [("costs.device_profile", "bundled_profiles")],
    "format": [("traces.read.formats", "FORMATS")],
}
