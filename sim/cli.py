"""The `sim` command: its parser, its exit codes. Commands import what they need when they run."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import Optional

from . import __version__
from .core import BadInput, Stuck

GROUPS = (
    "run", "sweep", "search", "compare", "report", "plot", "calibrate", "replay", "verify", "serve", "trace",
    "policies", "config",
)  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """Return the whole command line."""
    top = argparse.ArgumentParser(
        prog="sim",
        description="Simulate the scheduling of an LLM server, find the best policy, and prove it on the device.",
    )
    top.add_argument("--version", action="version", version=f"servesim {__version__}")
    commands = top.add_subparsers(metavar="COMMAND", required=True)
    for group in GROUPS:
        if importlib.util.find_spec(f"{__package__}.commands.{group}") is None:
            continue
        importlib.import_module(f".commands.{group}", __package__).register(commands)
    return top


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command; bad input is one line on standard error and exit code 2, never a traceback."""
    args = parser().parse_args(argv)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
    except BadInput as bad:
        print(f"sim: {bad}", file=sys.stderr)
        return 2
    except Stuck as stuck:
        print(f"sim: {stuck}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `sim ... | head` is no fault
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("sim: interrupted", file=sys.stderr)
        return 130
    return code
