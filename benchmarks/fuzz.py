"""Run `sim` on mutated inputs and check that it never shows a traceback, hangs or leaves a partial file.

    python benchmarks/fuzz.py                                 # about 20,000 inputs
    python benchmarks/fuzz.py --count 500
    python benchmarks/fuzz.py --target scenario --only 1234   # repeat one input, with its output

An input is accepted (exit code 0, 1 or 3) or rejected (exit code 2 and one line). All commands run in this process.
The number of an input and the seed determine it completely.
"""

from __future__ import annotations

import argparse
import faulthandler
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any, Optional

from fuzz_cases import Case, make_case
from fuzz_targets import TARGETS
from servesim import cli

HANG_S = 20
MEMORY = 6 << 30  # bytes of address space: an input that needs more is a failure, not a reason to stop the machine
FILE_SIZE = 256 << 20
MAX_LINES, MAX_LINE = 12, 1500  # of standard error
CODES = (0, 1, 2, 3)
JOURNALS = ("runs.jsonl",)  # an incomplete last line is removed when they are opened
TEMPORARY = (".part", ".tmp", "~")
ROOT = Path(__file__).resolve().parents[1]
PACKAGE = tuple(f"{folder}/" for folder in (ROOT / "sim", ROOT / "policies", ROOT / "calibrate", ROOT / "traces",
                                            Path(cli.__file__).parent))  # fmt: skip


class Limits:
    hang = HANG_S  # seconds


class Hang(BaseException):
    """A command ran too long; not an Exception, so that no command handles it."""


@dataclass
class Outcome:
    """What a command did with one input."""

    code: Optional[int] = None
    stdout: str = ""
    stderr: str = ""
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)  # what is wrong, without parts that differ between inputs
    stack: str = ""


def run_case(case: Case, folder: Path) -> Outcome:
    """Run the command of a case in a folder and check what it did. `folder` is three levels below the sandbox."""
    outcome = Outcome()
    before = snapshot(folder.parents[2])
    os.chdir(folder)
    signal.alarm(Limits.hang)
    start = time.perf_counter()
    try:
        call_main(case.argv, outcome)
    except BaseException as error:
        outcome.failures.append(f"{type(error).__name__} at {place(error.__traceback__)}")
        outcome.stack = "".join(traceback.format_tb(error.__traceback__))  # not str(error): that may take very long
    finally:
        signal.alarm(0)
        os.chdir("/")
    outcome.seconds = time.perf_counter() - start
    if not outcome.failures:
        check_output(outcome)
    check_files(case, outcome, folder, before)
    return outcome


def call_main(argv: list[str], outcome: Outcome) -> None:
    """Call `sim` with captured output; argparse ends the process, so that is caught too."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    try:
        with redirect_stdout(out), redirect_stderr(err), warnings.catch_warnings():
            warnings.simplefilter("always", RuntimeWarning)
            warnings.simplefilter("always", UserWarning)
            outcome.code = cli.main(argv)
    except SystemExit as end:
        outcome.code = end.code if isinstance(end.code, int) else 0 if end.code is None else -1
    finally:
        outcome.stdout, outcome.stderr = (s.buffer.getvalue().decode("utf-8", "replace") for s in (out, err))


def check_output(outcome: Outcome) -> None:
    """Check the exit code and the error lines."""
    lines = outcome.stderr.splitlines()
    if outcome.code not in CODES:
        outcome.failures.append(f"exit code {outcome.code}")
    if outcome.code == 2 and not (lines and lines[-1].startswith("sim")):  # lines before it are remarks about files
        outcome.failures.append("the error is not one line")
    if outcome.code == 1 and not lines and not re.search("stuck|fail", outcome.stdout):
        outcome.failures.append("exit code 1 without a reason")
    if len(lines) > MAX_LINES:
        outcome.failures.append("too many error lines")
    if any(len(line) > MAX_LINE for line in lines):
        outcome.failures.append("very long error line")
    if any(not (char.isprintable() or char in "\n\t") for char in outcome.stderr):
        outcome.failures.append("control character in an error line")
    if "Traceback" in outcome.stderr or "Traceback" in outcome.stdout:
        outcome.failures.append("traceback in the output")
    if "Warning: " in outcome.stderr:
        outcome.failures.append("Python warning in the output")
    if "not enough memory" in outcome.stderr:
        outcome.failures.append("out of memory")


def snapshot(folder: Path) -> dict[Path, bytes]:
    """Return the content of all files below a folder; of anything else, nothing."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and os.access(path, os.R_OK)}


def check_files(case: Case, outcome: Outcome, folder: Path, before: dict[Path, bytes]) -> None:
    """Check that only complete files appeared, at the right places, and that no input was lost."""
    allowed = tuple(folder / name for name in ("out", *case.written))
    after = snapshot(folder.parents[2])
    for path, data in after.items():
        if before.get(path) == data:
            continue
        inside = any(path == root or root in path.parents for root in allowed)
        if not inside:
            outcome.failures.append(f"wrote {'over an input' if path in before else 'outside the output folder'}")
        elif path.name.endswith(TEMPORARY):
            outcome.failures.append("temporary file left")
        elif outcome.code == 2 and (path not in before or path.name not in JOURNALS):
            outcome.failures.append(f"rejected, but wrote {path.name}")
        elif path.suffix == ".json" and not is_json(data):
            outcome.failures.append(f"wrote {path.name} that is not strict JSON")
    if any(path not in after for path in before):
        outcome.failures.append("deleted an input")


def is_json(data: bytes) -> bool:
    try:
        json.loads(data, parse_constant=lambda name: 1 / 0)
    except (ValueError, ZeroDivisionError):
        return False
    return True


def place(trace: Any) -> str:
    """Return the innermost line of servesim in a traceback."""
    own = [frame for frame in traceback.extract_tb(trace) if frame.filename.startswith(PACKAGE)]
    if not own:
        return "a line outside servesim"
    name = next(own[-1].filename.removeprefix(root) for root in PACKAGE if own[-1].filename.startswith(root))
    return f"{name}:{own[-1].lineno} ({own[-1].name})"


def stop_hang(number: int, frame: Optional[FrameType]) -> None:
    raise Hang


def protect() -> None:
    """Limit memory and file sizes of this process, and turn the alarm into Hang."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_SIZE, FILE_SIZE))
    signal.signal(signal.SIGALRM, stop_hang)
    os.environ["MPLBACKEND"] = "Agg"
    build = cache(cli.parser)  # building it takes longer than most commands
    cli.parser = lambda groups=cli.GROUPS: build(tuple(groups))


def try_valid_inputs(sizes: dict[str, int], sandbox: Path) -> int:
    """Run one command on each unchanged input: a fuzzer whose inputs are all rejected finds nothing."""
    failed = 0
    for name in sizes:
        for source in TARGETS[name].inputs():
            case = Case(dict(source.files), list(source.commands[0]), source.written)
            outcome = try_case(case, sandbox)
            if outcome.code != 0 or outcome.failures:
                failed += 1
                print(f"valid input of {name} failed: {case.command()}: {outcome.stderr}{outcome.failures}", flush=True)
    return failed


def try_input(name: str, seed: int, index: int, sandbox: Path) -> tuple[Case, Outcome]:
    """Make one input and run it."""
    case = make_case(name, TARGETS[name].inputs(), random.Random(f"{seed}/{name}/{index}"))
    return case, try_case(case, sandbox)


def try_case(case: Case, sandbox: Path) -> Outcome:
    """Write the files of a case and run it; the sandbox is empty before and after."""
    folder = sandbox / "x" / "y" / "case"
    faulthandler.dump_traceback_later(3 * Limits.hang + 10, exit=True)  # if a hang ignores the alarm
    case.write(folder)
    outcome = run_case(case, folder)
    faulthandler.cancel_dump_traceback_later()
    for entry in sandbox.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    return outcome


def counts(total: Optional[int], only: Optional[list[str]]) -> dict[str, int]:
    """Return the number of inputs of each target, in proportion to its share."""
    chosen = {name: target.share for name, target in TARGETS.items() if not only or name in only}
    if total is None:
        return chosen
    return {name: max(1, round(total * share / sum(chosen.values()))) for name, share in chosen.items()}


def fuzz(name: str, size: int, seed: int, sandbox: Path) -> int:
    """Run the inputs of a target, print one line for it and two per kind of failure; return the number of failures."""
    codes: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    first: dict[str, tuple[int, str]] = {}  # failure -> its first input
    start, slowest = time.perf_counter(), 0.0
    for index in range(size):
        case, outcome = try_input(name, seed, index, sandbox)
        slowest = max(slowest, outcome.seconds)
        codes["failed" if outcome.failures else "rejected" if outcome.code == 2 else "accepted"] += 1
        for failure in set(outcome.failures):
            failures[failure] += 1
            first.setdefault(failure, (index, case.command()))
    numbers = f"{size:>7}{codes['accepted']:>10}{codes['rejected']:>10}{codes['failed']:>10}"
    print(f"{name:<14}{numbers}{time.perf_counter() - start:>9.1f}{slowest:>9.2f}", flush=True)
    for failure, count in failures.most_common():
        index, command = first[failure]
        print(f"{count:>5} x {failure}\n        --seed {seed} --target {name} --only {index}: {command}", flush=True)
    return codes["failed"]


def show(name: str, seed: int, index: int, sandbox: Path, keep: Optional[str]) -> int:
    """Run one input and print what it was and what happened."""
    case, outcome = try_input(name, seed, index, sandbox)
    if keep:
        case.write(Path(keep))
    print(f"{case.describe()}\n{case.command()}\nexit code {outcome.code}, {outcome.seconds:.2f} s")
    print(f"{outcome.stderr[-3000:]}{outcome.stack[-6000:]}")
    print("\n".join(outcome.failures) or "passed")
    return 1 if outcome.failures else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, help="number of inputs (default: about 20,000)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default 0)")
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="only this target (repeatable)")
    parser.add_argument("--only", type=int, metavar="INDEX", help="run only this input of --target and show it")
    parser.add_argument(
        "--hang", type=int, default=HANG_S, metavar="S", help="seconds until a command hangs (default 20)"
    )
    parser.add_argument("--keep", metavar="DIR", help="with --only: write the files of the input to DIR")
    args = parser.parse_args()
    protect()
    Limits.hang = args.hang
    with TemporaryDirectory(prefix="fuzz-") as name:
        if args.only is not None:
            return show((args.target or ["trace"])[0], args.seed, args.only, Path(name), args.keep)
        start = time.perf_counter()
        sizes = counts(args.count, args.target)
        failures = try_valid_inputs(sizes, Path(name))
        print("target          tries  accepted  rejected    failed  seconds  slowest")
        failures += sum(fuzz(target, size, args.seed, Path(name)) for target, size in sizes.items())
    print(f"{sum(sizes.values())} inputs, {failures} failed, {time.perf_counter() - start:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
