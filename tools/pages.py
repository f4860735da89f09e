"""The examples of README and docs: run as a reader would, and their printed output put in place.

    python tools/pages.py [PAGE ...]      run the pages' examples, write down what they print

What a fenced block's language says of it:
    console   every `$ command` is run and must print exactly what stands below it
    bash      run, and must end well
    sh        not run, since it needs hardware, a network or long; but every `sim` in it must be known to the parser
    python    run, and must end well; with a file name (```python my_policy.py) it is saved under that name instead
    yaml, csv, json with a file name are saved, for the blocks that follow
    text, mermaid and such without a name are only shown
A page's blocks are run in order in one empty folder that sees examples/ of the checkout.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SHOWN = ("text", "mermaid", "yaml", "json", "csv", "html")
FENCE = re.compile(r"^( *)```(\S*) *(\S*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
LIMIT = 300  # seconds for one block


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    name: str  # of the file to save it as
    text: str
    line: int  # in the page, from 1
    start: int  # of its text in the page
    indent: str = ""


class Spoken(NamedTuple):
    """A command of a console block and what is printed below it."""

    command: str
    printed: str


def pages() -> list[Path]:
    """Return every page that people read."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(text: str) -> list[Block]:
    """Return the fenced blocks of a page."""
    found = []
    for match in FENCE.finditer(text):
        indent, language, name, body = match.groups()
        inside = re.sub(rf"^{indent}", "", body, flags=re.MULTILINE)
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(language, name, inside, line, match.start(4), indent))
    return found


def spoken(text: str) -> list[Spoken]:
    """Return the commands of a console block, lines that end in a backslash joined to the next."""
    found: list[Spoken] = []
    lines = iter(text.splitlines(keepends=True))
    for line in lines:
        if not line.startswith("$ "):
            last = found.pop()
            found.append(Spoken(last.command, last.printed + line))
            continue
        command = line[2:]
        while command.endswith("\\\n"):
            command += next(lines)
        found.append(Spoken(command, ""))
    return found


def surroundings() -> dict[str, str]:
    """Return the environment that examples run in: this interpreter's programs, nothing that depends on a terminal."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return {**os.environ, "PATH": path, "COLUMNS": "120", "MPLBACKEND": "Agg", "NO_COLOR": "1"}


def prepare(folder: Path) -> None:
    """Let a folder see what examples use of the checkout."""
    (folder / "examples").symlink_to(ROOT / "examples")


def run(command: list[str], folder: Path) -> tuple[int, str, str]:
    """Run one command; return its exit code, what it printed, and what it complained of."""
    done = subprocess.run(
        command, cwd=folder, env=surroundings(), capture_output=True, text=True, timeout=LIMIT, check=False
    )
    return done.returncode, done.stdout, done.stderr


def play(block: Block, folder: Path) -> Iterator[tuple[Spoken, str]]:
    """Run a block; return each command of a console with what it really prints. Raise where a block ends badly."""
    if block.name:
        (folder / block.name).parent.mkdir(parents=True, exist_ok=True)
        (folder / block.name).write_text(block.text, encoding="utf-8")
    elif block.language == "console":
        for one in spoken(block.text):
            code, out, complaint = run(["bash", "-c", one.command], folder)
            if code:
                raise RuntimeError(f"line {block.line}: exit code {code}: {one.command}{out}{complaint}")
            yield one, out
    elif block.language in ("bash", "python"):
        how = ["bash", "-ec"] if block.language == "bash" else [sys.executable, "-c"]
        code, out, complaint = run([*how, block.text], folder)
        if code:
            raise RuntimeError(f"line {block.line}: exit code {code}\n{block.text}{out}{complaint}")
    elif block.language not in ("sh", *SHOWN):
        raise RuntimeError(f"line {block.line}: a block of {block.language or 'no language'} is neither run nor shown")


def refresh(page: Path) -> bool:
    """Run a page and write down what its commands print; say whether anything changed."""
    text = page.read_text(encoding="utf-8")
    new, place = "", 0
    with tempfile.TemporaryDirectory(prefix="servesim-") as scratch:
        prepare(Path(scratch))
        for block in blocks(text):
            said = list(play(block, Path(scratch)))
            if said:
                body = "".join(f"$ {one.command}{out}" for one, out in said)
                old = len(block.text) + len(block.indent) * block.text.count("\n")
                new += text[place : block.start] + re.sub("^(?=.)", block.indent, body, flags=re.MULTILINE)
                place = block.start + old
    new += text[place:]
    if new != text:
        page.write_text(new, encoding="utf-8")
    return new != text


if __name__ == "__main__":
    for given in [Path(name).resolve() for name in sys.argv[1:]] or pages():
        print(given.relative_to(ROOT), "changed" if refresh(given) else "as it was", flush=True)
