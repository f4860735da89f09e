"""The `sim` command: parser, errors and exit codes. Commands import their libraries when they run."""

from __future__ import annotations

import argparse
import atexit
import codecs
import errno
import gc
import importlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NoReturn, Optional

from servesim.core import BadInput, PolicyError, Stuck
from servesim.core.errors import EXTRAS, MAX_MESSAGE, DeviceFailed, WorkerLost, cut_middle, missing_package
from servesim.files.terminal import fill, paint, printable_output, screen_of, two_columns

from .version import describe

GROUPS = (
    "recommend", "run", "explore", "sweep", "compare", "check", "tune", "report", "export", "calibrate", "replay",
    "verify", "serve", "trace", "policies", "models", "config", "completion",
)  # fmt: skip
ABOUT = "Simulate the scheduler of an LLM server, find the best policy, and verify it on the device."
TASKS = {
    "sim config init my.yaml": "write a scenario of a vLLM server; edit it",
    "sim run my.yaml": "simulate it and print its metrics; --trace FILE uses your requests",
    "sim sweep sweep.yaml": "run a grid of settings, rank them, write report.html",
    "sim capacity my.yaml --subject-to 'p99_ttft_ms <= 500'": "find the highest request rate that meets a limit",
    "sim replay my.yaml --url http://HOST:PORT": "send the requests to a real server and print the error",
}
NEW_OBJECTS = 100_000  # until a garbage collection: Python's 700 are a tenth of the time of a short command
FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)  # errors of a full disk
ASCII = {"±": "+-", "×": "x", "–": "-", "…": "..."}  # for terminals without UTF-8


class Parser(argparse.ArgumentParser):
    """A parser that prints errors as one line with a suggestion, and commands as a table."""

    finished = False
    add_late: Callable[[], None] = staticmethod(lambda: None)  # adds options when the command is used

    def __init__(self, *, run: Optional[Callable[[argparse.Namespace], int]] = None, **how: Any) -> None:
        """Create the parser of a command; `run` is what the command does, `how` what argparse needs."""
        super().__init__(**how)
        self.set_defaults(run=run)

    @property
    def commands(self) -> Any:
        """The action that holds the subcommands, or None."""
        return next((action for action in self._actions if isinstance(action, argparse._SubParsersAction)), None)

    def finish(self) -> None:
        """Add the options that come last: those of models, which are slow to import, and --quiet."""
        if self.finished or self.commands is not None:
            return
        self.finished = True
        self.add_late()
        self.add_argument("-q", "--quiet", action="store_true", help="print no progress and no notes, only warnings")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse; the subcommand reports unknown options, because it knows similar ones."""
        self.finish()
        self.words = list(args or ())
        result, extra = super().parse_known_args(args, namespace)
        if extra and self.commands is None:
            self.error(f"unrecognized arguments: {' '.join(extra)}")
        return result, extra

    def error(self, message: str) -> NoReturn:
        """Print the error as one line and exit; if the command is missing, print the help."""
        from servesim.files.read import did_you_mean

        if self.commands is not None and message.startswith("the following arguments are required"):
            if self.words:  # options without a command
                self.exit(
                    2, f"{self.prog}: expected a command, got {one_line(self.words[0])}; see {self.prog} --help\n"
                )
            self.exit(2, self.format_help())
        choice = re.search(r"invalid choice: '([^']*)'", message)
        if choice and self.commands is not None:
            hint = did_you_mean(choice[1], self.commands.choices)
            self.exit(
                2, f"{self.prog}: no command {one_line(choice[1])}; known: {', '.join(self.commands.choices)}{hint}\n"
            )
        option = re.search(r"unrecognized arguments: (--[\w-]+)", message)
        options = [name for action in self._actions for name in action.option_strings if name.startswith("--")]
        hint = did_you_mean(option[1], options) if option else ""
        self.exit(2, f"{self.prog}: {one_line(message)}{hint or f'; see {self.prog} --help'}\n")

    def format_help(self) -> str:
        """Return the help; for a parser with subcommands, a table of them."""
        if self.commands is None:
            return super().format_help()
        lines = [f"usage: {self.prog} COMMAND ...", ""]
        lines += [fill(self.description), ""] if self.description else []
        lines.append(two_columns({choice.dest: choice.help or "" for choice in self.commands._choices_actions}))
        lines += ["", fill(f"`{self.prog} COMMAND --help` shows the arguments of a command.")]
        return "\n".join(lines) + "\n" + (self.epilog or "")


def parser(groups: Sequence[str] = GROUPS) -> Parser:
    """Return the whole command line, or the part of some groups of commands."""
    top = Parser(prog="sim", description=ABOUT, epilog=f"\nFirst steps:\n{two_columns(TASKS)}\n")
    top.add_argument("--version", action="version", version=describe())
    commands = top.add_subparsers(metavar="COMMAND", required=True)
    for group in groups:
        importlib.import_module(f".commands.{group}", __package__).register(commands)
    top.set_defaults(quiet=False, whole=parser)
    return top


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command; bad input is one line on standard error and exit code 2, never a traceback."""
    if argv is None:
        collect_rarely()
    open_closed_streams()
    set_ascii_fallback()
    with printable_output():
        return run_words(argv)


def collect_rarely() -> None:
    """Let the garbage collector of this process scan the imported modules rarely, and not at exit."""
    gc.set_threshold(NEW_OBJECTS)
    atexit.register(gc.freeze)


def run_words(argv: Optional[Sequence[str]]) -> int:
    """Run the words of a command line, as `main`."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    if not words:
        print(f"{fill(ABOUT)}\n\n{two_columns(TASKS)}\n\nsim --help lists all commands.")
        return 0
    args = parser(words[:1] if words[0] in GROUPS else GROUPS).parse_args(words)
    try:
        code = run_command(args)
        sys.stdout.flush()
    except BrokenPipeError:  # `sim ... | head` is not an error
        discard_output()
        return 0
    except KeyboardInterrupt as interrupt:  # `resumable` of the command has added what continues it
        print("; ".join(["sim: interrupted", *interrupt.args]), file=sys.stderr)
        return 130
    except Exception as error:
        if isinstance(error, OSError) and error.errno in FULL:
            discard_output()
        code, message = format_error(error)
        print_error(message)
    return code


def print_error(message: str) -> None:
    """Print one line on standard error, in the colour of errors on a terminal."""
    print(paint(f"sim: {one_line(message)}", "error", screen_of(sys.stderr)), file=sys.stderr)


def run_command(args: argparse.Namespace) -> int:
    """Run a command. Only commands with --trust run scenarios, so only they may load policies from files."""
    from servesim.config.user_code import allow_code

    with allow_code(args.trust) if "trust" in args else nullcontext():
        code: int = args.run(args)
    return code


def discard_output() -> None:
    """Send what standard output still holds to nowhere, so that Python does not try to write it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def format_error(error: Exception) -> tuple[int, str]:
    """Return the exit code and the message of an error; an error of servesim itself is raised again."""
    from servesim.config.user_code import describe_error
    from servesim.files.read import quote

    if isinstance(error, BadInput):
        return 2, str(error)
    if isinstance(error, (Stuck, PolicyError, DeviceFailed, WorkerLost)):
        return 1, str(error)
    if isinstance(error, OSError) and error.errno in FULL:  # files have their own message
        return 2, f"standard output: cannot be written: {error.strerror}"
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:  # also from a test whether a file exists
        return 2, f"{quote(error.filename)}: {error.strerror}"
    if isinstance(error, MemoryError):
        return 1, "not enough memory; use fewer requests or fewer processes (--jobs)"
    package = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if package in EXTRAS:
        return 2, missing_package(package)
    message = describe_error(error)
    if message is None:
        raise error
    return 1, message


def one_line(message: str) -> str:
    """Return a message on one line of bounded length; a name in it may hold line breaks or terminal sequences."""
    text = cut_middle(message, MAX_MESSAGE)
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def open_closed_streams() -> None:
    """Send what a command prints to a closed stream (`sim run FILE >&-`) to nowhere.

    Otherwise the next file that is opened would have the number of the stream, and workers would print into it.
    """
    if None not in (sys.stdin, sys.stdout, sys.stderr):
        return
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    for number, (name, mode) in enumerate({"stdin": "r", "stdout": "w", "stderr": "w"}.items()):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def set_ascii_fallback() -> None:
    """Replace characters that the terminal cannot show by ASCII."""

    def replace(fault: Any) -> tuple[str, int]:
        letters = fault.object[fault.start : fault.end]
        return "".join(ASCII.get(letter, "?") for letter in letters), fault.end

    codecs.register_error("servesim", replace)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="servesim")
