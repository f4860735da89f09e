"""Run a module of the tests in two child processes: with the compiled package, and with its plain copy."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from .. import differences

ROOT = Path(__file__).resolve().parents[2]


def run_both(plain: Path, module: str, folder: Path, args: Sequence[str] = ()) -> tuple[list[str], list[str]]:
    """Run a module with the folders FOLDER/compiled and FOLDER/plain. Return the lines that both printed."""
    folder.mkdir(parents=True, exist_ok=True)
    outputs = {"compiled": folder / "compiled.txt", "plain": folder / "plain.txt"}
    children = []
    for name, path in outputs.items():
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        if name == "plain":
            environment["PYTHONPATH"] = str(plain)
        command = [sys.executable, "-m", f"tests.compiled.{module}", str(folder / name), *args]
        with path.open("w", encoding="utf-8") as file:
            child = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.PIPE, text=True)
        children.append(child)
    errors = [child.communicate()[1] for child in children]
    assert [child.returncode for child in children] == [0, 0], "\n".join(errors)
    compiled, in_plain = (path.read_text(encoding="utf-8").splitlines() for path in outputs.values())
    assert compiled.pop(0).endswith((".so", ".pyd")) and in_plain.pop(0).endswith(".py"), "the wrong package was loaded"
    return compiled, in_plain


def first_difference(one: str, other: str) -> str:
    """Return the first line that differs, from both texts."""
    found = differences.first_difference(one, other, exact=True)
    if found is None:
        return "no line differs"
    number, line, other_line = found
    return f"line {number}\n  compiled: {line[:500]}\n  plain:    {other_line[:500]}"
