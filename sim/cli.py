"""The `sim` command: its parser, its exit codes. Commands import what they need when they run."""

from __future__ import annotations

import argparse
import codecs
import importlib
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn, Optional

from servesim.core import BadInput, Stuck

from . import __version__

GROUPS = (
    "run", "sweep", "search", "compare", "report", "calibrate", "replay", "verify", "serve", "trace",
    "policies", "config",
)  # fmt: skip
START = """
To begin with:
  sim run -X 5 --set policy.decode_batch=64   1,500 requests, 5 a second, on the default engine
  sim policies list                           what schedulers there are
  sim config init my.yaml                     a scenario to change and `sim run my.yaml`
"""
EXTRAS = {"aiohttp": "replay", "optuna": "search", "distributed": "cluster", "pyarrow": "parquet", "torch": "torch"}
PLAIN = {"±": "+-", "×": "x", "–": "-", "…": "..."}  # for terminals that cannot show them


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are one line that says what was meant, and whose commands are shown in a table."""

    @property
    def commands(self) -> Any:
        """The action that holds the commands below this one, None at the end of the line."""
        return next((action for action in self._actions if isinstance(action, argparse._SubParsersAction)), None)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse; a command itself complains of what it does not know, since it knows what is near to it."""
        found, extra = super().parse_known_args(args, namespace)
        if extra and self.commands is None:
            self.error(f"unrecognized arguments: {' '.join(extra)}")
        return found, extra

    def error(self, message: str) -> NoReturn:
        """Say in one line what is wrong; without a command, which there are."""
        from servesim.files.suggestions import meant

        if self.commands is not None and message.startswith("the following arguments are required"):
            self.exit(2, self.format_help())
        choice = re.search(r"invalid choice: '([^']*)'", message)
        if choice and self.commands is not None:
            hint = meant(choice[1], self.commands.choices)
            self.exit(2, f"{self.prog}: no command {choice[1]}; known: {', '.join(self.commands.choices)}{hint}\n")
        option = re.search(r"unrecognized arguments: (--[\w-]+)", message)
        options = [name for action in self._actions for name in action.option_strings if name.startswith("--")]
        hint = meant(option[1], options) if option else ""
        self.exit(2, f"{self.prog}: {message}{hint or f'; see {self.prog} --help'}\n")

    def format_help(self) -> str:
        """Return the help; where there are commands, a table of them."""
        if self.commands is None:
            return super().format_help()
        rows = [(choice.dest, choice.help or "") for choice in self.commands._choices_actions]
        width = max(len(name) for name, _ in rows)
        lines = [f"usage: {self.prog} COMMAND ...", ""]
        lines += [self.description, ""] if self.description else []
        lines += [f"  {name:<{width}}  {about}" for name, about in rows]
        lines += ["", f"`{self.prog} COMMAND --help` says what a command takes."]
        return "\n".join(lines) + "\n" + (self.epilog or "")


def parser() -> argparse.ArgumentParser:
    """Return the whole command line."""
    top = Parser(
        prog="sim",
        description="Simulate the scheduling of an LLM server, find the best policy, and prove it on the device.",
        epilog=START,
    )
    top.add_argument("--version", action="version", version=f"servesim {__version__}")
    commands = top.add_subparsers(metavar="COMMAND", required=True)
    for group in GROUPS:
        importlib.import_module(f".commands.{group}", __package__).register(commands)
    return top


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command; bad input is one line on standard error and exit code 2, never a traceback."""
    speak_plainly()
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    args = parser().parse_args(words)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # `sim ... | head` is no fault
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("sim: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        code, told = complaint(error)
        print(f"sim: {told}", file=sys.stderr)
    return code


def complaint(error: Exception) -> tuple[int, str]:
    """Return the exit code and the line for what went wrong; a fault of ours is raised again, for a report."""
    from servesim.config.registry import blamed, own_policies

    if isinstance(error, BadInput):
        return 2, str(error)
    if isinstance(error, Stuck):
        return 1, str(error)
    if isinstance(error, MemoryError):
        return 1, "not enough memory; fewer requests or fewer processes (--jobs) take less"
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if package in EXTRAS:
        return 2, f"needs {package}, the extra `{EXTRAS[package]}`: pip install 'servesim[{EXTRAS[package]}]'"
    place = blamed(error)
    if place is None and isinstance(error, AssertionError) and str(error) and own_policies():
        place = f"{', '.join(own_policies())} (`sim policies check` looks into it)"
    if place is None:
        raise error
    return 1, f"{place}: {type(error).__name__}: {error}"


def speak_plainly() -> None:
    """Let a terminal that is not of UTF-8 show what it cannot in letters that it can."""
    codecs.register_error("servesim", lambda fault: (plain(fault), getattr(fault, "end", 0)))
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="servesim")


def plain(fault: UnicodeError) -> str:
    """Return what stands for the letters that an encoding does not have."""
    if not isinstance(fault, UnicodeEncodeError):
        raise fault
    return "".join(PLAIN.get(letter, "?") for letter in fault.object[fault.start : fault.end])
